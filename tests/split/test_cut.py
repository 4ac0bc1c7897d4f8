"""Cut points: known vectors, exactness, and one clear line for proportions that cannot be."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from numba_meta.errors import SplitError, UsageError
from numba_meta.split.cut import cut_extents, parse_tensor_split


@pytest.mark.parametrize(
    ("n", "unit", "text", "extents"),
    [
        (9, 3, "50,50", (6, 3)),
        (4, 1, "1,1,1", (1, 2, 1)),
        (3, 1, "1,1,1,1", (1, 1, 0, 1)),
        (1536, 32, "55,45", (832, 704)),
        (1536, 256, "55,45", (768, 768)),
        (49152, 1, "1,1,1,1,1", (9830, 9831, 9830, 9831, 9830)),
        (397, 1, ",".join(["0.1"] * 10), (40, 39, 40, 40, 39, 40, 40, 40, 39, 40)),
        (15, 1, ",".join(["0.1"] * 10), (2, 1, 1, 2, 2, 1, 1, 2, 2, 1)),  # 15 x 0.3 is a tie; summed as floats it is above
        (100, 32, "1,1", (64, 36)),  # the last unit is short
        (100, 32, "0,1,0", (0, 100, 0)),
        (1, 1, "1,1,1", (0, 1, 0)),
        (0, 4, "1,1", (0, 0)),
    ],
)
def test_vectors(n: int, unit: int, text: str, extents: tuple[int, ...]) -> None:
    assert cut_extents(n, unit, parse_tensor_split(text, text.count(",") + 1)) == extents


def test_floats_would_cut_elsewhere() -> None:
    """The vector of ten times 0.1 is one that floats get wrong (a tie becomes 198.50000000000006): exactness is not for show."""
    sums = list(accumulate([0.1] * 10))
    inexact = [round(397 * (part / sums[-1])) for part in sums]
    assert inexact != list(accumulate(cut_extents(397, 1, parse_tensor_split([0.1] * 10, 10))))


proportions = st.lists(st.fractions(0, 1000, max_denominator=1000), min_size=1, max_size=12).filter(any)


@given(st.integers(0, 10**6), st.integers(1, 512), proportions)
def test_cuts_are_exact_monotone_and_near_their_wishes(n: int, unit: int, parts: list[Fraction]) -> None:
    extents = cut_extents(n, unit, parts)
    assert sum(extents) == n and min(extents) >= 0 and len(extents) == len(parts)
    n_units = -(-n // unit)
    for cut, wish in zip(accumulate(extents), accumulate(parts), strict=True):
        assert cut % unit == 0 or cut == n
        in_units = n_units if cut == n else cut // unit
        assert abs(in_units - n_units * wish / sum(parts)) <= Fraction(1, 2)


@given(st.integers(0, 10**6), st.integers(1, 512), proportions, st.fractions(Fraction(1, 1000), 1000))
def test_only_ratios_count(n: int, unit: int, parts: list[Fraction], factor: Fraction) -> None:
    assert cut_extents(n, unit, [part * factor for part in parts]) == cut_extents(n, unit, parts)


@given(st.integers(0, 10**6), proportions)
def test_a_device_with_no_part_gets_nothing(n: int, parts: list[Fraction]) -> None:
    for extent, part in zip(cut_extents(n, 1, parts), parts, strict=True):
        assert part or not extent


@pytest.mark.parametrize(
    "value",
    [
        "0.1,0.9", "1,9", " 1 , 9 ", "1e-1,.9", "+1,9.", [0.1, 0.9], ("0.1", "0.9"), [1, 9], np.array([1, 9]),
        [Fraction(1, 10), Decimal("0.9")],
    ],  # fmt: skip
)
def test_every_spelling_is_exact(value: object) -> None:
    assert parse_tensor_split(value, 2) == (Fraction(1, 10), Fraction(9, 10))  # type: ignore[arg-type]


def test_floats_are_read_as_they_print() -> None:
    assert parse_tensor_split([0.1] * 10, 10) == (Fraction(1, 10),) * 10
    assert parse_tensor_split(np.full(10, 0.1, np.float32), 10) == (Fraction(1, 10),) * 10  # type: ignore[arg-type]


def test_no_split_is_equal_parts() -> None:
    assert parse_tensor_split(None, 3) == (Fraction(1, 3),) * 3
    assert parse_tensor_split("1,0", 2) == (1, 0)


@pytest.mark.parametrize(
    ("value", "n_devices", "words"),
    [
        ("-1,2", 2, "'-1' is negative"),
        ("0,0", 2, "every entry is 0"),
        ("1,1,1", 2, "3 entries for 2 devices"),
        ("1", 2, "1 entries for 2 devices"),
        ("nan,1", 2, "'nan' is not a number"),
        ("inf,1", 2, "'inf' is not a number"),
        ([float("inf"), 1], 2, "'inf' is not a number"),
        ([float("nan"), 1], 2, "'nan' is not a number"),
        ("", 1, "'' is not a number"),
        ("1,,1", 3, "'' is not a number"),
        ("a,b", 2, "'a' is not a number"),
        ("1/2,1/2", 2, "'1/2' is not a number"),
        ("1;2", 2, "'1;2' is not a number"),
        ("1,２", 2, "'２' is not a number"),
        ("1_0,1", 2, "'1_0' is not a number"),
        ([True, False], 2, "'True' is not a number"),
        ([None, 1], 2, "'None' is not a number"),
        ("1e999999999,1", 2, "not a number"),
        ("9" * 5000 + ",1", 2, "not a number"),
        ([10**5000, 1], 2, "not a number"),
        ("1\n,x\n,2", 3, "not a number"),
        (None, 0, "0 devices"),
    ],
)
def test_wrong_splits_are_one_line(value: object, n_devices: int, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_tensor_split(value, n_devices)  # type: ignore[arg-type]
    message = str(caught.value)
    assert words in message and "\n" not in message and len(message) < 250


@pytest.mark.parametrize(("n", "unit", "parts"), [(-1, 1, (1,)), (4, 0, (1,)), (4, 1, ()), (4, 1, (0, 0)), (4, 1, (2, -1))])
def test_impossible_cuts_are_errors(n: int, unit: int, parts: tuple[int, ...]) -> None:
    with pytest.raises(SplitError):
        cut_extents(n, unit, parts)
