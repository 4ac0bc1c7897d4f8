"""Ranks of `ipc` that are streams of one process on one GPU: their kernels run at the same time, as those of ranks on several GPUs do."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from numba_meta.comm.ipc import IpcMemory
from numba_meta.devices.cuda_driver import call, open_gpu
from numba_meta.devices.cuda_graph import CudaGraph, capture
from numba_meta.kernels.cuda.ipc import ipc_all_reduce, ipc_gather_columns
from numba_meta.kernels.cuda.kernel import CudaKernel, Gpu

_SECONDS = 5.0  # that a kernel waits


class StreamsOfRanks:
    """`size` ranks on `cuda:0`."""

    def __init__(self, size: int) -> None:
        self.gpu = open_gpu(0)
        self.size = size
        facts = self.gpu.facts
        self._facts = Gpu(facts.capability, facts.n_multiprocessors, facts.max_shared_bytes)
        self._memories = [IpcMemory(self.gpu, rank, size, _SECONDS) for rank in range(size)]
        for memory in self._memories:
            memory.fill_table([each.shared for each in self._memories])
        self._streams = [self.gpu.create_stream() for _ in range(size)]
        self._buffers: list[int] = []

    def upload(self, array: np.ndarray) -> int:
        """The address of a copy, until `close` or the next `sums` or `gathers`."""
        address = self.gpu.allocate(array.nbytes)
        self._buffers.append(address)
        self.gpu.write(address, np.ascontiguousarray(array))
        return address

    def sums(self, parts: np.ndarray, in_place: bool = False) -> list[np.ndarray]:
        """Every rank's sum of parts `[rank, row, column]`."""
        self._free_buffers()
        _, rows, n = parts.shape
        places = [self.upload(part) for part in parts]
        outs = places if in_place else [self.upload(np.full((rows, n), np.nan, np.float32)) for _ in places]
        arguments = [{"part": a, "part_stride": 4 * n, "out": b, "out_stride": 4 * n, "n": n} for a, b in zip(places, outs, strict=True)]
        self._run(ipc_all_reduce, rows, arguments, 1 if in_place else 3)
        return [self._download(out, (rows, n)) for out in outs]

    def gathers(self, pieces: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Every rank's copy of all pieces `[row, column]`, side by side."""
        self._free_buffers()
        rows, widths = len(pieces[0]), np.array([piece.shape[1] for piece in pieces])
        shape = (rows, int(widths.sum()))
        outs = [self.upload(np.full(shape, np.nan, np.float32)) for _ in pieces]
        same = {"widths": self.upload(widths), "out_stride": 4 * shape[1]}
        arguments = [
            {"part": self.upload(piece), "part_stride": 4 * piece.shape[1], "out": out, **same}
            for piece, out in zip(pieces, outs, strict=True)
        ]
        self._run(ipc_gather_columns, rows, arguments, 3)
        return [self._download(out, shape) for out in outs]

    def time_sum(self, n: int, launches: int, repeats: int) -> float:
        """Seconds of one sum of n elements, in graphs of so many: the median."""
        self._free_buffers()
        places = [self.upload(np.zeros(n, np.float32)) for _ in range(self.size)]
        arguments = [{"part": place, "part_stride": 4 * n, "out": place, "out_stride": 4 * n, "n": n} for place in places]
        graphs = self._record(ipc_all_reduce, 1, arguments, launches)
        begin, end = (self.gpu.create_event(timed=True) for _ in range(2))
        times = []
        for _ in range(repeats):
            with self.gpu.current():
                call("cuEventRecord", begin, self._streams[0])
                self._launch(graphs)
                call("cuEventRecord", end, self._streams[0])
                self._wait()
                times.append(call("cuEventElapsedTime", begin, end) / 1e3 / launches)
        for graph in graphs:
            graph.destroy()
        return statistics.median(times)

    def errors(self) -> list[int]:
        """The error word of every rank."""
        return [int(memory.host_words[1]) for memory in self._memories]

    def close(self) -> None:
        """Gives everything back."""
        self._free_buffers()
        for memory, stream in zip(self._memories, self._streams, strict=True):
            self.gpu.destroy_stream(stream)
            memory.free()

    def _run(self, kernel: CudaKernel, n_rows: int, arguments: Sequence[Mapping[str, Any]], times: int) -> None:
        graphs = self._record(kernel, n_rows, arguments, 1)
        for _ in range(times):
            self._launch(graphs)
        self._wait()
        for graph in graphs:
            graph.destroy()

    def _record(self, kernel: CudaKernel, n_rows: int, arguments: Sequence[Mapping[str, Any]], launches: int) -> list[CudaGraph]:
        """A graph of each rank's launches. All is loaded and allocated before the first one runs: nothing can be while one waits."""
        count = self.upload(np.array([n_rows], np.int64))
        graphs = []
        for rank, own in enumerate(arguments):
            values = {"table": self._memories[rank].table, "scratch": 0, "n_rows": count, **own}
            launch, packed = kernel.launch(values, n_rows, self._facts), kernel.pack(**values)
            entry, cubin = kernel.binary(self.gpu.facts.capability)
            function = self.gpu.function(cubin, entry)
            with capture(self.gpu, self._streams[rank]) as recorded:
                for _ in range(launches):
                    self.gpu.launch(function, launch.grid, launch.block, 0, self._streams[rank], int(packed.addresses.ctypes.data))
            graphs.append(recorded.graph)
            with self.gpu.current():
                call("cuGraphUpload", recorded.graph._executable, self._streams[rank])
        self._wait()
        return graphs

    def _launch(self, graphs: Sequence[CudaGraph]) -> None:
        for graph, stream in zip(graphs, self._streams, strict=True):
            graph.launch(stream)

    def _wait(self) -> None:
        for stream in self._streams:
            self.gpu.synchronize(stream)

    def _download(self, address: int, shape: tuple[int, int]) -> np.ndarray:
        out = np.empty(shape, np.float32)
        self.gpu.read(address, out)
        return out

    def _free_buffers(self) -> None:
        for address in self._buffers:
            self.gpu.free(address)
        self._buffers.clear()
