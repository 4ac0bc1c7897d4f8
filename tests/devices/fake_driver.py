"""A driver without a GPU: it keeps account of what is asked for, and fails where a test says so."""

from __future__ import annotations

import ctypes
from collections import Counter
from types import SimpleNamespace
from typing import Any

SUCCESS, INVALID_VALUE, OUT_OF_MEMORY = 0, 1, 2
_NAMES = {INVALID_VALUE: b"CUDA_ERROR_INVALID_VALUE", OUT_OF_MEMORY: b"CUDA_ERROR_OUT_OF_MEMORY"}


class FakeDriver:
    """What `cuda.bindings.driver` offers of what devices use. Device memory is the host's; a graph is the list of what was captured."""

    CUresult = SimpleNamespace(CUDA_ERROR_OUT_OF_MEMORY=OUT_OF_MEMORY, CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED=704)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUevent_flags = SimpleNamespace(CU_EVENT_DEFAULT=0, CU_EVENT_DISABLE_TIMING=2)
    CUmemorytype = SimpleNamespace(CU_MEMORYTYPE_HOST=1, CU_MEMORYTYPE_DEVICE=2)
    CUpointer_attribute = SimpleNamespace(CU_POINTER_ATTRIBUTE_MEMORY_TYPE=2)
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR="major", CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR="minor",
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT="count", CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN="shared",
    )  # fmt: skip

    def __init__(self, memory: int = 1 << 20, capability: tuple[int, int] = (8, 0), n_gpus: int = 2) -> None:
        self.attributes = {"major": capability[0], "minor": capability[1], "count": 10, "shared": 64 << 10}
        self.memory, self.n_gpus = memory, n_gpus
        self.held: dict[int, Any] = {}  # memory by address
        self.pinned: dict[int, Any] = {}
        self.live: Counter[str] = Counter()  # streams, events, contexts on the stack
        self.fails: dict[str, int] = {}  # status by call
        self.calls: Counter[str] = Counter()
        self._next = 100

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if not name.startswith("cu"):
            return found

        def counted(*arguments: Any) -> Any:
            self.calls[name] += 1
            status = self.fails.get(name, SUCCESS)
            return found(*arguments) if status == SUCCESS else (status,)

        return counted

    def _new(self, kind: str) -> tuple[int, int]:
        self.live[kind] += 1
        self._next += 1
        return SUCCESS, self._next

    def _end(self, kind: str) -> tuple[int]:
        self.live[kind] -= 1
        return (SUCCESS,)

    # ---- what is called ----------------------------------------------------------------------------------------------------------------

    def cuGetErrorName(self, status: int) -> Any:
        return SUCCESS, _NAMES.get(int(status), b"CUDA_ERROR_UNKNOWN")

    def cuDeviceGetCount(self) -> Any:
        return SUCCESS, self.n_gpus

    def cuDeviceGet(self, index: int) -> Any:
        return SUCCESS, index

    def cuDeviceGetAttribute(self, attribute: str, device: int) -> Any:
        return SUCCESS, self.attributes[attribute]

    def cuDeviceGetName(self, n: int, device: int) -> Any:
        return SUCCESS, b"A GPU".ljust(n, b"\0")

    def cuDeviceTotalMem(self, device: int) -> Any:
        return SUCCESS, self.memory

    def cuDeviceGetUuid(self, device: int) -> Any:
        return SUCCESS, SimpleNamespace(bytes=b"\1" * 16)

    def cuDevicePrimaryCtxRetain(self, device: int) -> Any:
        return SUCCESS, f"context {device}"

    def cuDeviceCanAccessPeer(self, device: int, other: int) -> Any:
        return SUCCESS, 1

    def cuCtxEnablePeerAccess(self, context: str, flags: int) -> Any:
        return (SUCCESS,)

    def cuCtxPushCurrent(self, context: str) -> Any:
        self.live["context"] += 1
        return (SUCCESS,)

    def cuCtxPopCurrent(self) -> Any:
        self.live["context"] -= 1
        return SUCCESS, "context"

    def cuCtxSynchronize(self) -> Any:
        return (SUCCESS,)

    def cuMemGetInfo(self) -> Any:
        return SUCCESS, self.memory - sum(len(each) for each in self.held.values()), self.memory

    def cuMemAlloc(self, n_bytes: int) -> Any:
        if n_bytes > self.cuMemGetInfo()[1]:
            return (OUT_OF_MEMORY,)
        memory = (ctypes.c_uint8 * n_bytes)()
        self.held[ctypes.addressof(memory)] = memory
        return SUCCESS, ctypes.addressof(memory)

    def cuMemFree(self, address: int) -> Any:
        del self.held[address]
        return (SUCCESS,)

    def cuMemHostAlloc(self, n_bytes: int, flags: int) -> Any:
        memory = (ctypes.c_uint8 * n_bytes)()
        self.pinned[ctypes.addressof(memory)] = memory
        return SUCCESS, ctypes.addressof(memory)

    def cuMemFreeHost(self, address: int) -> Any:
        """Refused for what another driver gave: memory of an earlier test, which was only collected now."""
        return (SUCCESS,) if self.pinned.pop(address, None) is not None else (INVALID_VALUE,)

    def cuMemsetD8(self, address: int, value: int, n_bytes: int) -> Any:
        ctypes.memset(address, value, n_bytes)
        return (SUCCESS,)

    def cuMemcpyHtoD(self, to: int, source: int, n_bytes: int) -> Any:
        ctypes.memmove(to, source, n_bytes)
        return (SUCCESS,)

    cuMemcpyDtoH = cuMemcpyHtoD

    def cuStreamCreate(self, flags: int) -> Any:
        return self._new("stream")

    def cuStreamDestroy(self, stream: int) -> Any:
        return self._end("stream")

    def cuStreamSynchronize(self, stream: int) -> Any:
        return (SUCCESS,)

    def cuEventCreate(self, flags: int) -> Any:
        return self._new("event")

    def cuEventDestroy(self, event: int) -> Any:
        return self._end("event")

    def cuPointerGetAttribute(self, attribute: int, address: int) -> Any:
        return (SUCCESS, 1) if address in self.pinned else (INVALID_VALUE, 0)


class GraphDriver(FakeDriver):
    """With graphs: `told` is what was asked for, in order."""

    CUstreamCaptureMode = staticmethod(int)
    CUDA_MEMCPY3D = SimpleNamespace
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="shared bytes")

    def __init__(self, **facts: Any) -> None:
        super().__init__(**facts)
        self.version = 13000
        self.told: list[Any] = []
        self.stack: list[str] = []
        self.capturing: set[int] = set()

    def cuCtxPushCurrent(self, context: str) -> Any:
        self.stack.append(context)
        return super().cuCtxPushCurrent(context)

    def cuCtxPopCurrent(self) -> Any:
        return super().cuCtxPopCurrent() if self.stack.pop() else (INVALID_VALUE,)

    def cuDriverGetVersion(self) -> Any:
        return SUCCESS, self.version

    def cuStreamBeginCapture(self, stream: int, mode: int) -> Any:
        if stream in self.capturing:
            return (INVALID_VALUE,)
        self.capturing.add(stream)
        return (SUCCESS,)

    def cuStreamEndCapture(self, stream: int) -> Any:
        self.capturing.discard(stream)
        return self._new("graph")

    def cuGraphDestroy(self, graph: int) -> Any:
        return self._end("graph")

    def cuGraphInstantiate(self, graph: int, flags: int) -> Any:
        return self._new("executable")

    def cuGraphExecDestroy(self, graph: int) -> Any:
        return self._end("executable")

    def cuGraphNodeSetEnabled(self, graph: int, node: str, enabled: int) -> Any:
        self.told.append((node, enabled))
        return (SUCCESS,)

    def cuGraphExecMemcpyNodeSetParams(self, graph: int, node: str, copy: Any, context: str) -> Any:
        self.told.append((node, copy.WidthInBytes, copy.Height, context, self.stack[-1]))
        return (SUCCESS,)

    def cuModuleLoadData(self, cubin: bytes) -> Any:
        return SUCCESS, cubin

    def cuModuleGetFunction(self, module: bytes, entry: bytes) -> Any:
        return SUCCESS, entry

    def cuFuncSetAttribute(self, function: bytes, attribute: str, value: int) -> Any:
        self.told.append((function, attribute, value))
        return (SUCCESS,)
