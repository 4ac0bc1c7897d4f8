"""Recording of GPU work: streams are captured into one graph, which is replayed with one call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from numba_meta.devices.cuda_driver import GpuContext, call
from numba_meta.devices.cuda_driver import _bindings as bindings

_THREAD_LOCAL = 1  # other threads of the process may call what a capture forbids


class CudaGraph:
    """A recorded step: `launch` enqueues all of it on a stream. Raises `DeviceError` with the failing call's name."""

    def __init__(self, gpu: GpuContext, graph: Any) -> None:
        self._gpu = gpu
        with gpu.current():
            try:
                self._executable = call("cuGraphInstantiate", graph, 0)
            finally:
                call("cuGraphDestroy", graph)
        self._destroyed = False

    def launch(self, stream: int) -> None:
        """Enqueues the whole step."""
        with self._gpu.current():
            call("cuGraphLaunch", self._executable, stream)

    def destroy(self) -> None:
        """Gives it back; it must not run any more. Twice is once."""
        if not self._destroyed:
            self._destroyed = True
            with self._gpu.current():
                call("cuGraphExecDestroy", self._executable)


class Capture:
    """What a `with capture(...)` block recorded, once the block has ended."""

    graph: CudaGraph


@contextmanager
def capture(gpu: GpuContext, stream: int) -> Iterator[Capture]:
    """Records what the block enqueues on a stream, and on streams that wait for its events and that it waits for in the end."""
    found = Capture()
    mode = bindings().CUstreamCaptureMode(_THREAD_LOCAL)
    with gpu.current():
        call("cuStreamBeginCapture", stream, mode)
    try:
        yield found
    except BaseException:
        with gpu.current():
            bindings().cuStreamEndCapture(stream)  # whatever it says: the first error counts
        raise
    with gpu.current():
        graph = call("cuStreamEndCapture", stream)
    found.graph = CudaGraph(gpu, graph)
