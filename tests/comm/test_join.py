"""Joining over fake ranks: all or none, always with the same words."""

from __future__ import annotations

import time

import pytest
from fake_ranks import run_ranks

from numba_meta.comm.errors import JoinError, RankError
from numba_meta.comm.join import Joined, JoinRequest, agree, join, join_timeout, last_words, leaders_first
from numba_meta.comm.world import SoloWorld
from numba_meta.errors import UsageError


def test_ranks_that_fit_join():
    def work(world):
        return join(world, lambda: JoinRequest({"a": "1"}, offers=("mpi",), needed_host_bytes=10 + world.rank), timeout=10)

    for rank, outcome in enumerate(run_ranks(4, work)):
        joined = outcome.value
        assert isinstance(joined, Joined) and joined.rank == rank and joined.size == 4
        assert [record.host for record in joined.records] == ["host0", "host1", "host2", "host3"]
        assert [need.needed_bytes for need in joined.host_needs] == [10, 11, 12, 13]
        assert joined.threads() >= 1 and not joined.one_host and joined.leads_host


def test_a_process_alone_joins():
    assert join(SoloWorld(), JoinRequest).size == 1


def refuse(message, error=UsageError):
    raise error(message)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_one_that_cannot_stops_all_with_its_reason(failing):
    released = []

    def work(world):
        prepare = (lambda: refuse("cuda:0 is missing")) if world.rank == failing else JoinRequest
        join(world, prepare, timeout=10, release=lambda: released.append(world.rank))

    outcomes = run_ranks(3, work)
    assert {str(outcome.error) for outcome in outcomes} == {f"rank {failing} (host{failing}): cuda:0 is missing"}
    for outcome in outcomes:
        assert isinstance(outcome.error, JoinError) and outcome.error.exit_status == 2 and outcome.error.speaker == 0
    assert sorted(released) == [0, 1, 2]


def test_an_unexpected_error_is_a_refusal_too():
    def work(world):
        join(world, (lambda: refuse("no\nluck", ZeroDivisionError)) if world.rank else JoinRequest, timeout=10)

    assert {str(outcome.error) for outcome in run_ranks(2, work)} == {"rank 1 (host1): unexpected ZeroDivisionError: no luck"}


def test_facts_that_differ():
    def work(world):
        join(world, lambda: JoinRequest({"ctx_size": str(2048 + world.rank // 2)}), timeout=10)

    messages = {str(outcome.error) for outcome in run_ranks(3, work)}
    assert messages == {"rank 2 (host2) has ctx_size 2049, rank 0 (host0) has 2048; start every rank with the same model and options"}


def test_versions_that_differ(monkeypatch):
    import numba_meta

    class OfRank(str):
        pass

    def work(world):
        def prepare():
            if world.rank == 1:  # records are made one after the other here: rank 1 waits until rank 0 has made its own
                time.sleep(0.3)
                monkeypatch.setattr(numba_meta, "__version__", OfRank("9.9"))
            return JoinRequest()

        join(world, prepare, timeout=10)

    own = numba_meta.__version__
    messages = {str(outcome.error) for outcome in run_ranks(2, work)}
    assert len(messages) == 1
    (message,) = messages
    assert "rank 1 (host1) runs numba_meta 9.9" in message and f"rank 0 (host0) runs numba_meta {own}" in message


def test_ranks_that_never_come_are_named():
    released = []
    begin = time.monotonic()
    outcomes = run_ranks(4, lambda w: join(w, JoinRequest, timeout=0.5, release=lambda: released.append(w.rank)), absent=(1, 3))
    assert time.monotonic() - begin < 8
    for rank in (0, 2):
        error = outcomes[rank].error
        assert isinstance(error, JoinError) and error.speaker == 0
        assert str(error).startswith("never heard from ranks 1, 3 of 4 within 0.5 s")
    assert sorted(released) == [0, 2]


def test_a_refusal_does_not_wait_for_those_who_never_come():
    begin = time.monotonic()
    outcomes = run_ranks(3, lambda w: join(w, (lambda: refuse("no")) if w.rank == 1 else JoinRequest, timeout=60), absent=(2,))
    assert time.monotonic() - begin < 10
    assert {str(outcomes[rank].error) for rank in (0, 1)} == {"rank 1 (host1): no"}


def test_ranks_of_one_host_give_up_together():
    """The first to come gives up after its time; one that came later says the same instead of waiting on alone."""

    def work(world):
        time.sleep(0.8 * world.rank)
        begin = time.monotonic()
        try:
            join(world, JoinRequest, timeout=1.0)
        finally:
            spent[world.rank] = time.monotonic() - begin

    spent: dict[int, float] = {}
    outcomes = run_ranks(3, work, absent=(2,), key="same")
    assert all(str(outcomes[rank].error).startswith("never heard from rank 2 of 3") for rank in (0, 1))
    assert spent[1] < spent[0] + 2.5


def test_who_gave_up_stops_who_heard_all():
    """Rank 1 comes when rank 0 has given up on it: it hears from all, and still must not go on alone."""

    def work(world):
        time.sleep(1.0 * world.rank)
        join(world, JoinRequest, timeout=0.5 if world.rank == 0 else 20)

    outcomes = run_ranks(2, work)
    assert str(outcomes[0].error).startswith("never heard from rank 1 of 2 within 0.5 s")
    assert str(outcomes[1].error).startswith("rank 0 (host0): never heard from rank 1 of 2 within 0.5 s")


def test_joining_twice():
    world = SoloWorld("hostA")
    with pytest.raises(RankError, match="call `join` first"):
        agree(world, JoinRequest)
    join(world, JoinRequest)
    with pytest.raises(RankError, match=r"rank 0 \(hostA\) joins twice"):
        join(world, JoinRequest)
    assert agree(world, JoinRequest).size == 1


def test_agreeing_on_a_second_model():
    def work(world):
        join(world, JoinRequest, timeout=10)
        agree(world, lambda: JoinRequest({"model": "draft"}))
        agree(world, lambda: JoinRequest({"model": f"draft {world.rank}"}))

    assert {str(o.error) for o in run_ranks(2, work)} == {
        "rank 1 (host1) has model draft 1, rank 0 (host0) has draft 0; start every rank with the same model and options"
    }


def test_the_leader_of_each_host_goes_first():
    done: list[int] = []

    def work(world):
        joined = join(world, JoinRequest, timeout=10)

        def compile_kernels():
            if joined.leads_host:
                time.sleep(0.2)
            done.append(world.rank)

        leaders_first(world, joined, compile_kernels)

    assert all(outcome.error is None for outcome in run_ranks(3, work, key="same"))
    assert done[0] == 0 and sorted(done) == [0, 1, 2]


def test_last_words_are_waited_for_until_all_who_can_speak_have_spoken():
    now = [100.0]
    deadline = last_words(102.0, [0, 2], lambda: now[0])
    assert deadline([b"a", None, None]) == 102.0
    assert deadline([b"a", None, b"c"]) == 100.25
    now[0] = 100.2
    assert deadline([b"a", None, b"c"]) == 100.25  # from when the last one spoke
    now[0] = 101.9
    assert last_words(102.0, [0], lambda: now[0])([b"a", None]) == 102.0


@pytest.mark.parametrize("text", ["0", "-1", "soon", "inf", "nan"])
def test_time_limits_that_are_none(monkeypatch, text):
    monkeypatch.setenv("NUMBA_META_JOIN_TIMEOUT", text)
    with pytest.raises(UsageError, match=f"NUMBA_META_JOIN_TIMEOUT='{text}'; expected seconds above 0"):
        join_timeout()


def test_time_limit(monkeypatch):
    assert join_timeout() == 60
    monkeypatch.setenv("NUMBA_META_JOIN_TIMEOUT", "2.5")
    assert join_timeout() == 2.5
