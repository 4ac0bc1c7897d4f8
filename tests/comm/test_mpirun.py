"""Launches of real ranks: they join, and whatever goes wrong ends all of them soon, with the reason once and a status that says so."""

from __future__ import annotations

import os
import signal
import sys

import pytest
from mpirun import Launch, check_ended, check_failed, needs_mpi

import numba_meta

pytestmark = needs_mpi


@pytest.mark.parametrize("n", [1, 2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_join_and_reduce(n, tmp_path):
    ended = Launch(n, tmp_path, "fits", str(tmp_path)).end()
    assert ended.status == 0 and ended.ranks == dict.fromkeys(range(n), 0), ended.stderr
    name = "alone" if n == 1 else "mpi"
    assert sorted(ended.stdout.splitlines()) == [f"rank {rank} of {n} reduces with {name}" for rank in range(n)]
    assert ended.left == [] and "numba-meta" not in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["mpi_of_its_own", "plain"])
def test_programs_without_a_command_line(scenario, tmp_path):
    ended = Launch(2, tmp_path, scenario, str(tmp_path)).end()
    assert ended.status == 0 and ended.ranks == {0: 0, 1: 0}, ended.stderr
    assert ended.stdout.count("reduces with mpi") == 2 and ended.left == []


@pytest.mark.slow
def test_a_forced_communicator(tmp_path):
    assert "reduces with pairwise" in Launch(2, tmp_path, "fits", str(tmp_path), NUMBA_META_COMM="pairwise").end().stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["none", "nccl", "tcp"])
def test_a_forced_communicator_that_cannot_be(name, tmp_path):
    ended = Launch(2, tmp_path, "fits", str(tmp_path), NUMBA_META_COMM=name).end()
    check_failed(ended, 2, f"NUMBA_META_COMM={name!r}" if name == "tcp" else f"NUMBA_META_COMM={name} (rank 0)")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "reason", "n"),
    [
        ("version", f"runs numba_meta {numba_meta.__version__} (wire format 2); install the same version for every rank", 2),
        ("options", "has ctx_size 2048, rank 0", 3),
        ("file", "has model header sha256", 2),
        ("refusal", "cuda:0 is missing; expected a GPU", 2),
        ("refusal", "cuda:0 is missing; expected a GPU", 4),
        ("refusal_of_all", "numba-meta: no file named model.gguf", 2),
        ("joins_twice", "joins twice", 2),
        ("raises_before_joining", "): --ctx-size -1 is below 1", 2),
        ("raises_before_joining_on_all", "numba-meta: --ctx-size -1 is below 1", 3),
        ("raises", "cuda:1 fell off the bus", 2),
        ("raises", "cuda:1 fell off the bus", 3),
        ("mpi4py_is_missing", "numba-meta: Open MPI started 3 ranks, but mpi4py is not installed; install numba-meta[mpi]", 3),
        ("mpi4py_is_missing_on_one", "numba-meta: Open MPI started 2 ranks, but mpi4py is not installed; install numba-meta[mpi]", 2),
        ("hangs_in_build", "did not build and probe a communicator within 4 s", 2),
        ("plain_raises", "ValueError: nobody catches this", 2),
        ("raises_on_all", "numba-meta: no such sampler: lottery", 3),
        ("raises_when_the_other_is_done", "ValueError: late news", 2),
    ],
)
def test_one_reason_ends_all(scenario, reason, n, tmp_path):
    variables = {"NUMBA_META_JOIN_TIMEOUT": "4"} if scenario == "hangs_in_build" else {}
    ended = Launch(n, tmp_path, scenario, str(tmp_path), **variables).end()
    check_failed(ended, n, reason)
    if scenario in ("version", "options", "file", "refusal"):
        assert sorted(file.name for file in tmp_path.glob("released.*")) == [f"released.{rank}" for rank in range(n)]


@pytest.mark.parametrize("scenario", [pytest.param("sleeps", marks=pytest.mark.slow), "never_starts"])
def test_a_rank_that_sleeps_is_named(scenario, tmp_path):
    ended = Launch(3, tmp_path, scenario, str(tmp_path), NUMBA_META_JOIN_TIMEOUT="5").end()
    check_failed(ended, 3, "never heard from rank 1 of 3 within 5 s")
    assert ended.seconds > 3  # it was waited for


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("scenario", "killed", "network"),
    [
        ("loop", 1, ""),
        pytest.param("loop", 0, "", marks=SLOW),
        pytest.param("loop_in_python", 1, "", marks=SLOW),
        pytest.param("loop", 1, "tcp,self", marks=SLOW),  # as between hosts: there Open MPI itself ends a rank whose peer is gone
        pytest.param("loop", 0, "tcp,self", marks=SLOW),
    ],
)
def test_a_killed_rank_is_named(scenario, killed, network, tmp_path):
    launch = Launch(2, tmp_path, scenario, str(tmp_path), **({"OMPI_MCA_btl": network} if network else {}))
    launch.wait_for("ready")
    launch.signal_rank(killed, signal.SIGKILL)
    ended = launch.end()
    check_failed(ended, 2, f"rank {killed} (")
    assert "has gone without a word" in ended.stderr and ended.ranks[killed] == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize(("number", "whole_group"), [(signal.SIGTERM, False), (signal.SIGINT, False), (signal.SIGINT, True)])
def test_signals_to_the_launcher_end_all(number, whole_group, tmp_path):
    launch = Launch(2, tmp_path, "loop", str(tmp_path))
    launch.wait_for("ready")
    launch.signal_launcher(number, whole_group)
    ended = launch.end()
    check_ended(ended, 2)
    # What Open MPI sends its ranks for both; a quarter of a second later it sends SIGKILL, too soon for a rank on a busy machine.
    assert set(ended.ranks.values()) <= {128 + signal.SIGTERM, -signal.SIGKILL}
    assert ended.stderr.count("numba-meta: ") <= 1  # a launcher that was told to end may no longer pass on what its ranks say


@pytest.mark.slow
@pytest.mark.parametrize(("number", "reason"), [(signal.SIGTERM, "was told to end (SIGTERM)"), (signal.SIGINT, "was interrupted (Ctrl-C)")])
def test_a_signal_to_one_rank_ends_all(number, reason, tmp_path):
    launch = Launch(3, tmp_path, "loop", str(tmp_path))
    launch.wait_for("ready")
    launch.signal_rank(1, number)
    ended = launch.end()
    check_failed(ended, 3, f"rank 1 ({os.uname().nodename}) {reason}")
    assert ended.ranks[1] == 128 + number


def test_mpi4py_that_is_missing(tmp_path, monkeypatch):
    """One line that names the extra; ranks are not started for this."""
    from numba_meta.comm import mpi_world
    from numba_meta.comm.errors import RankError
    from numba_meta.comm.launch import Launch as Found

    found = Found("Open MPI", 0, 2, 0, 2, "job")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(RankError, match=r"^Open MPI started 2 ranks, but mpi4py is not installed; install numba-meta\[mpi\]$"):
        mpi_world.import_mpi(found)
    monkeypatch.undo()

    def no_library(name):
        if name == "mpi4py.MPI":
            raise RuntimeError("cannot load MPI library\nlibmpi.so not found")
        return __import__(name)

    monkeypatch.setattr(mpi_world.importlib, "import_module", no_library)
    text = r"but mpi4py finds no MPI \(cannot load MPI library libmpi.so not found\); install numba-meta\[mpi\]"
    with pytest.raises(RankError, match=text):
        mpi_world.import_mpi(found)
