"""Recording of GPU work: streams are captured into one graph, which is replayed with one call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from numba_meta.devices.account import at_end
from numba_meta.devices.cuda_driver import GpuContext, call
from numba_meta.devices.cuda_driver import _bindings as bindings
from numba_meta.errors import DeviceError

_RELAXED = 2  # memory may be given back meanwhile, by other threads or as garbage of this one


@dataclass(frozen=True)
class Copy2D:
    """`height` rows of `width` bytes from host to device memory, pitches apart."""

    source: int
    source_pitch: int
    destination: int
    destination_pitch: int
    width: int
    height: int

    def parameters(self) -> Any:
        """As the driver takes them; rows without gaps are one."""
        kinds = bindings().CUmemorytype
        copy = bindings().CUDA_MEMCPY3D()
        copy.srcMemoryType, copy.dstMemoryType = kinds.CU_MEMORYTYPE_HOST, kinds.CU_MEMORYTYPE_DEVICE
        copy.srcHost, copy.dstDevice = self.source, self.destination
        is_one = self.width == self.source_pitch == self.destination_pitch
        copy.WidthInBytes, copy.Height, copy.Depth = (self.width * self.height, 1, 1) if is_one else (self.width, self.height, 1)
        if not is_one:
            copy.srcPitch, copy.dstPitch = self.source_pitch, self.destination_pitch
        return copy


def capture_copy(gpu: GpuContext, copy: Copy2D, stream: int) -> Any:
    """Records a copy on a stream that is being captured; its node, for `CudaGraph.set_copy`."""
    with gpu.current():
        call("cuMemcpy3DAsync", copy.parameters(), stream)
        _, _, _, dependencies, *_ = call("cuStreamGetCaptureInfo", stream)
    return dependencies[0]


class CudaGraph:
    """A recorded step: `launch` enqueues all of it on a stream. Raises `DeviceError` with the failing call's name."""

    def __init__(self, gpu: GpuContext, graph: Any) -> None:
        self._gpu = gpu
        with gpu.current():
            try:
                self._executable = call("cuGraphInstantiate", graph, 0)
            except BaseException:
                call("cuGraphDestroy", graph)
                raise
        self._destroy = at_end(self, _destroy, gpu, self._executable, graph)

    def launch(self, stream: int) -> None:
        """Enqueues the whole step."""
        with self._gpu.current():
            call("cuGraphLaunch", self._executable, stream)

    def destroy(self) -> None:
        """Gives it back; it must not run any more. Twice is once."""
        self._destroy()

    def set_copy(self, gpu: GpuContext, node: Any, copy: Copy2D) -> None:
        """Changes what a copy that was recorded for a GPU copies, from the next launch on; one without rows does nothing."""
        with gpu.current():
            call("cuGraphNodeSetEnabled", self._executable, node, int(copy.height > 0))
            if copy.height > 0:
                call("cuGraphExecMemcpyNodeSetParams", self._executable, node, copy.parameters(), gpu.handle)


def _destroy(gpu: GpuContext, executable: Any, graph: Any) -> None:
    with suppress(DeviceError), gpu.current():  # after a kernel's failure the driver refuses everything
        call("cuGraphExecDestroy", executable)
        call("cuGraphDestroy", graph)


class Capture:
    """What a `with capture(...)` block recorded, once the block has ended."""

    graph: CudaGraph


@contextmanager
def capture(gpu: GpuContext, stream: int) -> Iterator[Capture]:
    """Records what the block enqueues on a stream, and on streams that wait for its events and that it waits for in the end."""
    found = Capture()
    mode = bindings().CUstreamCaptureMode(_RELAXED)
    with gpu.current():
        call("cuStreamBeginCapture", stream, mode)
    try:
        yield found
    except BaseException:
        with gpu.current():
            status, *graphs = bindings().cuStreamEndCapture(stream)  # whatever it says: the first error counts
            if int(status) == 0 and graphs:
                bindings().cuGraphDestroy(*graphs)
        raise
    with gpu.current():
        graph = call("cuStreamEndCapture", stream)
    found.graph = CudaGraph(gpu, graph)
