"""Latency and bandwidth of reductions over ranks, next to mpi4py's own Allreduce: `mpirun -n 2 python benchmarks/reductions.py`.

For each size the ways take turns in one run. Two numbers are given: the median of the rounds, and the fastest tenth of them, which is what
remains on a machine that other programs use (a rank that waits for one without a core measures the scheduler). Ratios are of the latter.
`--exact-check` compares every result with the ordered float32 sum first.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
from command_line import count, run_main

from numba_meta.comm.communicators import forced_name, offered_names
from numba_meta.comm.failure import RankLaunch, ranks
from numba_meta.comm.join import JoinRequest
from numba_meta.comm.mpi import MpiCommunicator, PairwiseCommunicator, cpu_factories
from numba_meta.comm.mpi_table import MpiTable
from numba_meta.comm.mpi_world import MpiWorld
from numba_meta.kernels.cpu.kernel import ENTRY_TYPE
from numba_meta.kernels.cpu.mpi import mpi_all_reduce

FIRST = "mpi4py Allreduce"
SIZES = [2 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]


def ways(world: MpiWorld, x: np.ndarray) -> dict[str, Callable[[], object]]:
    """Every way to sum x over the ranks in place."""
    communicators = [MpiCommunicator(world)] + ([PairwiseCommunicator(world)] if world.size == 2 else [])
    mpi, comm = world.mpi, world.communicator
    found: dict[str, Callable[[], object]] = {FIRST: lambda: comm.Allreduce(mpi.IN_PLACE, x, mpi.SUM)}
    for communicator in communicators:
        found[f"{communicator.name}, Python"] = lambda c=communicator: c.all_reduce(x)  # type: ignore[misc]
        found[f"{communicator.name}, compiled"] = compiled(communicator.table, x)
    return found


def compiled(table: MpiTable, x: np.ndarray) -> Callable[[], object]:
    """One call into compiled code, as a recorded step makes it."""
    scratch = np.empty(table.reduce_scratch_bytes(x.size), np.uint8)
    rows = np.ones(1, np.int64)
    block = mpi_all_reduce.pack(
        table=table.address, part=x.ctypes.data, part_stride=x.nbytes, out=x.ctypes.data, out_stride=x.nbytes,
        scratch=scratch.ctypes.data, n=x.size, n_rows=rows.ctypes.data,
    )  # fmt: skip
    call, arguments = ENTRY_TYPE(mpi_all_reduce.address), int(block.ctypes.data)

    def run(keep: tuple[object, ...] = (table, scratch, rows, block)) -> None:
        call(arguments, 0, 1)

    return run


def check(world: MpiWorld, x: np.ndarray, run: Callable[[], object]) -> None:
    """Fails unless `run` leaves the ordered float32 sum in x."""
    parts = [np.random.default_rng(rank).standard_normal(x.size).astype(np.float32) for rank in range(world.size)]
    expected = parts[0].copy()
    for part in parts[1:]:
        expected += part
    x[:] = parts[world.rank]
    run()
    if x.tobytes() != expected.tobytes():
        raise SystemExit(f"a sum of {x.size} elements differs from the ordered float32 sum")


def measure(launch: RankLaunch, n_bytes: int, seconds: float, exact_check: bool) -> dict[str, tuple[float, float]]:
    """Microseconds of one reduction by each way, of the rounds of all ranks: their median and their first tenth. Ways take turns."""
    world = launch.world
    assert isinstance(world, MpiWorld)
    comm = world.communicator
    x = np.zeros(n_bytes // 4, np.float32)
    found = ways(world, x)
    for name, run in found.items():
        if exact_check and (world.size == 2 or name != FIRST):
            check(world, x, run)
    x[:] = 0
    per_round = max(1, min(50, (256 << 10) // n_bytes))
    samples: dict[str, list[float]] = {name: [] for name in found}
    end = time.monotonic() + seconds
    order, going = list(found.items()), True
    while going:
        order.append(order.pop(0))  # what runs first in a round finds the machine in another state than what follows
        for name, run in order:
            comm.Barrier()
            begin = time.perf_counter()
            for _ in range(per_round):
                run()
            samples[name].append((time.perf_counter() - begin) / per_round * 1e6)
        going = bool(comm.bcast(time.monotonic() < end or len(samples[FIRST]) < 10))
    # A round is as slow as its slowest rank.
    slowest = {name: np.max(comm.allgather(times), axis=0) for name, times in samples.items()}
    return {name: (float(np.median(times)), float(np.quantile(times, 0.1))) for name, times in slowest.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1.0, help="for each size (default 1)")
    parser.add_argument("--sizes", type=count(4), nargs="*", default=SIZES, help="bytes (default 2 KiB to 64 MiB)")
    parser.add_argument("--exact-check", action="store_true", help="compare every result with the ordered float32 sum first")
    options = parser.parse_args()
    with ranks() as launch:
        factories = cpu_factories()
        launch.join(lambda: JoinRequest(offers=offered_names(launch.world, factories), forced=forced_name()))
        if launch.size == 1:
            raise SystemExit("one rank has nothing to reduce: start with `mpirun -n 2 python benchmarks/reductions.py`")
        if launch.rank == 0:
            print("       size  way                      median     fastest tenth          ratio")
        for n_bytes in options.sizes:
            times = measure(launch, n_bytes, options.seconds, options.exact_check)
            for name, (median, fast) in times.items():
                if launch.rank == 0:
                    rate, ratio = n_bytes / fast / 1e3, fast / times[FIRST][1]
                    line = f"{n_bytes / 1024:7.0f} KiB  {name:18} {median:10.1f} us {fast:10.1f} us {rate:7.2f} GB/s {ratio:5.2f} x"
                    print(line, flush=True)


if __name__ == "__main__":
    run_main(main)
