"""Whether this process is one of several ranks, read from what launchers leave in the environment; MPI is not touched.

A launch of one rank, and a process that nobody launched, are alone: they need no MPI.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from numba_meta.comm.errors import RankError

JOINED_VARIABLE = "NUMBA_META_JOINED"  # job, rank and process that joined: seen by the processes that a rank starts


@dataclass(frozen=True)
class Launch:
    """What the launcher says of this process. `size` None: only MPI knows (a launcher that tells a rank and no size)."""

    launcher: str
    rank: int
    size: int | None
    local_rank: int
    local_size: int | None
    job: str  # names this launch among all that run on this host; empty where nothing does

    @property
    def alone(self) -> bool:
        return self.size == 1


ALONE = Launch(launcher="none", rank=0, size=1, local_rank=0, local_size=1, job="")

# launcher, rank, size, local rank, local size. Slurm's own names count only beside those that srun gives to MPI programs: a plain
# command in a batch job sees SLURM_NTASKS too.
_LAUNCHERS = (
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PMIx", "PMIX_RANK", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
)


def detect_launch(environ: Mapping[str, str] | None = None) -> Launch:
    """What this process is in its launch, from `environ` (None: the process's own).

    Raises `RankError` for a world size below 1, a rank out of range, a number that is none, and for a process that a joined rank started.
    """
    environ = os.environ if environ is None else environ
    for launcher, rank_name, size_name, local_rank_name, local_size_name in _LAUNCHERS:
        if rank_name not in environ:
            continue
        rank = _integer(environ, rank_name)
        size = _integer(environ, size_name) if size_name in environ else None
        check_rank(rank, size, f"{rank_name}={rank}", f"{size_name}={size}")
        local_rank = _integer(environ, local_rank_name) if local_rank_name in environ else rank
        local_size = _integer(environ, local_size_name) if local_size_name in environ else None
        check_rank(local_rank, local_size, f"{local_rank_name}={local_rank}", f"{local_size_name}={local_size}")
        launch = Launch(launcher, rank, size, local_rank, local_size, _job(environ))
        _check_first(launch, environ)
        return ALONE if size == 1 else launch
    return ALONE


def check_rank(rank: int, size: int | None, rank_text: str, size_text: str) -> None:
    """Raises `RankError` unless `0 <= rank < size` and `size >= 1`; the texts say where the numbers come from."""
    if size is not None and size < 1:
        raise RankError(f"{size_text}: a launch has at least 1 rank; start with `mpirun -n N`, N from 1 on")
    if rank < 0 or (size is not None and rank >= size):
        last = "" if size is None else f" to {size - 1}"
        raise RankError(f"{rank_text} is out of range; expected 0{last} ({size_text})")


def mark_joined(launch: Launch) -> None:
    """Notes in the environment that this process joined, so that processes which it starts do not join as the same rank."""
    os.environ[JOINED_VARIABLE] = f"{launch.job}:{launch.rank}:{os.getpid()}"


def _check_first(launch: Launch, environ: Mapping[str, str]) -> None:
    job, _, owner = environ.get(JOINED_VARIABLE, "").rpartition(":")
    if job == f"{launch.job}:{launch.rank}" and owner != str(os.getpid()):
        raise RankError(
            f"rank {launch.rank} joined already, as process {owner}; a process that a rank starts cannot join too: "
            f"start it without the launcher's variables ({launch.launcher})"
        )


def _job(environ: Mapping[str, str]) -> str:
    if name := environ.get("PMIX_NAMESPACE"):
        return name
    if "SLURM_JOB_ID" in environ:
        return f"slurm-{environ['SLURM_JOB_ID']}.{environ.get('SLURM_STEP_ID', '0')}"
    return f"parent-{os.getppid()}"  # a launcher starts all ranks of a host from one process


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise RankError(f"{name}={environ[name]!r} is not a number; expected what a launcher such as mpirun sets") from None
