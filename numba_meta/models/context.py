"""A context: a model on devices, its cache, and its recorded steps. Batches go in, rows of logits come out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from numba_meta.devices.cpu import ALIGNMENT, CpuBuffer, CpuStep
from numba_meta.devices.meta import MetaBuffer, MetaDevice
from numba_meta.dtypes import DType
from numba_meta.errors import NumbaMetaError, UsageError
from numba_meta.graph import Graph
from numba_meta.memory.placement import round_up
from numba_meta.memory.workspace import Workspace
from numba_meta.models.builder import BatchShape
from numba_meta.models.kv_cache import CachePlan, CacheShape, Cells, plan_cache
from numba_meta.models.weights import WeightPlan
from numba_meta.schedule.infer import SplitGraph, infer_splits
from numba_meta.schedule.plan import StepPlan, plan_step
from numba_meta.schedule.record import Binder, InputBlock
from numba_meta.split.policy import CutPlan
from numba_meta.split.state import MIRRORED, SplitState
from numba_meta.tensor import Role, Tensor

SMALL_ROWS = 16  # up to here a row's bits do not depend on its batch, and sequences may share one


@dataclass(frozen=True)
class Batch:
    """Tokens of one step, `[n]` each; `outputs` are the rows that give logits, in order. Plain sequences: most steps have one token."""

    tokens: Sequence[int]
    positions: Sequence[int]
    sequences: Sequence[int]
    cells: Sequence[int]
    window_cells: Sequence[int]
    outputs: Sequence[int]


@dataclass(frozen=True)
class Capacity:
    """What a recording can take in one step."""

    n_rows: int
    n_outputs: int


class Recording:
    """A step that is bound to memory: valid while its workspace has the generation that it was made for."""

    def __init__(
        self,
        plan: StepPlan,
        binder: Binder,
        step: CpuStep,
        inputs: dict[str, np.ndarray],
        logits: np.ndarray,
        workspace: Workspace[CpuBuffer],
    ) -> None:
        self.plan = plan
        self._step = step
        self._binder = binder  # keeps the constants that the step reads
        self._inputs = inputs
        self._logits = logits
        self._workspace = workspace
        self._generation = workspace.generation
        self.n_vocab = logits.shape[1]
        self.capacity = Capacity(len(inputs["tokens"]), len(inputs["output_rows"]))

    @property
    def is_valid(self) -> bool:
        return self._generation == self._workspace.generation

    def run(self, batch: Batch) -> np.ndarray:
        """Logits `[len(batch.outputs), n_vocab]`, float32, a view that the next step overwrites."""
        n, n_outputs, inputs = len(batch.tokens), len(batch.outputs), self._inputs
        inputs["n_tokens"][0] = n
        inputs["n_outputs"][0] = n_outputs
        inputs["tokens"][:n] = batch.tokens
        inputs["positions"][:n] = batch.positions
        inputs["sequences"][:n] = batch.sequences
        inputs["cells"][:n] = batch.cells
        if "window_cells" in inputs:
            inputs["window_cells"][:n] = batch.window_cells
        inputs["output_rows"][:n_outputs] = batch.outputs
        self._step.run()
        return self._logits[:n_outputs]


class Context:
    """A meta device with weights, a cache of `shape`, and recordings by capacity. It closes the device."""

    def __init__(
        self,
        build: Callable[[BatchShape], Graph],
        cuts: CutPlan,
        device: MetaDevice,
        weights: tuple[WeightPlan, MetaBuffer],
        shape: CacheShape,
        cache_types: tuple[DType, DType],
        exact: bool,
        ubatch_size: int,
    ) -> None:
        self._build = build
        self._cuts = cuts
        self.weight_plan, self._weights = weights
        self._cache_types = cache_types
        self._exact = exact
        self.device = device
        self.shape = shape
        self.ubatch_size = ubatch_size
        self.cells = Cells(shape)
        self._recordings: dict[Capacity, Recording] = {}
        self._closed = False
        self._meetings = np.zeros(8, np.int64)
        self._streams = device.compute_streams()
        self._small_workspaces: dict[Capacity, Workspace[CpuBuffer]] = {}
        self._large_workspace = self._new_workspace()
        self.cache_plan = self._place_cache()

    def prepare(self) -> None:
        """Records the steps that every generation needs: one token, and a prompt. Takes their memory and compiles their kernels now."""
        for n_rows in (self.ubatch_size, 1):
            self.recording(self.capacity_for(n_rows, 1))

    # ---- steps -------------------------------------------------------------------------------------------------------------------------

    def decode(self, tokens: Sequence[int], sequences: Sequence[int], outputs: Sequence[int], capacity: Capacity | None = None) -> np.ndarray:
        """Appends tokens to their sequences in one step; logits of the rows `outputs`.

        At most `ubatch_size` rows; more than SMALL_ROWS must belong to one sequence. Where the step cannot be made, nothing is appended.
        """
        if self._closed:
            raise NumbaMetaError("the context was closed; load the model again")
        recording = self.recording(capacity or self.capacity_for(len(tokens), len(outputs)))
        self._check_batch(tokens, sequences, outputs, recording)
        batch = self._next_batch(tokens, sequences, outputs)
        return recording.run(batch)

    def _check_batch(self, tokens: Sequence[int], sequences: Sequence[int], outputs: Sequence[int], recording: Recording) -> None:
        """Compiled code trusts what it is given, so nothing wrong may get there."""
        n = len(tokens)
        if n == 0 or n != len(sequences) or len(outputs) == 0 or n > recording.capacity.n_rows or len(outputs) > recording.capacity.n_outputs:
            raise UsageError(
                f"a step of {n} tokens with {len(sequences)} sequences and {len(outputs)} outputs; expected one sequence per token, "
                f"1 to {recording.capacity.n_rows} tokens and 1 to {recording.capacity.n_outputs} outputs"
            )
        if n > SMALL_ROWS and min(sequences) != max(sequences):
            raise UsageError(f"a step of {n} tokens holds several sequences; expected one, or at most {SMALL_ROWS} tokens")
        bounds = (("token id", tokens, recording.n_vocab), ("sequence", sequences, self.shape.n_sequences), ("output row", outputs, n))
        for what, values, stop in bounds:
            if min(values) < 0 or max(values) >= stop:
                wrong = min(values) if min(values) < 0 else max(values)
                raise UsageError(f"{what} {wrong} is impossible; expected 0 to {stop - 1}")

    def capacity_for(self, n_rows: int, n_outputs: int) -> Capacity:
        """The smallest of a few capacities that a batch fits, so that few recordings serve all batches."""
        if n_rows == 1:
            return Capacity(1, 1)
        if n_rows <= SMALL_ROWS:
            return Capacity(SMALL_ROWS, SMALL_ROWS)
        if n_rows <= self.ubatch_size:
            return Capacity(self.ubatch_size, 1 if n_outputs <= 1 else self.ubatch_size)
        raise NumbaMetaError(f"a step of {n_rows} rows is larger than ubatch_size {self.ubatch_size}; split it")

    def _next_batch(self, tokens: Sequence[int], sequences: Sequence[int], outputs: Sequence[int]) -> Batch:
        """Gives each run of rows of one sequence its next positions and cells; where they do not fit, none are taken."""
        positions: list[int] = []
        cells: list[int] = []
        window_cells: list[int] = []
        n_taken: list[tuple[int, int]] = []
        for sequence, run in groupby(sequences):
            start, n = self.cells.length(sequence), len(list(run))
            try:
                taken, in_window = self.cells.take(sequence, n)
            except NumbaMetaError:
                for earlier, length in reversed(n_taken):
                    self.cells.truncate(earlier, length)
                raise
            n_taken.append((sequence, start))
            positions += range(start, start + n)
            cells += taken
            window_cells += in_window
        return Batch(tokens, positions, sequences, cells, window_cells, outputs)

    # ---- recordings --------------------------------------------------------------------------------------------------------------------

    def recording(self, capacity: Capacity) -> Recording:
        """The recorded step of a capacity; made at its first use, and again when its memory has moved."""
        known = self._recordings.get(capacity)
        if known is None or not known.is_valid:
            known = self._recordings[capacity] = self._record(self.plan(capacity))
        return known

    def plan(self, capacity: Capacity) -> StepPlan:
        """The plan of a step of this capacity (pure: nothing is allocated)."""
        return plan_step(self._split(capacity), self.device.n_threads, self._exact, ALIGNMENT)

    def _split(self, capacity: Capacity) -> SplitGraph:
        shape = self.shape
        batch = BatchShape(
            n_rows=capacity.n_rows,
            n_outputs=capacity.n_outputs,
            n_sequences=shape.n_sequences,
            n_positions=shape.n_positions,
            n_cells=shape.n_stored_cells,
            n_window_cells=shape.n_window_cells * shape.n_sequences,
            cache_type_k=self._cache_types[0],
            cache_type_v=self._cache_types[1],
        )
        return infer_splits(self._build(batch), self._leaf_state, len(self.device))

    def _leaf_state(self, leaf: Tensor) -> SplitState:
        if leaf.role is Role.WEIGHT:
            return self._cuts.weight(leaf.name)
        kind, _, layer = leaf.name.partition(".")
        if kind in ("cache_k", "cache_v"):
            state: SplitState = getattr(self._cuts.layers[int(layer)], kind)
            return state
        return MIRRORED

    def _record(self, plan: StepPlan) -> Recording:
        workspace = self._workspace_for(plan)
        if not workspace.fits(plan.workspace):
            workspace.resize([max(a, b) for a, b in zip(plan.workspace.n_bytes, workspace.n_bytes, strict=True)])
        bases = tuple(buffer.address if buffer is not None else 0 for buffer in workspace.buffers)
        block, host = self._input_block(plan)
        binder = Binder(plan, bases, block, self._persistent_address)
        step = binder.record(self._streams, {}, self._meetings)
        output = plan.devices[0].graph.graph.outputs[0]
        offset = binder.address(0, output) - bases[0]
        first = workspace.buffers[0]
        assert first is not None
        logits = first.data[offset : offset + output.n_bytes].view(np.float32).reshape(output.shape[1], output.shape[0])
        return Recording(plan, binder, step, host, logits, workspace)

    def _workspace_for(self, plan: StepPlan) -> Workspace[CpuBuffer]:
        """Small steps keep memory of their own for good; large ones share one that may grow."""
        n_rows = next(leaf.shape[0] for leaf in plan.split.graph.leaves if leaf.name == "tokens")
        n_outputs = next(leaf.shape[0] for leaf in plan.split.graph.leaves if leaf.name == "output_rows")
        if n_rows > SMALL_ROWS:
            return self._large_workspace
        return self._small_workspaces.setdefault(Capacity(n_rows, n_outputs), self._new_workspace())

    def _new_workspace(self) -> Workspace[CpuBuffer]:
        devices = self.device.devices
        return Workspace(self.device.names, lambda j, n: devices[j].allocate(n, "the workspace"), lambda _, buffer: buffer.free())

    def _input_block(self, plan: StepPlan) -> tuple[InputBlock, dict[str, np.ndarray]]:
        """The inputs of a step as the host writes them, and memory for each device's copy."""
        offsets, end = {}, 0
        leaves = [leaf for leaf in plan.split.graph.leaves if leaf.role is Role.INPUT]
        for leaf in leaves:
            offsets[leaf.name] = end
            end = round_up(end + leaf.n_bytes, 8)
        host = np.zeros(end // 8 + 1, np.int64).view(np.uint8)
        copies = self.device.allocate([end] * len(self.device), "inputs")
        views = {
            leaf.name: host[offsets[leaf.name] : offsets[leaf.name] + leaf.n_bytes].view(np.int64 if leaf.dtype.block_bytes == 8 else np.int32)
            for leaf in leaves
        }
        return InputBlock(host.ctypes.data, copies.addresses, end, offsets), views

    # ---- memory ------------------------------------------------------------------------------------------------------------------------

    def _place_cache(self) -> CachePlan:
        """Allocates the cache (by share) and the cell tables (on every device)."""
        leaves = [leaf for leaf in self._split(Capacity(1, 1)).graph.leaves if leaf.role is Role.CACHE]
        kept = [leaf for leaf in leaves if leaf.name.startswith("cache_")]
        rows = [(leaf.name, leaf.dtype, leaf.shape[0], leaf.shape[1], self._leaf_state(leaf)) for leaf in kept]
        n_devices = len(self.device)
        plan = plan_cache(rows, n_devices, ALIGNMENT)
        cache = self.device.allocate([plan.placement.simple_bytes(j) for j in range(n_devices)], "the KV cache", sparse=True)
        bases = {binding.entry.name: (cache, binding.offsets) for binding in plan.bindings}
        for leaf in leaves:
            if leaf not in kept:
                bases[leaf.name] = (self.device.allocate([leaf.n_bytes] * n_devices, leaf.name, sparse=True), (0,) * n_devices)
        bases |= {name: (self._weights, offsets) for name, offsets in self.weight_plan.offsets.items()}
        self._addresses = [{name: buffer.addresses[j] + offsets[j] for name, (buffer, offsets) in bases.items()} for j in range(n_devices)]
        return plan

    def _persistent_address(self, device: int, tensor: Tensor) -> int:
        return self._addresses[device][tensor.name]

    def workspace_bytes(self, device: int) -> dict[str, int]:
        """Bytes of the workspaces that exist so far, by kind of step."""
        kinds = {"decode" if c.n_rows == 1 else "batch": w for c, w in self._small_workspaces.items()} | {"prompt": self._large_workspace}
        return {kind: workspace.n_bytes[device] for kind, workspace in kinds.items() if workspace.n_bytes[device]}

    @property
    def collectives_per_step(self) -> int:
        """How often the devices meet in a step."""
        return len(self._split(Capacity(1, 1)).collectives)

    def close(self) -> None:
        """Ends the devices' threads and gives all memory back. Twice is once."""
        self._closed = True
        self._recordings.clear()
        self.device.close()
