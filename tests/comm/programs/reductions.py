"""Reductions and gathers of one rank, compiled and from Python, compared byte for byte with ordered float32 sums: `reductions.py`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from numba_meta.comm.errors import MpiError
from numba_meta.comm.failure import ranks
from numba_meta.comm.join import JoinRequest
from numba_meta.comm.mpi import MpiCommunicator, PairwiseCommunicator
from numba_meta.comm.mpi_table import LARGE_BYTES, MpiTable
from numba_meta.comm.mpi_world import MpiWorld
from numba_meta.kernels.cpu import mpi as words
from numba_meta.kernels.cpu.mpi import mpi_all_reduce, mpi_gather_columns

LARGE = LARGE_BYTES // 4
SIZES = [1, 2, 3, 15, 16, 17, 61, 1000, LARGE - 1, LARGE, LARGE + 1, 4096, 32_767, 32_768, 131_072, 262_144, 262_147]
SEED = 20260
GARBAGE = np.uint32(0x7FC0BEEF)


def values(rank: int, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """A rank's summand: any rank can make any rank's."""
    rng = np.random.default_rng([SEED, rank, seed])
    return (rng.standard_normal(shape) * 10.0 ** rng.integers(-4, 5, shape)).astype(np.float32)


def ordered_sum(size: int, shape: tuple[int, ...], seed: int) -> np.ndarray:
    total = values(0, shape, seed)
    for rank in range(1, size):
        total = total + values(rank, shape, seed)
    return total


def garbage(n_bytes: int) -> np.ndarray:
    return np.full(n_bytes // 4, GARBAGE, np.uint32)


class Rows:
    """`rows` x n float32 with a gap behind each row, in memory full of garbage that must stay."""

    def __init__(self, rows: int, n: int, gap: int) -> None:
        self.memory = garbage(4 * (rows * (n + gap) + 16))
        self.array = self.memory[8 : 8 + rows * (n + gap)].reshape(rows, n + gap)[:, :n].view(np.float32)
        self.stride = 4 * (n + gap)
        self.address = self.memory[8:].ctypes.data
        self.n, self.gap = n, gap

    def outside(self) -> np.ndarray:
        inside = self.memory[8 : 8 + len(self.array) * (self.n + self.gap)].reshape(len(self.array), -1)
        return np.concatenate([self.memory[:8], inside[:, self.n :].ravel(), self.memory[8 + inside.size :]])


def reduce_compiled(table: MpiTable, world: MpiWorld, rows: int, n: int, gap: int, in_place: bool, live: int) -> None:
    part, out = Rows(rows, n, gap), Rows(rows, n, gap)
    mine = values(world.rank, (rows, n), n)
    part.array[:] = mine
    target = part if in_place else out
    scratch = garbage(table.reduce_scratch_bytes(rows * n) + 64)
    mpi_all_reduce(
        threads=2, table=table.address, part=part.address, part_stride=part.stride, out=target.address, out_stride=target.stride,
        scratch=scratch, n=n, n_rows=np.array([live]),
    )  # fmt: skip
    table.check()
    expected = ordered_sum(world.size, (rows, n), n)
    assert target.array[:live].tobytes() == expected[:live].tobytes(), (rows, n, gap, in_place)
    untouched = mine[live:] if in_place else np.full((rows - live, n), GARBAGE).view(np.float32)
    assert target.array[live:].tobytes() == untouched.tobytes()
    if not in_place:
        assert part.array.tobytes() == mine.tobytes()
    for each in (part, out):
        assert (each.outside() == GARBAGE).all()
    assert (scratch[-16:] == GARBAGE).all(), "wrote behind its scratch"


def gather_compiled(table: MpiTable, world: MpiWorld, rows: int, widths: Sequence[int], gap: int) -> None:
    own = widths[world.rank]
    part, out = Rows(rows + 1, own, gap), Rows(rows + 1, sum(widths), gap)
    part.array[:] = values(world.rank, (rows + 1, own), 7)
    scratch = garbage(table.gather_scratch_bytes(widths, rows) + 64)
    mpi_gather_columns(
        threads=2, table=table.address, part=part.address, part_stride=part.stride, widths=np.array(widths), out=out.address,
        out_stride=out.stride, scratch=scratch, n_rows=np.array([rows]),
    )  # fmt: skip
    table.check()
    expected = np.concatenate([values(rank, (rows + 1, width), 7) for rank, width in enumerate(widths)], axis=1)
    assert out.array[:rows].tobytes() == expected[:rows].tobytes(), (rows, widths, gap)
    assert (out.array[rows:].view(np.uint32) == GARBAGE).all()
    assert (out.outside() == GARBAGE).all() and (scratch[-16:] == GARBAGE).all()


def failing(world: MpiWorld) -> None:
    """A function that returns an error: kept, raised by `check`, and nothing is called afterwards."""
    table = MpiTable(world)
    table.words[words.FLOAT // 8] = world.mpi._handleof(world.mpi.DATATYPE_NULL)  # every rank the same: nobody waits for anyone
    x = np.ones(8, np.float32)
    scratch = garbage(table.reduce_scratch_bytes(x.size))
    for _ in range(2):
        mpi_all_reduce(
            table=table.address, part=x, part_stride=32, out=x, out_stride=32, scratch=scratch, n=8, n_rows=np.ones(1, np.int64)
        )  # fmt: skip
    try:
        table.check()
    except MpiError as error:
        assert "MPI_All" in str(error) and "failed" in str(error), error
    else:
        raise AssertionError("an error of MPI was lost")


with ranks() as launch:
    world = launch.world
    assert isinstance(world, MpiWorld)
    launch.join(JoinRequest)
    communicators = [MpiCommunicator(world), MpiCommunicator(world, large_bytes=64)]
    if world.size == 2:
        communicators.append(PairwiseCommunicator(world))
    checked = 0
    for communicator in communicators:
        for n in SIZES:
            x = values(world.rank, (n,), n)
            communicator.all_reduce(x)
            assert x.tobytes() == ordered_sum(world.size, (n,), n).tobytes(), (communicator.name, n)
            reduce_compiled(communicator.table, world, 1, n, 3, in_place=n % 2 == 0, live=1)
            checked += 2
        for rows, n, gap, live in ((3, 61, 0, 3), (5, 61, 3, 3), (4, 1000, 0, 2), (9, LARGE // 4, 5, 8), (3, 16, 1, 0)):
            for in_place in (False, True):
                reduce_compiled(communicator.table, world, rows, n, gap, in_place, live)
                checked += 1
    size = world.size
    for widths in ([5] * size, [0] * (size - 1) + [33], list(range(size)), [1000 + rank for rank in range(size)], [0] * size):
        for rows, gap in ((1, 0), (1, 4), (3, 0), (4, 4), (0, 2)):
            gather_compiled(communicators[0].table, world, rows, widths, gap)
            checked += 1
    failing(world)
    print(f"rank {world.rank}: {checked} results are equal", flush=True)
