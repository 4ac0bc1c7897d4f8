"""The contract of exchange."""

from __future__ import annotations

import pytest
from fake_ranks import FakeHub, FakeWorld, run_ranks

from numba_meta.comm.errors import RankError
from numba_meta.comm.world import CAPACITY, SoloWorld


@pytest.mark.parametrize("n_bytes", [0, 1, CAPACITY, CAPACITY + 1, 3 * CAPACITY + 17])
def test_payloads_come_in_rank_order(n_bytes):
    def work(world):
        return [world.exchange(bytes([world.rank + turn]) * n_bytes, f"turn {turn}") for turn in range(2)]

    for outcome in run_ranks(3, work):
        assert outcome.error is None
        assert outcome.value == [[bytes([rank + turn]) * n_bytes for rank in range(3)] for turn in range(2)]


def test_a_process_alone_hears_itself():
    assert SoloWorld().exchange(b"x" * 40_000) == [b"x" * 40_000]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda w: w.exchange(b"abc"[: 2 + w.rank // 2], "cuts"),
            "rank 2 is in exchange 0 (cuts) of 3 bytes while rank 0 is in exchange 0 (cuts) of 2",
        ),
        (
            lambda w: w.exchange(b"", "cuts" if w.rank else "join"),
            "rank 1 is in exchange 0 (cuts) of 0 bytes while rank 0 is in exchange 0 (join)",
        ),
    ],
)
def test_every_rank_names_the_call_that_differs(call, message):
    for outcome in run_ranks(3, call):
        assert isinstance(outcome.error, RankError)
        assert message in str(outcome.error)


@pytest.mark.parametrize(("rank", "size", "message"), [(0, 0, "at least 1 rank"), (3, 3, "out of range"), (-1, 2, "out of range")])
def test_ranks_out_of_range(rank, size, message):
    with pytest.raises(RankError, match=message):
        FakeWorld(FakeHub(size), rank)
