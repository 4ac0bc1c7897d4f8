"""CUDA devices: memory with an account and a limit, and streams. Several devices may lie on one GPU; they share its context."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from numba_meta.devices.cuda_driver import GpuContext, PinnedMemory, open_gpu
from numba_meta.devices.parse import DeviceSpec, format_bytes
from numba_meta.errors import DeviceError, OutOfMemoryError
from numba_meta.kernels.cuda.kernel import OLDEST, CudaKernel, Gpu
from numba_meta.kernels.cuda.variants import VariantKernel


@dataclass(eq=False)
class CudaBuffer:
    """Memory of one CUDA device: `n_bytes` from `address` on, aligned to 256 bytes."""

    device: CudaDevice
    n_bytes: int
    label: str
    address: int

    def read(self, offset: int, n_bytes: int) -> np.ndarray:
        """A copy of some bytes, uint8 `[n_bytes]`; waits."""
        out = np.empty(n_bytes, np.uint8)
        self.device.gpu.read(self.address + offset, out)
        return out

    @contextmanager
    def edit(self, offset: int, n_bytes: int, keep: bool = True) -> Iterator[np.ndarray]:
        """Bytes for the host to change, uint8 `[n_bytes]`, on the device when the block ends. `keep`: they begin with what is there."""
        data = self.read(offset, n_bytes) if keep else np.zeros(n_bytes, np.uint8)
        yield data
        self.device.gpu.write(self.address + offset, data)

    def free(self) -> None:
        """Gives the memory back; neither the buffer nor what was recorded on it must be used afterwards. Twice is once."""
        self.device._forget(self)


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
        self.allocated_bytes = 0
        self.peak_bytes = 0
        self._buffers: set[CudaBuffer] = set()
        self._streams: list[int] = []
        self._pinned: list[PinnedMemory] = []
        self._closed = False

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
            raise OutOfMemoryError(
                f"{self.name}: {label} needs {n_bytes} bytes ({format_bytes(n_bytes)}), {have} are free; "
                "use a smaller context or batch, another split, or more devices"
            )
        buffer = CudaBuffer(self, n_bytes, label, address)
        self._buffers.add(buffer)
        self.allocated_bytes += n_bytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        self.gpu.fill_zero(address, n_bytes)
        return buffer

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
        sums: dict[str, int] = {}
        for buffer in self._buffers:
            sums[buffer.label] = sums.get(buffer.label, 0) + buffer.n_bytes
        return dict(sorted(sums.items(), key=lambda item: (-item[1], item[0])))

    def pinned(self, n_bytes: int) -> PinnedMemory:
        """Host memory that steps of this device copy from and to; given back when the device is closed, or before."""
        memory = PinnedMemory(self.gpu, n_bytes)
        self._pinned = [each for each in self._pinned if each.address]  # the others were given back
        self._pinned.append(memory)
        return memory

    def _forget(self, buffer: CudaBuffer) -> None:
        if buffer in self._buffers:
            self._buffers.remove(buffer)
            self.allocated_bytes -= buffer.n_bytes
            with suppress(DeviceError):  # after a kernel's failure the driver refuses everything
                self.gpu.free(buffer.address)
            buffer.address = 0

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
        ends: list[Callable[[], None]] = [partial(self.gpu.synchronize, stream) for stream in self._streams]
        ends += [partial(self.gpu.destroy_stream, stream) for stream in self._streams]
        ends += [*(buffer.free for buffer in list(self._buffers)), *(memory.free for memory in self._pinned)]
        for end in ends:
            with suppress(DeviceError):
                end()

    def __enter__(self) -> CudaDevice:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{self.name}: {self.gpu.facts.name}, {format_bytes(self.allocated_bytes)} in use>"


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
