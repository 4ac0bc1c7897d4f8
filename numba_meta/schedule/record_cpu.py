"""Recording for CPU devices: flat programs with addresses, one per stream, that compiled threads walk."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from numba_meta.devices.cpu import CpuDevice, CpuEvent, CpuStep, CpuStream
from numba_meta.devices.cpu_record import CpuRecorder
from numba_meta.devices.cpu_stream import StreamTimes
from numba_meta.devices.host_memory import HostMemory
from numba_meta.devices.meta import MetaDevice
from numba_meta.devices.simple import Buffer
from numba_meta.errors import PlacementError
from numba_meta.kernels.cpu import program
from numba_meta.kernels.cpu.copy import copy_2d
from numba_meta.kernels.cpu.kernel import CpuKernel
from numba_meta.lowering import Constant
from numba_meta.schedule.calls import AddressList, Call, EventName, Peer, Place
from numba_meta.schedule.plan import INPUTS_THERE
from numba_meta.schedule.record import Binder
from numba_meta.schedule.trace import Mark
from numba_meta.tensor import Role, Tensor


class CpuSteps:
    """Streams of CPU devices, and the steps that are recorded on them."""

    place_constant = None  # kernels read the host's memory

    def __init__(self, device: MetaDevice) -> None:
        self._device = device
        self._streams = device.compute_streams()
        self._transfer_streams: dict[int, CpuStream] = {}
        self._meetings = np.zeros(8, np.int64)

    def host_memory(self, n_bytes: int) -> HostMemory:
        """Zeroed host memory that steps copy from."""
        return HostMemory(n_bytes, True)

    def record(self, binder: Binder, output: Buffer, offset: int, n_bytes: int) -> RecordedCpuStep:
        """The step of a binder's plan; its output is the bytes of a buffer of the first device."""
        for j, plan in enumerate(binder.plan.devices):
            if plan.transfer_calls and j not in self._transfer_streams:
                device = self._device.devices[j]
                assert isinstance(device, CpuDevice)
                self._transfer_streams[j] = device.stream("transfer", n_threads=1)
        step = CpuStepRecorder(binder).record(self._streams, self._transfer_streams, self._meetings)
        return RecordedCpuStep(step, binder, output.read(offset, n_bytes))

    def end_transfers(self) -> None:
        """Ends the transfer streams; what was recorded on them must not run any more."""
        for stream in self._transfer_streams.values():
            stream.close()
        self._transfer_streams.clear()


class RecordedCpuStep:
    """A step that is ready to run: `output` uint8 is what it leaves for the host, a view that the next step overwrites."""

    def __init__(self, step: CpuStep, binder: Binder, output: np.ndarray) -> None:
        self.step = step
        self.output = output
        self._keep = binder  # and with it the constants that the step reads

    def run(self) -> None:
        """Runs the step to its end."""
        self.step.run()

    def run_noting_times(self) -> tuple[StreamTimes, ...]:
        """As `run`; says when each stream was at which call."""
        return self.step.run_noting_times()

    def release(self) -> None:
        """Nothing but memory of the host, which goes with the object."""


class CpuStepRecorder:
    """Records the step of a binder's plan on CPU devices."""

    def __init__(self, binder: Binder) -> None:
        self._binder = binder
        self._plan = binder.plan
        self._inputs = binder.inputs

    def record(self, streams: Sequence[CpuStream], transfer_streams: Mapping[int, CpuStream], meet_counter: np.ndarray) -> CpuStep:
        """The step of all devices: `streams[j]` computes on device j, `transfer_streams[j]` copies to it where it has a ring."""
        total = sum(stream.n_threads for stream in streams)
        recorders = []
        for device, stream in enumerate(streams):
            own = {"compute": stream, "transfer": transfer_streams.get(device)}
            together: list[tuple[CpuRecorder, deque[Mark]]] = []
            for purpose, calls in self._plan.devices[device].streams().items():
                on = own[purpose]
                if on is None:
                    raise PlacementError(f"device {device} has no {purpose} stream, and {len(calls)} calls for it")
                together.append((CpuRecorder(on), deque(Mark(device, purpose, call) for call in calls)))
            self._copy_inputs(device, together[0][0])
            self._record_together(device, together, meet_counter, total)
            recorders += [recorder for recorder, _ in together]
        return CpuStep([recorder.stream for recorder in recorders], [recorder.program() for recorder in recorders])

    def _record_together(
        self, device: int, streams: list[tuple[CpuRecorder, deque[Mark]]], meet_counter: np.ndarray, total: int
    ) -> None:
        """Records the streams of a device in an order in which they could run: a wait comes after what it waits for."""
        events: dict[EventName, CpuEvent] = {}
        hazards = [_Hazards() for _ in streams]
        inputs = self._inputs.device_addresses[device]
        hazards[0].needs_barrier([], [(inputs, inputs + self._inputs.n_bytes)])  # just copied
        moved = True
        while moved:
            moved = False
            for (recorder, marks), touched in zip(streams, hazards, strict=True):
                while marks and (marks[0].call.waits is None or marks[0].call.waits in events):
                    self._record_call(recorder, marks.popleft(), touched, events, meet_counter, total)
                    moved = True
        for recorder, marks in streams:
            if marks:
                raise PlacementError(f"{recorder.stream.name} waits for {marks[0].call.waits}, which nothing records before it")

    def _record_call(
        self, recorder: CpuRecorder, mark: Mark, touched: _Hazards, events: dict[EventName, CpuEvent], meet_counter: np.ndarray, total: int
    ) -> None:
        device, call = mark.device, mark.call
        if call.kernel is not None:
            assert isinstance(call.kernel, CpuKernel)
            values = {name: self._binder.value(device, value) for name, value in call.arguments.items()}
            barrier = touched.needs_barrier(self._ranges(device, call.reads), self._ranges(device, call.writes))
            recorder.call(call.kernel, barrier=barrier, mark=mark, **values)
            return
        if call.records is not None:
            recorder.record(events.setdefault(call.records, CpuEvent(call.records.name)), mark)
        elif call.waits is not None:
            recorder.wait(events[call.waits], mark)
        else:
            recorder.call(program.meet, barrier=False, mark=mark, counter=meet_counter, total=total)
        touched.clear()  # all of these have a barrier before them, or before the call that follows

    def _ranges(self, device: int, places: tuple[Place, ...]) -> list[tuple[int, int]]:
        ranges = []
        for place in places:
            if isinstance(place, (Constant, AddressList, Peer)) or (isinstance(place, Tensor) and place.role is Role.WEIGHT):
                continue  # never written in a step, or ordered by a meeting
            if place.n_bytes:
                start = self._binder.address(device, place)
                ranges.append((start, start + place.n_bytes))
        return ranges

    def _copy_inputs(self, device: int, recorder: CpuRecorder) -> None:
        source, destination, n = self._inputs.host_address, self._inputs.device_addresses[device], self._inputs.n_bytes
        values = {"source": source, "source_pitch": n, "destination": destination, "destination_pitch": n, "width": n, "height": 1}
        recorder.call(copy_2d, barrier=False, mark=Mark(device, "compute", Call(copy_2d, values, node=INPUTS_THERE.name)), **values)


class _Hazards:
    """The bytes touched since the last barrier. A call that reads what was written, or writes what was touched, needs a new one."""

    def __init__(self) -> None:
        self._read: list[tuple[int, int]] = []
        self._written: list[tuple[int, int]] = []

    def clear(self) -> None:
        self._read.clear()
        self._written.clear()

    def needs_barrier(self, reads: list[tuple[int, int]], writes: list[tuple[int, int]]) -> bool:
        """Whether a call must wait for all threads; notes what it touches."""
        conflict = _overlap(reads, self._written) or _overlap(writes, self._written) or _overlap(writes, self._read)
        if conflict:
            self.clear()
        self._read += reads
        self._written += writes
        return conflict


def _overlap(some: list[tuple[int, int]], others: list[tuple[int, int]]) -> bool:
    return any(start < other_stop and other_start < stop for start, stop in some for other_start, other_stop in others)
