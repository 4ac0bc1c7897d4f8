"""Graphs: names, order, and errors that leave them as they were."""

from __future__ import annotations

import pytest

from numba_meta.dtypes import F32, I32, Q4_0
from numba_meta.errors import ShapeError
from numba_meta.graph import Graph
from numba_meta.tensor import Role, Rows


def test_nodes_are_kept_in_order_and_named_by_operation() -> None:
    graph = Graph("g")
    x = graph.leaf("x", F32, [4], Role.INPUT)
    y = graph.apply("scale", x, factor=2.0)
    z = graph.apply("add", x, y, name="sum")
    assert graph.leaves == [x]
    assert graph.nodes == [y, z]
    assert [y.name, z.name] == ["scale_0", "sum"]
    assert z.sources == (x, y)
    assert dict(y.params) == {"factor": 2.0}
    assert graph.output(z) is z and graph.outputs == [z]


def test_leaves_say_what_they_are() -> None:
    graph = Graph()
    count = graph.leaf("n", I32, [1], Role.INPUT)
    x = graph.leaf("x", Q4_0, [64, 3], Role.CACHE, Rows(count, 1))
    assert (x.shape, x.role, x.op, x.sources) == ((64, 3, 1, 1), Role.CACHE, "", ())
    assert x.rows == Rows(count, 1)


def test_names_are_unique() -> None:
    graph = Graph("g")
    x = graph.leaf("x", F32, [4], Role.INPUT)
    with pytest.raises(ShapeError, match=r"^two tensors of g would be called x; names are unique in a graph$"):
        graph.leaf("x", F32, [4], Role.INPUT)
    with pytest.raises(ShapeError, match="two tensors of g would be called x"):
        graph.apply("scale", x, name="x", factor=2.0)
    assert (graph.leaves, graph.nodes) == ([x], [])


def test_what_fails_leaves_nothing_behind() -> None:
    graph = Graph("g")
    x = graph.leaf("x", F32, [4], Role.INPUT)
    with pytest.raises(ShapeError, match=r"^add y: x f32\[4\], x2 f32\[5\] do not fit"):
        graph.apply("add", x, Graph().leaf("x2", F32, [5], Role.INPUT), name="y")
    with pytest.raises(ShapeError, match="does not fill blocks"):
        graph.leaf("q", Q4_0, [33], Role.WEIGHT)
    assert graph.apply("scale", x, name="y", factor=1.0).name == "y"
    assert graph.leaf("q", Q4_0, [32], Role.WEIGHT).name == "q"
    assert len(graph.nodes) == 1


def test_an_unknown_operation_is_an_error_that_lists_the_known_ones() -> None:
    graph = Graph("g")
    with pytest.raises(ShapeError, match=r"^there is no operation convolve; known are add, [^\n]*matmul, [^\n]*$"):
        graph.apply("convolve", graph.leaf("x", F32, [4], Role.INPUT))
