"""Plans as text and HTML tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from numba_meta.devices.parse import format_bytes
from numba_meta.dtypes import I64
from numba_meta.errors import UsageError
from numba_meta.inspect import facts
from numba_meta.tensor import Tensor

if TYPE_CHECKING:
    from numba_meta.models.model import Model
    from numba_meta.models.plan import ModelPlan
    from numba_meta.schedule.calls import Call

_HEADER = ("device", "threads", "weights", "KV cache", "KV share", "workspace")


@dataclass(frozen=True, repr=False)
class Table:
    """Rows of text under a header: aligned columns in a terminal, a table in a notebook."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __repr__(self) -> str:
        return text_table(self.header, self.rows)

    def _repr_html_(self) -> str:
        return html_table(self.header, self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def head(self, n_rows: int) -> Table:
        """The first rows."""
        return Table(self.header, self.rows[:n_rows])


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to equal width, two spaces between them."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (header, *rows)]
    return "\n".join(lines)


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same for a notebook."""
    left = ' style="text-align: left"'
    head = "".join(f"<th{left}>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td{left}>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


# ---- a loaded model --------------------------------------------------------------------------------------------------------------------


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


# ---- the plan of a model ---------------------------------------------------------------------------------------------------------------


def plan_facts(plan: ModelPlan) -> list[str]:
    """The lines above the table of devices."""
    window = f", {plan.n_window_cells} cells per sequence in layers with a sliding window" if plan.n_window_cells else ""
    place = cache_place(plan.n_device_layers, plan.host_cache_bytes)
    arithmetic = "float32 activations (exact)" if plan.exact else "8-bit activations"
    return [
        f"{plan.model}: {plan.architecture}, {arithmetic}, kernels for {plan.isa}",
        f"{place}: {plan.n_cells} cells for {_count(plan.n_sequences, 'sequence')}, {'/'.join(plan.cache_types)}{window}",
        f"{_count(plan.collectives_per_step, 'meeting')} of {_who_meets(plan)} per step",
        *plan.cuts,
    ]


def cache_place(n_device_layers: int | None, host_bytes: int) -> str:
    """`KV cache on the device`, or `KV cache in the host (180.0 MiB), of the first 2 layers on the device`."""
    if n_device_layers is None:
        return "KV cache on the device"
    first = f", of the first {_count(n_device_layers, 'layer')} on the device" if n_device_layers else ""
    return f"KV cache in the host ({format_bytes(host_bytes)}){first}"


def _who_meets(plan: ModelPlan) -> str:
    if not plan.devices_of_ranks:
        return _count(len(plan.devices), "device")
    return f"{_count(sum(plan.devices_of_ranks), 'device')} in {_count(len(plan.devices_of_ranks), 'rank')}"


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def device_rows(plan: ModelPlan) -> list[list[str]]:
    """One row per device, under the header of the table."""
    return [
        [
            d.name,
            str(d.n_threads),
            format_bytes(d.weight_bytes),
            format_bytes(d.cache_bytes),
            f"{d.kv_share / 65536:.3f}",
            ", ".join(f"{kind} {format_bytes(n)}" for kind, n in d.workspace_bytes.items()) or "none yet",
        ]
        for d in plan.devices
    ]


def plan_table(plan: ModelPlan) -> str:
    """A `ModelPlan` for a terminal."""
    return "\n".join([*plan_facts(plan), text_table(_HEADER, device_rows(plan))])


def plan_html(plan: ModelPlan) -> str:
    """A `ModelPlan` for a notebook."""
    lines = "<br>".join(escape(line) for line in plan_facts(plan))
    return f"<p>{lines}</p>{html_table(_HEADER, device_rows(plan))}"
