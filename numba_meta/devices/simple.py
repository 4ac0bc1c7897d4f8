"""What every kind of simple device offers, whatever it computes with."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from numba_meta.devices.parse import DeviceSpec


class Buffer(Protocol):
    """Memory of one device."""

    address: int

    @property
    def n_bytes(self) -> int:
        """Its size."""

    def read(self, offset: int, n_bytes: int) -> np.ndarray:
        """Bytes as the host sees them, uint8 `[n_bytes]`; not to be written."""

    def edit(self, offset: int, n_bytes: int, keep: bool = True) -> AbstractContextManager[np.ndarray]:
        """Bytes for the host to change, uint8 `[n_bytes]`; they are there when the block ends. `keep`: they begin with what is there."""

    def free(self) -> None:
        """Gives the memory back. Twice is once."""


class SimpleDevice(Protocol):
    """One device: memory with an account and a limit."""

    kind: str  # `cpu` or `cuda`
    name: str
    spec: DeviceSpec
    n_threads: int
    alignment: int
    memory_limit: int | None
    is_one_of_several: bool  # of a model: what is too much for it may lie elsewhere

    @property
    def allocated_bytes(self) -> int:
        """Bytes in use."""

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were in use at once."""

    def allocate(self, n_bytes: int, label: str, sparse: bool = False) -> Buffer:
        """A zeroed buffer. Raises `OutOfMemoryError` where the device's limit or the machine's memory is passed."""

    @property
    def level(self) -> str:
        """What its kernels are made for: `avx512 vnni`, `sm_90`."""

    @property
    def free_bytes(self) -> int | None:
        """Bytes that can still be allocated; None where nobody knows."""

    def bytes_by_label(self) -> Mapping[str, int]:
        """Bytes in use by what they are for, largest first."""

    def compile(self, kernel: Any) -> None:
        """Compiles a kernel of this device's kind, or loads it from the cache of kernels."""

    def close(self) -> None:
        """Gives everything back. Twice is once."""
