"""Operations over axis 0: root mean square, softmax, the index of the largest."""

from __future__ import annotations

import pytest
from ops.rule_helpers import A0, A1, A2, MIRRORED, PARTIAL, check_gathers, check_reduces, check_refused, check_shape_error, leaf, rule

from numba_meta.dtypes import F16, I32, I64
from numba_meta.graph import Graph
from numba_meta.ops import norm
from numba_meta.split.state import SplitState, split
from numba_meta.tensor import Rows, Tensor


def make(op: str) -> Tensor:
    graph = Graph("g")
    x = leaf(graph, "x", 4, 4)
    if op == "rms_norm":
        return norm.rms_norm(graph, x, leaf(graph, "w", 4), 1e-5, "node")
    if op == "center":
        return norm.center(graph, x, "node")
    return norm.softmax(graph, x, 1.0, "node") if op == "softmax" else norm.argmax(graph, x, "node")


def states(op: str, x: SplitState, weight: SplitState = MIRRORED) -> list[SplitState]:
    return [x, weight] if op == "rms_norm" else [x]


OVER_ROWS = ("rms_norm", "center", "softmax", "argmax")


@pytest.mark.parametrize("op", OVER_ROWS)
def test_rows_must_be_whole(op: str) -> None:
    node = make(op)
    assert rule(node, *states(op, MIRRORED)) == MIRRORED
    check_reduces(node, states(op, PARTIAL), node.sources[0])
    check_gathers(node, states(op, A0), node.sources[0])


def test_a_cut_between_rows_stays() -> None:
    assert rule(make("rms_norm"), A1, MIRRORED) == A1
    assert rule(make("rms_norm"), A2, MIRRORED) == A2
    assert rule(make("softmax"), A1) == A1
    assert rule(make("argmax"), A1) == A0  # [n, t] becomes [t]


def test_a_norm_weight_is_on_every_device() -> None:
    for x in (MIRRORED, A1):
        check_refused(make("rms_norm"), x, A0)
    node = make("rms_norm")
    check_reduces(node, [MIRRORED, PARTIAL], node.sources[1])
    check_reduces(node, [PARTIAL, PARTIAL], *node.sources)


def test_shapes() -> None:
    graph = Graph("g")
    x = leaf(graph, "x", 4, 5)
    x.rows = Rows(leaf(graph, "n", 1, dtype=I64), 1)
    for node in (norm.rms_norm(graph, x, leaf(graph, "w", 4), 1e-5), norm.softmax(graph, x)):
        assert node.shape == x.shape and node.rows == x.rows
    index = norm.argmax(graph, x)
    assert (index.shape, index.dtype, index.rows) == ((5, 1, 1, 1), I32, Rows(x.rows.count, 0))


def test_shape_errors() -> None:
    graph = Graph("g")
    x, half = leaf(graph, "x", 4, 5), leaf(graph, "half", 4, 5, dtype=F16)
    with check_shape_error("rms_norm node: x f32.4, 5., w f32.5. do not fit; expected contiguous float32 x"):
        norm.rms_norm(graph, x, leaf(graph, "w", 5), 1e-5, "node")
    with check_shape_error("half f16"):
        norm.softmax(graph, half)
    with check_shape_error("half f16"):
        norm.argmax(graph, half)
    with check_shape_error("deep f32"):
        norm.argmax(graph, leaf(graph, "deep", 4, 5, 2))


def test_an_empty_piece_between_rows_stays() -> None:
    assert rule(make("rms_norm"), split(1, [4, 0]), MIRRORED) == split(1, [4, 0])
