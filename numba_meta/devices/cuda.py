"""CUDA devices: memory with an account and a limit, and streams. Several devices may lie on one GPU; they share its context."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from numba_meta.devices.account import Account, at_end
from numba_meta.devices.cuda_driver import GpuContext, PinnedMemory, open_gpu
from numba_meta.devices.parse import DeviceSpec, format_bytes
from numba_meta.devices.shortage import out_of_memory
from numba_meta.errors import DeviceError, OutOfMemoryError
from numba_meta.kernels.cuda.kernel import OLDEST, CudaKernel, Gpu
from numba_meta.kernels.cuda.variants import VariantKernel


@dataclass(eq=False)
class CudaBuffer:
    """Memory of one CUDA device: `n_bytes` from `address` on, aligned to 256 bytes.

    It goes when nobody holds it any more, or with `free`; its device only counts it.
    """

    gpu: GpuContext
    n_bytes: int
    label: str
    address: int
    account: Account
    _give_back: Callable[[], object] = field(init=False)

    def __post_init__(self) -> None:
        self._give_back = self.account.take(self, self.n_bytes, partial(_free, self.gpu, self.address))

    def read(self, offset: int, n_bytes: int) -> np.ndarray:
        """A copy of some bytes, uint8 `[n_bytes]`; waits."""
        out = np.empty(n_bytes, np.uint8)
        self.gpu.read(self.address + offset, out)
        return out

    @contextmanager
    def edit(self, offset: int, n_bytes: int, keep: bool = True) -> Iterator[np.ndarray]:
        """Bytes for the host to change, uint8 `[n_bytes]`, on the device when the block ends. `keep`: they begin with what is there."""
        data = self.read(offset, n_bytes) if keep else np.zeros(n_bytes, np.uint8)
        yield data
        self.gpu.write(self.address + offset, data)

    def free(self) -> None:
        """Gives the memory back; neither the buffer nor what was recorded on it must be used afterwards. Twice is once."""
        self._give_back()
        self.account.buffers.discard(self)
        self.address = 0


class CudaDevice:
    """One simple device `cuda:N`. `name` tells devices on one GPU apart: `cuda:0`, `cuda:0#1`. A context manager; see `close`."""

    kind = "cuda"
    alignment = 256  # bytes: two cache lines

    def __init__(self, spec: DeviceSpec, name: str) -> None:
        self.spec = spec
        self.name = name
        self.n_threads = 1  # who counts compute threads counts the GPU as one
        self.gpu: GpuContext = open_gpu(spec.index)
        facts = self.gpu.facts
        if facts.capability < OLDEST:
            have, need = ("{}.{}".format(*each) for each in (facts.capability, OLDEST))
            raise DeviceError(f"{name}: {facts.name} has compute capability {have}; expected {need} or newer")
        self.launch_facts = Gpu(facts.capability, facts.n_multiprocessors, facts.max_shared_bytes)
        self.memory_limit = spec.memory_limit
        self.is_one_of_several = False
        self._account = Account()
        self._buffers = self._account.buffers
        self._streams: list[int] = []
        self._pinned: weakref.WeakSet[PinnedMemory] = weakref.WeakSet()
        self._closed = False
        self._end_streams = at_end(self, _end_streams, self.gpu, self._streams)

    # ---- memory ------------------------------------------------------------------------------------------------------------------------

    def allocate(self, n_bytes: int, label: str, sparse: bool = False) -> CudaBuffer:
        """A zeroed buffer. Raises `OutOfMemoryError` where the device's limit or the GPU's memory is passed."""
        if n_bytes < 0 or self._closed:
            why = "the device was closed" if self._closed else "expected 0 or more"
            raise DeviceError(f"{self.name}: {label} cannot have {n_bytes} bytes; {why}")
        free = self.free_bytes
        address = 0
        if n_bytes <= free:
            try:
                address = self.gpu.allocate(n_bytes)
            except OutOfMemoryError:
                free = min(free, self.free_bytes)
        if not address:
            have = f"{free} bytes of memory" if self.memory_limit is None else f"{free} of {self.memory_limit}"
            raise out_of_memory(self.name, label, n_bytes, f"{have} are free", self.is_one_of_several)
        buffer = CudaBuffer(self.gpu, n_bytes, label, address, self._account)
        self.gpu.fill_zero(address, n_bytes)
        return buffer

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
        """What its kernels are made for, and the GPU: `sm_90 (NVIDIA H200)`."""
        facts = self.gpu.facts
        return "sm_{}{} ({})".format(*facts.capability, facts.name)

    @property
    def free_bytes(self) -> int:
        """Bytes that can still be allocated: what the GPU has, and within the limit."""
        there = self.gpu.free_bytes()
        return there if self.memory_limit is None else min(there, self.memory_limit - self.allocated_bytes)

    def bytes_by_label(self) -> dict[str, int]:
        """Bytes in use by what they are for (`weights`, `the KV cache` ...), largest first."""
        return self._account.by_label()

    def pinned(self, n_bytes: int) -> PinnedMemory:
        """Host memory that steps of this device copy from and to; given back when the device is closed, or when nobody holds it."""
        memory = PinnedMemory(self.gpu, n_bytes)
        self._pinned.add(memory)
        return memory

    # ---- streams -----------------------------------------------------------------------------------------------------------------------

    def stream(self) -> int:
        """A new stream."""
        if self._closed:
            raise DeviceError(f"{self.name}: the device was closed; nothing can run on it")
        stream = self.gpu.create_stream()
        self._streams.append(stream)
        return stream

    def compile(self, kernel: Any) -> None:
        """Compiles a `CudaKernel` for this GPU, or loads it from the cache of kernels. What a library does needs no compiling."""
        if isinstance(kernel, CudaKernel | VariantKernel):
            kernel.for_gpu(self.launch_facts).binary(self.gpu.facts.capability)

    def close(self) -> None:
        """Waits for its work, then gives streams and all memory back. Twice is once.

        Goes on where the driver refuses: after a kernel's failure it refuses everything, and the first error is the one to tell.
        """
        if self._closed:
            return
        self._closed = True
        self._end_streams()
        for buffer in list(self._buffers):
            buffer.free()
        for memory in list(self._pinned):
            memory.free()

    def __enter__(self) -> CudaDevice:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{self.name}: {self.gpu.facts.name}, {format_bytes(self.allocated_bytes)} in use>"


def _free(gpu: GpuContext, address: int) -> None:
    with suppress(DeviceError):  # after a kernel's failure the driver refuses everything
        gpu.free(address)


def _end_streams(gpu: GpuContext, streams: list[int]) -> None:
    for end in (gpu.synchronize, gpu.destroy_stream):
        for stream in streams:
            with suppress(DeviceError):
                end(stream)
    streams.clear()


def open_cuda(specs: Sequence[DeviceSpec], names: Sequence[str]) -> list[CudaDevice]:
    """The devices of a list of names, whose GPUs reach each other's memory where the machine allows it. Takes no memory yet."""
    devices = [CudaDevice(spec, name) for spec, name in zip(specs, names, strict=True)]
    let_reach_each_other(devices)
    return devices


def let_reach_each_other(devices: Sequence[CudaDevice]) -> None:
    """Peer access between all GPUs of some devices, where the machine allows it; else steps go through host memory (`can_read`)."""
    gpus = {device.gpu.facts.index: device.gpu for device in devices}
    for mine in gpus.values():
        for theirs in gpus.values():
            if mine is not theirs:
                mine.enable_peer(theirs)
