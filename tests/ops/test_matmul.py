"""Matrix products: every row of the split rule, and what has none."""

from __future__ import annotations

import itertools

import pytest
from ops.rule_helpers import A0, A1, A2, MIRRORED, PARTIAL, check_reduces, check_refused, check_shape_error, exactly, leaf, rule

from numba_meta.dtypes import F16, I64, Q4_0
from numba_meta.graph import Graph
from numba_meta.operation import NeedsGather
from numba_meta.ops import matmul
from numba_meta.split.state import SplitState, split, split_segments
from numba_meta.tensor import Role, Rows, Tensor


def product() -> Tensor:
    graph = Graph("g")
    return matmul.matmul(graph, leaf(graph, "w", 4, 4, 4, dtype=F16, role=Role.WEIGHT), leaf(graph, "x", 4, 4, 4), "y")


RULES = {
    (A1, MIRRORED): A0,  # column parallel
    (A0, A0): PARTIAL,  # row parallel
    (MIRRORED, MIRRORED): MIRRORED,
    (MIRRORED, A1): A1,
    (A2, A2): A2,  # per head
}


@pytest.mark.parametrize("states", RULES, ids=lambda states: " x ".join(map(str, states)))
def test_rules(states: tuple[SplitState, SplitState]) -> None:
    assert rule(product(), *states) == RULES[states]


def test_column_parallel_gathers_the_pieces_of_its_inputs() -> None:
    node = product()
    with pytest.raises(NeedsGather) as caught:
        rule(node, A1, A0)
    assert caught.value.sources == (node.sources[1],)


WITHOUT_RULE = [s for s in itertools.product([A0, A1, A2, MIRRORED], repeat=2) if s not in RULES and s != (A1, A0)]


@pytest.mark.parametrize("states", WITHOUT_RULE, ids=str)
def test_what_has_no_rule(states: tuple[SplitState, SplitState]) -> None:
    check_refused(product(), *states)


def test_cuts_must_be_the_same_but_may_be_written_otherwise() -> None:
    check_refused(product(), split(0, [3, 1]), split(0, [2, 2]))
    check_refused(product(), split(2, [3, 1]), split(2, [2, 2]))
    assert rule(product(), split(0, [2, 2]), split_segments(0, [[2, 0], [0, 2]])) == PARTIAL
    assert rule(product(), split_segments(1, [[1, 1], [1, 1]]), MIRRORED) == split_segments(0, [[1, 1], [1, 1]])


def test_summands_are_added_up_first() -> None:
    node = product()
    weight, x = node.sources
    for state in (MIRRORED, A0, A1):
        check_reduces(node, [state, PARTIAL], x)
    check_reduces(node, [PARTIAL, PARTIAL], weight, x)


def test_shapes_and_rows() -> None:
    graph = Graph("g")
    x = leaf(graph, "x", 32, 3)
    x.rows = Rows(leaf(graph, "n", 1, dtype=I64), 1)
    y = matmul.matmul(graph, leaf(graph, "w", 32, 7, dtype=Q4_0, role=Role.WEIGHT), x)
    assert y.shape == (7, 3, 1, 1)
    assert y.rows == x.rows


def test_shape_errors() -> None:
    graph = Graph("g")
    w, x = leaf(graph, "w", 32, 7, dtype=Q4_0, role=Role.WEIGHT), leaf(graph, "x", 31, 3)
    with check_shape_error(exactly("matmul y: w q4_0[32, 7], x f32[31, 3] do not fit; expected W [k, n] and float32 x [k, t]")):
        matmul.matmul(graph, w, x, "y")
    with check_shape_error(exactly("w q4_0[32, 7], heads f32[32, 3, 2]")):
        matmul.matmul(graph, w, leaf(graph, "heads", 32, 3, 2))
    with check_shape_error("half f16"):
        matmul.matmul(graph, w, leaf(graph, "half", 32, 3, dtype=F16))
    counted = leaf(graph, "counted", 32)
    counted.rows = Rows(leaf(graph, "n", 1, dtype=I64), 0)
    with check_shape_error("counted f32"):
        matmul.matmul(graph, w, counted)
