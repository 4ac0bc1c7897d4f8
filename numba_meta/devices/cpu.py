"""CPU devices: memory with an account and a limit, streams of compiled threads, events.

Several CPU devices of one process have memory of their own and compute at the same time, each with its own threads: what a split over two
GPUs does can be seen and tested on any machine.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass

import numpy as np

from numba_meta.devices.parse import DeviceSpec, format_bytes
from numba_meta.errors import DeviceError, OutOfMemoryError
from numba_meta.kernels.cpu import program
from numba_meta.kernels.cpu.kernel import _ENTRY_TYPE

ALIGNMENT = 64  # bytes: a cache line, an AVX-512 register


@dataclass(eq=False)
class CpuBuffer:
    """Memory of one CPU device: `data` uint8 `[n_bytes]`, its first byte aligned to ALIGNMENT."""

    device: CpuDevice
    data: np.ndarray
    label: str

    @property
    def n_bytes(self) -> int:
        return self.data.size

    @property
    def address(self) -> int:
        return self.data.ctypes.data

    def free(self) -> None:
        """Gives the memory back; the buffer must not be used afterwards."""
        self.device._account(-self.data.size)
        self.data = np.empty(0, np.uint8)


class CpuDevice:
    """One simple device `cpu:N`. `name` tells devices of one core apart: `cpu:0`, `cpu:0#1`."""

    def __init__(self, spec: DeviceSpec, name: str, n_threads: int) -> None:
        if n_threads < 1:
            raise DeviceError(f"{name}: a device needs at least one thread, not {n_threads}")
        self.spec = spec
        self.name = name
        self.n_threads = n_threads
        self.memory_limit = spec.memory_limit
        self.allocated_bytes = 0
        self.peak_bytes = 0

    def allocate(self, n_bytes: int, label: str) -> CpuBuffer:
        """A zeroed buffer. Raises `OutOfMemoryError` where the device's limit or the machine's memory is passed."""
        if self.memory_limit is not None and self.allocated_bytes + n_bytes > self.memory_limit:
            free = self.memory_limit - self.allocated_bytes
            raise OutOfMemoryError(
                f"{self.name}: {label} needs {n_bytes} bytes ({format_bytes(n_bytes)}), {free} of {self.memory_limit} are free; "
                "use a smaller context or batch, another --tensor-split, or more devices"
            )
        try:
            raw = np.zeros(n_bytes + ALIGNMENT, np.uint8)
        except (MemoryError, ValueError):
            raise OutOfMemoryError(f"{self.name}: {label} needs {n_bytes} bytes ({format_bytes(n_bytes)}), more than this machine gives") from None
        start = -raw.ctypes.data % ALIGNMENT
        self._account(n_bytes)
        return CpuBuffer(self, raw[start : start + n_bytes], label)

    def _account(self, n_bytes: int) -> None:
        self.allocated_bytes += n_bytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)

    def __repr__(self) -> str:
        return f"<{self.name}: {self.n_threads} threads, {format_bytes(self.allocated_bytes)} in use>"


class CpuStream:
    """A team of compiled threads that runs recorded programs in order.

    The first thread of a stream with `caller_joins` is whoever calls `run`; a stream has its other threads from its first use until `close`.
    """

    def __init__(self, name: str, n_threads: int, caller_joins: bool) -> None:
        self.name = name
        self.n_threads = n_threads
        self.control = np.zeros(program.CONTROL_WORDS + 8, np.int64)
        self.control = self.control[(-self.control.ctypes.data % 64) // 8 :][: program.CONTROL_WORDS]
        self.control[program.N_THREADS] = n_threads
        libc = ctypes.CDLL(None)
        for init, word in ((libc.pthread_mutex_init, program.MUTEX), (libc.pthread_cond_init, program.CONDITION)):
            init(ctypes.c_void_p(self.control[word:].ctypes.data), None)
        self._caller_joins = caller_joins
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Starts the threads that are not there yet."""
        if self._threads or self.control[program.STOP]:
            return
        call = _ENTRY_TYPE(program.worker.address)
        for index in range(1 if self._caller_joins else 0, self.n_threads):
            block = program.worker.pack(control=self.control.ctypes.data, own_index=index)
            thread = threading.Thread(target=self._life, args=(call, block), name=f"{self.name}-{index}", daemon=True)
            thread.start()
            self._threads.append(thread)

    @staticmethod
    def _life(call: ctypes._CFuncPtr, block: np.ndarray) -> None:
        call(block.ctypes.data, 0, 1)

    def close(self) -> None:
        """Ends the threads; the stream runs nothing afterwards. Twice is once."""
        if self.control[program.STOP]:
            return
        self.control[program.STOP] = 1
        if self._threads:
            program.wake(control=self.control)
            for thread in self._threads:
                thread.join()
            self._threads.clear()


@dataclass(frozen=True)
class CpuProgram:
    """A recorded list of calls for one stream: `calls` int64 `[n, 3]` (kernel, arguments, barrier before); `keep` is what it points into."""

    calls: np.ndarray
    keep: tuple[object, ...]


class CpuStep:
    """One step of several streams, ready to run again and again: binding is done once, a run is one call into compiled code."""

    def __init__(self, streams: list[CpuStream], programs: list[CpuProgram]) -> None:
        self._streams = streams
        self._programs = programs
        self._controls = np.array([stream.control.ctypes.data for stream in streams], np.int64)
        self._block = program.run_step.pack(controls=self._controls.ctypes.data, n_teams=len(streams))
        self._call = _ENTRY_TYPE(program.run_step.address)

    def run(self) -> None:
        """Runs every stream's program once and returns when all have finished. The caller is the first stream's first thread."""
        for stream, recorded in zip(self._streams, self._programs, strict=True):
            stream.start()
            stream.control[program.PROGRAM] = recorded.calls.ctypes.data
            stream.control[program.N_CALLS] = len(recorded.calls)
        self._call(self._block.ctypes.data, 0, 1)
