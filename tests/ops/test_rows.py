"""Rows by index: shape rules and split rules."""

from __future__ import annotations

import pytest
from ops.rule_helpers import A0, A1, A2, MIRRORED, PARTIAL, check_reduces, check_refused, check_shape_error, exactly, leaf, rule

from numba_meta.dtypes import F16, I32, I64, Q4_0
from numba_meta.graph import Graph
from numba_meta.operation import operation
from numba_meta.ops import rows
from numba_meta.split.state import SplitState, split, split_segments
from numba_meta.tensor import Role, Rows, Tensor


def lookup() -> Tensor:
    graph = Graph("g")
    return rows.get_rows(graph, leaf(graph, "table", 4, 4), leaf(graph, "ids", 4, dtype=I32), "node")


def store() -> Tensor:
    graph = Graph("g")
    cache = leaf(graph, "cache", 4, 9, dtype=F16, role=Role.CACHE)
    return rows.set_rows(graph, cache, leaf(graph, "rows", 4, 3), leaf(graph, "ids", 3, dtype=I32), "node")


def test_get_rows_follows_its_table() -> None:
    assert rule(lookup(), A0, MIRRORED) == A0
    assert rule(lookup(), MIRRORED, MIRRORED) == MIRRORED
    assert rule(lookup(), PARTIAL, MIRRORED) == PARTIAL


def test_a_vocabulary_cut_gives_summands() -> None:
    node = lookup()
    assert rule(node, A1, MIRRORED) == PARTIAL
    op = operation("get_rows")
    assert [op.localize(node, [A1, MIRRORED], PARTIAL, j)["first"] for j in range(2)] == [0, 3]
    assert op.localize(node, [split(1, [0, 4]), MIRRORED], PARTIAL, 0)["first"] == 0  # holds no rows
    assert "first" not in op.localize(node, [A0, MIRRORED], A0, 1)


@pytest.mark.parametrize("states", [(A1, A0), (MIRRORED, A0), (A0, A1), (A2, MIRRORED)], ids=str)
def test_get_rows_without_a_rule(states: tuple[SplitState, SplitState]) -> None:
    check_refused(lookup(), *states)


@pytest.mark.parametrize("cut", [split(1, [1, 1], repeat=2), split_segments(1, [[1, 1], [1, 1]])], ids=str)
def test_a_vocabulary_in_several_runs_per_device_has_no_rule(cut: SplitState) -> None:
    check_refused(lookup(), cut, MIRRORED)


@pytest.mark.parametrize("state", [A0, MIRRORED], ids=str)
def test_set_rows_needs_destination_and_rows_that_agree(state: SplitState) -> None:
    assert rule(store(), state, state, MIRRORED) == state


@pytest.mark.parametrize("states", [(A1, A1, MIRRORED), (A0, MIRRORED, MIRRORED), (MIRRORED, A0, MIRRORED), (A0, A0, A0)], ids=str)
def test_set_rows_without_a_rule(states: tuple[SplitState, ...]) -> None:
    check_refused(store(), *states)


def test_rows_to_store_are_whole_sums() -> None:
    node = store()
    check_reduces(node, [MIRRORED, PARTIAL, MIRRORED], node.sources[1])


def test_a_store_is_a_view_of_its_destination() -> None:
    node = store()
    assert node.view_of is node.sources[0]
    assert (node.role, node.dtype, node.shape) == (Role.CACHE, F16, (4, 9, 1, 1))


def test_cells_are_stored_on_every_device() -> None:
    graph = Graph("g")
    table = leaf(graph, "table", 8, 2, dtype=I32, role=Role.CACHE)
    given = [leaf(graph, name, 3, dtype=I32) for name in ("sequences", "positions", "cells")]
    node = rows.store_cells(graph, table, *given, name="node")
    assert node.storage is table
    assert rule(node, MIRRORED, MIRRORED, MIRRORED, MIRRORED) == MIRRORED
    check_refused(node, A0, MIRRORED, MIRRORED, MIRRORED)
    with check_shape_error("store_cells node2: table i32.8, 2., x f32"):
        rows.store_cells(graph, table, leaf(graph, "x", 3), *given[1:], name="node2")


def test_looked_up_rows_are_float32_and_counted_by_the_ids() -> None:
    graph = Graph("g")
    ids = leaf(graph, "ids", 3, dtype=I32)
    ids.rows = Rows(leaf(graph, "n", 1, dtype=I64), 0)
    node = rows.get_rows(graph, leaf(graph, "table", 32, 9, dtype=Q4_0, role=Role.WEIGHT), ids)
    assert (node.dtype.name, node.shape) == ("f32", (32, 3, 1, 1))
    assert node.rows == Rows(ids.rows.count, 1)


def test_shape_errors() -> None:
    graph = Graph("g")
    ids, floats = leaf(graph, "ids", 3, dtype=I32), leaf(graph, "floats", 3)
    table, deep = leaf(graph, "table", 4, 9), leaf(graph, "deep", 4, 9, 2)
    with check_shape_error(exactly("get_rows node: table f32[4, 9], floats f32[3] do not fit; expected a table [n, rows]")):
        rows.get_rows(graph, table, floats, "node")
    with check_shape_error(exactly("deep f32[4, 9, 2]")):
        rows.get_rows(graph, deep, ids)
    cache = leaf(graph, "cache", 4, 9, dtype=F16, role=Role.CACHE)
    for name, wrong in (("narrow", (3, 3)), ("fewer", (4, 2)), ("more", (4, 3, 2))):
        with check_shape_error(f"set_rows s: cache f16.4, 9., {name} f32"):
            rows.set_rows(graph, cache, leaf(graph, name, *wrong), ids, "s")
    with check_shape_error("ids i32.3., ids i32"):
        rows.set_rows(graph, cache, ids, ids)
