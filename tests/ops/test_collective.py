"""All-reduce and gather: what they take and give."""

from __future__ import annotations

import pytest
from ops.rule_helpers import A0, A1, A2, MIRRORED, PARTIAL, check_refused, check_shape_error, leaf, rule

from numba_meta.dtypes import I32
from numba_meta.graph import Graph
from numba_meta.split.state import SplitState, split, split_segments


@pytest.mark.parametrize("state", [A0, A1, A2, MIRRORED], ids=str)
def test_an_all_reduce_takes_summands_only(state: SplitState) -> None:
    graph = Graph("g")
    node = graph.apply("all_reduce", leaf(graph, "x", 4, 4), name="node")
    assert rule(node, PARTIAL) == MIRRORED
    check_refused(node, state)


@pytest.mark.parametrize("state", [A1, A2, MIRRORED, PARTIAL, split(0, [1, 1], repeat=2), split_segments(0, [[1, 1], [1, 1]])], ids=str)
def test_a_gather_takes_one_run_of_axis_0_per_device(state: SplitState) -> None:
    graph = Graph("g")
    node = graph.apply("gather", leaf(graph, "x", 4, 4), name="node")
    assert rule(node, A0) == MIRRORED
    assert rule(node, split(0, [0, 4, 0])) == MIRRORED
    check_refused(node, state)


def test_shape_errors() -> None:
    graph = Graph("g")
    ids, deep = leaf(graph, "ids", 4, dtype=I32), leaf(graph, "deep", 4, 4, 2)
    flipped = graph.apply("permute", leaf(graph, "x", 4, 2), axes=(1, 0, 2, 3), name="flipped")
    for op in ("all_reduce", "gather"):
        with check_shape_error("ids i32"):
            graph.apply(op, ids)
        with check_shape_error("flipped f32"):
            graph.apply(op, flipped)
    with check_shape_error("deep f32"):
        graph.apply("gather", deep)
