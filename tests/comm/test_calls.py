"""What ranks tell each other of their calls, as threads of this process: calls that fit go on, all others end with the same reason."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from numba_meta.comm import calls as calls_module
from numba_meta.comm.calls import DOUBT_SECONDS, Call, CallLog
from numba_meta.comm.errors import RankError

ONE = Call("generate", {"model": "of model 1", "lengths": "with 3 prompt tokens", "seed": "with seed 1"})


class Ranks:
    """Call logs whose messages arrive at once, and the reasons for which they would end the launch."""

    def __init__(self, n: int) -> None:
        self.now = 0.0
        self.failed: list[str] = []
        self.logs = [CallLog(rank, f"host{rank}", lambda said, rank=rank: self._tell(rank, said), self.failed.append, lambda: self.now)
                     for rank in range(n)]  # fmt: skip
        for log in self.logs:
            log.attach({rank: f"host{rank}" for rank in range(n) if rank != log.rank})

    def _tell(self, rank: int, said: dict[str, object]) -> None:
        for log in self.logs:
            if log.rank != rank:
                log.hear(rank, json.loads(json.dumps(said)))

    def run(self, *works: Callable[[CallLog], Any], seconds: float = 5) -> list[Any]:
        """One piece of work on each rank, at the same time; what each returned or raised."""
        outcomes: list[Any] = [None] * len(works)

        def live(rank: int) -> None:
            self.logs[rank]._thread = None  # each piece of work has a thread of its own here
            try:
                outcomes[rank] = works[rank](self.logs[rank])
            except RankError as error:
                outcomes[rank] = error

        threads = [threading.Thread(target=live, args=(rank,), daemon=True) for rank in range(len(works))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(seconds)
        return outcomes

    def end(self, rank: int) -> None:
        self._tell(rank, self.logs[rank].end())

    def reason(self, rank: int) -> str | None:
        """What the rank makes of it, now and after a while."""
        self.logs[rank].judge()
        self.now += DOUBT_SECONDS
        return self.logs[rank].judge()


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "_HALT_SECONDS", 0.0)


def steps(log: CallLog, n: int, call: Call = ONE) -> int:
    seed = log.begin(call)
    for _ in range(n):
        with log:
            pass
    return seed


def test_equal_calls_go_on_with_rank_0s_number() -> None:
    ranks = Ranks(3)
    rounds = [ranks.run(*[lambda log: steps(log, 2)] * 3) for _ in range(20)]
    assert ranks.failed == [] and all(len(set(one)) == 1 for one in rounds) and len({one[0] for one in rounds}) > 15
    assert [log.number for log in ranks.logs] == [21] * 3 and all(len(peer.calls) <= 2 for peer in ranks.logs[0]._peers.values())
    for rank in range(3):
        ranks.end(rank)
    assert [ranks.reason(rank) for rank in range(3)] == [None] * 3


def test_a_rank_waits_for_the_others() -> None:
    ranks, late = Ranks(2), []

    def slow(log: CallLog) -> int:
        time.sleep(0.3)
        late.append(time.monotonic())
        return log.begin(ONE)

    def quick(log: CallLog) -> float:
        log.begin(ONE)
        return time.monotonic()

    begun = ranks.run(quick, slow)[0]
    assert begun >= late[0]


@pytest.mark.parametrize(
    ("here", "there", "said"),
    [
        ({"n": "with 3 tokens"}, {"n": "with 2 tokens"}, "generate with 2 tokens; rank 0 (host0): generate with 3 tokens;"),
        ({"x": "with x 1", "y": "with y 1"}, {"x": "with x 1", "y": "with y 2"}, "generate with y 2; rank 0 (host0): generate with y 1;"),
        ({}, None, "logits; rank 0 (host0): generate;"),
    ],
)  # fmt: skip
def test_calls_that_differ_end_all_with_one_reason(here: dict[str, str], there: dict[str, str] | None, said: str) -> None:
    ranks = Ranks(2)
    other = Call("logits") if there is None else Call("generate", there)
    outcomes = ranks.run(lambda log: log.begin(Call("generate", here)), lambda log: log.begin(other))
    assert [str(outcome) for outcome in outcomes] == ranks.failed and len(set(ranks.failed)) == 1
    assert ranks.failed[0].startswith(f"rank 1 (host1) made call 2: {said}") and ranks.failed[0].endswith(calls_module.ALIKE)


def test_a_rank_that_has_left_a_call_is_not_waited_for() -> None:
    ranks = Ranks(2)
    ranks.run(lambda log: steps(log, 3), lambda log: steps(log, 3))
    ranks.run(lambda log: log.__enter__(), lambda log: log.leave(log.number))
    assert ranks.logs[0].judge() is None, "it may yet have an error of its own"
    reason = ranks.reason(0)
    assert reason is not None and "rank 1 (host1) left call 2 (generate) after 3 steps of it, rank 0 (host0) goes on with it" in reason
    assert ranks.reason(1) is None, "rank 0 says it"


def test_a_step_that_fails_on_all_is_no_difference() -> None:
    ranks = Ranks(2)
    ranks.run(lambda log: steps(log, 3), lambda log: steps(log, 3))
    ranks.run(lambda log: log.__enter__(), lambda log: log.leave(log.number))
    assert ranks.logs[0].judge() is None
    ranks.now += 0.9 * DOUBT_SECONDS
    assert ranks.logs[0].judge() is None
    ranks.logs[0].__exit__(ValueError, ValueError(), None)
    assert ranks.reason(0) is None
    assert all(isinstance(seed, int) for seed in ranks.run(*[lambda log: log.begin(ONE)] * 2))


def test_steps_are_compared_where_the_next_call_begins() -> None:
    ranks = Ranks(2)
    ranks.run(lambda log: steps(log, 4), lambda log: steps(log, 3))
    outcomes = ranks.run(*[lambda log: log.begin(ONE)] * 2)
    assert all("steps of call 2" in str(outcome) for outcome in outcomes), outcomes


def test_calls_that_take_turns() -> None:
    """Steps of an earlier call are a call of their own: those of another one would be found."""
    ranks = Ranks(2)

    def turns(log: CallLog) -> list[int]:
        numbers = []
        for _ in range(2):
            log.begin(ONE)
            numbers.append(log.number)
        return [log.go_on(numbers[0]), log.go_on(numbers[1]), log.go_on(log.number)]

    assert ranks.run(turns, turns) == [[4, 5, 5]] * 2

    def wrong(log: CallLog) -> list[int]:
        log.begin(ONE)
        return [log.go_on(4 + log.rank)]

    outcomes = ranks.run(wrong, wrong)
    assert "another token of call 5; rank 0 (host0): another token of call 4" in str(outcomes[0])


@pytest.mark.parametrize("ended", [0, 1])
def test_a_program_that_ends_before_a_call(ended: int) -> None:
    ranks = Ranks(2)
    other = 1 - ended
    ranks.end(ended)
    assert [ranks.reason(rank) for rank in range(2)] == [None, None], "the other may end too"
    begun = [lambda log: None, lambda log: None]
    begun[other] = lambda log: log.begin(ONE)  # type: ignore[assignment, return-value]
    ranks.run(*begun, seconds=0.3)  # it waits for the other
    for rank in range(2):
        reason = ranks.reason(rank)
        assert reason is not None and f"rank {ended} (host{ended}) ended after call 1" in reason and "made call 2: generate" in reason


def test_programs_that_end_in_the_same_call_after_other_steps() -> None:
    ranks = Ranks(2)
    ranks.run(lambda log: steps(log, 4), lambda log: steps(log, 3))
    for rank in range(2):
        ranks.end(rank)
    assert all("ended after" in str(ranks.reason(rank)) for rank in range(2))


def test_a_second_thread_is_refused() -> None:
    ranks = Ranks(2)
    ranks.run(lambda log: log.begin(ONE), lambda log: log.begin(ONE))
    for work in (lambda: ranks.logs[0].begin(ONE), lambda: ranks.logs[0].__enter__(), ranks.logs[0].check_thread):
        with pytest.raises(RankError, match="a second thread would use a model"):
            work()
    assert len(ranks.failed) == 3


def test_a_thread_that_outlives_its_program() -> None:
    ranks = Ranks(2)
    ranks.run(lambda log: steps(log, 4), lambda log: steps(log, 4))
    ranks.end(0)
    ranks.run(lambda log: log.__enter__())
    assert "ended while a thread of its own uses a model" in str(ranks.reason(0))


def test_alone_nobody_is_waited_for() -> None:
    log = CallLog(0, "host", lambda _: None, lambda _: None)
    assert isinstance(log.begin(ONE), int) and log.judge() is None
