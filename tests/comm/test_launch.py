"""What launchers say of a process, without MPI."""

from __future__ import annotations

import os

import pytest

from numba_meta.comm.errors import RankError
from numba_meta.comm.launch import ALONE, JOINED_VARIABLE, detect_launch, mark_joined

OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}


def test_a_plain_process_is_alone():
    assert detect_launch({}) == ALONE
    assert detect_launch({"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}).alone  # a command in a batch job


def test_open_mpi():
    launch = detect_launch(OPEN_MPI | {"PMIX_NAMESPACE": "job@1", "PMIX_RANK": "2"})
    assert (launch.launcher, launch.rank, launch.size, launch.local_rank, launch.local_size) == ("Open MPI", 2, 4, 0, 2)
    assert launch.job == "job@1" and not launch.alone


def test_mpich_and_slurm():
    hydra = detect_launch({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"})
    assert (hydra.launcher, hydra.rank, hydra.size, hydra.local_rank, hydra.local_size) == ("PMI", 1, 2, 1, 2)
    assert str(os.getppid()) in hydra.job
    slurm = {"PMIX_RANK": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2"}
    assert (detect_launch(slurm).rank, detect_launch(slurm).size, detect_launch(slurm).local_rank) == (3, 4, 1)
    assert detect_launch(slurm).job == "slurm-7.2"


def test_a_size_that_only_mpi_knows():
    launch = detect_launch({"PMIX_RANK": "1", "PMIX_NAMESPACE": "x"})
    assert launch.size is None and not launch.alone


def test_a_launch_of_one_is_alone():
    assert detect_launch({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}) == ALONE


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "0"}, "OMPI_COMM_WORLD_SIZE=0: a launch has at least 1 rank"),
        ({"OMPI_COMM_WORLD_SIZE": "-3"}, "OMPI_COMM_WORLD_SIZE=-3"),
        ({"OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK=4 is out of range; expected 0 to 3"),
        ({"OMPI_COMM_WORLD_RANK": "-1"}, "OMPI_COMM_WORLD_RANK=-1 is out of range"),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "2"}, "OMPI_COMM_WORLD_LOCAL_RANK=2 is out of range"),
        ({"OMPI_COMM_WORLD_SIZE": "two"}, "OMPI_COMM_WORLD_SIZE='two' is not a number"),
    ],
)
def test_numbers_that_cannot_be_right(changed, message):
    with pytest.raises(RankError, match="^" + message.replace("(", r"\(")):
        detect_launch(OPEN_MPI | changed)


def test_a_child_of_a_rank_cannot_join(monkeypatch):
    monkeypatch.delenv(JOINED_VARIABLE, raising=False)
    environ = OPEN_MPI | {"PMIX_NAMESPACE": "job@1"}
    mark_joined(detect_launch(environ))
    joined = os.environ.pop(JOINED_VARIABLE)
    assert detect_launch(environ | {JOINED_VARIABLE: joined}).rank == 2  # the same process may look again
    parent = joined.replace(str(os.getpid()), "4711")
    with pytest.raises(RankError, match="rank 2 joined already, as process 4711"):
        detect_launch(environ | {JOINED_VARIABLE: parent})
    assert detect_launch(environ | {JOINED_VARIABLE: parent, "PMIX_NAMESPACE": "job@2"}).rank == 2  # a launch inside a launch
