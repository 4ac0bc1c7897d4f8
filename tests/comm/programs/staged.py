"""One rank with a GPU whose memory is the host's, or, as rank 0, with a CPU device: sums and gathers through MPI, byte for byte."""

from __future__ import annotations

from typing import Any

import numpy as np
from fake_gpu import FakeGpu, FakePinnedMemory

from numba_meta.comm.errors import MpiError
from numba_meta.comm.failure import ranks
from numba_meta.comm.join import JoinRequest
from numba_meta.comm.mpi import MpiFactory, PairwiseFactory
from numba_meta.comm.mpi_staged import StagedMpiFactory, StagedTable
from numba_meta.comm.mpi_world import MpiWorld
from numba_meta.devices import cuda_driver

cuda_driver.PinnedMemory = FakePinnedMemory  # type: ignore[assignment, misc]


def values(rank: int, rows: int, n: int) -> np.ndarray:
    """Any rank can make any rank's."""
    return np.random.default_rng([77, rank, rows, n]).standard_normal((rows, n)).astype(np.float32)


def run(kernel: Any, live: int, max_rows: int, widths: np.ndarray, arguments: dict[str, int]) -> None:
    """As a recorded step does it, twice on a GPU."""
    count = np.array([live], np.int64)
    arguments = arguments | {"n_rows": count.ctypes.data}
    if hasattr(kernel, "prepare"):
        work = kernel.prepare(arguments | {"widths": 0}, {"widths": widths}, max_rows)
        work.enqueue(1)
        work.enqueue(1)
        work.free()
    else:
        for _ in range(2):
            kernel(**arguments)


def check(world: MpiWorld, table: Any) -> int:
    """How many results were right."""
    size, n_checked = world.size, 0
    for rows, n, live in ((1, 1, 1), (1, 5000, 1), (3, 61, 2), (4, 16, 4), (2, 7, 0), (3, 40_000, 3)):
        parts = [values(rank, rows, n) for rank in range(size)]
        own, out = parts[world.rank].copy(), np.full((rows, n), np.nan, np.float32)
        scratch = np.empty(max(1, table.reduce_scratch_bytes(rows * n)), np.uint8)
        places = {"table": table.address, "part": own.ctypes.data, "scratch": scratch.ctypes.data, "out": out.ctypes.data}
        run(table.all_reduce, live, rows, np.empty(0, np.int64), places | {"part_stride": 4 * n, "out_stride": 4 * n, "n": n})
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        assert out[:live].tobytes() == total[:live].tobytes(), (rows, n)
        widths = np.array([n if rank != size - 1 else 3 * (n % 2) for rank in range(size)], np.int64)
        pieces = [values(rank, rows, int(width)) for rank, width in enumerate(widths)]
        own, whole = pieces[world.rank].copy(), int(widths.sum())
        out = np.full((rows, whole + 3), np.nan, np.float32)
        scratch = np.empty(max(1, table.gather_scratch_bytes(widths.tolist(), rows)), np.uint8)
        places = {"table": table.address, "part": own.ctypes.data, "scratch": scratch.ctypes.data, "out": out.ctypes.data}
        places |= {"part_stride": 4 * own.shape[1], "out_stride": out.strides[0]}
        run(table.gather_columns, live, rows, widths, places | {"widths": widths.ctypes.data})
        assert out[:live, :whole].tobytes() == np.concatenate(pieces, axis=1)[:live].tobytes(), (rows, n)
        assert np.isnan(out[:, whole:]).all()
        table.check()
        n_checked += 2
    return n_checked


def failing(table: StagedTable) -> None:
    """An error on the driver's thread is kept, and raised by `check`."""

    def fail(x: np.ndarray) -> None:
        raise MpiError("a reduction failed")

    table.reduce = fail  # type: ignore[method-assign]
    x, count = np.ones(4, np.float32), np.ones(1, np.int64)
    places = {"table": 0, "part": x.ctypes.data, "out": x.ctypes.data, "part_stride": 16, "out_stride": 16, "n": 4}
    work = table.all_reduce.prepare(places | {"n_rows": count.ctypes.data}, {}, 1)
    work.enqueue(1)
    work.free()
    try:
        table.check()
    except MpiError as error:
        assert str(error) == "a reduction failed"
    else:
        raise AssertionError("an error was lost")


with ranks() as launch:
    world = launch.world
    assert isinstance(world, MpiWorld)
    launch.join(JoinRequest)
    checked = 0
    for pairwise in (False, True) if world.size == 2 else (False,):
        factory: Any = StagedMpiFactory(FakeGpu(), pairwise)  # type: ignore[arg-type]
        if world.rank == 0:
            factory = PairwiseFactory() if pairwise else MpiFactory()
        assert factory.obstacle(world) == "" and factory.name == ("pairwise" if pairwise else "mpi")
        communicator = factory.build(world)
        x = values(world.rank, 1, 999)
        communicator.all_reduce(x)
        assert x.tobytes() == sum((values(rank, 1, 999) for rank in range(1, world.size)), values(0, 1, 999)).tobytes()
        checked += check(world, communicator.table)
        if world.rank > 0:
            failing(communicator.table)
        communicator.close()
    print(f"rank {world.rank}: {checked} results are equal", flush=True)
