"""A context: a model on devices, its cache, and its recorded steps. Batches go in, rows of logits come out."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from numba_meta.devices.cpu_stream import StreamTimes
from numba_meta.devices.meta import MetaBuffer, MetaDevice
from numba_meta.dtypes import DType
from numba_meta.errors import NumbaMetaError, NumbaMetaWarning, UsageError
from numba_meta.graph import Graph
from numba_meta.interrupts import held_back
from numba_meta.models.architectures.builder import BatchShape
from numba_meta.models.cache.cells import CachePlan, CacheShape, Cells
from numba_meta.models.cache.memory import CacheMemory
from numba_meta.models.cache.operations import CacheOperations, find_cache_layers
from numba_meta.models.cache.transport import HostCacheOptions, Transport
from numba_meta.models.cache.windows import Window, WindowLayout, choose_window_shape, full_window, tight_window_shape
from numba_meta.models.running.ranks import RankGroup, leaf_of_devices
from numba_meta.models.running.recordings import Capacity, Logits, Recorder, Recording
from numba_meta.models.running.step_shape import SMALL_ROWS, batch_shape, leaf_state
from numba_meta.models.running.weights import WeightPlan
from numba_meta.one_process import OneProcess
from numba_meta.ops.transport import WindowShape
from numba_meta.schedule.infer import SplitGraph, infer_splits
from numba_meta.schedule.plan import StepPlan
from numba_meta.schedule.trace import StepTrace
from numba_meta.schedule.transport_plan import TransportOptions
from numba_meta.split.policy import CutPlan
from numba_meta.tensor import Role, Tensor


@dataclass
class _Agreed:
    """What all ranks agreed on for the recordings of a capacity, and how many steps in a row had twice the room that they needed."""

    windows: dict[bool, WindowShape]
    may_use_ring: bool
    is_too_large: bool = False  # a smaller window could use the rings
    n_roomy_steps: int = 0


_Planned = tuple[SplitGraph, dict[bool, WindowShape]]
_NOTHING = Window((0,), 0)
ROOMY_STEPS = 64  # large and small batches may take turns; a recording takes as long as many steps


class Context(OneProcess):
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
        few_rows_apart: bool,
        host_cache: HostCacheOptions | None = None,
        deterministic: bool = False,
        group: RankGroup | None = None,
    ) -> None:
        super().__init__()
        self._build = build
        self.group = group
        self._devices = group.ranks.own if group else range(len(device))  # among those of all ranks
        self._agreed: dict[Capacity, _Agreed] = {}
        self._deterministic = deterministic
        self._leaf_state = leaf_state(cuts)
        self.weight_plan, self._weights = weights
        self._cache_types = cache_types
        self.device = device
        self.shape = shape
        self.ubatch_size = ubatch_size
        self.few_rows_apart = few_rows_apart
        self.cells = Cells(shape)
        self._recordings: dict[Capacity, Recording] = {}
        self._closed = False
        self.traces: deque[StepTrace] | None = None  # of the steps to come; None: nothing is noted
        self._host_cache = host_cache
        kinds = (False, True) if shape.n_window_cells else (False,)
        self._layouts = {local: WindowLayout(self.cells, local) for local in kinds} if host_cache else {}
        graph = self._split(Capacity(1, 1), self._window_shapes({}, {})).graph
        self._n_vocab = graph.outputs[0].shape[0]
        own = [leaf_of_devices(leaf, self._leaf_state(leaf), self._devices) for leaf in graph.leaves if leaf.role is not Role.WEIGHT]
        may_pin = host_cache is not None and host_cache.pinned and all(d.spec.can_pin for d in device.devices)
        self._memory = CacheMemory(device, own, lambda leaf: self._leaf_state(leaf).of_devices(self._devices), may_pin)
        is_pinned = may_pin and (self._memory.host is None or self._memory.host.is_pinned)
        if host_cache is not None and host_cache.pinned and not is_pinned:
            names = ", ".join(d.name for d in device.devices if may_pin or not d.spec.can_pin)
            told = f"host memory could not be pinned for {names}: the KV cache is pageable and its deliveries stay ordered"
            warnings.warn(told, NumbaMetaWarning, stacklevel=2)
        self.transport = Transport(device, host_cache.transport if host_cache else TransportOptions(), is_pinned, self._devices)
        persistent = partial(_persistent_address, self.weight_plan, self._weights, self._memory)  # not a method: it would hold the context
        self._recorder = Recorder(device, self.transport, persistent, exact, group.ranks if group else None)
        self.cache = CacheOperations(self.cells, self._memory, find_cache_layers(graph), self._layouts.values())

    @property
    def cache_plan(self) -> CachePlan:
        """Where the device-resident part of the cache lies."""
        return self._memory.plan

    @property
    def host_cache_bytes(self) -> int:
        """Bytes of the part of the cache that lies in host memory."""
        return self._memory.host.data.size if self._memory.host else 0

    def compile(self) -> None:
        """Compiles the kernels of these steps, or loads them from the cache of kernels. Takes no memory of the devices."""
        for n_rows in (self.ubatch_size, 1):
            for device in self.plan(self.capacity_for(n_rows, 1)).devices:
                kernels = {call.kernel for call in (*device.calls, *device.transfer_calls) if call.kernel is not None}
                self.device.compile(kernels)

    def prepare(self) -> None:
        """Records the steps that every generation needs: one token, and a prompt. Takes their memory and compiles their kernels now."""
        for n_rows in (self.ubatch_size, 1):
            self.recording(self.capacity_for(n_rows, 1))

    # ---- steps -------------------------------------------------------------------------------------------------------------------------

    def decode(self, tokens: Sequence[int], sequences: Sequence[int], outputs: Sequence[int], capacity: Capacity | None = None) -> Logits:
        """Appends tokens to their sequences in one step; logits of the rows `outputs`.

        At most `ubatch_size` rows; more than SMALL_ROWS must belong to one sequence. Where the step cannot be made, nothing is appended.
        """
        if self._closed:
            raise NumbaMetaError("the context was closed; load the model again")
        if self.group is None:
            return self._decode(tokens, sequences, outputs, capacity)
        with self.group.calls:
            return self._decode(tokens, sequences, outputs, capacity)

    def _decode(self, tokens: Sequence[int], sequences: Sequence[int], outputs: Sequence[int], capacity: Capacity | None) -> Logits:
        capacity = capacity or self.capacity_for(len(tokens), len(outputs))
        self._check_batch(tokens, sequences, outputs, capacity)
        note = None if self.traces is None else partial(self._note_times, len(tokens), len(set(sequences)) == len(tokens))
        with held_back():  # cells that were given out and never filled would be taken for what was computed
            values = self._append(tokens, sequences, outputs)
            try:
                windows = {local: layout.window(sequences) for local, layout in self._layouts.items()}
                recording = self.recording(capacity, windows)
                if windows:
                    self._add_windows(values, windows, recording)
                return recording.run(values, note)
            except BaseException:
                self._take_back(sequences)
                for layout in self._layouts.values():
                    layout.forget_tables()  # they may have been written in part
                raise

    def _note_times(self, n_rows: int, generates: bool, times: tuple[StreamTimes, ...]) -> None:
        trace = self.transport.note_times(times, n_rows, generates)
        if self.traces is not None:
            self.traces.append(trace)

    def _add_windows(self, values: dict[str, Sequence[int]], windows: Mapping[bool, Window], recording: Recording) -> None:
        """The inputs that say what is delivered, and the tables of slot cells where they have changed."""
        for local in set(recording.delivered.values()):
            window, layout, prefix = windows[local], self._layouts[local], "window_" if local else ""
            for sequence, cells in layout.stale_rows(window, values["sequences"]).items():
                self._memory.write_table_row(f"{prefix}slot_table", sequence, cells)
            values[f"{prefix}streams"] = window.streams
            values[f"{prefix}n_streams"] = (len(window.streams),)
            values[f"{prefix}n_cells"] = (window.n_cells,)
            values[f"{prefix}slot_cells"] = layout.slot_cells(window, values["sequences"], values["positions"])
        if recording.plan.transport is not None:
            self.transport.note_step(recording.plan.transport, {layer: windows[local] for layer, local in recording.delivered.items()})

    def _check_batch(self, tokens: Sequence[int], sequences: Sequence[int], outputs: Sequence[int], capacity: Capacity) -> None:
        """Compiled code trusts what it is given, so nothing wrong may get there."""
        n = len(tokens)
        if n == 0 or n != len(sequences) or len(outputs) == 0 or n > capacity.n_rows or len(outputs) > capacity.n_outputs:
            raise UsageError(
                f"a step of {n} tokens with {len(sequences)} sequences and {len(outputs)} outputs; expected one sequence per token, "
                f"1 to {capacity.n_rows} tokens and 1 to {capacity.n_outputs} outputs"
            )
        if n > SMALL_ROWS and min(sequences) != max(sequences):
            raise UsageError(f"a step of {n} tokens holds several sequences; expected one, or at most {SMALL_ROWS} tokens")
        bounds = (("token id", tokens, self._n_vocab), ("sequence", sequences, self.shape.n_sequences), ("output row", outputs, n))
        for what, values, stop in bounds:
            if min(values) < 0 or max(values) >= stop:
                wrong = min(values) if min(values) < 0 else max(values)
                raise UsageError(f"{what} {wrong} is impossible; expected 0 to {stop - 1}")

    def stays_small(self, n_rows: int) -> bool:
        """Whether so many rows must not be computed by a recording for more than SMALL_ROWS (`LoadPlan.few_rows_apart`)."""
        return self.few_rows_apart and n_rows <= SMALL_ROWS

    def capacity_for(self, n_rows: int, n_outputs: int) -> Capacity:
        """The smallest of a few capacities that a batch fits, so that few recordings serve all batches."""
        if n_rows == 1:
            return Capacity(1, 1)
        if n_rows <= self.ubatch_size and n_outputs <= 1 and not self.stays_small(n_rows):
            return Capacity(self.ubatch_size, 1)  # a prompt, short ones too
        if n_rows <= SMALL_ROWS:
            return Capacity(SMALL_ROWS, SMALL_ROWS)
        if n_rows <= self.ubatch_size:
            return Capacity(self.ubatch_size, self.ubatch_size)
        raise NumbaMetaError(f"a step of {n_rows} rows is larger than ubatch_size {self.ubatch_size}; split it")

    def _append(self, tokens: Sequence[int], sequences: Sequence[int], outputs: Sequence[int]) -> dict[str, Sequence[int]]:
        """Gives each run of rows of one sequence its next positions and cells; where they do not fit, none are taken."""
        positions: list[int] = []
        cells: list[int] = []
        window_cells: list[int] = []
        for sequence, run in groupby(sequences):
            start, n = self.cells.length(sequence), len(list(run))
            try:
                taken, in_window = self.cells.take(sequence, n, tokens[len(positions) : len(positions) + n])
            except NumbaMetaError:
                self._take_back(sequences[: len(positions)])
                raise
            positions += range(start, start + n)
            cells += taken
            window_cells += in_window
        return {
            "n_tokens": (len(tokens),),
            "n_outputs": (len(outputs),),
            "tokens": tokens,
            "positions": positions,
            "sequences": sequences,
            "cells": cells,
            "window_cells": window_cells,
            "output_rows": outputs,
        }

    def _take_back(self, sequences: Sequence[int]) -> None:
        """Forgets the last tokens of a step that was not made: one for each time that a sequence is named."""
        for sequence in set(sequences):
            self.cells.truncate(sequence, self.cells.length(sequence) - sum(s == sequence for s in sequences))

    # ---- recordings --------------------------------------------------------------------------------------------------------------------

    def recording(self, capacity: Capacity, windows: Mapping[bool, Window] | None = None) -> Recording:
        """The recorded step of a capacity; made at its first use, and again when its memory has moved or a window has outgrown it.

        One that was too large for a ring is made anew when steps have done with half its room for a while.
        """
        known, windows = self._recordings.get(capacity), windows or {}
        if self.group is not None and self._layouts:
            return self._recording_over_ranks(self.group, capacity, windows, known)
        shapes = self._window_shapes(windows, known.windows if known else {})
        if known is not None and known.is_too_large and windows:
            shapes = self._less_room(known, windows, shapes)
        if known is None or not known.is_valid or known.windows != shapes:
            if known is not None:
                self._recordings.pop(capacity).release()
            known = self._recordings[capacity] = self._recorder.record(capacity, *self._with_room(capacity, windows, shapes))
        return known

    def _recording_over_ranks(
        self, group: RankGroup, capacity: Capacity, windows: Mapping[bool, Window], known: Recording | None
    ) -> Recording:
        """As `recording` for a cache in the hosts' memory: all ranks take the same room and the same path.

        When they must agree anew follows from the tokens alone, so that all ranks do so in the same step.
        """
        agreed = self._agreed.get(capacity)
        shapes = self._window_shapes(windows, agreed.windows if agreed else {})
        if agreed is not None and agreed.is_too_large and windows:
            shapes = self._less_room(agreed, windows, shapes)
        is_new = agreed is None or shapes != agreed.windows
        if agreed is None or is_new:
            agreed = self._agreed[capacity] = self._agree_on_room(group, capacity, windows, shapes)
        self.transport.may_use_ring = agreed.may_use_ring
        if known is None or not known.is_valid or known.windows != agreed.windows or is_new:
            known = self._record_anew(capacity, agreed.windows)
        if is_new and agreed.may_use_ring and not group.least(int(not known.is_ordered), "transport"):
            agreed = self._agreed[capacity] = _Agreed(agreed.windows, False, True)
            self.transport.may_use_ring = False
            known = self._record_anew(capacity, agreed.windows)
        return known

    def _record_anew(self, capacity: Capacity, windows: dict[bool, WindowShape]) -> Recording:
        if capacity in self._recordings:
            self._recordings.pop(capacity).release()
        recording = self._recordings[capacity] = self._recorder.record(capacity, self._split(capacity, windows), windows)
        return recording

    def _agree_on_room(
        self, group: RankGroup, capacity: Capacity, windows: Mapping[bool, Window], shapes: dict[bool, WindowShape]
    ) -> _Agreed:
        """Room to grow where the ring of every rank takes it, less where only so it fits all, else the ordered path for all."""
        self.transport.may_use_ring = True
        tight = self._tight_shapes(windows, shapes)
        split = self._split(capacity, shapes)
        level = 2 if self.transport.has_room(split) else 0
        if level == 0 and tight != shapes and self.transport.has_room(self._split(capacity, tight)):
            level = 1
        level = group.least(level, "ring")
        if level == 0:
            return _Agreed(shapes, False, not group.least(int(not self._is_too_large(split)), "room"))
        return _Agreed(tight if level == 1 else shapes, True)

    def _less_room(
        self, known: Recording | _Agreed, windows: Mapping[bool, Window], shapes: dict[bool, WindowShape]
    ) -> dict[bool, WindowShape]:
        """Room for these windows alone, once steps have done with half of what there is for a while."""
        fresh = self._window_shapes(windows, {})
        is_roomy = 2 * sum(s.capacity for s in fresh.values()) <= sum(s.capacity for s in shapes.values())
        known.n_roomy_steps = known.n_roomy_steps + 1 if is_roomy else 0
        return fresh if known.n_roomy_steps > ROOMY_STEPS else shapes

    def _tight_shapes(self, windows: Mapping[bool, Window], shapes: Iterable[bool]) -> dict[bool, WindowShape]:
        return {local: tight_window_shape(windows.get(local, _NOTHING), full_window(self.shape, local)) for local in shapes}

    def _window_shapes(self, windows: Mapping[bool, Window], had: Mapping[bool, WindowShape]) -> dict[bool, WindowShape]:
        """Room for the windows of a step: what there is (`had`), if it is enough."""
        full = {local: full_window(self.shape, local) for local in self._layouts}
        return {local: choose_window_shape(windows.get(local, _NOTHING), full[local], had.get(local)) for local in full}

    def _with_room(self, capacity: Capacity, windows: Mapping[bool, Window], shapes: dict[bool, WindowShape]) -> _Planned:
        """The graph of a step with room to grow; with less room where only so it fits a ring."""
        split = self._split(capacity, shapes)
        tight = self._tight_shapes(windows, shapes)
        if tight != shapes and self._is_too_large(split):
            less = self._split(capacity, tight)
            if not self._is_too_large(less):
                return less, tight
        return split, shapes

    def _is_too_large(self, split: SplitGraph) -> bool:
        transport = self.transport.decide(split)
        return transport is not None and transport.is_too_large

    def plan(self, capacity: Capacity) -> StepPlan:
        """The plan of a step of this capacity, as it is now or would be recorded; nothing is allocated."""
        known = self._recordings.get(capacity)
        if known is not None and known.is_valid:
            return known.plan
        return self._recorder.plan(self._split(capacity, self._window_shapes({}, {})))

    def _split(self, capacity: Capacity, windows: Mapping[bool, WindowShape]) -> SplitGraph:
        batch = batch_shape(self.shape, self._cache_types, self._host_cache, capacity.n_rows, capacity.n_outputs, windows)
        return infer_splits(self._build(batch), self._leaf_state, self._n_devices, may_gather=lambda _: self._deterministic)

    @property
    def _n_devices(self) -> int:
        """Devices of all ranks."""
        return self.group.ranks.n_devices if self.group else len(self.device)

    # ---- memory ------------------------------------------------------------------------------------------------------------------------

    def workspace_bytes(self, device: int) -> dict[str, int]:
        """Bytes of the workspaces that exist so far, by kind of step."""
        return self._recorder.workspace_bytes(device)

    @property
    def collectives_per_step(self) -> int:
        """How often the devices meet in a step."""
        return len(self._split(Capacity(1, 1), self._window_shapes({}, {})).collectives)

    def close(self) -> None:
        """Ends the devices' threads and gives all memory back. Twice is once."""
        with held_back():
            self._closed = True
            for recording in self._recordings.values():
                recording.release()
            self._recordings.clear()
            self.device.close()


def _persistent_address(plan: WeightPlan, weights: MetaBuffer, cache: CacheMemory, device: int, tensor: Tensor) -> int:
    """Where a device finds a weight, or a tensor of the cache."""
    offsets = plan.offsets.get(tensor.name)
    if offsets is not None:
        return weights.addresses[device] + offsets[device]
    return cache.address(device, tensor.name)
