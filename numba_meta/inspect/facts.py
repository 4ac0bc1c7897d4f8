"""What a loaded model decided, as plain data for tables and drawings: cuts, meetings, calls, and where things lie. Decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from numba_meta.errors import UsageError
from numba_meta.split.state import SplitState
from numba_meta.tensor import Role, Tensor, format_shape

if TYPE_CHECKING:
    from numba_meta.models.model import Model
    from numba_meta.schedule.plan import StepPlan


@dataclass(frozen=True)
class TensorCut:
    """How one weight or cache is divided. `piece_bytes[j]` is what device j holds of it in memory, packed for its kernels and padded.

    `result` is the state of what a product with this weight gives; None for anything but the weight of a product.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]  # axis 0 first, without trailing extents of 1
    state: SplitState
    piece_bytes: tuple[int, ...]
    result: SplitState | None = None

    @property
    def layer(self) -> int | None:
        """The layer that the name tells; None outside of layers."""
        parts = self.name.split(".")
        number = parts[1] if len(parts) > 1 else ""
        return int(number) if number.isdigit() else None

    @property
    def short_name(self) -> str:
        """The name without its layer and `.weight`."""
        parts = self.name.removesuffix(".weight").split(".")
        return ".".join(part for part in parts if part != "blk" and not part.isdigit())

    def piece_shape(self, device: int) -> tuple[int, ...]:
        """The shape of what a device holds."""
        return self.state.piece_shape(self.shape, device)


@dataclass(frozen=True)
class Meeting:
    """A place in a step where all devices wait for each other. `call` is its number among the first device's calls."""

    kind: str  # "all_reduce" or "gather"
    tensor: str
    shape: tuple[int, ...]
    n_bytes: int  # of the whole tensor: what each device has after it
    call: int


@dataclass(frozen=True)
class Lifetime:
    """An intermediate tensor in the workspace of one device: `n_bytes` at `offset`, from call `first` to call `last`, both included.

    `kind`: "summand" (PARTIAL, before an all-reduce), "piece" (before a gather), "scratch" (named by no graph), "tensor".
    """

    name: str
    kind: str
    offset: int
    n_bytes: int
    first: int
    last: int


def step_plan(model: Model, n_rows: int = 1) -> StepPlan:
    """The plan of the step that serves `n_rows` tokens (1: decode; its capacity may be larger), with logits for the last one.

    Nothing is allocated or run. Raises `UsageError` for more rows than the model's `ubatch_size`.
    """
    if not 1 <= n_rows <= model.context.ubatch_size:
        raise UsageError(f"a step of {n_rows} rows is impossible; expected 1 to {model.context.ubatch_size}, the model's ubatch_size")
    from numba_meta.models.running.step_shape import SMALL_ROWS

    n_outputs = n_rows if n_rows <= SMALL_ROWS else 1  # several sequences that each get a token, or a prompt
    return model.context.plan(model.context.capacity_for(n_rows, n_outputs))


def device_names(model: Model) -> tuple[str, ...]:
    """`cpu:0`, `cpu:0#1`, ...: in the order of all that has one entry per device."""
    return tuple(device.name for device in model.context.device)


def weight_cuts(model: Model) -> tuple[TensorCut, ...]:
    """All weights, in the order in which a step reads them."""
    plan, weights = step_plan(model), model.context.weight_plan
    leaves = [leaf for leaf in plan.split.graph.leaves if leaf.role is Role.WEIGHT]
    results = {node.sources[0].name: plan.split.states[node] for node in plan.split.graph.nodes if node.op == "matmul"}
    ends = [weights.offsets[leaf.name] for leaf in leaves[1:]] + [weights.n_bytes]
    cuts = []
    for leaf, end in zip(leaves, ends, strict=True):
        n_bytes = tuple(stop - start for start, stop in zip(weights.offsets[leaf.name], end, strict=True))
        cuts.append(TensorCut(leaf.name, leaf.dtype.name, trimmed(leaf.shape), weights.states[leaf.name], n_bytes, results.get(leaf.name)))
    return tuple(cuts)


def cache_cuts(model: Model) -> tuple[TensorCut, ...]:
    """The K and V cache of every layer, `[elements of a cell, cells]`."""
    split = step_plan(model).split
    leaves = {leaf.name: leaf for leaf in split.graph.leaves if leaf.role is Role.CACHE}
    cuts = []
    for binding in model.context.cache_plan.bindings:
        leaf = leaves[binding.entry.name]
        cuts.append(TensorCut(leaf.name, leaf.dtype.name, trimmed(leaf.shape), split.states[leaf], binding.entry.piece_bytes))
    return tuple(cuts)


def layer_cuts(model: Model, layer: int) -> tuple[TensorCut, ...]:
    """Weights and caches of one layer. Raises `UsageError` for a layer that the model lacks."""
    n_layers = model.config.shape.n_layer
    if not 0 <= layer < n_layers:
        raise UsageError(f"layer {layer} is not in {model.config.architecture} model with {n_layers} layers; expected 0 to {n_layers - 1}")
    return tuple(cut for cut in (*weight_cuts(model), *cache_cuts(model)) if cut.layer == layer)


def meetings(plan: StepPlan) -> tuple[Meeting, ...]:
    """Where the devices meet, in order; none on one device."""
    calls = [i for i, call in enumerate(plan.devices[0].calls) if call.meets]
    return tuple(
        Meeting(node.op, node.sources[0].name, trimmed(node.shape), node.n_bytes, call)
        for node, call in zip(plan.split.collectives, calls, strict=True)
    )


def lifetimes(plan: StepPlan, device: int) -> tuple[Lifetime, ...]:
    """What lies in a device's workspace and when; storages of zero bytes are left out."""
    from numba_meta.schedule.plan import storage_lifetimes

    own = plan.devices[device]
    shared = {own.graph.simple[node.sources[0]].storage: node.op for node in plan.split.collectives}
    uses = storage_lifetimes(own.graph, own.calls)
    found = []
    for place, offset in zip(own.places, plan.workspace.layouts[device].offsets, strict=True):
        kind = {None: "tensor", "all_reduce": "summand", "gather": "piece"}[shared.get(place) if isinstance(place, Tensor) else None]
        if place.n_bytes:
            first, last = uses[place]
            found.append(Lifetime(place.name, kind if isinstance(place, Tensor) else "scratch", offset, place.n_bytes, first, last))
    return tuple(found)


def trimmed(shape: Sequence[int]) -> tuple[int, ...]:
    """A shape without trailing extents of 1; at least one extent."""
    n = len(shape)
    while n > 1 and shape[n - 1] == 1:
        n -= 1
    return tuple(shape[:n])


def shown_shape(shape: Sequence[int]) -> str:
    """`[576, 1536]`."""
    return format_shape((*shape, 1, 1, 1, 1)[:4])  # type: ignore[arg-type]
