"""A GPU whose memory is the host's: what communicators ask of the driver, and what they did not give back."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np

from numba_meta.devices.cuda_driver import GpuFacts
from numba_meta.errors import DeviceError, OutOfMemoryError


class FakeGpu:
    """Stands for `GpuContext`. `hidden`: uuids that it cannot reach; `fails`: names of calls that raise."""

    def __init__(self, uuid: str = "ab" * 16, hidden: tuple[str, ...] = (), fails: tuple[str, ...] = ()) -> None:
        self.facts = GpuFacts(0, "fake", (9, 0), 4, 48 << 10, 1 << 30, uuid)
        self._hidden = hidden
        self._fails = fails
        self.memory: dict[int, np.ndarray] = {}
        self.imported: list[int] = []
        self.streams: list[int] = []

    def _fail_if_told(self, call: str) -> None:
        if call in self._fails:
            raise (OutOfMemoryError if call == "allocate" else DeviceError)(f"{call} failed: CUDA_ERROR_FAKE")

    @contextmanager
    def current(self) -> Iterator[None]:
        with nullcontext():
            yield

    def allocate(self, n_bytes: int) -> int:
        self._fail_if_told("allocate")
        memory = np.full(n_bytes, 0xFF, np.uint8)
        self.memory[memory.ctypes.data] = memory
        return memory.ctypes.data

    def free(self, address: int) -> None:
        del self.memory[address]

    def fill_zero(self, address: int, n_bytes: int) -> None:
        ctypes.memset(address, 0, n_bytes)

    def write(self, address: int, data: np.ndarray) -> None:
        ctypes.memmove(address, data.ctypes.data, data.nbytes)

    def read(self, address: int, data: np.ndarray) -> None:
        ctypes.memmove(data.ctypes.data, address, data.nbytes)

    def copy_2d_async(self, destination: int, to_pitch: int, source: int, from_pitch: int, width: int, height: int, stream: int) -> None:
        for row in range(height):
            ctypes.memmove(destination + row * to_pitch, source + row * from_pitch, width)

    def copy_async(self, destination: int, source: int, n_bytes: int, stream: int) -> None:
        ctypes.memmove(destination, source, n_bytes)

    def call_host(self, function: int, stream: int) -> None:
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(None)

    def reaches(self, uuid: str) -> bool:
        return uuid not in self._hidden

    def export_memory(self, address: int) -> bytes:
        self._fail_if_told("export")
        return address.to_bytes(8, "little").ljust(64, b"\1")

    def import_memory(self, handle: bytes) -> int:
        self._fail_if_told("import")
        self.imported.append(int.from_bytes(handle[:8], "little"))
        return self.imported[-1]

    def forget_memory(self, address: int) -> None:
        self.imported.remove(address)

    def create_stream(self) -> int:
        self.streams.append(len(self.streams) + 1)
        return self.streams[-1]

    def synchronize(self, stream: int) -> None:
        assert stream in self.streams

    def destroy_stream(self, stream: int) -> None:
        self.streams.remove(stream)

    @property
    def is_clean(self) -> bool:
        """Whether everything was given back."""
        return not self.memory and not self.imported and not self.streams


class FakePinnedMemory:
    """Stands for `PinnedMemory`."""

    def __init__(self, gpu: Any, n_bytes: int) -> None:
        self._raw = np.zeros(-(-n_bytes // 8), np.int64)
        self.data: np.ndarray = self._raw.view(np.uint8)[:n_bytes]
        self.address = self._raw.ctypes.data

    def free(self) -> None:
        self.address = 0
