"""The CUDA driver's calls that devices need, with errors that name the call. Nothing is imported or started before the first use.

Memory is addresses, streams and events are handles (int). Every call that touches a GPU is given its context; contexts are the GPUs'
primary ones, which other libraries of the process share.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np

from numba_meta.devices.account import at_end
from numba_meta.errors import DeviceError, OutOfMemoryError

_EARLY_DRIVER = 12030  # CUDA 12.3: graphs keep that a kernel may begin early
DRIVER_LIBRARY = "libcuda.so.1"
_HANDLE_BYTES = 64  # of an exported allocation
_INSTALL = "install numba-meta[cuda13] (driver 580 or newer) or numba-meta[cuda12]"


@functools.cache
def _bindings() -> Any:
    """`cuda.bindings.driver`, initialized."""
    try:
        from cuda.bindings import driver
    except (ImportError, OSError, AttributeError) as error:
        raise DeviceError(f"CUDA devices need the package cuda-bindings ({error}); {_INSTALL}") from None
    try:
        status = driver.cuInit(0)[0]
    except RuntimeError as error:  # the driver's library is not there, or lacks what the package asks for
        told = str(error).splitlines()[0]
        if has_library(DRIVER_LIBRARY):
            raise DeviceError(f"NVIDIA's driver is older than the package cuda-bindings ({told}); {_INSTALL}") from None
        raise DeviceError(f"CUDA devices need NVIDIA's driver, which this machine lacks ({told}); use cpu:N") from None
    if int(status) != 0:
        told = _name(driver, status)
        raise DeviceError(f"the CUDA driver does not start ({told}); check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or use cpu:N")
    return driver


def start() -> None:
    """Loads and starts the driver, once. Raises `DeviceError` with what is missing."""
    _bindings()


def has_library(name: str) -> bool:
    """Whether a shared library is found and can be loaded."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _name(driver: Any, status: Any) -> str:
    try:
        return str(driver.cuGetErrorName(status)[1].decode())
    except Exception:  # an error that this version of the bindings has no name for
        return str(status)


_whose: ContextVar[str] = ContextVar("_whose", default="")


@contextmanager
def _calls_for(index: int) -> Iterator[None]:
    """Calls inside that fail say which GPU they were for."""
    before = _whose.set(f"cuda:{index}: ")
    try:
        yield
    finally:
        _whose.reset(before)


def call(what: str, *arguments: Any) -> Any:
    """A function of the driver by name; what it returns beside the status. Raises `DeviceError` that names the GPU and the call."""
    driver = _bindings()
    status, *results = getattr(driver, what)(*arguments)
    if int(status) != 0:
        kind = OutOfMemoryError if int(status) == int(driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY) else DeviceError
        raise kind(f"{_whose.get()}{what} failed: {_name(driver, status)}")
    return results[0] if len(results) == 1 else tuple(results)


@dataclass(frozen=True)
class GpuFacts:
    """One GPU as the driver describes it."""

    index: int
    name: str
    capability: tuple[int, int]
    n_multiprocessors: int
    max_shared_bytes: int
    total_bytes: int
    uuid: str


class GpuContext:
    """The primary context of one GPU: facts, memory, streams, events, modules. Shared by all devices on it; see `open_gpu`."""

    def __init__(self, index: int) -> None:
        count = call("cuDeviceGetCount")
        if not 0 <= index < count:
            there = f"this machine has {count}" if count else "this machine has none"
            raise DeviceError(f"there is no GPU cuda:{index}; {there} (numbered from 0)")
        with _calls_for(index):
            self._open(index)

    def _open(self, index: int) -> None:
        self._device = call("cuDeviceGet", index)
        attribute = _bindings().CUdevice_attribute

        def of(name: str) -> int:
            return int(call("cuDeviceGetAttribute", getattr(attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), self._device))

        self.facts = GpuFacts(
            index=index,
            name=call("cuDeviceGetName", 256, self._device).split(b"\0")[0].decode(),
            capability=(of("COMPUTE_CAPABILITY_MAJOR"), of("COMPUTE_CAPABILITY_MINOR")),
            n_multiprocessors=of("MULTIPROCESSOR_COUNT"),
            max_shared_bytes=of("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
            total_bytes=int(call("cuDeviceTotalMem", self._device)),
            uuid=bytes(call("cuDeviceGetUuid", self._device).bytes).hex(),
        )
        self.handle = call("cuDevicePrimaryCtxRetain", self._device)
        self._modules: dict[bytes, Any] = {}
        self._functions: dict[tuple[bytes, str], Any] = {}
        self._shared: dict[tuple[bytes, str], int] = {}  # dynamic shared memory that a function was allowed
        self._readable: set[int] = {index}  # GPUs whose memory kernels of this one reach

    @contextmanager
    def current(self) -> Iterator[None]:
        """This GPU's context for the calls inside."""
        with _calls_for(self.facts.index):
            call("cuCtxPushCurrent", self.handle)
            try:
                yield
            finally:
                call("cuCtxPopCurrent")

    @functools.cached_property
    def records_early_launches(self) -> bool:
        """Whether a recorded launch may begin while the kernel before it still runs: from capability 9.0 and CUDA 12.3 on."""
        return self.facts.capability >= (9, 0) and call("cuDriverGetVersion") >= _EARLY_DRIVER

    # ---- memory ------------------------------------------------------------------------------------------------------------------------

    def free_bytes(self) -> int:
        """What the GPU has left, for all processes."""
        with self.current():
            return int(call("cuMemGetInfo")[0])

    def allocate(self, n_bytes: int) -> int:
        """The address of at least one byte of device memory. Raises `OutOfMemoryError`."""
        with self.current():
            return int(call("cuMemAlloc", max(1, n_bytes)))

    def free(self, address: int) -> None:
        """Gives memory back."""
        with self.current():
            call("cuMemFree", address)

    def fill_zero(self, address: int, n_bytes: int) -> None:
        """Zero bytes; waits."""
        if n_bytes:
            with self.current():
                call("cuMemsetD8", address, 0, n_bytes)
                call("cuCtxSynchronize")

    def write(self, address: int, data: np.ndarray) -> None:
        """Copies a contiguous array to the device; waits."""
        if data.nbytes:
            with self.current():
                call("cuMemcpyHtoD", address, data.ctypes.data, data.nbytes)
                call("cuStreamSynchronize", 0)  # a pageable source may still be on its way

    def read(self, address: int, data: np.ndarray) -> None:
        """Fills a contiguous array from the device; waits."""
        if data.nbytes:
            with self.current():
                call("cuMemcpyDtoH", data.ctypes.data, address, data.nbytes)

    def enable_peer(self, other: GpuContext) -> bool:
        """Lets kernels and copies of this GPU reach the other one's memory; False where the machine does not allow it, or no more of it."""
        if call("cuDeviceCanAccessPeer", self._device, other._device):
            with self.current():
                status = int(_bindings().cuCtxEnablePeerAccess(other.handle, 0)[0])
            if status in (0, int(_bindings().CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)):
                self._readable.add(other.facts.index)
        return self.can_read(other)

    def can_read(self, other: GpuContext) -> bool:
        """Whether its kernels reach the other one's memory: its own, or by `enable_peer`."""
        return other.facts.index in self._readable

    def reaches(self, uuid: str) -> bool:
        """Whether it can reach the memory of the GPU of this uuid: this one, or one that the process sees and has peer access to."""
        if uuid == self.facts.uuid:
            return True
        for index in range(call("cuDeviceGetCount")):
            other = call("cuDeviceGet", index)
            if bytes(call("cuDeviceGetUuid", other).bytes).hex() == uuid:
                return bool(call("cuDeviceCanAccessPeer", self._device, other))
        return False

    def export_memory(self, address: int) -> bytes:
        """A handle (64 bytes) with which another process of this host reaches memory of `allocate`, from its first byte on."""
        with self.current():
            handle = call("cuIpcGetMemHandle", address)
            return ctypes.string_at(handle.getPtr(), _HANDLE_BYTES)

    def import_memory(self, handle: bytes) -> int:
        """The address here of memory that another process exported; see `forget_memory`."""
        given = _bindings().CUipcMemHandle()
        ctypes.memmove(given.getPtr(), handle, _HANDLE_BYTES)
        with self.current():
            return int(call("cuIpcOpenMemHandle", given, int(_bindings().CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)))

    def forget_memory(self, address: int) -> None:
        """Gives back what `import_memory` returned."""
        with self.current():
            call("cuIpcCloseMemHandle", address)

    def is_pinned(self, address: int) -> bool:
        """Whether an address is memory that the driver knows: kernels reach it."""
        with self.current():
            kind = _bindings().CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
            status, memory = _bindings().cuPointerGetAttribute(kind, address)
        return int(status) == 0 and int(memory) != 0

    # ---- streams and events ------------------------------------------------------------------------------------------------------------

    def create_stream(self) -> int:
        """A stream that does not wait for the default one."""
        with self.current():
            return int(call("cuStreamCreate", _bindings().CUstream_flags.CU_STREAM_NON_BLOCKING))

    def destroy_stream(self, stream: int) -> None:
        """Ends a stream after its work."""
        with self.current():
            call("cuStreamDestroy", stream)

    def synchronize(self, stream: int) -> None:
        """Waits until all work of a stream is done."""
        with self.current():
            call("cuStreamSynchronize", stream)

    def create_event(self, timed: bool = False) -> int:
        """An event, for ordering alone unless `timed`."""
        flags = _bindings().CUevent_flags
        with self.current():
            return int(call("cuEventCreate", flags.CU_EVENT_DEFAULT if timed else flags.CU_EVENT_DISABLE_TIMING))

    def destroy_event(self, event: int) -> None:
        """Gives an event back."""
        with self.current():
            call("cuEventDestroy", event)

    def record_event(self, event: int, stream: int) -> None:
        """Marks a point of a stream."""
        with self.current():
            call("cuEventRecord", event, stream)

    def wait_event(self, stream: int, event: int) -> None:
        """What follows on a stream waits for an event, of this GPU or another one."""
        with self.current():
            call("cuStreamWaitEvent", stream, event, 0)

    def copy_async(self, destination: int, source: int, n_bytes: int, stream: int) -> None:
        """Copies bytes in a stream's order; where they lie, host or device, the addresses say."""
        with self.current():
            call("cuMemcpyAsync", destination, source, n_bytes, stream)

    def copy_2d_async(
        self, destination: int, destination_pitch: int, source: int, source_pitch: int, width: int, height: int, stream: int
    ) -> None:
        """Copies `height` rows of `width` bytes in a stream's order; where they lie, host or device, the addresses say."""
        copy, unified = _bindings().CUDA_MEMCPY2D(), _bindings().CUmemorytype.CU_MEMORYTYPE_UNIFIED
        copy.srcMemoryType = copy.dstMemoryType = unified
        copy.srcDevice, copy.srcPitch, copy.dstDevice, copy.dstPitch = source, source_pitch, destination, destination_pitch
        copy.WidthInBytes, copy.Height = width, height
        with self.current():
            call("cuMemcpy2DAsync", copy, stream)

    def call_host(self, function: int, stream: int) -> None:
        """Calls a C function `void(void *)`, given by its address, in a stream's order, from a thread of the driver."""
        # Not by the bindings: what they wrap around a function is gone after its first call, and recordings call it again.
        library = ctypes.CDLL(DRIVER_LIBRARY)
        with self.current():
            status = library.cuLaunchHostFunc(ctypes.c_void_p(stream), ctypes.c_void_p(function), None)
            if status != 0:
                raise DeviceError(f"{_whose.get()}cuLaunchHostFunc failed: {_name(_bindings(), _bindings().CUresult(status))}")

    # ---- kernels -----------------------------------------------------------------------------------------------------------------------

    def function(self, cubin: bytes, entry: str, shared_bytes: int = 0) -> Any:
        """A kernel of a cubin, loaded once; it may use so much dynamic shared memory."""
        with self.current():
            if cubin not in self._modules:
                self._modules[cubin] = call("cuModuleLoadData", cubin)
            key = (cubin, entry)
            if key not in self._functions:
                self._functions[key] = call("cuModuleGetFunction", self._modules[cubin], entry.encode())
            function = self._functions[key]
            if shared_bytes > self._shared.get(key, 48 << 10):  # never less: another launch of it may need what it has
                kind = _bindings().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                call("cuFuncSetAttribute", function, kind, shared_bytes)
                self._shared[key] = shared_bytes
            return function

    def launch(
        self, function: Any, grid: Sequence[int], block: Sequence[int], shared_bytes: int, stream: int, parameters: int, early: bool = False
    ) -> None:
        """One launch; `parameters` is the address of the arguments' addresses.

        `early`: it may begin while the kernel before it in the stream still runs; it waits for that one itself.
        """
        with self.current():
            if not early:
                call("cuLaunchKernel", function, *grid, *block, shared_bytes, stream, parameters, 0)
                return
            driver = _bindings()
            attribute, value = driver.CUlaunchAttribute(), driver.CUlaunchAttributeValue()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            value.programmaticStreamSerializationAllowed = 1
            attribute.value = value
            config = driver.CUlaunchConfig()
            config.gridDimX, config.gridDimY, config.gridDimZ = grid
            config.blockDimX, config.blockDimY, config.blockDimZ = block
            config.sharedMemBytes, config.hStream = shared_bytes, stream
            config.attrs, config.numAttrs = [attribute], 1
            call("cuLaunchKernelEx", config, function, parameters, 0)


@functools.cache
def open_gpu(index: int) -> GpuContext:
    """The GPU of this number, opened once in a process. Raises `DeviceError` where there is none."""
    return GpuContext(index)


def n_gpus() -> int:
    """How many GPUs the driver sees; 0 without a driver or its package."""
    try:
        return int(call("cuDeviceGetCount"))
    except DeviceError:
        return 0


class PinnedMemory:
    """Host memory that GPUs copy from and to while they compute: `data` uint8 `[n_bytes]`. Raises `DeviceError`."""

    is_pinned = True

    def __init__(self, gpu: GpuContext, n_bytes: int) -> None:
        with gpu.current():
            # Portable: all GPUs of the process know it. Mapped: kernels reach it at the same address.
            self.address = int(call("cuMemHostAlloc", max(1, n_bytes), 1 | 2))
        raw = (ctypes.c_uint8 * max(1, n_bytes)).from_address(self.address)
        at_end(raw, _free_pinned, gpu, self.address)
        self.data: np.ndarray = np.ctypeslib.as_array(raw)[:n_bytes]
        self.data[:] = 0

    def read(self, offset: int, n_bytes: int) -> np.ndarray:
        """Some bytes, a view."""
        return self.data[offset : offset + n_bytes]

    @contextmanager
    def edit(self, offset: int, n_bytes: int) -> Iterator[np.ndarray]:
        """Some bytes to be changed."""
        yield self.data[offset : offset + n_bytes]

    def free(self) -> None:
        """Gives the memory back, once the last view of it (a caller's logits) is gone. Twice is once."""
        self.address = 0
        self.data = np.empty(0, np.uint8)


def _free_pinned(gpu: GpuContext, address: int) -> None:
    with suppress(DeviceError), gpu.current():  # after a kernel's failure the driver refuses everything
        call("cuMemFreeHost", address)
