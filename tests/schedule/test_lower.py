"""Kernel calls of a step: their arguments, what is left out, what is shared; and that carrying them out gives the right numbers."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from reference_interpreter import evaluate, piece_of
from schedule.model_graphs import ModelGraph
from schedule.run_plan import PlanRun
from schedule.test_localize import step_values

from numba_meta.dtypes import F32, I32, I64, Q4_0
from numba_meta.errors import ShapeError
from numba_meta.graph import Graph
from numba_meta.ops import attention, concat, elementwise, layout, matmul, norm, rows, unary
from numba_meta.schedule.calls import AddressList, Offset, Peer, Scratch
from numba_meta.schedule.infer import infer_splits
from numba_meta.schedule.plan import StepPlan, plan_step, storage_of
from numba_meta.split.state import MIRRORED, SplitState, split
from numba_meta.tensor import Role, Rows, Tensor

ARCHITECTURES = ("llama", "gemma3")


def plan_of(model: ModelGraph, n_devices: int, exact: bool = False, n_threads: int = 2) -> StepPlan:
    return plan_step(infer_splits(model.graph, model.leaf_state, n_devices), [n_threads] * n_devices, exact, 64)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("n_rows", [1, 4, 40])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_arguments_are_those_of_the_kernels(architecture: str, n_rows: int, exact: bool) -> None:
    plan = plan_of(ModelGraph(architecture, [2, 1], n_rows=n_rows, n_outputs=1), 2, exact)
    for device in plan.devices:
        for call in device.calls:
            if call.kernel is None:
                assert call.meets and not call.arguments and not call.reads and not call.writes
                continue
            assert not call.meets
            assert call.arguments.keys() == call.kernel.parameters.keys(), call
            known = {id(storage_of(place)) for place in (*call.reads, *call.writes) if not isinstance(place, Peer)}
            for name, value in call.arguments.items():
                if not isinstance(value, (int, float)):
                    assert id(storage_of(value)) in known, f"{call.node}: {name} is neither read nor written"


@pytest.mark.parametrize("proportions", [[1, 0], [0, 1], [1, 0, 1], [1] * 6], ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nothing_is_called_for_empty_pieces_and_views(architecture: str, proportions: list[int]) -> None:
    model = ModelGraph(architecture, proportions, n_head_kv=2)
    plan = plan_of(model, len(proportions))
    for device in plan.devices:
        nodes = {node.name: node for node in device.graph.graph.nodes}
        called = {call.node for call in device.calls if call.kernel is not None}
        assert called
        assert all(nodes[name].n_elements for name in called)
        assert not called & {name for name, node in nodes.items() if node.op in ("reshape", "permute", "slice")}
        assert [call.node for call in device.calls if call.meets] == [node.name for node in plan.split.collectives]
        assert all(place.n_bytes for call in device.calls for place in call.writes if isinstance(place, (Tensor, Scratch)))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_activations_are_quantized_once_for_all_that_read_them(architecture: str) -> None:
    n_layer = 3
    plan = plan_of(ModelGraph(architecture, [1, 1], n_layer=n_layer), 2)
    for device in plan.devices:
        quantized = Counter(call.reads[0] for call in device.calls if call.kernel is not None and "quantize" in call.kernel.name)
        assert set(quantized.values()) == {1}
        # per layer: before q, k and v; before the attention's output; before gate and up; before down. And before the head.
        assert len(quantized) == 4 * n_layer + 1
        scratch = [place for call in device.calls for place in call.reads if isinstance(place, Scratch)]
        assert set(Counter(place for place in scratch if place.name.startswith("attn_norm")).values()) == {3}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_exact_mode_quantizes_nothing(architecture: str) -> None:
    plan = plan_of(ModelGraph(architecture, [1, 1]), 2, exact=True)
    assert not [call for device in plan.devices for call in device.calls if call.kernel is not None and "quantize" in call.kernel.name]


def test_only_the_first_device_joins_the_logits_that_the_host_reads() -> None:
    plan = plan_of(ModelGraph("llama", [1, 1]), 2)
    gathers = [[call for call in device.calls if call.node == "logits.gather" and call.kernel] for device in plan.devices]
    assert [len(calls) for calls in gathers] == [1, 0]
    (peers,) = [place for place in gathers[0][0].reads if isinstance(place, AddressList)]
    assert [(peer.device, peer.tensor.name) for peer in peers.peers] == [(0, "logits"), (1, "logits")]


def test_a_strided_source_without_a_unit_axis_is_an_error() -> None:
    graph = Graph("g")
    x = graph.leaf("x", F32, [4, 6], Role.INPUT)
    graph.output(layout.contiguous(graph, layout.permute(graph, x, [1, 0, 2, 3]), "copy"))
    with pytest.raises(ShapeError, match=r"^copy: permute_0 cannot be copied, its axis 0 has gaps \(16, 4, 96, 96\); permute other axes$"):
        plan_step(infer_splits(graph, lambda _: MIRRORED, 1), [1], True, 64)


def test_a_second_operand_of_some_rows_is_an_error_on_cpu_devices() -> None:
    graph = Graph("g")
    graph.output(elementwise.add(graph, graph.leaf("x", F32, [4, 6, 2], Role.INPUT), graph.leaf("y", F32, [1, 6], Role.INPUT), "sum"))
    with pytest.raises(ShapeError, match="a second tensor of one row or of all rows"):
        plan_step(infer_splits(graph, lambda _: MIRRORED, 1), [1], True, 64)


# ---- carried out -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("proportions", [[1], [1, 1], [1, 0], [1, 2, 1]], ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_calls_of_a_model_give_its_logits(architecture: str, proportions: list[int]) -> None:
    n_devices = len(proportions)
    model = ModelGraph(architecture, proportions, weight_type=F32, cache_type=F32, n_rows=3, n_outputs=2)
    values = step_values(model, np.random.default_rng(5))
    values |= {leaf: np.array([2]).reshape(leaf.shape) for leaf in model.graph.leaves if leaf.name == "n_outputs"}
    values = {leaf: value * 0.2 if leaf.role is Role.WEIGHT and leaf.shape[1] > 1 else value for leaf, value in values.items()}
    expected = evaluate(model.graph, values)[model.graph.outputs[0]]
    result = infer_splits(model.graph, model.leaf_state, n_devices)
    pieces = {leaf: [piece_of(values[leaf], result.states[leaf], j) for j in range(n_devices)] for leaf in result.graph.leaves}
    (logits,) = PlanRun(plan_step(result, [2] * n_devices, True, 64), pieces).run()
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def run_small(build: object, states: dict[str, SplitState], n_devices: int, seed: int = 0, n_live: int = 5) -> None:
    """Builds a graph of float32 leaves, carries out its plan on poisoned memory and compares the outputs with the interpreter's."""
    graph = Graph("small")
    build(graph)  # type: ignore[operator]
    rng = np.random.default_rng(seed)
    values = {leaf: rng.integers(0, 4, leaf.shape) if leaf.dtype == I32 else rng.standard_normal(leaf.shape) for leaf in graph.leaves}
    values = {leaf: np.full(leaf.shape, n_live) if leaf.dtype == I64 else value for leaf, value in values.items()}
    whole = evaluate(graph, values)
    result = infer_splits(graph, lambda leaf: states.get(leaf.name, MIRRORED), n_devices)
    pieces = {leaf: [piece_of(values[leaf], result.states[leaf], j) for j in range(n_devices)] for leaf in graph.leaves}
    outputs = PlanRun(plan_step(result, [2] * n_devices, True, 64), pieces).run()
    for output, actual in zip(graph.outputs, outputs, strict=True):
        np.testing.assert_allclose(actual, whole[output], rtol=1e-5, atol=1e-5, err_msg=output.name)


def leaf(graph: Graph, name: str, *shape: int, role: Role = Role.INPUT) -> Tensor:
    return graph.leaf(name, F32, shape, role)


@pytest.mark.parametrize("cut", [None, [4, 2], [0, 6], [3, 1, 2]], ids=str)
def test_elements_and_copies(cut: list[int] | None) -> None:
    """Element by element, slices, permutes, copies and concatenations on an axis that is cut, and one that is not."""

    def build(graph: Graph) -> None:
        x, y = leaf(graph, "x", 6, 5), leaf(graph, "y", 6, 5)
        for op in ("add", "sub", "mul"):
            graph.output(graph.apply(op, x, y, name=op))
        graph.output(elementwise.glu(graph, x, y, "reglu", "gated"))
        graph.output(unary.clamp(graph, x, -0.5, 0.25, "clamped"))
        graph.output(unary.softcap(graph, x, 2.0, "capped"))
        graph.output(unary.scale_add(graph, x, 2.0, -1.0, "scaled"))
        graph.output(layout.contiguous(graph, layout.slice_axis(graph, x, 1, 1, 4), "some rows"))
        graph.output(layout.contiguous(graph, layout.slice_axis(graph, x, 0, 1, 5), "some columns"))
        graph.output(concat.concat(graph, [x, y, layout.slice_axis(graph, x, 1, 2, 3)], 1, "rows of both"))
        graph.output(concat.concat(graph, [x, leaf(graph, "mirrored", 6, 2)], 1, "and mirrored rows"))

    states = {} if cut is None else {"x": split(0, cut), "y": split(0, cut)}
    run_small(build, states, 1 if cut is None else len(cut))


@pytest.mark.parametrize("n_rows", [5, 20], ids=["chunks", "a prompt"])
@pytest.mark.parametrize(
    ("cut", "n_kv"), [([6], 3), ([4, 2], 3), ([0, 6], 3), ([2, 0, 4], 3), ([2, 2, 2], 3), ([5, 1], 1), ([1, 3, 2], 1)], ids=str
)
def test_attention_with_sinks(cut: list[int], n_kv: int, n_rows: int) -> None:
    """Each device has the sinks of its query heads."""

    def build(graph: Graph) -> None:
        count = graph.leaf("n", I64, [1], Role.INPUT)
        q = graph.leaf("q", F32, [8, n_rows, 6], Role.INPUT, Rows(count, 1))
        k, v, sinks = leaf(graph, "k", 8, 4, n_kv), leaf(graph, "v", 4, 4, n_kv), leaf(graph, "sinks", 6, role=Role.WEIGHT)
        table = graph.leaf("table", I32, [8, 4], Role.INPUT)
        sequences, positions = (graph.leaf(name, I32, [n_rows], Role.INPUT) for name in ("sequences", "positions"))
        for window in (0, 2):
            heads = attention.attention(graph, q, k, v, table, sequences, positions, scale=0.5, window=window, sinks=sinks)
            graph.output(layout.reshape(graph, heads, [24, n_rows], f"window {window}"))

    kv = split(2, [n // 2 for n in cut]) if n_kv > 1 else MIRRORED
    run_small(build, {"q": split(2, cut), "k": kv, "v": kv, "sinks": split(0, cut)}, len(cut), n_live=n_rows)


@pytest.mark.parametrize("cut", [[2, 1], [0, 3], [1, 0, 2]], ids=str)
def test_a_mirrored_part_joins_one_whose_cut_repeats(cut: list[int]) -> None:
    def build(graph: Graph) -> None:
        rows_of_both = concat.concat(graph, [leaf(graph, "x", 6, 5), leaf(graph, "mirrored", 6, 2)], 1, "both")
        graph.output(matmul.matmul(graph, leaf(graph, "w", 6, 9, role=Role.WEIGHT), rows_of_both, "product"))

    state = split(0, cut, repeat=2)
    run_small(build, {"x": state, "w": state}, len(cut))


def test_whole_rows() -> None:
    def build(graph: Graph) -> None:
        x = leaf(graph, "x", 37, 5)
        graph.output(norm.softmax(graph, x, 0.5, "softmax"))
        graph.output(norm.argmax(graph, x, "argmax"))
        graph.output(norm.rms_norm(graph, x, leaf(graph, "w", 37), 1e-3, "normed"))
        graph.output(concat.concat(graph, [x, leaf(graph, "y", 3, 5)], 0, "wider"))
        heads = layout.permute(graph, layout.reshape(graph, leaf(graph, "heads", 8, 5), [4, 2, 5]), [0, 2, 1, 3])
        graph.output(layout.contiguous(graph, heads, "by head"))

    run_small(build, {}, 1)


@pytest.mark.parametrize("cut", [[3, 1], [4, 0], [0, 4], [1, 0, 3]], ids=str)
def test_rows_of_a_table_that_is_cut_between_rows(cut: list[int]) -> None:
    """The sum over the devices has each row once, for a weight and for float32 rows alike."""

    def build(graph: Graph) -> None:
        ids = graph.leaf("ids", I32, [6], Role.INPUT)
        graph.output(rows.get_rows(graph, leaf(graph, "table", 16, 4, role=Role.WEIGHT), ids, "embedding"))
        graph.output(rows.get_rows(graph, leaf(graph, "values", 7, 4), ids, "picked"))

    run_small(build, {"table": split(1, cut), "values": split(1, cut)}, len(cut))


@pytest.mark.parametrize("cut", [[16, 16], [32, 0], [0, 32], [16, 0, 16]], ids=str)
def test_a_row_parallel_product_with_delayed_sum(cut: list[int]) -> None:
    def build(graph: Graph) -> None:
        y = matmul.matmul(graph, leaf(graph, "w", 32, 9, role=Role.WEIGHT), leaf(graph, "x", 32, 5), "product")
        y = elementwise.scale(graph, y, 0.5, "half")
        graph.output(elementwise.add(graph, y, leaf(graph, "residual", 9, 5), "sum"))

    run_small(build, {"w": split(0, cut), "x": split(0, cut)}, len(cut))


def test_only_live_rows_are_computed() -> None:
    """A step plans for 8 rows; 5 are live, the others keep the poison."""
    graph = Graph("g")
    count = graph.leaf("n", I64, [1], Role.INPUT)
    x = graph.leaf("x", F32, [6, 8], Role.INPUT, Rows(count, 1))
    graph.output(elementwise.scale(graph, x, 2.0, "y"))
    value = np.arange(48.0).reshape(6, 8, 1, 1)
    pieces = {count: [np.array([5]).reshape(1, 1, 1, 1)], x: [value]}
    (y,) = PlanRun(plan_step(infer_splits(graph, lambda _: MIRRORED, 1), [2], True, 64), pieces).run()
    np.testing.assert_array_equal(y[:, :5], 2 * value[:, :5])
    assert np.isnan(y[:, 5:]).all()


def test_offsets_name_a_place() -> None:
    x = Graph().leaf("x", Q4_0, [32], Role.WEIGHT)
    assert storage_of(Offset(x, 18)) is x
