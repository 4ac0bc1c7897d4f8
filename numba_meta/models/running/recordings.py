"""Recordings of steps: a plan is bound to memory and streams, and then runs without Python (page "How a step runs")."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from numba_meta.devices.cpu_stream import StreamTimes
from numba_meta.devices.meta import MetaDevice
from numba_meta.devices.simple import Buffer
from numba_meta.errors import OutOfMemoryError
from numba_meta.kernels import kernel_set
from numba_meta.kernels.code_cache import tidy_after_compiling
from numba_meta.memory.placement import round_up
from numba_meta.memory.workspace import Workspace
from numba_meta.models.cache.transport import Transport
from numba_meta.models.running.step_shape import SMALL_ROWS
from numba_meta.ops.transport import WindowShape
from numba_meta.schedule.infer import SplitGraph
from numba_meta.schedule.plan import StepPlan, plan_step
from numba_meta.schedule.ranks import Ranks
from numba_meta.schedule.record import Binder, InputBlock
from numba_meta.schedule.steps import RecordedStep, steps_of
from numba_meta.schedule.transport_plan import TransportPlan
from numba_meta.tensor import Role, Tensor

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Capacity:
    """What a recording can take in one step."""

    n_rows: int
    n_outputs: int


class Freeable(Protocol):
    """Memory of some kind."""

    def free(self) -> None:
        """Gives it back."""


class Recording:
    """A step that is bound to memory: valid while its workspace, and the ring if it uses one, have the generations that it was made for."""

    def __init__(
        self,
        plan: StepPlan,
        step: RecordedStep,
        inputs: dict[str, np.ndarray],
        workspace: Workspace[Buffer],
        transport: Transport,
        windows: Mapping[bool, WindowShape],
        own_memory: Sequence[Freeable],
        check: Callable[[], None] | None = None,
    ) -> None:
        self.plan = plan
        self._check = check  # raises where ranks could not reach each other
        self._own_memory = tuple(own_memory)  # its inputs, on the host and on the devices
        self.windows = windows
        self._step = step
        self._inputs = inputs
        output = plan.devices[0].graph.graph.outputs[0]
        self._logits = step.output.view(np.float32).reshape(output.shape[1], output.shape[0])
        self._workspace, self._transport = workspace, transport
        self._has_ring = plan.transport is not None and plan.transport.ring is not None
        self._generations = self._generations_now()
        self.n_roomy_steps = 0  # how many steps in a row would have done with half the room
        self.delivered = {n.params["layer"]: n.sources[1].name != "streams" for n in plan.split.graph.nodes if n.op == "deliver"}

    @property
    def is_valid(self) -> bool:
        return self._generations == self._generations_now()

    def _generations_now(self) -> tuple[int, int]:
        return self._workspace.generation, self._transport.generation if self._has_ring else 0

    @property
    def is_too_large(self) -> bool:
        return self.plan.transport is not None and self.plan.transport.is_too_large

    @property
    def is_ordered(self) -> bool:
        """Whether deliveries that could have used a ring do without."""
        return self.plan.transport is not None and not self.plan.transport.is_pipelined_or_empty

    def release(self) -> None:
        """Gives back the memory that only this recording uses; it must not run again."""
        self._step.release()
        for memory in self._own_memory:
            memory.free()

    def run(self, values: Mapping[str, Sequence[int]], note_times: Callable[[tuple[StreamTimes, ...]], None] | None = None) -> Logits:
        """Logits `[outputs, n_vocab]`, a view that the next step overwrites. `values` are the live parts of the inputs, by name.

        `note_times` is told when each stream was at which call.
        """
        for name, memory in self._inputs.items():
            live = values[name]
            memory[: len(live)] = live
        if note_times is None:
            self._step.run()
        else:
            note_times(self._step.run_noting_times())
        if self._check is not None:
            self._check()
        return self._logits[: len(values["output_rows"])]


class Recorder:
    """Makes recordings for the streams of a meta device, and holds the workspaces that they share.

    `persistent(device, tensor)` says where weights and caches lie.
    """

    def __init__(
        self,
        device: MetaDevice,
        transport: Transport,
        persistent: Callable[[int, Tensor], int],
        exact: bool,
        ranks: Ranks | None = None,
    ) -> None:
        self._device = device
        self._ranks = ranks
        self._transport = transport
        self._persistent = persistent
        self._exact = exact
        self._steps = steps_of(device)
        self._kernels = kernel_set(device.kind)
        self._small_workspaces: dict[Capacity, Workspace[Buffer]] = {}
        self._large_workspace = self._new_workspace()

    def plan(self, split: SplitGraph) -> StepPlan:
        """The plan of a step without deliveries through a ring; nothing is allocated."""
        return self._plan(split, None)

    def _plan(self, split: SplitGraph, transport: TransportPlan | None) -> StepPlan:
        device = self._device
        links = self._transport.links if transport else ()
        return plan_step(split, device.n_threads, self._exact, device.alignment, transport, links, self._ranks, self._kernels)

    def record(self, capacity: Capacity, split: SplitGraph, windows: Mapping[bool, WindowShape]) -> Recording:
        """Plans and binds a step. Where it does not fit beside the ring, the ring is given up and it is planned once more."""
        transport = self._transport.prepare(split)
        plan = self._plan(split, transport)
        workspace = self._workspace_for(capacity)
        try:
            if not workspace.fits(plan.workspace):
                workspace.resize([max(a, b) for a, b in zip(plan.workspace.n_bytes, workspace.n_bytes, strict=True)])
            with tidy_after_compiling():
                return self._record(plan, workspace, windows)
        except OutOfMemoryError:
            if not self._transport.give_up():
                raise
            return self.record(capacity, split, windows)

    def _record(self, plan: StepPlan, workspace: Workspace[Buffer], windows: Mapping[bool, WindowShape]) -> Recording:
        """A recording of a plan whose workspace is there. Where it fails, what it took for itself is given back."""
        block, host, own = self._input_block(plan)
        try:
            bases = tuple(buffer.address if buffer is not None else 0 for buffer in workspace.buffers)
            rings = self._transport.ring_addresses
            binder = Binder(plan, bases, block, self._persistent, rings, self._steps.place_constant)
            if not rings:  # nor is a recording valid that had one
                self._steps.end_transfers()
            output = plan.devices[0].graph.graph.outputs[0]
            first = workspace.buffers[0]
            assert first is not None
            step = self._steps.record(binder, first, binder.address(0, output) - bases[0], output.n_bytes)
        except BaseException:
            for memory in own:
                memory.free()
            raise
        check = self._ranks.table.check if self._ranks else None
        return Recording(plan, step, host, workspace, self._transport, windows, own, check)

    def _workspace_for(self, capacity: Capacity) -> Workspace[Buffer]:
        """Small steps keep memory of their own for good; large ones share one that may grow."""
        if capacity.n_rows > SMALL_ROWS:
            return self._large_workspace
        return self._small_workspaces.setdefault(capacity, self._new_workspace())

    def _new_workspace(self) -> Workspace[Buffer]:
        devices = self._device.devices
        return Workspace(self._device.names, lambda j, n: devices[j].allocate(n, "the workspace"), lambda _, buffer: buffer.free())

    def _input_block(self, plan: StepPlan) -> tuple[InputBlock, dict[str, np.ndarray], tuple[Freeable, Freeable]]:
        """The inputs of a step as the host writes them, and memory for each device's copy."""
        offsets, end = {}, 0
        leaves = [leaf for leaf in plan.split.graph.leaves if leaf.role is Role.INPUT]
        for leaf in leaves:
            offsets[leaf.name] = end
            end = round_up(end + leaf.n_bytes, 8)
        host = self._steps.host_memory(end)
        try:
            copies = self._device.allocate([end] * len(self._device), "inputs")
        except BaseException:
            host.free()
            raise
        types = {4: np.int32, 8: np.int64}
        parts = {leaf: host.data[offsets[leaf.name] : offsets[leaf.name] + leaf.n_bytes] for leaf in leaves}
        views = {leaf.name: part.view(types[leaf.dtype.block_bytes]) for leaf, part in parts.items()}
        return InputBlock(host.address, copies.addresses, end, offsets), views, (host, copies)

    def workspace_bytes(self, device: int) -> dict[str, int]:
        """Bytes of the workspaces that exist so far, by kind of step."""
        kinds = {"decode" if c.n_rows == 1 else "batch": w for c, w in self._small_workspaces.items()} | {"prompt": self._large_workspace}
        return {kind: workspace.n_bytes[device] for kind, workspace in kinds.items() if workspace.n_bytes[device]}
