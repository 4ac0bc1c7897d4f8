"""MPI for CUDA devices: the summand is copied to pinned host memory, summed there by MPI, and copied back.

This works with any MPI, between hosts, and beside ranks that compute on CPU devices. In a recorded step the sum is a call of the host
between two copies, which a thread of the driver makes: no other thread is in MPI then, since the one that runs the step waits for it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from numba_meta.comm.errors import RankError
from numba_meta.comm.mpi import MpiCommunicator, PairwiseCommunicator
from numba_meta.comm.mpi_table import mpi_error
from numba_meta.comm.mpi_world import MpiWorld
from numba_meta.comm.world import World

if TYPE_CHECKING:
    from numba_meta.devices.cuda_driver import GpuContext, PinnedMemory

_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_Function = Any  # an instance of it
_COUNT_BYTES = 64  # before the rows: how many are live


class StagedTable:
    """What recorded steps need of it (`schedule.ranks.ReductionTable`)."""

    address = 0  # nothing is read from memory

    def __init__(self, gpu: GpuContext, world: MpiWorld, communicator: MpiCommunicator) -> None:
        self.gpu = gpu
        self.rank = world.rank
        self.reduce = communicator.all_reduce
        self.all_reduce = StagedAllReduce(self)
        self.gather_columns = StagedGatherColumns(self)
        self._world = world
        self._error: BaseException | None = None

    def reduce_scratch_bytes(self, n_elements: int) -> int:
        """None on the device."""
        return 0

    def gather_scratch_bytes(self, widths: Sequence[int], n_rows: int) -> int:
        """None on the device."""
        return 0

    def check(self) -> None:
        """Raises what MPI raised while a step ran."""
        if self._error is not None:
            raise self._error

    def host_function(self, work: Callable[[], None]) -> _Function:
        """A C function that does this. After an error nothing of the kind is done any more: `check` tells it."""

        def function(_: int | None) -> None:
            try:
                if self._error is None:
                    work()
            except BaseException as error:
                self._error = error

        return _HOST_FUNCTION(function)

    def pinned(self, n_elements: int) -> tuple[PinnedMemory, np.ndarray, np.ndarray]:
        """Pinned memory: a count int64 `[1]`, and float32 `[n_elements]`."""
        from numba_meta.devices.cuda_driver import PinnedMemory

        memory = PinnedMemory(self.gpu, _COUNT_BYTES + 4 * n_elements)
        return memory, memory.data[:8].view(np.int64), memory.data[_COUNT_BYTES:].view(np.float32)

    def gather(self, part: np.ndarray, widths: Sequence[int], out: np.ndarray) -> None:
        """out `[row, column]`: all ranks' rows side by side. part: this rank's rows, without gaps. Raises `MpiError`."""
        if not out.size:
            return
        mpi, n_rows = self._world.mpi, len(out)
        counts = [n_rows * width for width in widths]
        starts = [sum(counts[:rank]) for rank in range(len(counts))]
        pieces = np.empty(sum(counts), np.float32)
        try:
            self._world.communicator.Allgatherv([part[: counts[self.rank]], mpi.FLOAT], [pieces, (counts, starts), mpi.FLOAT])
        except mpi.Exception as error:
            raise mpi_error(mpi, f"a gather over {len(counts)} ranks", error.Get_error_code()) from None
        column = 0
        for width, start, count in zip(widths, starts, counts, strict=True):
            out[:, column : column + width] = pieces[start : start + count].reshape(n_rows, width)
            column += width


@dataclass(frozen=True)
class StagedWork:
    """One reduction or gather of a recorded step (`schedule.ranks.StreamWork`): copies to the host, its work, copies back."""

    gpu: GpuContext
    memory: PinnedMemory
    function: _Function  # alive as long as it may be called
    copies_in: tuple[tuple[int, int, int], ...]  # destination, source, bytes
    copy_back: Callable[[int], None]

    def enqueue(self, stream: int) -> None:
        """On a stream that may be captured."""
        for destination, source, n_bytes in self.copies_in:
            if n_bytes:
                self.gpu.copy_async(destination, source, n_bytes, stream)
        self.gpu.call_host(ctypes.cast(self.function, ctypes.c_void_p).value or 0, stream)
        self.copy_back(stream)

    def free(self) -> None:
        """Gives the pinned memory back."""
        self.memory.free()


class StagedAllReduce:
    """A sum over the ranks (`schedule.ranks.StreamCall`)."""

    name = "mpi_staged_all_reduce"

    def __init__(self, table: StagedTable) -> None:
        self._table = table

    def prepare(self, arguments: Mapping[str, int], data: Mapping[str, np.ndarray], max_rows: int) -> StagedWork:
        """Arguments as of the kernel `mpi_all_reduce`; rows lie without gaps. All rows are copied, the live ones summed."""
        table, n, gpu = self._table, arguments["n"], self._table.gpu
        if max_rows > 1 and {arguments["part_stride"], arguments["out_stride"]} != {4 * n}:
            raise RankError(f"{self.name}: expected rows of {n} float32 without gaps")
        memory, live, rows = table.pinned(n * max_rows)
        place, n_bytes = memory.address + _COUNT_BYTES, rows.nbytes
        return StagedWork(
            gpu,
            memory,
            table.host_function(lambda: table.reduce(rows[: n * int(live[0])])),
            ((memory.address, arguments["n_rows"], 8), (place, arguments["part"], n_bytes)),
            lambda stream: gpu.copy_async(arguments["out"], place, n_bytes, stream) if n_bytes else None,
        )


class StagedGatherColumns:
    """Rows of all ranks' parts side by side (`schedule.ranks.StreamCall`)."""

    name = "mpi_staged_gather_columns"

    def __init__(self, table: StagedTable) -> None:
        self._table = table

    def prepare(self, arguments: Mapping[str, int], data: Mapping[str, np.ndarray], max_rows: int) -> StagedWork:
        """Arguments as of the kernel `mpi_gather_columns`; rows of the part lie without gaps."""
        table, gpu, widths = self._table, self._table.gpu, [int(width) for width in data["widths"]]
        own, total = widths[table.rank], sum(widths)
        memory, live, floats = table.pinned((own + total) * max_rows)
        part, out = floats[: own * max_rows], floats[own * max_rows :].reshape(max_rows, total)
        place, row_bytes = memory.address + _COUNT_BYTES, 4 * total

        def copy_back(stream: int) -> None:
            if total:
                gpu.copy_2d_async(arguments["out"], arguments["out_stride"], place + part.nbytes, row_bytes, row_bytes, max_rows, stream)

        return StagedWork(
            gpu,
            memory,
            table.host_function(lambda: table.gather(part, widths, out[: int(live[0])])),
            ((memory.address, arguments["n_rows"], 8), (place, arguments["part"], part.nbytes)),
            copy_back,
        )


class StagedCommunicator:
    """`mpi` or `pairwise` of the host, for steps on a GPU."""

    def __init__(self, gpu: GpuContext, world: MpiWorld, pairwise: bool) -> None:
        self._communicator = PairwiseCommunicator(world) if pairwise else MpiCommunicator(world)
        self.name = self._communicator.name
        self.table = StagedTable(gpu, world, self._communicator)

    def accepts(self, n_elements: int) -> bool:
        """Every size."""
        return self._communicator.accepts(n_elements)

    def all_reduce(self, x: np.ndarray) -> None:
        """x float32, contiguous: summed over all ranks in place."""
        self._communicator.all_reduce(x)

    def close(self) -> None:
        """Nothing is under way after a step, and the MPI communicator is the world's."""


class StagedMpiFactory:
    """Makes `mpi` or `pairwise` for a rank with CUDA devices."""

    def __init__(self, gpu: GpuContext, pairwise: bool = False) -> None:
        self._gpu = gpu
        self._pairwise = pairwise
        self.name = "pairwise" if pairwise else "mpi"

    def obstacle(self, world: World) -> str:
        """MPI must take calls from several threads in turns."""
        if not isinstance(world, MpiWorld):
            return "the ranks were not started by MPI"
        if self._pairwise and world.size != 2:
            return f"{world.size} ranks; expected 2"
        return "" if world.mpi.Query_thread() >= world.mpi.THREAD_SERIALIZED else "this MPI allows calls from one thread alone"

    def prepare(self, world: World) -> None:
        """Nothing of its own: MPI runs already."""

    def build(self, world: World) -> StagedCommunicator:
        """Together with the other ranks, some of which may compute on CPU devices."""
        assert isinstance(world, MpiWorld)  # obstacle
        return StagedCommunicator(self._gpu, world, self._pairwise)
