"""The covering sample: every pair is there, and the sample is small."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st
from transport.pairwise import all_pairs, pairwise

SIZES = st.lists(st.integers(1, 5), min_size=2, max_size=6)
FACTORS = SIZES.map(lambda sizes: {f"factor {i}": list(range(n)) for i, n in enumerate(sizes)})


@given(FACTORS)
def test_every_pair_of_values_is_in_a_row(factors: dict[str, list[int]]) -> None:
    rows = pairwise(factors)
    got = {((one, row[one]), (other, row[other])) for row in rows for one, other in combinations(factors, 2)}
    assert got == all_pairs(factors)
    assert all(row.keys() == factors.keys() for row in rows)


@given(FACTORS)
def test_the_sample_is_small_and_the_same_each_time(factors: dict[str, list[int]]) -> None:
    rows = pairwise(factors)
    first, second, *_ = sorted((len(values) for values in factors.values()), reverse=True)
    assert first * second <= len(rows) <= 2 * first * second + len(factors)
    assert rows == pairwise(factors)
