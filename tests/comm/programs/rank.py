"""One rank of the failure tests: `rank.py SCENARIO FOLDER`. What each scenario does is in the function of its name."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np

import numba_meta
from numba_meta.comm.communicators import forced_name, offered_names
from numba_meta.comm.failure import RankLaunch, enter_ranks, ranks
from numba_meta.comm.join import JoinRequest
from numba_meta.comm.mpi import MpiCommunicator, MpiFactory, cpu_factories
from numba_meta.comm.record import facts_of
from numba_meta.comm.world import World
from numba_meta.errors import DeviceError, NumbaMetaError, UsageError
from numba_meta.kernels.cpu.mpi import mpi_all_reduce

scenario, folder = sys.argv[1], Path(sys.argv[2])
own_rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))


def join(launch: RankLaunch, header: bytes = b"model", ctx_size: int = 4096, refusal: NumbaMetaError | None = None) -> None:
    def prepare() -> JoinRequest:
        if refusal is not None:
            raise refusal
        offers = offered_names(launch.world, cpu_factories())
        return JoinRequest(facts_of(header, (0, 4, 9), {"ctx_size": ctx_size}), offers=offers, forced=forced_name())

    launch.join(prepare, release=lambda: (folder / f"released.{own_rank}").touch())  # type: ignore[func-returns-value]
    launch.negotiate(cpu_factories())


def ready() -> None:
    (folder / f"ready.{own_rank}").touch()


def reduce_forever(launch: RankLaunch, compiled: bool = True) -> None:
    """Reductions until something happens; a rank that is left alone hangs in MPI's C code."""
    assert launch.reduction is not None
    table = launch.reduction.communicators[0].table  # type: ignore[attr-defined]
    x, rows = np.zeros(5000, np.float32), np.ones(1, np.int64)
    scratch = np.empty(table.reduce_scratch_bytes(x.size), np.uint8)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if compiled:
            mpi_all_reduce(
                table=table.address, part=x, part_stride=x.nbytes, out=x, out_stride=x.nbytes, scratch=scratch, n=x.size, n_rows=rows
            )  # fmt: skip
            table.check()
        else:
            launch.reduction.all_reduce(x)
        ready()


def fits(launch: RankLaunch) -> None:
    join(launch)
    assert launch.reduction is not None
    x = np.full(40_000, own_rank + 1, np.float32)
    launch.reduction.all_reduce(x)
    assert set(x.tolist()) == {launch.size * (launch.size + 1) / 2}
    print(f"rank {launch.rank} of {launch.size} reduces with {launch.reduction.name}", flush=True)


def version(launch: RankLaunch) -> None:
    if own_rank == 1:
        numba_meta.__version__ = "9.9"
    join(launch)


def options(launch: RankLaunch) -> None:
    join(launch, ctx_size=4096 if own_rank != 1 else 2048)


def file(launch: RankLaunch) -> None:
    join(launch, header=b"model" if own_rank != 1 else b"another")


def refusal(launch: RankLaunch) -> None:
    join(launch, refusal=DeviceError("cuda:0 is missing; expected a GPU") if own_rank == 1 else None)


def refusal_of_all(launch: RankLaunch) -> None:
    join(launch, refusal=UsageError("no file named model.gguf"))


def sleeps(launch: RankLaunch) -> None:
    if own_rank == 1:
        time.sleep(60)
    join(launch)


def loop(launch: RankLaunch) -> None:
    join(launch)
    reduce_forever(launch)


def loop_in_python(launch: RankLaunch) -> None:
    join(launch)
    reduce_forever(launch, compiled=False)


def raises(launch: RankLaunch) -> None:
    join(launch)
    if own_rank == 1:
        raise DeviceError("cuda:1 fell off the bus")
    reduce_forever(launch)


def raises_on_all(launch: RankLaunch) -> None:
    join(launch)
    raise UsageError("no such sampler: lottery")


def raises_when_the_other_is_done(launch: RankLaunch) -> None:
    join(launch)
    if own_rank == 1:
        time.sleep(1)
        raise ValueError("late\nnews")


def joins_twice(launch: RankLaunch) -> None:
    from numba_meta.comm.join import join as join_world

    join(launch)
    join_world(launch.world, JoinRequest)


def raises_before_joining(launch: RankLaunch) -> None:
    if own_rank == 1:
        raise UsageError("--ctx-size -1 is below 1")
    time.sleep(0.5)
    join(launch)


def raises_before_joining_on_all(launch: RankLaunch) -> None:
    raise UsageError("--ctx-size -1 is below 1")


class Hanging(MpiFactory):
    """Rank 1 never comes back from building it."""

    def build(self, world: World) -> MpiCommunicator:
        if world.rank == 1:
            time.sleep(60)
        return super().build(world)


def hangs_in_build(launch: RankLaunch) -> None:
    launch.join(lambda: JoinRequest(offers=("mpi",)))
    launch.negotiate([Hanging()])


def main() -> int:
    (folder / f"started.{own_rank}").touch()  # Python is here: MPI and the launch begin
    if scenario == "mpi4py_is_missing" or (scenario == "mpi4py_is_missing_on_one" and own_rank == 1):
        sys.modules["mpi4py"] = None  # type: ignore[assignment]
    if scenario == "mpi_of_its_own":
        from mpi4py import MPI

        with ranks() as launch:
            fits(launch)
        MPI.COMM_WORLD.Barrier()  # still there
        return 0
    if scenario.startswith("plain"):
        launch = enter_ranks()
        assert enter_ranks() is launch
        fits(launch)
        if scenario == "plain_raises" and own_rank == 1:
            raise ValueError("nobody catches this")
        if scenario == "plain_raises":
            reduce_forever(launch)
        return 0
    if scenario == "never_starts" and own_rank == 1:
        time.sleep(60)
    try:
        with ranks() as launch:
            globals().get(scenario, fits)(launch)
    except KeyboardInterrupt:
        return 130
    except NumbaMetaError as error:
        print(f"numba-meta: {error}", file=sys.stderr, flush=True)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
