"""Kernels on a real GPU, one at a time: arrays go there, kernels run, arrays come back; launches are timed as replays of a graph."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from numba_meta.devices import cuda_driver
from numba_meta.devices.cuda_graph import capture
from numba_meta.kernels.cuda.kernel import EARLY, CudaArguments, CudaKernel, Gpu

Work = tuple[CudaKernel, int, Mapping[str, Any]]  # kernel, most live rows, arguments


class Buffer:
    """Memory of the GPU."""

    def __init__(self, gpu: TestGpu, n_bytes: int) -> None:
        self._gpu = gpu.context
        self.n_bytes = n_bytes
        self.address = self._gpu.allocate(n_bytes)

    def download(self, dtype: Any, shape: Any) -> np.ndarray:
        """A copy of its first bytes."""
        out = np.empty(shape, dtype)
        assert out.nbytes <= self.n_bytes
        self._gpu.read(self.address, out)
        return out

    def __del__(self) -> None:
        self._gpu.free(self.address)


class TestGpu:
    """`cuda:0`."""

    __test__ = False

    def __init__(self) -> None:
        self.context = cuda_driver.open_gpu(0)
        facts = self.context.facts
        self.facts = Gpu(facts.capability, facts.n_multiprocessors, facts.max_shared_bytes)
        self.stream = self.context.create_stream()

    def upload(self, array: np.ndarray) -> Buffer:
        """A copy of an array on the GPU."""
        array = np.ascontiguousarray(array)
        buffer = Buffer(self, array.nbytes)
        self.context.write(buffer.address, array)
        return buffer

    def empty(self, n_bytes: int, fill: int = 0xFF) -> Buffer:
        """Bytes that are all `fill`: NaN in every float type."""
        return self.upload(np.full(n_bytes, fill, np.uint8))

    def run(self, kernel: CudaKernel, n_rows: int, /, **arguments: Any) -> None:
        """Launches a kernel and waits for it."""
        self._enqueue(kernel, n_rows, arguments)
        self.context.synchronize(self.stream)

    def _enqueue(self, kernel: CudaKernel, n_rows: int, arguments: Mapping[str, Any], early: bool = False) -> CudaArguments:
        values = {name: value.address if isinstance(value, Buffer) else value for name, value in arguments.items()}
        kernel = kernel.for_gpu(self.facts)
        launch = kernel.launch(values, n_rows, self.facts)
        packed = kernel.pack(**values)
        entry, cubin = kernel.binary(self.facts.capability)
        function = self.context.function(cubin, entry, launch.shared_bytes)
        if all(launch.grid):
            parameters = int(packed.addresses.ctypes.data)
            self.context.launch(function, launch.grid, launch.block, launch.shared_bytes, self.stream, parameters, early)
        return packed

    def time(self, work: Sequence[Work], repeats: int = 20) -> float:
        """Seconds of all launches together, one after the other: the median of replays of a graph."""
        for kernel, n_rows, arguments in work:
            self._enqueue(kernel, n_rows, arguments)
        self.context.synchronize(self.stream)
        with capture(self.context, self.stream) as recorded:
            for index, (kernel, n_rows, arguments) in enumerate(work):
                self._enqueue(kernel, n_rows, arguments, early=index > 0 and self.facts.capability >= EARLY)
        begin, end = (self.context.create_event(timed=True) for _ in range(2))
        times = []
        for _ in range(repeats + 3):
            with self.context.current():
                cuda_driver.call("cuEventRecord", begin, self.stream)
                recorded.graph.launch(self.stream)
                cuda_driver.call("cuEventRecord", end, self.stream)
                cuda_driver.call("cuEventSynchronize", end)
                times.append(cuda_driver.call("cuEventElapsedTime", begin, end) / 1e3)
        recorded.graph.destroy()
        return statistics.median(times[3:])


@functools.cache
def open_gpu() -> TestGpu:
    """The GPU, opened once."""
    return TestGpu()
