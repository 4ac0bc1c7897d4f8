"""Attention: shape rules, split rules, and which heads a device finds."""

from __future__ import annotations

import pytest
from ops.rule_helpers import A0, A1, MIRRORED, PARTIAL, check_reduces, check_refused, check_shape_error, exactly, leaf, rule

from numba_meta.dtypes import F16, I32, I64
from numba_meta.graph import Graph
from numba_meta.operation import operation
from numba_meta.ops import attention, layout
from numba_meta.split.state import SplitState, split
from numba_meta.tensor import Role, Rows, Tensor


def make(n_head: int = 6, n_kv: int = 3, head_dim_v: int = 8, n_sinks: int = 0) -> Tensor:
    graph = Graph("g")
    q = leaf(graph, "q", 4, 5, n_head)
    q.rows = Rows(leaf(graph, "n", 1, dtype=I64), 1)
    k = leaf(graph, "k", 4, 16, n_kv, dtype=F16, role=Role.CACHE)
    v = leaf(graph, "v", head_dim_v, 16, n_kv, dtype=F16, role=Role.CACHE)
    table = leaf(graph, "table", 16, 2, dtype=I32, role=Role.CACHE)
    sequences, positions = (leaf(graph, name, 5, dtype=I32) for name in ("sequences", "positions"))
    sinks = leaf(graph, "sinks", n_sinks, role=Role.WEIGHT) if n_sinks else None
    return attention.attention(graph, q, k, v, table, sequences, positions, scale=0.5, sinks=sinks, name="node")


WHOLE = (MIRRORED, MIRRORED, MIRRORED)
Q, KV = split(2, [4, 2]), split(2, [2, 1])


def test_the_result_has_heads_of_v_for_every_query_row() -> None:
    node = make()
    assert node.shape == (8, 6, 5, 1)
    assert node.rows is not None and node.rows.axis == 2
    assert node.params["group"] == 2


def test_heads_on_axis_2_become_axis_1() -> None:
    assert rule(make(), Q, KV, KV, *WHOLE) == split(1, [4, 2])
    assert rule(make(), split(2, [6, 0]), split(2, [3, 0]), split(2, [3, 0]), *WHOLE) == split(1, [6, 0])
    assert rule(make(), MIRRORED, MIRRORED, MIRRORED, *WHOLE) == MIRRORED


def test_mirrored_k_and_v_serve_any_cut_of_the_query_heads() -> None:
    q = split(2, [1, 2, 1])
    node = make(4, 1)
    assert rule(node, q, MIRRORED, MIRRORED, *WHOLE) == q.on_axis(1)
    op = operation("attention")
    params = [op.localize(node, [q, MIRRORED, MIRRORED, *WHOLE], q.on_axis(1), j) for j in range(3)]
    assert [(p["first_head"], p["first_kv"], p["group"]) for p in params] == [(0, 0, 4), (1, 0, 4), (3, 0, 4)]


def test_a_device_knows_its_first_heads() -> None:
    op, node = operation("attention"), make()
    states = [Q, KV, KV, *WHOLE]
    params = [op.localize(node, states, Q.on_axis(1), j) for j in range(2)]
    assert [(p["first_head"], p["first_kv"]) for p in params] == [(0, 0), (4, 2)]
    empty = [split(2, [6, 0]), split(2, [3, 0]), split(2, [3, 0]), *WHOLE]
    assert op.localize(node, empty, split(1, [6, 0]), 1)["first_head"] == 0


NO_RULE = {
    "kv cut elsewhere": (split(2, [4, 2]), split(2, [1, 2]), split(2, [1, 2])),
    "a cut inside a KV head": (split(2, [3, 3]), split(2, [2, 1]), split(2, [2, 1])),
    "k and v cut differently": (Q, KV, split(2, [1, 2])),
    "v mirrored, k cut": (Q, KV, MIRRORED),
    "k mirrored, v cut": (Q, MIRRORED, KV),
    "q mirrored, k and v cut": (MIRRORED, KV, KV),
    "q cut on its rows": (A1, MIRRORED, MIRRORED),
    "q cut in its heads": (A0, MIRRORED, MIRRORED),
    "cells cut": (Q, split(1, [8, 8]), split(1, [8, 8])),
    "two runs of heads per device": (split(2, [2, 1], repeat=2), MIRRORED, MIRRORED),
}


@pytest.mark.parametrize("states", NO_RULE.values(), ids=NO_RULE.keys())
def test_what_has_no_rule(states: tuple[SplitState, ...]) -> None:
    check_refused(make(), *states, *WHOLE)


@pytest.mark.parametrize("index", [3, 4, 5])
def test_tables_and_positions_are_mirrored(index: int) -> None:
    states = [Q, KV, KV, *WHOLE]
    states[index] = A0
    check_refused(make(), *states)


def test_sums_are_whole_first() -> None:
    node = make()
    check_reduces(node, [PARTIAL, MIRRORED, MIRRORED, *WHOLE], node.sources[0])
    check_reduces(node, [Q, PARTIAL, PARTIAL, *WHOLE], *node.sources[1:3])


def test_sinks_are_cut_with_the_query_heads() -> None:
    node, sinks = make(n_sinks=6), split(0, [4, 2])
    assert node.shape == make().shape and [source.name for source in node.sources[6:]] == ["sinks"]
    assert rule(node, Q, KV, KV, *WHOLE, sinks) == split(1, [4, 2])
    assert rule(node, split(2, [6, 0]), split(2, [3, 0]), split(2, [3, 0]), *WHOLE, split(0, [6, 0])) == split(1, [6, 0])
    assert rule(node, *[MIRRORED] * 7) == MIRRORED
    one_kv = make(6, 1, n_sinks=6)
    assert rule(one_kv, split(2, [1, 3, 2]), MIRRORED, MIRRORED, *WHOLE, split(0, [1, 3, 2])) == split(1, [1, 3, 2])
    params = operation("attention").localize(node, [Q, KV, KV, *WHOLE, sinks], split(1, [4, 2]), 1)
    assert (params["first_head"], params["first_kv"]) == (4, 2)


@pytest.mark.parametrize("state", [MIRRORED, split(0, [3, 3]), split(0, [2, 4]), split(0, [4, 1, 1]), split(1, [4, 2])], ids=str)
def test_sinks_that_are_not_those_of_a_devices_heads_have_no_rule(state: SplitState) -> None:
    check_refused(make(n_sinks=6), Q, KV, KV, *WHOLE, state)
    check_refused(make(6, 1, n_sinks=6), Q, MIRRORED, MIRRORED, *WHOLE, state)


def test_sinks_of_heads_that_every_device_has_are_whole() -> None:
    check_refused(make(n_sinks=6), MIRRORED, MIRRORED, MIRRORED, *WHOLE, split(0, [4, 2]))
    node = make(n_sinks=6)
    check_reduces(node, [Q, KV, KV, *WHOLE, PARTIAL], node.sources[6])


def test_sinks_of_another_shape_or_type_are_an_error() -> None:
    with check_shape_error(exactly("sinks f32[5] do not fit; expected q [head_dim, t, heads]") + r".*, float32 sinks \[heads\]"):
        make(n_sinks=5)
    node, graph = make(), Graph("h")
    halves, rows = leaf(graph, "halves", 6, dtype=F16), leaf(graph, "rows", 1, 6)
    for sinks in (halves, rows, layout.permute(graph, leaf(graph, "x", 2, 6), [1, 0, 2, 3])):
        with check_shape_error(r"float32 sinks \[heads\]"):
            attention.attention(graph, *node.sources, scale=1.0, sinks=sinks)


def test_shape_errors() -> None:
    with check_shape_error(exactly("attention node: q f32[4, 5, 7], k f16[4, 16, 3]") + ".* expected as many query heads for each KV head"):
        make(7, 3)
    with check_shape_error("q f32.4, 5, 2., k f16.4, 16, 3."):
        make(2, 3)
    node = make()
    graph, (q, k, v, table, sequences, positions) = Graph("h"), node.sources
    given = {"q": q, "k": k, "v": v, "table": table, "sequences": sequences, "positions": positions}
    wrong = {"q": leaf(graph, "flat", 4, 5, 6), "k": leaf(graph, "wide", 5, 16, 3), "v": leaf(graph, "short", 8, 15, 3)}
    wrong |= {"table": leaf(graph, "floats", 16, 2), "positions": leaf(graph, "times", 5)}
    for name, tensor in wrong.items():
        with check_shape_error(rf"{tensor.name} f32.*expected q \[head_dim, t, heads\]"):
            attention.attention(graph, *({**given, name: tensor}.values()), scale=1.0)
