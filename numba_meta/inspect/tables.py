"""What is cut, where devices meet and what they call, as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from numba_meta.devices.parse import format_bytes
from numba_meta.dtypes import I64
from numba_meta.errors import UsageError
from numba_meta.inspect import facts
from numba_meta.tables import Table
from numba_meta.tensor import Tensor

if TYPE_CHECKING:
    from numba_meta.models.model import Model
    from numba_meta.schedule.calls import Call

def cut_table(model: Model, layer: int | None = 0) -> Table:
    """How tensors are divided: what lies outside of layers and one layer's weights and caches, or all of them (`layer=None`).

    One column per device says the shape of its piece and the bytes that it takes in memory.
    """
    everything = (*facts.weight_cuts(model), *facts.cache_cuts(model))
    if layer is not None:
        inside = facts.layer_cuts(model, layer)
        everything = (*(cut for cut in everything if cut.layer is None), *inside)
    header = ("tensor", "type", "shape", "state", *facts.device_names(model))
    return Table(header, tuple(_cut_row(cut) for cut in everything))


def _cut_row(cut: facts.TensorCut) -> tuple[str, ...]:
    shapes = (facts.shown_shape(cut.piece_shape(device)) for device in range(len(cut.piece_bytes)))
    pieces = (f"{shape} {format_bytes(n_bytes)}" if n_bytes else "-" for shape, n_bytes in zip(shapes, cut.piece_bytes, strict=True))
    return (cut.name, cut.dtype, facts.shown_shape(cut.shape), str(cut.state), *pieces)


def meeting_table(model: Model, n_rows: int = 1) -> Table:
    """Where the devices meet in a step of `n_rows` tokens: the call before which all wait, what is made whole, and its bytes."""
    header = ("call", "collective", "of", "shape", "bytes")
    found = facts.meetings(facts.step_plan(model, n_rows))
    rows = [(str(m.call), m.kind.replace("_", "-"), m.tensor, facts.shown_shape(m.shape), format_bytes(m.n_bytes)) for m in found]
    return Table(header, tuple(rows))


def call_table(model: Model, device: int = 0, start: int = 0, stop: int | None = None, n_rows: int = 1) -> Table:
    """Calls `start` to `stop` of what a device does in a step of `n_rows` tokens: kernel, the graph's node, what is read and written.

    Workspace tensors are followed by `@` and their offset in bytes; `meet` is where all devices wait for each other.
    """
    plan = facts.step_plan(model, n_rows)
    if not 0 <= device < len(plan.devices):
        raise UsageError(f"device {device} is not among this model's {len(plan.devices)}; expected 0 to {len(plan.devices) - 1}")
    own = plan.devices[device]
    offsets = dict(zip(own.places, plan.workspace.layouts[device].offsets, strict=True))
    numbered = list(enumerate(own.calls))[start:stop]
    return Table(("call", "kernel", "node", "reads", "writes"), tuple(_call_row(i, call, offsets) for i, call in numbered))


def _call_row(index: int, call: Call, offsets: dict[Any, int]) -> tuple[str, ...]:
    kernel = call.kernel.name if call.kernel else "meet"
    return (str(index), kernel, call.node, _shown_places(call.reads, offsets), _shown_places(call.writes, offsets))


def _shown_places(places: Sequence[Any], offsets: dict[Any, int]) -> str:
    """Names of tensors and scratch; a peer's tensor as `name on device j`. Constants, address lists and row counts say nothing here."""
    shown = []
    for place in places:
        if isinstance(place, Tensor) and place.dtype == I64:
            continue
        peer = getattr(place, "device", None)
        if peer is not None:
            shown.append(f"{place.tensor.name} on device {peer}")
        elif getattr(place, "n_bytes", 0):
            storage = place.storage if isinstance(place, Tensor) else place
            at = f"@{offsets[storage]}" if storage in offsets else ""
            shown.append(f"{place.name}{at}")
    return ", ".join(shown)
