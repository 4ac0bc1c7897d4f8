"""Recording: a step plan becomes flat programs with addresses, one per stream, that compiled threads walk."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from numba_meta.devices.cpu import CpuEvent, CpuStep, CpuStream
from numba_meta.devices.cpu_record import CpuRecorder
from numba_meta.errors import PlacementError
from numba_meta.kernels.cpu import program
from numba_meta.ops.lowering import Constant, Scratch
from numba_meta.schedule.lower import AddressList, Call, EventName, Offset, Peer, Place
from numba_meta.schedule.plan import INPUTS_THERE, StepPlan
from numba_meta.schedule.trace import Mark
from numba_meta.schedule.transport_plan import TransportPlan
from numba_meta.schedule.transport_slots import Ring
from numba_meta.tensor import Role, Tensor


@dataclass(frozen=True)
class InputBlock:
    """The inputs of a step as the host writes them, and each device's copy: same offsets everywhere, `offsets[name]` in bytes."""

    host_address: int
    device_addresses: tuple[int, ...]
    n_bytes: int
    offsets: Mapping[str, int]


class Binder:
    """Finds the address of every place of a plan.

    `persistent(device, tensor)` gives the address of weights and caches; `rings` where each device's ring begins, if it has one.
    """

    def __init__(
        self,
        plan: StepPlan,
        workspaces: Sequence[int],
        inputs: InputBlock,
        persistent: Callable[[int, Tensor], int],
        rings: Sequence[int] = (),
    ) -> None:
        self._plan = plan
        self._inputs = inputs
        self._persistent = persistent
        self._offsets: list[dict[Tensor | Scratch, int]] = []
        for device, layout, base in zip(plan.devices, plan.workspace.layouts, workspaces, strict=True):
            self._offsets.append({place: base + offset for place, offset in zip(device.places, layout.offsets, strict=True)})
        if plan.transport and plan.transport.ring:
            self._place_windows(plan.transport, plan.transport.ring, rings)
        self._keep: list[np.ndarray] = []

    def _place_windows(self, transport: TransportPlan, ring: Ring, rings: Sequence[int]) -> None:
        """Windows of staged layers lie in their slots: one after the other, from the first again after the last."""
        slots = {delivery.layer: (index % ring.n_slots, ring.bind(delivery)) for index, delivery in enumerate(transport.staged)}
        for j, device in enumerate(self._plan.devices):
            for node in device.graph.graph.nodes:
                if node.op == "deliver" and node.params["layer"] in slots:
                    slot, bindings = slots[node.params["layer"]]
                    within = bindings["kv".index(node.params["part"])].offsets[j]
                    self._offsets[j][node] = rings[j] + ring.slot_offset(slot, j) + within

    def address(self, device: int, place: Any) -> int:
        """The address of a place as a device sees it; numbers stand for themselves."""
        if isinstance(place, Offset):
            return self.address(device, place.place) + place.n_bytes
        if isinstance(place, Peer):
            return self.address(place.device, place.tensor)
        if isinstance(place, AddressList):
            return self._constant(np.array([self.address(device, peer) for peer in place.peers], np.int64))
        if isinstance(place, Constant):
            return self._constant(place.data)
        if isinstance(place, Scratch):
            return self._offsets[device][place]
        return self._tensor(device, place)

    def _tensor(self, device: int, tensor: Tensor) -> int:
        storage = tensor.storage
        if storage.role is Role.NODE:
            known = self._offsets[device].get(storage)
            if known is None:
                if storage.n_elements == 0:
                    return 0
                raise PlacementError(f"{storage.name} has no place on device {device}: it is read but never written")
            return known + tensor.storage_offset
        if storage.role is Role.INPUT:
            return self._inputs.device_addresses[device] + self._inputs.offsets[storage.name] + tensor.storage_offset
        return self._persistent(device, storage) + tensor.storage_offset

    def _constant(self, data: np.ndarray) -> int:
        self._keep.append(data)
        return int(data.ctypes.data)

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
            values = {name: self._value(device, value) for name, value in call.arguments.items()}
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

    def _value(self, device: int, value: Any) -> Any:
        return value if isinstance(value, (int, float)) else self.address(device, value)

    def _ranges(self, device: int, places: tuple[Place, ...]) -> list[tuple[int, int]]:
        ranges = []
        for place in places:
            if isinstance(place, (Constant, AddressList, Peer)) or (isinstance(place, Tensor) and place.role is Role.WEIGHT):
                continue  # never written in a step, or ordered by a meeting
            if place.n_bytes:
                start = self.address(device, place)
                ranges.append((start, start + place.n_bytes))
        return ranges

    def _copy_inputs(self, device: int, recorder: CpuRecorder) -> None:
        from numba_meta.kernels.cpu.copy import copy_2d

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
