"""The plan of a step: what every device calls and where its intermediate tensors lie. Data; nothing is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from numba_meta.errors import PlacementError
from numba_meta.kernels import KernelSet, kernel_set
from numba_meta.lowering import Scratch
from numba_meta.memory.layout import Request
from numba_meta.memory.workspace import WorkspacePlan, plan_workspace
from numba_meta.schedule.calls import Call, EventName, Peer, Place, storage_of
from numba_meta.schedule.fuse import fuse
from numba_meta.schedule.infer import SplitGraph
from numba_meta.schedule.localize import DeviceGraph, localize
from numba_meta.schedule.lower import DeviceLowering
from numba_meta.schedule.lower_transport import Link
from numba_meta.schedule.ranks import Ranks
from numba_meta.schedule.transport_plan import TransportPlan
from numba_meta.tensor import Role, Tensor

INPUTS_THERE = EventName("inputs")  # of a device: its copy of the inputs has come


@dataclass(frozen=True)
class DevicePlan:
    """What one device does in a step. `places` are its storages in the workspace, in the order of the layout's offsets.

    `transfer_calls` is the program of its transfer stream, empty on the ordered path.
    """

    graph: DeviceGraph
    calls: tuple[Call, ...]
    places: tuple[Tensor | Scratch, ...]
    transfer_calls: tuple[Call, ...] = ()

    def streams(self) -> dict[str, tuple[Call, ...]]:
        """What each of its streams does once the inputs were copied, in order: `compute`, and `transfer` where it has one."""
        if not self.transfer_calls:
            return {"compute": self.calls}
        return {
            "compute": (Call(None, records=INPUTS_THERE), *self.calls),
            "transfer": (Call(None, waits=INPUTS_THERE), *self.transfer_calls),
        }


@dataclass(frozen=True)
class StepPlan:
    """A step of all devices."""

    split: SplitGraph
    devices: tuple[DevicePlan, ...]
    workspace: WorkspacePlan
    transport: TransportPlan | None = None  # None: nothing is delivered

    @property
    def n_collectives(self) -> int:
        """How often all devices, of all ranks, meet in a step."""
        return len(self.split.collectives)


def plan_step(
    split: SplitGraph,
    n_threads: Sequence[int],
    exact: bool,
    alignment: int,
    transport: TransportPlan | None = None,
    links: Sequence[Link] = (),
    ranks: Ranks | None = None,
    kernels: KernelSet | None = None,
) -> StepPlan:
    """Localizes and lowers a graph for every device (`n_threads[j]` threads each) and lays out their workspaces.

    `transport` says which deliveries go through the ring; `links` how each device is reached (none: as fast as memory).
    `kernels`: of the devices' kind (None: CPU devices).
    With `ranks` the plan is that of this rank's devices, and all others count from its first one.
    """
    devices = ranks.own if ranks else range(len(n_threads))
    if len(devices) != len(n_threads):
        raise PlacementError(f"{len(devices)} devices of this rank with {len(n_threads)} numbers of threads; expected one for each")
    graphs = [localize(split, device, position) for position, device in enumerate(devices)]
    staged = [delivery.layer for delivery in transport.staged] if transport else []
    n_slots = transport.n_slots if transport else 0
    plans = []
    for graph, n in zip(graphs, n_threads, strict=True):
        link = links[graph.device] if links else None
        kernels = kernels or kernel_set("cpu")
        lowering = DeviceLowering(graphs, graph.device, exact, n, kernels, staged, n_slots, link, (ranks, split) if ranks else None)
        calls = tuple(lowering.lower())
        if kernels.kind == "cuda":
            calls = tuple(fuse(calls, kernels, exact, read_elsewhere(graph)))
        lives = storage_lifetimes(graph, calls, staged)
        requests = [Request(place.name, place.n_bytes, first, last) for place, (first, last) in lives.items()]
        plans.append((DevicePlan(graph, calls, tuple(lives), tuple(lowering.transport.transfer_calls())), requests))
    workspace = plan_workspace([requests for _, requests in plans], [alignment] * len(graphs))
    return StepPlan(split, tuple(plan for plan, _ in plans), workspace, transport)


def read_elsewhere(graph: DeviceGraph) -> set[Tensor]:
    """Storages that other devices read (summands and pieces), or the host (outputs)."""
    pieces = (node.sources[0] for node in graph.graph.nodes if node.op in ("all_reduce", "gather"))
    outputs = graph.graph.outputs if graph.device == 0 else ()
    return {place.storage for place in (*pieces, *outputs)}


def storage_lifetimes(
    graph: DeviceGraph, calls: Sequence[Call], staged_layers: Sequence[int] = ()
) -> dict[Tensor | Scratch, tuple[int, int]]:
    """First and last call that uses each storage of the workspace.

    What other devices read stays until the first meeting after the collective's last own one: by then all have read it. That is a summand
    or a piece, and with ranks also the first device's result. Outputs stay until the end of the step.
    """
    lives: dict[Tensor | Scratch, tuple[int, int]] = {}

    def use(place: Place, index: int) -> None:
        storage = storage_of(place)
        if isinstance(storage, Tensor) and storage.op == "deliver" and storage.params["layer"] in staged_layers:
            return  # it lies in the ring
        if isinstance(storage, Scratch) or (isinstance(storage, Tensor) and storage.role is Role.NODE):
            first, last = lives.get(storage, (index, index))
            lives[storage] = (min(first, index), max(last, index))

    for index, call in enumerate(calls):
        for place in (*call.reads, *call.writes):
            if not isinstance(place, Peer):
                use(place, index)
    last_call = max(0, len(calls) - 1)
    collectives = [node for node in graph.graph.nodes if node.op in ("all_reduce", "gather")]
    meetings = [index for index, call in enumerate(calls) if call.meets]
    for node in collectives:
        own = [index for index in meetings if calls[index].node == node.name]
        if own:
            after = next((index for index in meetings if index > own[-1]), last_call)
            use(node.sources[0], after)
            if len(own) > 1 and graph.device == 0:
                use(node, after)
    if graph.device == 0:
        for output in graph.graph.outputs:
            use(output, last_call)
    return lives
