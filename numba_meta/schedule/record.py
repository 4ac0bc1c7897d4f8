"""Recording: a step plan becomes flat programs with addresses, one per device, that compiled threads walk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from numba_meta.devices.cpu import CpuProgram
from numba_meta.errors import PlacementError
from numba_meta.kernels.cpu import program
from numba_meta.schedule.lower import AddressList, Constant, Offset, Peer, Place, Scratch
from numba_meta.schedule.plan import StepPlan
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

    `persistent(device, tensor)` gives the address of weights and caches.
    """

    def __init__(
        self, plan: StepPlan, workspaces: tuple[int, ...], inputs: InputBlock, persistent: Callable[[int, Tensor], int]
    ) -> None:
        self._plan = plan
        self._inputs = inputs
        self._persistent = persistent
        self._offsets: list[dict[Tensor | Scratch, int]] = []
        for device, layout, base in zip(plan.devices, plan.workspace.layouts, workspaces, strict=True):
            self._offsets.append({place: base + offset for place, offset in zip(device.places, layout.offsets, strict=True)})
        self._keep: list[np.ndarray] = []

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

    def record(self, device: int, meet_counter: np.ndarray, n_threads_total: int) -> CpuProgram:
        """The program of one device, its barriers placed where calls touch the same bytes."""
        calls: list[tuple[int, int, int]] = []
        hazards = _Hazards()
        kernel_address, block, reads, writes = self._copy_inputs(device)
        hazards.needs_barrier(reads, writes)
        calls.append((kernel_address, self._constant(block), 0))
        for call in self._plan.devices[device].calls:
            if call.kernel is None:
                block = program.meet.pack(counter=meet_counter.ctypes.data, total=n_threads_total)
                calls.append((program.meet.address, self._constant(block), 0))
                hazards.clear()
                continue
            values = {name: self._value(device, value) for name, value in call.arguments.items()}
            barrier = hazards.needs_barrier(self._ranges(device, call.reads), self._ranges(device, call.writes))
            calls.append((call.kernel.address, self._constant(call.kernel.pack(**values)), int(barrier)))
        keep = (tuple(self._keep), meet_counter)
        return CpuProgram(np.array(calls, np.int64).reshape(-1, program.CALL_WORDS), keep)

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

    def _copy_inputs(self, device: int) -> tuple[int, np.ndarray, list[tuple[int, int]], list[tuple[int, int]]]:
        from numba_meta.kernels.cpu.copy import copy_2d

        source, destination, n = self._inputs.host_address, self._inputs.device_addresses[device], self._inputs.n_bytes
        block = copy_2d.pack(source=source, source_pitch=n, destination=destination, destination_pitch=n, width=n, height=1)
        return copy_2d.address, block, [(source, source + n)], [(destination, destination + n)]


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
