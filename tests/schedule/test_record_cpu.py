"""Where a recording waits for all threads of a device: exactly where calls touch the same bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from numba_meta.schedule.record_cpu import _Hazards

Ranges = list[tuple[int, int]]
ranges = st.lists(st.builds(lambda start, n: (start, start + n), st.integers(0, 40), st.integers(1, 6)), max_size=3)
calls = st.lists(st.one_of(st.none(), st.tuples(ranges, ranges)), max_size=20)  # None: all devices meet


def touches(some: Ranges, others: Ranges) -> bool:
    return bool({i for start, stop in some for i in range(start, stop)} & {i for start, stop in others for i in range(start, stop)})


def conflict(first: tuple[Ranges, Ranges], second: tuple[Ranges, Ranges]) -> bool:
    """Whether two calls must not run at the same time or change places: one writes what the other touches."""
    return touches(first[1], second[0]) or touches(first[1], second[1]) or touches(first[0], second[1])


@given(calls)
def test_a_barrier_lies_between_any_two_calls_that_conflict(work: list[tuple[Ranges, Ranges] | None]) -> None:
    hazards = _Hazards()
    barriers = []
    for call in work:
        if call is None:
            hazards.clear()
            barriers.append(True)
        else:
            barriers.append(hazards.needs_barrier(*call))
    for j, second in enumerate(work):
        for i, first in enumerate(work[:j]):
            if first is not None and second is not None and conflict(first, second):
                assert any(barriers[i + 1 : j + 1]), f"calls {i} and {j} of {work}"


@given(calls)
def test_a_barrier_is_placed_only_where_calls_since_the_last_one_conflict(work: list[tuple[Ranges, Ranges] | None]) -> None:
    hazards = _Hazards()
    since: list[tuple[Ranges, Ranges]] = []
    for call in work:
        if call is None:
            hazards.clear()
            since = []
            continue
        needed = any(conflict(earlier, call) for earlier in since)
        assert hazards.needs_barrier(*call) == needed
        since = [call] if needed else [*since, call]


def test_readers_of_the_same_bytes_run_together() -> None:
    hazards = _Hazards()
    assert not hazards.needs_barrier([], [(0, 8)])
    assert hazards.needs_barrier([(0, 8)], [(8, 16)])
    assert not hazards.needs_barrier([(0, 8)], [(16, 24)])
    assert not hazards.needs_barrier([(4, 8)], [(24, 32)])
    assert hazards.needs_barrier([(8, 9)], [(32, 40)])
    assert not hazards.needs_barrier([(0, 8)], [])
    assert hazards.needs_barrier([], [(0, 8)])
