"""Concatenation: shape rules and split rules."""

from __future__ import annotations

import pytest
from ops.rule_helpers import A0, A1, A2, MIRRORED, PARTIAL, check_reduces, check_refused, check_shape_error, exactly, leaf, rule

from numba_meta.dtypes import F16, I64, Q4_0
from numba_meta.graph import Graph
from numba_meta.operation import operation
from numba_meta.ops.concat import concat
from numba_meta.split.state import SplitState, split
from numba_meta.tensor import Rows, Tensor


def make(axis: int) -> Tensor:
    graph = Graph("g")
    return concat(graph, [leaf(graph, "x", 4, 4, 4), leaf(graph, "y", 4, 4, 4)], axis, "node")


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
@pytest.mark.parametrize("state", [A0, A1, A2, MIRRORED], ids=str)
def test_equal_states_on_another_axis_stay(axis: int, state: SplitState) -> None:
    if state.axis == axis:
        check_refused(make(axis), state, state)
    else:
        assert rule(make(axis), state, state) == state


def test_a_mirrored_part_joins_a_split_one_on_another_axis() -> None:
    node = make(1)
    assert rule(node, A0, MIRRORED) == A0
    assert rule(node, MIRRORED, A0) == A0
    params = operation("concat").localize(node, [MIRRORED, A0], A0, 1)
    assert params["cut"] == (0, ((3, 4),), (0,))
    check_refused(node, A1, MIRRORED)


@pytest.mark.parametrize("states", [(A0, split(0, [2, 2])), (A0, A2), (A1, A0)], ids=str)
def test_different_cuts_have_no_rule(states: tuple[SplitState, SplitState]) -> None:
    check_refused(make(3), *states)


def test_sums_are_whole_first() -> None:
    node = make(1)
    check_reduces(node, [PARTIAL, PARTIAL], *node.sources)


def test_shapes_and_rows() -> None:
    graph = Graph("g")
    x, y = leaf(graph, "x", 4, 3), leaf(graph, "y", 2, 3)
    x.rows = y.rows = Rows(leaf(graph, "n", 1, dtype=I64), 1)
    node = concat(graph, [x, y, x], 0)
    assert node.shape == (10, 3, 1, 1)
    assert node.rows == x.rows
    assert concat(graph, [x, x], 1).rows is None


def test_shape_errors() -> None:
    graph = Graph("g")
    x = leaf(graph, "x", 4, 3)
    with check_shape_error(exactly("concat node: x f32[4, 3], y f32[4, 2] do not fit; expected equal extents on all axes but 0")):
        concat(graph, [x, leaf(graph, "y", 4, 2)], 0, "node")
    with check_shape_error("tensors of one type and an axis 0 to 3, not 0"):
        concat(graph, [x, leaf(graph, "half", 4, 3, dtype=F16)], 0)
    with check_shape_error("not 4"):
        concat(graph, [x, x], 4)
    with check_shape_error("tensors of one type"):
        concat(graph, [], 0)
    assert concat(graph, [leaf(graph, "q", 32, 1, dtype=Q4_0)] * 2, 0).shape == (64, 1, 1, 1)
