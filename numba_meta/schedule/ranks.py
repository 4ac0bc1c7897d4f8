"""One process among several that compute a step together: which devices are its own, and how compiled code reaches the other processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from numba_meta.lowering import Kernel


@runtime_checkable
class StreamWork(Protocol):
    """Work that a library, or the host, does in the order of a CUDA device's stream; there as long as a recording of it runs."""

    def enqueue(self, stream: int) -> None:
        """Enqueues it on a stream, which may be captured: nothing may be allocated or loaded now."""

    def free(self) -> None:
        """Gives back what it uses."""


@runtime_checkable
class StreamCall(Protocol):
    """Stands where a kernel does, for such work."""

    name: str

    def prepare(self, arguments: Mapping[str, int], data: Mapping[str, np.ndarray], max_rows: int) -> StreamWork:
        """The work for these arguments. `data`: those that are constants, as the host knows them. `max_rows`: as many can be live."""


class ReductionTable(Protocol):
    """How recorded steps reduce over ranks: with MPI (`comm.mpi_table.MpiTable`, `comm.mpi_staged`), `comm.ipc`, `comm.nccl`.

    `all_reduce` and `gather_columns` are kernels, or stand for them, with the arguments of `kernels/cpu/mpi.py`.
    """

    @property
    def all_reduce(self) -> Kernel:
        """Sums rows over all ranks."""

    @property
    def gather_columns(self) -> Kernel:
        """Joins rows of all ranks."""

    @property
    def address(self) -> int:
        """Where its words begin."""

    def reduce_scratch_bytes(self, n_elements: int) -> int:
        """Scratch bytes for a reduction of up to `n_elements`."""

    def gather_scratch_bytes(self, widths: Sequence[int], n_rows: int) -> int:
        """Scratch bytes for a gather of up to `n_rows` rows, `widths[r]` elements of each from rank r."""

    def check(self) -> None:
        """Raises where a collective failed in compiled code."""


@dataclass(frozen=True)
class Ranks:
    """This process is `rank`; rank r owns the devices `devices[r]` of the whole model, counted over all ranks."""

    rank: int
    devices: tuple[range, ...]
    table: ReductionTable

    @property
    def own(self) -> range:
        """This rank's devices."""
        return self.devices[self.rank]

    @property
    def n_devices(self) -> int:
        """Devices of all ranks."""
        return self.devices[-1].stop


def device_ranges(counts: Sequence[int]) -> tuple[range, ...]:
    """The devices of each rank, in rank order, from how many each has: (2, 1) gives 0..1 and 2."""
    starts = [sum(counts[:rank]) for rank in range(len(counts))]
    return tuple(range(start, start + n) for start, n in zip(starts, counts, strict=True))
