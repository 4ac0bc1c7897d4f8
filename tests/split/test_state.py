"""Split states: what they hold for each device, how they follow a reshape, and what does not fit a tensor."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from split.strategies import split_states

from numba_meta.dtypes import F32, Q4_0, Q4_K
from numba_meta.errors import SplitError
from numba_meta.split.state import MIRRORED, PARTIAL, Segment, SplitState, split, split_segments


def owners(state: SplitState) -> list[int]:
    """Device of every element of the axis, written out from the definition."""
    result: list[int] = []
    for segment in state.segments:
        pattern = [device for device, extent in enumerate(segment.extents) for _ in range(extent)]
        result += pattern * segment.repeat
    return result


@given(split_states())
def test_ranges_hold_every_element_once_in_order(state: SplitState) -> None:
    owner = owners(state)
    assert state.total == len(owner)
    for device in range(state.n_devices or 0):
        ranges = state.ranges(device)
        held = [i for start, stop in ranges for i in range(start, stop)]
        assert held == [i for i, device_of in enumerate(owner) if device_of == device]
        assert state.extent(device) == len(held)
        assert all(first[1] < second[0] for first, second in zip(ranges, ranges[1:], strict=False))
        assert all(start < stop for start, stop in ranges)


def test_segments_are_stored_one_after_the_other() -> None:
    qkv = split_segments(1, [(6, 3), (2, 1), (2, 1)])
    assert qkv.ranges(0) == ((0, 6), (9, 11), (12, 14))
    assert qkv.ranges(1) == ((6, 9), (11, 12), (14, 15))
    assert qkv.extents == (10, 5)
    assert str(qkv) == "axis 1: 6|3 + 2|1 + 2|1"


def test_repeats_start_the_pattern_again() -> None:
    state = split(0, (3, 1), repeat=2)
    assert state.ranges(0) == ((0, 3), (4, 7))
    assert state.ranges(1) == ((3, 4), (7, 8))
    assert str(state) == "axis 0: 2 x (3|1)"


def test_names_of_states() -> None:
    assert str(split(1, (384, 192))) == "axis 1: 384|192"
    assert (str(MIRRORED), str(PARTIAL)) == ("mirrored", "partial")
    assert MIRRORED.is_mirrored and not MIRRORED.is_split and not MIRRORED.is_partial
    assert PARTIAL.is_partial and not PARTIAL.is_split and not PARTIAL.is_mirrored
    assert MIRRORED.n_devices is None and PARTIAL.n_devices is None
    assert len({MIRRORED, PARTIAL, split(0, (1, 1)), split(0, [1, 1])}) == 3


@given(split_states(), st.integers(1, 5))
def test_scaled_and_repeated_follow_a_merge_of_axes(state: SplitState, factor: int) -> None:
    owner = np.array(owners(state))
    assert owners(state.scaled(factor)) == np.repeat(owner, factor).tolist()
    assert owners(state.repeated(factor)) == np.tile(owner, factor).tolist()
    assert state.scaled(factor).divided(factor) == state
    assert state.repeated(factor).unrepeated(factor).same_cuts(state)


def test_divided_and_unrepeated_are_exact_or_errors() -> None:
    with pytest.raises(SplitError, match=r"axis 0: 6\|3\) divided by 2"):
        split(0, (6, 3)).divided(2)
    with pytest.raises(SplitError, match="over 3 stretches"):
        split(0, (2, 1), repeat=4).unrepeated(3)
    with pytest.raises(SplitError, match="over 2 stretches"):
        split_segments(0, [(2, 1), (1, 2)]).unrepeated(2)
    for state in (MIRRORED, PARTIAL):
        assert state.scaled(3) == state.divided(3) == state.repeated(3) == state.unrepeated(3) == state


def test_same_cuts_compares_places_not_spelling() -> None:
    assert split(0, (2, 1), repeat=2).same_cuts(split_segments(2, [(2, 1), (2, 1)]))
    assert not split(0, (2, 1)).same_cuts(split(0, (1, 2)))
    assert not split(0, (2, 1)).same_cuts(split(0, (2, 1, 0)))
    assert not split(0, (2, 0)).same_cuts(MIRRORED)
    assert MIRRORED.same_cuts(MIRRORED) and not MIRRORED.same_cuts(PARTIAL)


@given(split_states(), split_states())
def test_same_cuts_means_same_owners(a: SplitState, b: SplitState) -> None:
    assert a.same_cuts(b) == (a.n_devices == b.n_devices and owners(a) == owners(b))


def test_validate_accepts_what_fits() -> None:
    split(0, (512, 0, 256)).validate((768, 4), Q4_K)
    split(1, (3, 1)).validate((768, 4), Q4_K)
    split(0, (3, 1), repeat=2).validate((8,), F32)
    split(2, (1, 0)).validate((8, 4), F32)
    MIRRORED.validate((7,), F32)
    PARTIAL.validate((7,), F32)


@pytest.mark.parametrize(
    ("state", "shape", "words"),
    [
        (split(0, (256, 128)), (768, 4), r"ffn_down \[768, 4\] q4_0: the split \(axis 0: 256\|128\) covers 384 elements of axis 0"),
        (split(0, (700, 68)), (768, 4), "cuts inside a block; expected multiples of 32"),
        (split(2, (2, 1)), (768, 4), "covers 3 elements of axis 2, expected 1"),
    ],
)
def test_validate_names_what_does_not_fit(state: SplitState, shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(SplitError, match=words) as caught:
        state.validate(shape, Q4_0, "ffn_down")
    assert "\n" not in str(caught.value)


def test_piece_shape() -> None:
    assert split(1, (3, 0, 1)).piece_shape((64, 4, 2), 0) == (64, 3, 2)
    assert split(1, (3, 0, 1)).piece_shape((64, 4, 2), 1) == (64, 0, 2)
    assert split(2, (1, 0)).piece_shape((64, 4), 1) == (64, 4, 0)
    assert MIRRORED.piece_shape((64, 4), 1) == (64, 4)
    assert PARTIAL.piece_shape((64, 4), 1) == (64, 4)


@pytest.mark.parametrize(
    "make",
    [
        lambda: split(4, (1, 1)),
        lambda: split(0, ()),
        lambda: split(0, (2, -1)),
        lambda: split(0, (2, 1), repeat=0),
        lambda: split_segments(0, []),
        lambda: split_segments(0, [(1, 1), (1, 1, 1)]),
        lambda: SplitState(MIRRORED.axis, (Segment((1,)),)),
        lambda: split(0, (1, 1)).ranges(2),
        lambda: MIRRORED.extent(0),
        lambda: PARTIAL.total,
        lambda: split(0, (1, 1)).scaled(0),
    ],
)
def test_impossible_states_are_errors(make: object) -> None:
    with pytest.raises(SplitError):
        make()  # type: ignore[operator]
