"""Recording work on a CPU stream: kernels, asynchronous copies, events.

    loaded = CpuEvent("loaded")
    transfer, compute = CpuRecorder(transfer_stream), CpuRecorder(compute_stream)
    transfer.copy_2d(Rows(host, 0, 1088), Rows(slot.data, 0, 544), width=544, height=256)
    transfer.record(loaded)
    compute.call(first_kernel, ...)        # runs while the copy runs
    compute.wait(loaded)
    compute.call(second_kernel, ...)       # reads the slot
    step = CpuStep([compute_stream, transfer_stream], [compute.program(), transfer.program()])

The order in which a step is recorded is an order in which it could run, so recorded waits never form a circle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from numba_meta.devices.cpu_stream import CpuEvent, CpuProgram, CpuStream
from numba_meta.errors import DeviceError
from numba_meta.kernels.cpu import copy, program
from numba_meta.kernels.cpu.kernel import CpuKernel


@dataclass(frozen=True)
class Rows:
    """Rows of bytes: `memory` uint8 `[n_bytes]` (a buffer's `data`, or the host's), the first at `offset`, `pitch` bytes apart."""

    memory: np.ndarray
    offset: int
    pitch: int


class CpuRecorder:
    """Collects the calls of one stream for one step. Each call sees what the calls before it wrote, whichever thread wrote it.

    A call may be given a `mark`, which comes back with its times (`CpuStep.run_noting_times`).
    """

    def __init__(self, stream: CpuStream) -> None:
        self.stream = stream
        self._calls: list[tuple[int, int, int]] = []
        self._marks: list[object] = []
        self._keep: list[object] = []
        self._records: list[CpuEvent] = []
        self._waits: list[CpuEvent] = []
        self._waited = False

    def call(self, kernel: CpuKernel, *, barrier: bool = True, mark: object = None, **arguments: Any) -> None:
        """A kernel on all threads of the stream; arrays stand for their addresses and are kept alive.

        `barrier=False` where it neither reads what the calls since the last barrier wrote nor writes what they touched. Raises
        `NumbaMetaError` for arguments that do not fit the kernel.
        """
        plain = {name: value.ctypes.data if isinstance(value, np.ndarray) else value for name, value in arguments.items()}
        block = kernel.pack(**plain)
        self._keep += [block, *arguments.values()]
        self._calls.append((kernel.address, int(block.ctypes.data), int(barrier or self._waited)))
        self._marks.append(mark)
        self._waited = False

    def copy_2d(self, source: Rows, destination: Rows, width: int, height: int, *, barrier: bool = True, mark: object = None) -> None:
        """An asynchronous copy of `height` rows of `width` bytes, in this stream's order. The two must not overlap.

        Raises `DeviceError` where rows overlap each other or lie outside their memory.
        """
        for name, rows in (("source", source), ("destination", destination)):
            _check_rows(f"{self.stream.name}: {name}", rows, width, height)
        self.call(
            copy.copy_2d,
            barrier=barrier,
            mark=mark,
            source=source.memory.ctypes.data + source.offset,
            source_pitch=source.pitch,
            destination=destination.memory.ctypes.data + destination.offset,
            destination_pitch=destination.pitch,
            width=width,
            height=height,
        )
        self._keep += [source.memory, destination.memory]

    def record(self, event: CpuEvent, mark: object = None) -> None:
        """Marks this point: who waits for the event sees all that this stream did before."""
        event.n_records += 1
        self.call(program.record_event, mark=mark, event=event.address)
        self._records.append(event)

    def wait(self, event: CpuEvent, mark: object = None) -> None:
        """What follows on this stream waits for the latest record of the event so far. Raises `DeviceError` where there is none."""
        if event.n_records == 0:
            raise DeviceError(f"{self.stream.name} would wait for event {event.name}, which is not recorded yet; record it first")
        self.call(program.wait_event, barrier=False, mark=mark, event=event.address, n_records=event.n_records)
        self._waits.append(event)
        self._waited = True  # one thread waits for all: the others at the next call's barrier

    def program(self) -> CpuProgram:
        """What was recorded so far, for a `CpuStep`."""
        calls = np.array(self._calls, np.int64).reshape(-1, program.CALL_WORDS)
        keep = (tuple(self._keep), *self._records, *self._waits)
        return CpuProgram(calls, keep, tuple(self._records), tuple(self._waits), tuple(self._marks))


def _check_rows(what: str, rows: Rows, width: int, height: int) -> None:
    memory = rows.memory
    if memory.dtype != np.uint8 or memory.ndim != 1 or not memory.flags.c_contiguous:
        raise DeviceError(f"{what} is {memory.dtype} {list(memory.shape)}; expected contiguous uint8 [n_bytes]")
    if width < 0 or height < 0 or rows.offset < 0 or (height > 1 and rows.pitch < width):
        raise DeviceError(f"{what} of {height} x {width} bytes, {rows.pitch} apart, from {rows.offset}; expected rows that do not overlap")
    end = rows.offset + (height - 1) * rows.pitch + width if width and height else rows.offset
    if end > memory.size:
        raise DeviceError(f"{what} of {height} x {width} bytes, {rows.pitch} apart, ends at {end}; expected at most {memory.size}")
