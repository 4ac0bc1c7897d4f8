"""Agreeing on a communicator, with fake ones that some ranks lack, that fail on one, or that compute nonsense."""

from __future__ import annotations

import numpy as np
import pytest
from fake_ranks import FakeFactory, run_ranks

from numba_meta.comm.communicators import PROBE_SIZES, Reduction, choose_candidates, forced_name, negotiate, offered_names
from numba_meta.comm.errors import JoinError, RankError
from numba_meta.comm.join import JoinRequest, join
from numba_meta.comm.world import SoloWorld
from numba_meta.errors import UsageError


def run(size, factories, forced=None):
    """Joins and negotiates; per rank the reduction or the error, and all warnings."""
    warnings: list[str] = []

    def work(world):
        request = JoinRequest(offers=offered_names(world, factories), forced=(forced or {}).get(world.rank, ""))
        return negotiate(world, join(world, lambda: request, timeout=10), factories, warn=warnings.append)

    return run_ranks(size, work), warnings


def names(outcomes):
    assert [outcome.error for outcome in outcomes] == [None] * len(outcomes)
    return {tuple(c.name for c in outcome.value.communicators) for outcome in outcomes}


def test_the_best_that_all_have():
    outcomes, warnings = run(3, [FakeFactory("mpi"), FakeFactory("nccl"), FakeFactory("ipc", lacking=(2,))])
    assert names(outcomes) == {("nccl",)} and not warnings


def test_what_one_rank_lacks_is_not_built_anywhere():
    lacking = FakeFactory("nccl", lacking=(1,))
    outcomes, warnings = run(3, [lacking, FakeFactory("mpi")])
    assert names(outcomes) == {("mpi",)} and not warnings and not lacking.prepared


def spoil_large(rank, x):
    if rank == 1 and x.size > 1000:
        x[-1] = 7


def spoil_one(rank, x):
    if rank == 0 and x.size == 1:
        x[0] = np.nan


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (FakeFactory("nccl", prepare_fails=(1,)), "nccl: rank 1: no memory left"),
        (FakeFactory("nccl", build_fails=(2,)), "nccl: rank 2: OSError: device is busy"),
        (FakeFactory("nccl", spoil=spoil_large), "nccl: rank 1: a probe of 40001"),
        (FakeFactory("nccl", spoil=spoil_one), "nccl: rank 0: a probe of 1 "),
    ],
)
def test_a_failure_on_one_rank_sends_all_to_the_next_best(bad, message):
    outcomes, warnings = run(3, [bad, FakeFactory("mpi")])
    assert names(outcomes) == {("mpi",)}
    assert len(warnings) == 1 and message in warnings[0] and "the ranks reduce with mpi" in warnings[0]
    assert all(made.closed for made in bad.made)
    if bad.prepare_fails:
        assert not bad.made  # nobody builds what one could not prepare


def test_one_that_is_not_for_these_ranks_is_passed_over_in_silence():
    """By whichever rank sees it. Where another one fails, the warning has all that was tried."""
    unsuited = FakeFactory("ipc", unsuited=(1, 2))
    outcomes, warnings = run(3, [unsuited, FakeFactory("nccl"), FakeFactory("mpi")])
    assert names(outcomes) == {("nccl",)} and not warnings and all(made.closed for made in unsuited.made)
    assert {outcome.value.notes for outcome in outcomes} == {("ipc: rank 1: another host",)}
    outcomes, warnings = run(3, [unsuited, FakeFactory("nccl", build_fails=(0,)), FakeFactory("mpi")])
    assert names(outcomes) == {("mpi",)}
    assert warnings == ["the ranks reduce with mpi, after ipc: rank 1: another host; nccl: rank 0: OSError: device is busy"]
    outcomes, warnings = run(3, [unsuited, FakeFactory("mpi")], forced={0: "ipc"})
    assert {str(outcome.error) for outcome in outcomes} == {"no communicator works on all ranks (ipc: rank 1: another host)"}


def test_nothing_is_left():
    bad = [FakeFactory("nccl", build_fails=(0,)), FakeFactory("mpi", spoil=lambda rank, x: x.__setitem__(slice(0, 1), -1))]
    outcomes, warnings = run(2, bad)
    (message,) = {str(outcome.error) for outcome in outcomes}
    assert all(isinstance(outcome.error, JoinError) for outcome in outcomes) and not warnings
    assert message.startswith("no communicator works on all ranks (nccl: rank 0: OSError: device is busy; mpi: rank 0: a probe of 1 ")


def test_one_that_declines_sizes_has_another_behind_it():
    small = FakeFactory("ipc", largest=1000)
    outcomes, _ = run(2, [small, FakeFactory("mpi"), FakeFactory("pairwise")])
    assert names(outcomes) == {("ipc", "mpi")}
    probed = {made.n_calls for made in small.made}
    assert probed == {sum(n <= 1000 for n in PROBE_SIZES)}
    reduction = outcomes[0].value
    assert reduction.choose(1000).name == "ipc" and reduction.choose(1001).name == "mpi"


@pytest.mark.parametrize("forcing", [0, 1])
def test_one_rank_forces_all(forcing):
    outcomes, _ = run(2, [FakeFactory("nccl"), FakeFactory("mpi")], forced={forcing: "mpi"})
    assert names(outcomes) == {("mpi",)}


@pytest.mark.parametrize(
    ("forced", "message"),
    [
        ({0: "mpi", 1: "nccl"}, "NUMBA_META_COMM is mpi on rank 0 and nccl on rank 1"),
        ({1: "none"}, "NUMBA_META_COMM=none (rank 1) forbids every communicator, and 2 ranks need one"),
        ({0: "ipc"}, "NUMBA_META_COMM=ipc (rank 0), but rank 1 cannot use it (it offers nccl, mpi)"),
    ],
)
def test_wishes_that_cannot_be(forced, message):
    outcomes, _ = run(2, [FakeFactory("nccl"), FakeFactory("ipc", lacking=(1,)), FakeFactory("mpi")], forced=forced)
    for outcome in outcomes:
        assert isinstance(outcome.error, JoinError) and message in str(outcome.error)


def test_a_rank_says_why_it_cannot_use_what_it_forces():
    factories = [FakeFactory("nccl", lacking=(0,)), FakeFactory("mpi")]
    assert offered_names(SoloWorld(), factories) == offered_names(SoloWorld(), factories, "mpi") == ("mpi",)
    with pytest.raises(RankError, match="NUMBA_META_COMM=nccl cannot be used: not here"):
        offered_names(SoloWorld(), factories, "nccl")
    with pytest.raises(RankError, match="NUMBA_META_COMM=ipc is not for the devices of rank 0; expected one of nccl, mpi"):
        offered_names(SoloWorld(), factories, "ipc")


def test_no_common_offer():
    with pytest.raises(JoinError, match="no communicator that all ranks can use .rank 0: mpi; rank 1: none."):
        choose_candidates([("mpi",), ()], ["", ""])


def test_wrong_name(monkeypatch):
    monkeypatch.setenv("NUMBA_META_COMM", "tcp")
    with pytest.raises(UsageError, match="NUMBA_META_COMM='tcp'; expected one of ipc, nccl, mpi, pairwise, none"):
        forced_name()
    monkeypatch.setenv("NUMBA_META_COMM", " MPI ")
    assert forced_name() == "mpi"


def test_alone_nothing_is_reduced():
    outcomes, _ = run(1, [FakeFactory("mpi")])
    x = np.array([1, 2], np.float32)
    outcomes[0].value.all_reduce(x)
    assert x.tolist() == [1, 2] and outcomes[0].value.name == "alone"


def test_no_elements_return_at_once_and_a_size_nobody_takes_is_an_error():
    class Picky:
        name = "picky"

        def accepts(self, n_elements):
            return False

    reduction = Reduction((Picky(),))
    reduction.all_reduce(np.empty((0, 4), np.float32))
    with pytest.raises(RankError, match="no communicator accepts 3 elements .agreed: picky."):
        reduction.all_reduce(np.ones(3, np.float32))
