"""The communicators `mpi` and `pairwise`: float32 in host memory, summed in rank order at every size, with the same bits on all ranks.

These are called from Python (probes, steps that are not recorded). Recorded steps call the same MPI functions from compiled code through
`table`; both give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from numba_meta.comm.errors import RankError
from numba_meta.comm.mpi_table import LARGE_BYTES, MpiTable, mpi_error
from numba_meta.comm.mpi_world import MpiWorld
from numba_meta.comm.world import World

_TAG = 0x6E6D


class MpiCommunicator:
    """Two ranks: MPI's Allreduce, whose one addition has no order. More: all summands to all (small), or to who adds them (large)."""

    name = "mpi"

    def __init__(self, world: MpiWorld, *, large_bytes: int = LARGE_BYTES) -> None:
        self.rank, self.size = world.rank, world.size
        self.large_bytes = large_bytes
        self.table = MpiTable(world, pairwise=self.name == "pairwise", large_bytes=large_bytes)
        self._mpi = world.mpi
        self._comm: Any = world.communicator

    def accepts(self, n_elements: int) -> bool:
        return True  # larger than MPI counts: in pieces

    def all_reduce(self, x: np.ndarray) -> None:
        """x float32, contiguous, any shape: summed over all ranks in place. Raises `RankError` for another type, `MpiError` from MPI."""
        if x.dtype != np.float32 or not x.flags.c_contiguous:
            raise RankError(f"a reduction of {x.dtype} {list(x.shape)}; expected contiguous float32")
        flat = x.reshape(-1)
        for start in range(0, flat.size, _PIECE):
            with self._errors():
                self._reduce(flat[start : start + _PIECE])

    def _reduce(self, x: np.ndarray) -> None:
        if self.size == 2:
            self._comm.Allreduce(self._mpi.IN_PLACE, x, self._mpi.SUM)
        elif x.nbytes < self.large_bytes:
            parts = np.empty((self.size, x.size), np.float32)
            self._comm.Allgather(x, parts)
            _sum_in_order(parts, x)
        else:
            bounds = [x.size * rank // self.size for rank in range(self.size + 1)]
            starts, counts = bounds[:-1], [b - a for a, b in zip(bounds, bounds[1:], strict=False)]
            own = counts[self.rank]
            parts = np.empty((self.size, own), np.float32)
            receive = [parts, ([own] * self.size, [own * rank for rank in range(self.size)]), self._mpi.FLOAT]
            self._comm.Alltoallv([x, (counts, starts), self._mpi.FLOAT], receive)
            _sum_in_order(parts, x[starts[self.rank] : starts[self.rank] + own])
            self._comm.Allgatherv(self._mpi.IN_PLACE, [x, (counts, starts), self._mpi.FLOAT])

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except self._mpi.Exception as error:
            raise mpi_error(self._mpi, f"a reduction over {self.size} ranks", error.Get_error_code()) from None

    def close(self) -> None:
        """Nothing is under way after a call, and the MPI communicator is the world's."""


class PairwiseCommunicator(MpiCommunicator):
    """Two ranks send each other their summands and add them, rank 0's first."""

    name = "pairwise"

    def _reduce(self, x: np.ndarray) -> None:
        other = np.empty_like(x)
        peer = 1 - self.rank
        # Combined, so that neither waits to receive before it sends, at any size.
        self._comm.Sendrecv(x, peer, _TAG, other, peer, _TAG)
        first, second = (x, other) if self.rank == 0 else (other, x)
        np.add(first, second, out=x)


_PIECE = 1 << 28  # elements in one call of MPI, 1 GiB


def _sum_in_order(parts: np.ndarray, out: np.ndarray) -> None:
    """out = ((parts[0] + parts[1]) + parts[2]) ...; parts `[rank, element]`."""
    out[:] = parts[0]
    for part in parts[1:]:
        out += part


class MpiFactory:
    """Makes `mpi`, for ranks that MPI started."""

    name = "mpi"

    def obstacle(self, world: World) -> str:
        return "" if isinstance(world, MpiWorld) else "the ranks were not started by MPI"

    def prepare(self, world: World) -> None:
        """Nothing of its own: MPI runs already."""

    def build(self, world: World) -> MpiCommunicator:
        assert isinstance(world, MpiWorld)  # obstacle
        return MpiCommunicator(world)


class PairwiseFactory(MpiFactory):
    """Makes `pairwise`, for two ranks."""

    name = "pairwise"

    def obstacle(self, world: World) -> str:
        return super().obstacle(world) or ("" if world.size == 2 else f"{world.size} ranks; expected 2")

    def build(self, world: World) -> PairwiseCommunicator:
        assert isinstance(world, MpiWorld)  # obstacle
        return PairwiseCommunicator(world)


def cpu_factories() -> tuple[MpiFactory, ...]:
    """What CPU devices of several ranks can use."""
    return MpiFactory(), PairwiseFactory()
