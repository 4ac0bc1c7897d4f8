"""Views and copies: shapes, strides, and where the cut goes."""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ops.rule_helpers import A0, A1, MIRRORED, PARTIAL, check_refused, check_shape_error, exactly, leaf, rule

from numba_meta.dtypes import F32, I64, Q4_0
from numba_meta.errors import SplitError
from numba_meta.graph import Graph
from numba_meta.operation import operation
from numba_meta.ops import layout
from numba_meta.ops.layout import reshaped_state
from numba_meta.split.state import Segment, SplitState, split, split_segments
from numba_meta.tensor import Rows, Shape, Tensor, pad_shape


def reshaped(old: list[int], new: list[int], tokens: bool = False) -> Tensor:
    graph = Graph("g")
    x = leaf(graph, "x", *old)
    if tokens:
        x.rows = Rows(leaf(graph, "n", 1, dtype=I64), len(old) - 1)
    return layout.reshape(graph, x, new, "node")


# ---- reshape ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "state", "new", "expected"),
    [
        ([12, 5], split(0, [8, 4]), [4, 3, 5], split(1, [2, 1])),  # into heads
        ([4, 3, 5], split(1, [2, 1]), [12, 5], split(0, [8, 4])),  # and back
        ([12, 5], split(0, [6, 6]), [4, 3, 5], None),  # a cut inside a head
        ([12], split(0, [6, 6]), [4, 3], None),
        ([4, 6], split(1, [4, 2]), [4, 3, 2], None),
        ([4, 6], split(1, [2, 1], repeat=2), [4, 3, 2], split(1, [2, 1])),
        ([4, 3, 2], split(1, [2, 1]), [4, 6], split(1, [2, 1], repeat=2)),  # the cut repeats inside the new axis
        ([4, 3, 2], split(1, [2, 1]), [24], split(0, [8, 4], repeat=2)),
        ([24], split(0, [8, 4], repeat=2), [4, 3, 2], split(1, [2, 1])),
        ([4, 6], split(1, [3, 3]), [2, 2, 6], split(2, [3, 3])),
        ([4, 6], split(1, [0, 6]), [4, 2, 3], split(2, [0, 3])),
        ([6, 2], split_segments(0, [[3, 1], [1, 1]]), [12], split_segments(0, [[3, 1], [1, 1], [3, 1], [1, 1]])),
        ([6, 2], split_segments(0, [[2, 2], [2, 0]]), [2, 3, 2], split_segments(1, [[1, 1], [1, 0]])),
        ([4, 1], MIRRORED, [2, 2], MIRRORED),
        ([4, 1], PARTIAL, [2, 2], PARTIAL),
    ],
)  # fmt: skip
def test_reshape(old: list[int], state: SplitState, new: list[int], expected: SplitState | None) -> None:
    node = reshaped(old, new)
    if expected is None:
        check_refused(node, state)
    else:
        assert rule(node, state) == expected


@pytest.mark.parametrize("n_rows", [1, 3])
@pytest.mark.parametrize(("n_head", "heads"), [(4, [4, 0]), (4, [0, 4]), (4, [3, 1]), (1, [1, 0]), (1, [0, 1, 0])])
def test_heads_stay_below_the_tokens_also_if_one_device_has_them_all(n_head: int, heads: list[int], n_rows: int) -> None:
    columns = split(0, [8 * n for n in heads])
    node = reshaped([8 * n_head, n_rows], [8, n_head, n_rows], tokens=True)
    assert node.rows is not None and node.rows.axis == 2
    assert rule(node, columns) == split(1, heads)
    back = reshaped([8, n_head, n_rows], [8 * n_head, n_rows], tokens=True)
    assert back.rows is not None and back.rows.axis == 1
    assert rule(back, split(1, heads)) == columns


def labels(state: SplitState, shape: Shape) -> np.ndarray:
    """The device of each element, in the order in which they lie in memory."""
    of_axis = np.full(shape[state.axis], -1)
    for device in range(state.n_devices or 0):
        for start, stop in state.ranges(device):
            of_axis[start:stop] = device
    view = [1, 1, 1, 1]
    view[state.axis] = -1
    return np.broadcast_to(of_axis.reshape(view), shape).reshape(-1, order="F")


@st.composite
def extents(draw: st.DrawFn, n_devices: int, n_holding: int) -> tuple[int, ...]:
    """What each device has; at least `n_holding` of them have something."""
    holders = draw(st.permutations(range(n_devices)))[:n_holding]
    return tuple(draw(st.integers(int(device in holders), 3)) for device in range(n_devices))


@st.composite
def cut_segments(draw: st.DrawFn, n_devices: int, n_holding: int, most: int) -> tuple[Segment, ...]:
    """Up to `most` segments, one of which `n_holding` devices have something of."""
    holding = [n_holding] + [0] * (draw(st.integers(1, most)) - 1)
    return tuple(Segment(draw(extents(n_devices, n)), draw(st.integers(1, 3))) for n in draw(st.permutations(holding)))


@st.composite
def cut_shapes(draw: st.DrawFn, plain: bool = False) -> tuple[Shape, SplitState, Shape]:
    """A shape, a cut of it, and another shape of as many elements; plain, repeating and fused cuts, empty pieces.

    `plain`: one segment, of which several devices have something.
    """
    n_devices, axis = draw(st.integers(1 + plain, 3)), draw(st.integers(0, 3))
    segments = draw(cut_segments(n_devices, 1 + plain, 1 if plain else 2))
    scale = draw(st.sampled_from([1, 2, 4]))
    state = SplitState(axis, segments).scaled(scale)
    old = [draw(st.integers(1, 4)) for _ in range(4)]
    old[axis] = state.total
    rest, new = math.prod(old), []
    for _ in range(3):
        new.append(draw(st.sampled_from([n for n in range(1, 13) if rest % n == 0])))
        rest //= new[-1]
    new.insert(draw(st.integers(0, 3)), rest)
    return pad_shape(old), state, pad_shape(new)


@given(cut_shapes())
def test_a_reshaped_cut_gives_each_device_the_same_elements(case: tuple[Shape, SplitState, Shape]) -> None:
    old, state, new = case
    moved = reshaped_state(state, old, new)
    if moved is not None:
        moved.validate(new, F32)
        np.testing.assert_array_equal(labels(moved, new), labels(state, old))
    back = reshaped_state(state, old, old)
    assert back == state


@given(cut_shapes(plain=True))
def test_a_plain_cut_is_refused_only_where_no_axis_has_it(case: tuple[Shape, SplitState, Shape]) -> None:
    old, state, new = case
    if reshaped_state(state, old, new) is None:
        flat = labels(state, old)
        for axis in range(4):
            by_axis = np.moveaxis(flat.reshape(new, order="F"), axis, 0).reshape(new[axis], -1)
            assert (by_axis != by_axis[:, :1]).any(), f"axis {axis} of {new} could have been cut"


def test_a_tensor_without_elements_keeps_its_cut_or_has_no_rule() -> None:
    node = reshaped([4, 0], [4, 0])
    assert rule(node, split(1, [0, 0])) == split(1, [0, 0])
    check_refused(reshaped([4, 0], [0, 4]), split(1, [0, 0]))


def test_a_cut_between_elements_that_falls_inside_a_block_is_an_error() -> None:
    graph = Graph("g")
    x = leaf(graph, "x", 32, 4, dtype=Q4_0)
    node = layout.reshape(graph, x, [64, 2], "node")
    assert rule(layout.reshape(graph, x, [128]), split(1, [2, 2])) == split(0, [64, 64])
    check_refused(node, split(1, [1, 3]))
    halves = layout.reshape(graph, x, [32, 2, 2])
    assert rule(halves, split(0, [32, 0])) == split(0, [32, 0])
    with pytest.raises(SplitError, match="cuts inside a block"):
        rule(layout.reshape(graph, x, [128, 1]), split(0, [16, 16]))


def test_reshape_is_a_view_and_keeps_the_token_axis_where_it_is_named() -> None:
    node = reshaped([12, 5], [4, 3, 5], tokens=True)
    assert node.view_of is node.sources[0]
    assert node.strides == (4, 16, 48, 240)
    assert node.rows is not None and node.rows.axis == 2
    assert reshaped([12, 5], [60], tokens=True).rows is None
    assert reshaped([2, 6, 6], [12, 6, 1], tokens=True).rows is None
    assert reshaped([2, 2, 2], [2, 2, 2, 1], tokens=True).rows is None


def test_reshape_errors() -> None:
    graph = Graph("g")
    x = leaf(graph, "x", 4, 6)
    with check_shape_error(exactly("reshape node: x f32[4, 6] do not fit; expected a contiguous tensor of as many elements as [5, 5]")):
        layout.reshape(graph, x, [5, 5], "node")
    with check_shape_error("flipped f32"):
        layout.reshape(graph, layout.permute(graph, x, [1, 0, 2, 3], "flipped"), [24])
    with check_shape_error(exactly("one to four extents of at least 0, not (4, -6)")):
        layout.reshape(graph, x, [4, -6])
    with check_shape_error(exactly("blocks q4_0[32, 3] do not fit; expected whole blocks on axis 0 of [48, 2]")):
        layout.reshape(graph, leaf(graph, "blocks", 32, 3, dtype=Q4_0), [48, 2])


# ---- permute, contiguous ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", list(permutations(range(4))), ids=str)
def test_the_cut_follows_its_axis(axes: tuple[int, ...]) -> None:
    graph = Graph("g")
    node = layout.permute(graph, leaf(graph, "x", 2, 3, 4, 5), axes)
    assert [node.shape[axes[i]] for i in range(4)] == [2, 3, 4, 5]
    assert [node.strides[axes[i]] for i in range(4)] == [4, 8, 24, 96]
    for axis, extents in enumerate([[1, 1], [3, 0], [2, 2], [1, 4]]):
        assert rule(node, split(axis, extents)) == split(axes[axis], extents)
    assert rule(node, MIRRORED) == MIRRORED
    assert rule(node, PARTIAL) == PARTIAL


def test_permute_errors() -> None:
    graph = Graph("g")
    with check_shape_error(exactly("each of the axes 0, 1, 2, 3 once, not (0, 1, 1, 3)")):
        layout.permute(graph, leaf(graph, "x", 4, 4), [0, 1, 1, 3])
    with check_shape_error("blocks to stay on axis 0"):
        layout.permute(graph, leaf(graph, "q", 32, 32, dtype=Q4_0), [1, 0, 2, 3])
    assert layout.permute(graph, leaf(graph, "r", 32, 2, 3, dtype=Q4_0), [0, 2, 1, 3]).shape == (32, 3, 2, 1)


@pytest.mark.parametrize("state", [A0, A1, MIRRORED, PARTIAL], ids=str)
def test_a_contiguous_copy_keeps_every_state(state: SplitState) -> None:
    graph = Graph("g")
    x = layout.permute(graph, leaf(graph, "x", 4, 4, 3), [0, 2, 1, 3])
    node = layout.contiguous(graph, x)
    assert node.shape == x.shape and node.is_contiguous and node.view_of is None
    assert rule(node, state) == state


# ---- slice -----------------------------------------------------------------------------------------------------------------------------


def sliced(axis: int, start: int, stop: int, n: int = 12) -> Tensor:
    graph = Graph("g")
    return layout.slice_axis(graph, leaf(graph, "x", n, 4), axis, start, stop, "node")


FUSED = split_segments(0, [[4, 2], [2, 1], [1, 2]])  # Q, K and V in one


@pytest.mark.parametrize(("start", "stop", "extents"), [(0, 6, [4, 2]), (6, 9, [2, 1]), (9, 12, [1, 2])])
def test_a_slice_of_a_fused_tensor_is_one_of_its_parts(start: int, stop: int, extents: list[int]) -> None:
    node = sliced(0, start, stop)
    assert rule(node, FUSED) == split(0, extents)
    pieces = [operation("slice").localize(node, [FUSED], split(0, extents), j) for j in range(2)]
    begin = {0: [0, 0], 6: [4, 2], 9: [6, 3]}[start]
    assert [(p["start"], p["stop"]) for p in pieces] == [(b, b + e) for b, e in zip(begin, extents, strict=True)]


def test_a_sub_range_inside_a_segment_is_cut_where_the_segment_is() -> None:
    assert rule(sliced(0, 1, 5), FUSED) == split(0, [3, 1])
    assert rule(sliced(0, 4, 6), FUSED) == split(0, [0, 2])
    assert rule(sliced(0, 3, 9), split(0, [2, 1], repeat=4)) == split(0, [2, 1], repeat=2)
    assert rule(sliced(0, 4, 6), split(0, [2, 1], repeat=4)) == split(0, [1, 1])


def test_a_sub_range_of_several_segments_or_broken_periods_has_no_rule() -> None:
    check_refused(sliced(0, 5, 7), FUSED)
    check_refused(sliced(0, 0, 9), FUSED)
    check_refused(sliced(0, 2, 7), split(0, [2, 1], repeat=4))


@pytest.mark.parametrize("state", [A1, MIRRORED, PARTIAL], ids=str)
def test_a_slice_of_another_axis_keeps_the_state(state: SplitState) -> None:
    assert rule(sliced(0, 2, 7), state) == state


@given(st.data())
def test_a_slice_of_a_piece_is_a_piece_of_the_slice(data: st.DataObject) -> None:
    n_devices = data.draw(st.integers(1, 3))
    state = SplitState(0, data.draw(cut_segments(n_devices, 1, 3)))
    start = data.draw(st.integers(0, state.total - 1))
    stop = data.draw(st.integers(start + 1, state.total))
    node = sliced(0, start, stop, state.total)
    try:
        result = rule(node, state)
    except SplitError:
        return
    result.validate(node.shape, F32)
    for device in range(n_devices):
        held = [i for begin, end in state.ranges(device) for i in range(begin, end)]
        local = operation("slice").localize(node, [state], result, device)
        wanted = [start + i for begin, end in result.ranges(device) for i in range(begin, end)]
        assert held[local["start"] : local["stop"]] == wanted


def test_slices_are_views_with_the_same_strides() -> None:
    graph = Graph("g")
    x = leaf(graph, "x", 64, 4, 2, dtype=Q4_0)
    blocks, rows = layout.slice_axis(graph, x, 0, 32, 64), layout.slice_axis(graph, x, 1, 1, 3)
    assert (blocks.shape, blocks.view_offset) == ((32, 4, 2, 1), 18)
    assert (rows.shape, rows.view_offset) == ((64, 2, 2, 1), 36)
    assert blocks.strides == rows.strides == x.strides
    assert (blocks.n_bytes, rows.n_bytes) == (7 * 36 + 18, 4 * 36 + 2 * 36)


def test_slice_errors() -> None:
    graph = Graph("g")
    x = leaf(graph, "x", 64, 4, dtype=Q4_0)
    with check_shape_error(exactly("slice node: x q4_0[64, 4] do not fit; expected a range in whole blocks of axis 0, not [16, 48)")):
        layout.slice_axis(graph, x, 0, 16, 48, "node")
    for start, stop in ((-1, 2), (3, 2), (0, 5)):
        with check_shape_error(exactly(f"of axis 1, not [{start}, {stop})")):
            layout.slice_axis(graph, x, 1, start, stop)
