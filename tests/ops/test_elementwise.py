"""Sums, products, scales, gates and functions of one element: shape rules and split rules."""

from __future__ import annotations

import pytest
from ops.rule_helpers import A0, A1, A2, MIRRORED, PARTIAL, check_reduces, check_refused, check_shape_error, exactly, leaf, rule

from numba_meta.dtypes import F16, I64
from numba_meta.graph import Graph
from numba_meta.operation import NeedsGather
from numba_meta.ops import elementwise, unary
from numba_meta.split.state import SplitState, split, split_segments
from numba_meta.tensor import Role, Rows, Tensor

BINARY = ("add", "sub", "mul", "div")


def pair(op: str, second: tuple[int, ...] = (4, 4, 4)) -> Tensor:
    graph = Graph("g")
    return graph.apply(op, leaf(graph, "x", 4, 4, 4), leaf(graph, "y", *second), name="node")


@pytest.mark.parametrize("op", BINARY)
def test_results_have_the_shape_and_rows_of_the_first(op: str) -> None:
    graph = Graph("g")
    x = leaf(graph, "x", 4, 6)
    x.rows = Rows(leaf(graph, "n", 1, dtype=I64), 1)
    for name, shape in (("same", (4, 6)), ("row", (4,)), ("column", (1, 6)), ("one", (1,))):
        node = graph.apply(op, x, leaf(graph, name, *shape))
        assert node.shape == (4, 6, 1, 1)
        assert node.rows == x.rows
        assert node.is_contiguous and node.view_of is None


@pytest.mark.parametrize("op", BINARY)
def test_what_does_not_broadcast_to_the_first_is_an_error(op: str) -> None:
    graph = Graph("g")
    x = leaf(graph, "x", 4, 1)
    with check_shape_error(exactly(f"{op} node: x f32[4], y f32[4, 6] do not fit; expected contiguous float32 tensors")):
        graph.apply(op, x, leaf(graph, "y", 4, 6), name="node")
    with check_shape_error("half f16"):
        graph.apply(op, x, leaf(graph, "half", 4, dtype=F16))
    with check_shape_error("x f32"):
        graph.apply(op, x, graph.apply("permute", leaf(graph, "z", 1, 4), axes=(1, 0, 2, 3)))


@pytest.mark.parametrize("op", BINARY)
@pytest.mark.parametrize("state", [A0, A1, A2, MIRRORED], ids=str)
def test_equal_states_stay(op: str, state: SplitState) -> None:
    assert rule(pair(op), state, state) == state


@pytest.mark.parametrize("op", BINARY)
def test_equal_cuts_written_otherwise_are_equal(op: str) -> None:
    assert rule(pair(op), split(0, [2, 2]), split_segments(0, [[2, 0], [0, 2]])) == split(0, [2, 2])


@pytest.mark.parametrize("op", BINARY)
def test_a_mirrored_operand_broadcasts_unless_it_spans_the_split_axis(op: str) -> None:
    assert rule(pair(op, (4, 1, 1)), A1, MIRRORED) == A1
    assert rule(pair(op, (4, 1, 1)), A2, MIRRORED) == A2
    assert rule(pair(op, (1, 4, 4)), A0, MIRRORED) == A0
    if op in ("add", "sub"):  # a residual sum of a column-parallel product: the policy may gather it
        node = pair(op, (4, 1, 1))
        with pytest.raises(NeedsGather) as caught:
            rule(node, A0, MIRRORED)
        assert caught.value.sources == (node.sources[0],)
    else:
        check_refused(pair(op, (4, 1, 1)), A0, MIRRORED)
    check_refused(pair(op), A1, MIRRORED)
    check_refused(pair(op), MIRRORED, A1)


@pytest.mark.parametrize("op", BINARY)
def test_an_axis_of_one_that_only_the_second_cuts_has_no_rule(op: str) -> None:
    graph = Graph("g")
    node = graph.apply(op, leaf(graph, "x", 4, 1), leaf(graph, "y", 4, 1))
    check_refused(node, MIRRORED, split(1, [1, 0]))


@pytest.mark.parametrize("op", BINARY)
@pytest.mark.parametrize("states", [(A0, A1), (A0, split(0, [2, 2])), (A2, split(2, [3, 1, 0]))], ids=str)
def test_different_cuts_have_no_rule(op: str, states: tuple[SplitState, SplitState]) -> None:
    check_refused(pair(op), *states)


@pytest.mark.parametrize("op", ["add", "sub"])
def test_sums_keep_summands_only_with_summands(op: str) -> None:
    node = pair(op)
    x, y = node.sources
    assert rule(node, PARTIAL, PARTIAL) == PARTIAL
    assert rule(pair(op, (4,)), PARTIAL, PARTIAL) == PARTIAL
    check_reduces(node, [PARTIAL, MIRRORED], x)
    check_reduces(node, [MIRRORED, PARTIAL], y)
    check_reduces(node, [PARTIAL, A1], x)


@pytest.mark.parametrize("op", ["mul", "div"])
def test_products_keep_summands_with_a_mirrored_factor(op: str) -> None:
    node = pair(op)
    x, y = node.sources
    assert rule(node, PARTIAL, MIRRORED) == PARTIAL
    check_reduces(node, [PARTIAL, PARTIAL], x, y)
    check_reduces(node, [PARTIAL, A1], x)
    check_reduces(node, [A1, PARTIAL], y)


def test_only_a_product_may_have_its_summands_second() -> None:
    assert rule(pair("mul"), MIRRORED, PARTIAL) == PARTIAL
    quotient = pair("div")
    check_reduces(quotient, [MIRRORED, PARTIAL], quotient.sources[1])


@pytest.mark.parametrize("state", [A0, A1, MIRRORED, PARTIAL], ids=str)
def test_a_scale_keeps_every_state(state: SplitState) -> None:
    graph = Graph("g")
    assert rule(elementwise.scale(graph, leaf(graph, "x", 4, 4), 2.0), state) == state


def test_a_scale_needs_float32() -> None:
    graph = Graph("g")
    with check_shape_error(exactly("scale node: x f16[4] do not fit; expected a contiguous float32 tensor")):
        elementwise.scale(graph, leaf(graph, "x", 4, dtype=F16), 2.0, "node")


@pytest.mark.parametrize("kind", elementwise.GLU_KINDS)
def test_a_gate_takes_equal_states_and_whole_sums(kind: str) -> None:
    graph = Graph("g")
    gate, up = leaf(graph, "gate", 4, 4), leaf(graph, "up", 4, 4)
    node = elementwise.glu(graph, gate, up, kind, "node")
    assert node.shape == (4, 4, 1, 1)
    for state in (A0, A1, MIRRORED):
        assert rule(node, state, state) == state
    check_refused(node, A0, A1)
    check_refused(node, A0, MIRRORED)
    check_reduces(node, [PARTIAL, PARTIAL], gate, up)
    check_reduces(node, [PARTIAL, MIRRORED], gate)
    check_reduces(node, [A0, PARTIAL], up)


def test_a_gate_of_another_kind_or_shape_is_an_error() -> None:
    graph = Graph("g")
    gate = leaf(graph, "gate", 4, 4)
    with check_shape_error("a kind of"):
        elementwise.glu(graph, gate, gate, "swish")
    with check_shape_error(exactly("gate f32[4, 4], up f32[4]")):
        elementwise.glu(graph, gate, leaf(graph, "up", 4), "swiglu")


@pytest.mark.parametrize("state", [A0, A1, A2, MIRRORED], ids=str)
def test_functions_of_one_element_keep_the_state_of_a_whole_source(state: SplitState) -> None:
    graph = Graph("g")
    x = leaf(graph, "x", 4, 4, 4)
    nodes = [unary.unary(graph, x, "silu"), unary.clamp(graph, x, -1.0, 1.0)]
    nodes += [unary.softcap(graph, x, 30.0), unary.scale_add(graph, x, 2.0, 1.0)]
    for node in nodes:
        assert node.shape == x.shape
        assert rule(node, state) == state
        check_reduces(node, [PARTIAL], x)


def test_an_unknown_function_is_an_error() -> None:
    graph = Graph("g")
    with check_shape_error("not cosine"):
        unary.unary(graph, leaf(graph, "x", 4), "cosine")
    with check_shape_error("w f16"):
        unary.unary(graph, leaf(graph, "w", 4, dtype=F16, role=Role.WEIGHT), "silu")
