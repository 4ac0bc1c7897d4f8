"""CPU devices: memory with an account and a limit, and streams of compiled threads.

Several CPU devices of one process have memory of their own and compute at the same time, each with its own threads: what a split over two
GPUs does can be seen and tested on any machine. Recording of work, events and asynchronous copies: `cpu_record.py`.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from numba_meta.devices.account import Account
from numba_meta.devices.cpu_stream import CpuEvent, CpuProgram, CpuStep, CpuStream
from numba_meta.devices.host_memory import available_bytes
from numba_meta.devices.parse import DeviceSpec, format_bytes
from numba_meta.devices.shortage import out_of_memory
from numba_meta.errors import DeviceError
from numba_meta.kernels.cpu.isa import detect

__all__ = ["ALIGNMENT", "CpuBuffer", "CpuDevice", "CpuEvent", "CpuProgram", "CpuStep", "CpuStream"]

ALIGNMENT = 64  # bytes: a cache line, an AVX-512 register
_CHECKED_BYTES = 64 << 20  # from this size on, the machine is asked first: it promises more than it has


@dataclass(eq=False)
class CpuBuffer:
    """Memory of one CPU device: `data` uint8 `[n_bytes]`, its first byte at `address`, aligned to ALIGNMENT (also of no bytes).

    It goes when nobody holds it any more, or with `free`; its device only counts it.
    """

    data: np.ndarray
    label: str
    address: int
    account: Account
    _give_back: Callable[[], object] = field(init=False)

    def __post_init__(self) -> None:
        self._give_back = self.account.take(self, self.n_bytes)

    @property
    def n_bytes(self) -> int:
        return self.data.size

    def read(self, offset: int, n_bytes: int) -> np.ndarray:
        """Bytes as the host sees them, uint8 `[n_bytes]`; not to be written."""
        return self.data[offset : offset + n_bytes]

    @contextmanager
    def edit(self, offset: int, n_bytes: int, keep: bool = True) -> Iterator[np.ndarray]:
        """Bytes for the host to change, uint8 `[n_bytes]`; they are there when the block ends. `keep`: they begin with what is there."""
        yield self.data[offset : offset + n_bytes]

    def free(self) -> None:
        """Gives the memory back; neither the buffer nor what was recorded on it must be used afterwards. Twice is once."""
        self._give_back()
        self.account.buffers.discard(self)
        self.data = np.empty(0, np.uint8)
        self.address = 0


class CpuDevice:
    """One simple device `cpu:N`. `name` tells devices of one core apart: `cpu:0`, `cpu:0#1`. A context manager; see `close`."""

    kind = "cpu"
    alignment = ALIGNMENT

    def __init__(self, spec: DeviceSpec, name: str, n_threads: int) -> None:
        if n_threads < 1:
            raise DeviceError(f"{name}: a device needs at least one thread, not {n_threads}")
        self.spec = spec
        self.name = name
        self.n_threads = n_threads
        self.memory_limit = spec.memory_limit
        self.is_one_of_several = False
        self._account = Account()
        self._buffers = self._account.buffers
        self._streams: weakref.WeakSet[CpuStream] = weakref.WeakSet()
        self._closed = False

    # ---- memory ------------------------------------------------------------------------------------------------------------------------

    def allocate(self, n_bytes: int, label: str, sparse: bool = False) -> CpuBuffer:
        """A zeroed buffer. Raises `OutOfMemoryError` where the device's limit or the machine's memory is passed.

        `sparse`: filled bit by bit (a cache of many cells); only pages that are used take memory of the machine.
        """
        if n_bytes < 0 or self._closed:
            why = "the device was closed" if self._closed else "expected 0 or more"
            raise DeviceError(f"{self.name}: {label} cannot have {n_bytes} bytes; {why}")
        free = self.free_bytes if self.memory_limit is not None or n_bytes >= _CHECKED_BYTES else None
        if free is not None and n_bytes > free:
            have = f"{free} bytes of memory" if self.memory_limit is None else f"{free} of {self.memory_limit}"
            raise out_of_memory(self.name, label, n_bytes, f"{have} are free", self.is_one_of_several)
        try:
            raw = _small_pages(n_bytes + ALIGNMENT) if sparse else np.zeros(n_bytes + ALIGNMENT, np.uint8)
        except (MemoryError, ValueError, OSError, OverflowError):
            raise out_of_memory(self.name, label, n_bytes, "more than this machine gives", False) from None
        start = -raw.ctypes.data % ALIGNMENT
        address = raw.ctypes.data + start  # numpy gives an empty view none
        return CpuBuffer(raw[start : start + n_bytes], label, address, self._account)

    @property
    def allocated_bytes(self) -> int:
        """Bytes in use."""
        return self._account.n_bytes

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were in use at once."""
        return self._account.peak_bytes

    @property
    def level(self) -> str:
        """What its kernels are made for: `avx512 vnni`, `avx2`, `portable`."""
        return detect().name.lower().replace("_", " ")

    @property
    def free_bytes(self) -> int | None:
        """Bytes that can still be allocated: within the limit, or what the machine has; None where neither is known."""
        return available_bytes() if self.memory_limit is None else self.memory_limit - self.allocated_bytes

    def bytes_by_label(self) -> dict[str, int]:
        """Bytes in use by what they are for (`weights`, `the KV cache` ...), largest first."""
        return self._account.by_label()

    # ---- streams -----------------------------------------------------------------------------------------------------------------------

    def stream(self, purpose: str = "compute", n_threads: int | None = None, caller_joins: bool = False) -> CpuStream:
        """A new stream, with all the device's threads unless told otherwise (a transfer stream has one)."""
        if self._closed:
            raise DeviceError(f"{self.name}: the device was closed; nothing can run on it")
        stream = CpuStream(f"{self.name} {purpose}", self.n_threads if n_threads is None else n_threads, caller_joins)
        self._streams.add(stream)
        return stream

    def compile(self, kernel: Any) -> None:
        """Compiles a `CpuKernel`, or loads it from the cache of kernels."""
        _ = kernel.address

    def close(self) -> None:
        """Ends the threads of its streams, then gives all its memory back. Twice is once."""
        self._closed = True
        for stream in list(self._streams):
            stream.close()
        for buffer in list(self._buffers):
            buffer.free()

    def __enter__(self) -> CpuDevice:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{self.name}: {self.n_threads} threads, {format_bytes(self.allocated_bytes)} in use>"


def _small_pages(n_bytes: int) -> np.ndarray:
    """Zeroed memory whose pages are taken one by one. Numpy asks for huge ones: the first cell of every layer would take one."""
    mapped = mmap.mmap(-1, n_bytes)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        try:
            mapped.madvise(mmap.MADV_NOHUGEPAGE)
        except OSError:
            pass  # a kernel without huge pages
    return np.frombuffer(mapped, np.uint8)
