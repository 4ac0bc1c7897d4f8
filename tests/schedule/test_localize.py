"""A device's graph, and the proof by numbers that the split rules are right: pieces and collectives give what the whole graph gives."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_interpreter import Array, Values, evaluate, evaluate_split, piece_of
from schedule.model_graphs import ModelGraph

from numba_meta.dtypes import F32, I32
from numba_meta.errors import ShapeError, SplitError
from numba_meta.graph import Graph
from numba_meta.ops import elementwise, layout, matmul, norm
from numba_meta.schedule.infer import SplitGraph, infer_splits
from numba_meta.schedule.localize import localize
from numba_meta.split.state import MIRRORED, PARTIAL, Segment, SplitState, split, split_segments
from numba_meta.tensor import Role, Tensor


def assert_same(split_graph: SplitGraph, held: Mapping[Tensor, list[Array]], whole: Mapping[str, Array]) -> None:
    """Every tensor that the devices hold, by its state, is the tensor of the whole graph."""
    for tensor, pieces in held.items():
        name = tensor.name.removesuffix(".all_reduce").removesuffix(".gather")
        expected, state = whole[name], split_graph.states[tensor]
        atol = 1e-9 * max(1.0, np.abs(expected).max(initial=0.0), max(np.abs(piece).max(initial=0.0) for piece in pieces))
        if state.is_partial:
            np.testing.assert_allclose(np.sum(pieces, axis=0), expected, rtol=0, atol=atol, err_msg=name)
            continue
        for device, piece in enumerate(pieces):
            np.testing.assert_allclose(piece, piece_of(expected, state, device), rtol=0, atol=atol, err_msg=f"{name} on {device}")


# ---- models ----------------------------------------------------------------------------------------------------------------------------


def step_values(model: ModelGraph, rng: np.random.Generator) -> Values:
    """Random weights and cache, and a batch of two sequences that have some cells already."""
    batch, values = model.batch, {}
    n = batch.n_rows
    sequences = np.sort(rng.integers(0, batch.n_sequences, n))
    positions = np.array([3 + int(np.sum(sequences[:i] == sequences[i])) for i in range(n)])
    cells = rng.permutation(batch.n_cells)
    tables = cells[: batch.n_sequences * 3].reshape(3, batch.n_sequences), cells[batch.n_sequences * 3 :]
    for leaf in model.graph.leaves:
        if leaf.name.endswith("cell_table"):
            table = np.full(leaf.shape, -1)
            table[:3, :, 0, 0] = tables[0]
            values[leaf] = table
        elif leaf.dtype == F32 or leaf.role is not Role.INPUT:
            values[leaf] = rng.standard_normal(leaf.shape)
        else:
            given = {"tokens": rng.integers(0, model.shape.n_vocab, n), "positions": positions, "sequences": sequences}
            given |= {"output_rows": rng.permutation(n)[: batch.n_outputs], "cells": tables[1][:n], "window_cells": tables[1][:n]}
            values[leaf] = given.get(leaf.name, np.array([n])).reshape(leaf.shape)
    return values


def check_model(model: ModelGraph, n_devices: int, seed: int) -> None:
    values = step_values(model, np.random.default_rng(seed))
    whole = {tensor.name: value for tensor, value in evaluate(model.graph, values).items()}
    result = infer_splits(model.graph, model.leaf_state, n_devices)
    pieces = {leaf: [piece_of(values[leaf], result.states[leaf], j) for j in range(n_devices)] for leaf in result.graph.leaves}
    held = evaluate_split(result, pieces, n_devices)
    assert_same(result, held, whole)
    assert np.abs(whole["logits"]).max() > 1e-3


@pytest.mark.parametrize("proportions", [[1, 1], [7, 3], [1, 0], [0, 1], [1, 1, 1], [1, 0, 2, 1], [1] * 6], ids=str)
@pytest.mark.parametrize(
    ("architecture", "n_head", "n_head_kv"), [("llama", 6, 3), ("llama", 4, 4), ("gemma3", 4, 1), ("llama", 1, 1), ("gemma3", 2, 2)]
)
def test_a_model_on_many_devices_computes_what_it_computes_on_one(
    architecture: str, n_head: int, n_head_kv: int, proportions: list[int]
) -> None:
    check_model(ModelGraph(architecture, proportions, n_head=n_head, n_head_kv=n_head_kv, n_layer=2), len(proportions), 1)


@pytest.mark.parametrize(("n_rows", "n_outputs"), [(1, 1), (4, 1), (5, 5)])
@pytest.mark.parametrize("proportions", [[1, 1], [1, 0], [1, 2, 1]], ids=str)
def test_any_number_of_rows(proportions: list[int], n_rows: int, n_outputs: int) -> None:
    for architecture, heads in (("llama", (2, 2)), ("gemma3", (2, 1)), ("llama", (1, 1))):
        model = ModelGraph(architecture, proportions, n_head=heads[0], n_head_kv=heads[1], n_layer=1, n_rows=n_rows, n_outputs=n_outputs)
        check_model(model, len(proportions), 2)


@given(
    st.lists(st.fractions(0, 3, max_denominator=7), min_size=2, max_size=5).filter(any),
    st.sampled_from(["llama", "gemma3"]),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 40),
    st.integers(0, 99),
)
@settings(max_examples=15)
def test_any_cuts_of_a_model(proportions: list[Fraction], architecture: str, n_head_kv: int, group: int, n_vocab: int, seed: int) -> None:
    model = ModelGraph(architecture, proportions, n_head=n_head_kv * group, n_head_kv=n_head_kv, n_layer=1, n_vocab=n_vocab)
    check_model(model, len(proportions), seed)


# ---- random graphs ---------------------------------------------------------------------------------------------------------------------

N_DEVICES = st.integers(1, 4)
EXTENTS = (4, 6)
KINDS = ("binary", "matmul", "reshape", "permute", "slice", "rows", "unary", "glu", "norm", "softmax", "concat", "scale")


class RandomGraph:
    """Grows node by node: what has no shape or split rule is taken back, what is left is compared."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.graph = Graph("random")
        self.n_devices = draw(N_DEVICES)
        self.states: dict[Tensor, SplitState] = {}
        # One or two ways to cut each extent, so that tensors that meet are often cut alike.
        self.cuts = {n: [self._cut(n) for _ in range(2)] for n in (2, *EXTENTS)}
        self.pool = [self.leaf(f"leaf{i}") for i in range(draw(st.integers(2, 4)))]
        self.n_refused = 0

    def _cut(self, n: int) -> tuple[Segment, ...]:
        if n == 6 and self.draw(st.booleans()):  # a fused tensor: 4 and 2, each cut
            return (*self._cut(4), *self._cut(2))
        points = sorted(self.draw(st.lists(st.integers(0, n), min_size=self.n_devices - 1, max_size=self.n_devices - 1)))
        return (Segment(tuple(b - a for a, b in zip([0, *points], [*points, n], strict=True))),)

    def leaf(self, name: str) -> Tensor:
        shape = self.draw(st.sampled_from([[4, 6], [6, 4], [4, 4], [6, 6], [4], [6], [2, 4, 6], [4, 6, 2]]))
        tensor = self.graph.leaf(name, F32, shape, Role.INPUT)
        axis = self.draw(st.integers(-2, len(shape) - 1))
        cut = SplitState(axis, self.draw(st.sampled_from(self.cuts[shape[axis]]))) if axis >= 0 else None
        self.states[tensor] = cut or (MIRRORED, PARTIAL)[axis + 1]
        return tensor

    def ids(self, n: int, below: int) -> Tensor:
        tensor = self.graph.leaf(f"ids{len(self.graph.leaves)}.{below}", I32, [n], Role.INPUT)
        self.states[tensor] = MIRRORED
        return tensor

    def grow(self) -> None:
        n_nodes, n_leaves, names = len(self.graph.nodes), len(self.graph.leaves), set(self.graph._names)
        try:
            node = self._draw_node(f"n{n_nodes}")
            infer_splits(self.graph, self.states.__getitem__, self.n_devices, lambda _: True)
            self.pool.append(node)
        except (ShapeError, SplitError) as error:
            assert "\n" not in str(error)
            self.n_refused += 1
            del self.graph.nodes[n_nodes:], self.graph.leaves[n_leaves:]
            self.graph._names = names

    def _draw_node(self, name: str) -> Tensor:
        g, draw = self.graph, self.draw
        x, y = draw(st.sampled_from(self.pool)), draw(st.sampled_from(self.pool))
        kind = draw(st.sampled_from(KINDS))
        if kind == "binary":
            return g.apply(draw(st.sampled_from(["add", "sub", "mul"])), x, y, name=name)
        if kind == "matmul":
            return matmul.matmul(g, x, y, name)
        if kind == "reshape":
            a, b = draw(st.sampled_from([1, 2, 4, 6])), draw(st.sampled_from([1, 2, 4, 6]))
            return layout.reshape(g, x, [a, b, x.n_elements // (a * b)], name)
        if kind == "permute":
            return layout.contiguous(g, layout.permute(g, x, draw(st.permutations([0, 1, 2, 3])), f"{name}.view"), name)
        if kind == "slice":
            axis = draw(st.integers(0, 2))
            start = draw(st.integers(0, x.shape[axis] - 1))
            cut = layout.slice_axis(g, x, axis, start, draw(st.integers(start + 1, x.shape[axis])), f"{name}.view")
            return layout.contiguous(g, cut, name)
        if kind == "rows":
            return g.apply("get_rows", x, self.ids(4, x.shape[1]), name=name)
        if kind == "norm":
            return norm.rms_norm(g, x, y, 1e-2, name)
        if kind == "softmax":
            return norm.softmax(g, x, 0.5, name)
        if kind == "concat":
            return g.apply("concat", x, y, name=name, axis=draw(st.integers(0, 2)))
        if kind == "scale":
            return elementwise.scale(g, x, -0.75, name)
        if kind == "glu":
            return elementwise.glu(g, x, y, "swiglu", name)
        return g.apply("unary", x, name=name, kind=draw(st.sampled_from(["tanh", "scale_add", "clamp", "sigmoid"])), p=-0.5, q=0.5)

    def values(self, rng: np.random.Generator) -> tuple[Values, dict[Tensor, list[Array]]]:
        """Random whole leaves and what each device gets of them: pieces, copies or summands."""
        whole: Values = {}
        pieces: dict[Tensor, list[Array]] = {}
        for leaf in self.graph.leaves:
            state = self.states[leaf]
            if leaf.dtype == I32:
                whole[leaf] = rng.integers(0, int(leaf.name.split(".")[1]), leaf.shape)
            else:
                whole[leaf] = rng.uniform(-1, 1, leaf.shape)
            if state.is_partial:
                summands = list(rng.uniform(-1, 1, (self.n_devices - 1, *leaf.shape)))
                pieces[leaf] = [*summands, whole[leaf] - np.sum(summands, axis=0)] if summands else [whole[leaf]]
            else:
                pieces[leaf] = [piece_of(whole[leaf], state, j) if self.n_devices > 1 else whole[leaf] for j in range(self.n_devices)]
        return whole, pieces


@given(st.data(), st.integers(0, 1 << 30))
@settings(max_examples=250)
def test_a_random_graph_in_pieces_gives_what_the_whole_gives(data: st.DataObject, seed: int) -> None:
    random = RandomGraph(data.draw)
    for _ in range(12):
        random.grow()
    result = infer_splits(random.graph, random.states.__getitem__, random.n_devices, lambda _: True)
    values, pieces = random.values(np.random.default_rng(seed))
    whole = {tensor.name: value for tensor, value in evaluate(random.graph, values).items()}
    held = evaluate_split(result, pieces, random.n_devices)
    assert_same(result, held, whole)


# ---- pieces ----------------------------------------------------------------------------------------------------------------------------


def one_node_graph(state: SplitState) -> tuple[Graph, Tensor, dict[Tensor, SplitState]]:
    graph = Graph("small")
    x = graph.leaf("x", F32, [4, 6], Role.INPUT)
    return graph, x, {x: state}


def test_pieces_have_the_shapes_of_their_states_and_their_own_strides() -> None:
    graph, x, states = one_node_graph(split(0, [3, 1]))
    graph.output(elementwise.scale(graph, x, 2.0, "y"))
    result = infer_splits(graph, states.__getitem__, 2)
    first, second = localize(result, 0), localize(result, 1)
    assert [t.shape[:2] for t in (first.simple[x], second.simple[x])] == [(3, 6), (1, 6)]
    assert first.simple[x].strides == (4, 12, 72, 72)
    assert second.simple[x].strides == (4, 4, 24, 24)
    assert [n.name for n in first.graph.nodes] == ["y", "y.gather"]
    assert [g.graph.outputs[0].shape[:2] for g in (first, second)] == [(4, 6), (4, 6)]
    assert first.graph.outputs[0] is first.simple[result.graph.outputs[0]]


def test_zero_width_pieces_go_through_every_kind_of_node() -> None:
    graph, x, states = one_node_graph(split(0, [4, 0]))
    weight = graph.leaf("weight", F32, [4, 5], Role.WEIGHT)
    states[weight] = split(0, [4, 0])
    y = layout.reshape(graph, elementwise.scale(graph, x, 2.0, "scaled"), [2, 2, 6], "reshaped")
    y = layout.contiguous(graph, layout.permute(graph, y, [0, 2, 1, 3], "permuted"), "copied")
    product = matmul.matmul(graph, weight, x, "product")
    result = infer_splits(graph, states.__getitem__, 2)
    empty = localize(result, 1).simple
    assert [empty[t].n_elements for t in (x, weight, y)] == [0, 0, 0]
    assert [empty[t].n_bytes for t in (x, weight, y)] == [0, 0, 0]
    assert empty[product].shape == (5, 6, 1, 1)
    assert result.states[product].is_partial


def test_a_slice_is_taken_from_what_a_device_holds() -> None:
    graph, x, states = one_node_graph(split_segments(1, [[1, 1], [3, 1]]))
    y = layout.slice_axis(graph, x, 1, 2, 6, "y")
    result = infer_splits(graph, states.__getitem__, 2)
    assert result.states[y] == split(1, [3, 1])
    params = [localize(result, j).simple[y].params for j in range(2)]
    assert params == [{"axis": 1, "start": 1, "stop": 4}, {"axis": 1, "start": 1, "stop": 2}]
    assert [localize(result, j).simple[y].view_offset for j in range(2)] == [16, 16]


def test_a_piece_that_does_not_fit_its_state_is_an_error() -> None:
    graph, x, states = one_node_graph(split(0, [3, 1]))
    y = elementwise.scale(graph, x, 2.0, "y")
    wrong = SplitGraph(graph, {x: states[x], y: split(0, [2, 2])})
    with pytest.raises(SplitError, match=r"scale y: device 0 gets a piece \[3, 6, 1, 1\], but axis 0: 2\|2 means \[2, 6, 1, 1\]"):
        localize(wrong, 0)


def test_counts_of_live_rows_are_the_devices_own() -> None:
    model = ModelGraph("llama", [1, 1])
    result = infer_splits(model.graph, model.leaf_state, 2)
    device = localize(result, 1)
    counts = {leaf for leaf in device.graph.leaves if leaf.name in ("n_tokens", "n_outputs")}
    used = {node.rows.count for node in device.graph.nodes if node.rows}
    assert used == counts


@pytest.mark.parametrize(("n_head", "n_head_kv", "expected"), [(6, 3, [(0, 0), (4, 2)]), (4, 1, [(0, 0), (2, 0)])])
def test_attention_finds_its_first_heads(n_head: int, n_head_kv: int, expected: list[tuple[int, int]]) -> None:
    model = ModelGraph("llama", [1, 1], n_head=n_head, n_head_kv=n_head_kv, n_layer=1)
    result = infer_splits(model.graph, model.leaf_state, 2)
    attention = next(node for node in result.graph.nodes if node.op == "attention")
    params = [localize(result, j).simple[attention].params for j in range(2)]
    assert [(p["first_head"], p["first_kv"]) for p in params] == expected
    assert {p["group"] for p in params} == {n_head // n_head_kv}


def test_get_rows_finds_its_first_vocabulary_row() -> None:
    model = ModelGraph("llama", [1, 1, 1], n_vocab=37)
    result = infer_splits(model.graph, model.leaf_state, 3)
    embedding = next(node for node in result.graph.nodes if node.name == "embedding")
    assert [localize(result, j).simple[embedding].params["first"] for j in range(3)] == [0, 12, 25]
