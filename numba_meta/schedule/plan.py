"""The plan of a step: what every device calls and where its intermediate tensors lie. Data; nothing is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from numba_meta.memory.layout import Request
from numba_meta.memory.workspace import WorkspacePlan, plan_workspace
from numba_meta.schedule.infer import SplitGraph
from numba_meta.schedule.localize import DeviceGraph, localize
from numba_meta.schedule.lower import Call, CpuLowering, Offset, Peer, Place, Scratch
from numba_meta.tensor import Role, Tensor


@dataclass(frozen=True)
class DevicePlan:
    """What one device does in a step. `places` are its storages in the workspace, in the order of the layout's offsets."""

    graph: DeviceGraph
    calls: tuple[Call, ...]
    places: tuple[Tensor | Scratch, ...]


@dataclass(frozen=True)
class StepPlan:
    """A step of all devices."""

    split: SplitGraph
    devices: tuple[DevicePlan, ...]
    workspace: WorkspacePlan

    @property
    def n_collectives(self) -> int:
        """How often the devices meet in a step."""
        return len(self.split.collectives)


def plan_step(split: SplitGraph, n_threads: Sequence[int], exact: bool, alignment: int) -> StepPlan:
    """Localizes and lowers a graph for every device (`n_threads[j]` threads each) and lays out their workspaces."""
    graphs = [localize(split, device) for device in range(len(n_threads))]
    calls = [tuple(CpuLowering(graphs, device, exact, n).lower()) for device, n in enumerate(n_threads)]
    lifetimes = [storage_lifetimes(graph, device_calls) for graph, device_calls in zip(graphs, calls, strict=True)]
    requests = [
        [Request(place.name, place.n_bytes, first, last) for place, (first, last) in lives.items()] for lives in lifetimes
    ]
    workspace = plan_workspace(requests, [alignment] * len(graphs))
    devices = tuple(DevicePlan(g, c, tuple(life)) for g, c, life in zip(graphs, calls, lifetimes, strict=True))
    return StepPlan(split, devices, workspace)


def storage_of(place: Place | Offset) -> Place:
    """The place that owns the bytes."""
    if isinstance(place, Offset):
        return storage_of(place.place)
    return place.storage if isinstance(place, Tensor) else place


def storage_lifetimes(graph: DeviceGraph, calls: Sequence[Call]) -> dict[Tensor | Scratch, tuple[int, int]]:
    """First and last call that uses each storage of the workspace.

    A summand or piece that other devices read stays until the meeting after the one where they read it: by then all have read it.
    Outputs stay until the end of the step.
    """
    lives: dict[Tensor | Scratch, tuple[int, int]] = {}

    def use(place: Place, index: int) -> None:
        storage = storage_of(place)
        if isinstance(storage, Scratch) or (isinstance(storage, Tensor) and storage.role is Role.NODE):
            first, last = lives.get(storage, (index, index))
            lives[storage] = (min(first, index), max(last, index))

    meetings = [index for index, call in enumerate(calls) if call.meets]
    for index, call in enumerate(calls):
        for place in (*call.reads, *call.writes):
            if not isinstance(place, Peer):
                use(place, index)
    last_call = max(0, len(calls) - 1)
    collectives = [node for node in graph.graph.nodes if node.op in ("all_reduce", "gather")]
    for n, node in enumerate(collectives):
        use(node.sources[0], meetings[n + 1] if n + 1 < len(meetings) else last_call)
    if graph.device == 0:
        for output in graph.graph.outputs:
            use(output, last_call)
    return lives
