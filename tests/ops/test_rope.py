"""Rotary embedding: shape rules and split rules."""

from __future__ import annotations

import pytest
from ops.rule_helpers import A0, A1, A2, MIRRORED, PARTIAL, check_reduces, check_refused, check_shape_error, exactly, leaf, rule

from numba_meta.dtypes import I32, I64
from numba_meta.graph import Graph
from numba_meta.ops import rope
from numba_meta.split.state import SplitState
from numba_meta.tensor import Rows, Tensor


def make() -> tuple[Tensor, Tensor]:
    graph = Graph("g")
    positions = leaf(graph, "positions", 4, dtype=I32)
    positions.rows = Rows(leaf(graph, "n", 1, dtype=I64), 0)
    angles = rope.rope_angles(graph, positions, [1.0, 0.1], name="angles")
    return angles, rope.rope(graph, leaf(graph, "x", 4, 4, 4), angles, True, "y")


def test_shapes() -> None:
    angles, y = make()
    assert angles.shape == (4, 4, 1, 1)
    assert angles.rows is not None and angles.rows.axis == 1
    assert y.shape == (4, 4, 4, 1)


@pytest.mark.parametrize("state", [A1, MIRRORED], ids=str)
def test_heads_keep_their_state(state: SplitState) -> None:
    assert rule(make()[1], state, MIRRORED) == state


@pytest.mark.parametrize("states", [(A0, MIRRORED), (A2, MIRRORED), (A1, A0), (A1, A1), (MIRRORED, A1)], ids=str)
def test_what_the_angles_span_is_not_cut(states: tuple[SplitState, SplitState]) -> None:
    check_refused(make()[1], *states)


def test_positions_are_mirrored() -> None:
    angles, y = make()
    assert rule(angles, MIRRORED) == MIRRORED
    check_refused(angles, A0)
    check_reduces(y, [PARTIAL, MIRRORED], y.sources[0])


def test_shape_errors() -> None:
    graph = Graph("g")
    with check_shape_error(exactly("rope_angles a: p f32[4] do not fit; expected int32 positions [t]")):
        rope.rope_angles(graph, leaf(graph, "p", 4), [1.0], name="a")
    angles = rope.rope_angles(graph, leaf(graph, "positions", 4, dtype=I32), [1.0, 0.1], name="angles")
    with check_shape_error(exactly("rope y: x f32[4, 4, 3], angles f32[4, 4] do not fit")):
        rope.rope(graph, leaf(graph, "x", 4, 4, 3), angles, True, "y")
    with check_shape_error(exactly("narrow f32[2, 4, 4]")):
        rope.rope(graph, leaf(graph, "narrow", 2, 4, 4), angles, True)
