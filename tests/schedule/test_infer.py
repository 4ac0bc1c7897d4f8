"""Where the devices of a split graph meet."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule.model_graphs import ModelGraph

from numba_meta.dtypes import F32, I32
from numba_meta.errors import SplitError
from numba_meta.graph import Graph
from numba_meta.ops import attention, elementwise, layout, matmul, norm, rows, unary
from numba_meta.schedule.infer import SplitGraph, infer_splits
from numba_meta.split.state import MIRRORED, PARTIAL, SplitState, split
from numba_meta.tensor import Role, Rows, Tensor


class Sketch:
    """A graph with leaves whose states are given by hand, over two devices."""

    def __init__(self) -> None:
        self.graph = Graph("sketch")
        self.states: dict[Tensor, SplitState] = {}

    def leaf(self, name: str, shape: list[int], state: SplitState = MIRRORED) -> Tensor:
        leaf = self.graph.leaf(name, F32, shape, Role.INPUT)
        self.states[leaf] = state
        return leaf

    def infer(self, may_gather: Callable[[Tensor], bool] = lambda _: False, n_devices: int = 2) -> SplitGraph:
        return infer_splits(self.graph, self.states.__getitem__, n_devices, may_gather)


def met(result: SplitGraph) -> list[tuple[str, str]]:
    """The collectives: which, of what."""
    return [(node.op, node.sources[0].name) for node in result.collectives]


def test_a_reduction_is_delayed_along_a_chain_that_keeps_summands() -> None:
    s = Sketch()
    x, weight, other = s.leaf("x", [4, 3], PARTIAL), s.leaf("weight", [4]), s.leaf("other", [4, 3], PARTIAL)
    y = elementwise.scale(s.graph, x, 2.0, "scaled")
    y = elementwise.mul(s.graph, y, weight, "weighted")
    y = layout.reshape(s.graph, y, [2, 6], "reshaped")
    y = layout.reshape(s.graph, y, [4, 3], "back")
    y = elementwise.add(s.graph, y, other, "sum")
    y = norm.rms_norm(s.graph, y, weight, 1e-5, "normed")
    s.graph.output(y)
    result = s.infer()
    assert met(result) == [("all_reduce", "sum")]
    assert [result.states[node].is_partial for node in result.graph.nodes] == [True] * 5 + [False, False]
    assert result.graph.outputs[0].name == "normed"


def test_unrelated_mirrored_nodes_between_do_not_end_a_delay() -> None:
    s = Sketch()
    x, y, weight = s.leaf("x", [4, 3], PARTIAL), s.leaf("y", [4, 3]), s.leaf("weight", [4])
    first = elementwise.scale(s.graph, x, 2.0, "first")
    unrelated = norm.rms_norm(s.graph, y, weight, 1e-5, "unrelated")
    second = elementwise.scale(s.graph, first, 3.0, "second")
    s.graph.output(elementwise.add(s.graph, unrelated, second, "joined"))
    assert met(s.infer()) == [("all_reduce", "second")]


def test_a_diamond_that_ends_in_one_reduction_is_delayed() -> None:
    s = Sketch()
    x, weight = s.leaf("x", [4, 3], PARTIAL), s.leaf("weight", [4])
    left, right = elementwise.scale(s.graph, x, 2.0, "left"), elementwise.mul(s.graph, x, weight, "right")
    s.graph.output(norm.rms_norm(s.graph, elementwise.add(s.graph, left, right, "joined"), weight, 1e-5, "normed"))
    assert met(s.infer()) == [("all_reduce", "joined")]


def test_branches_that_end_in_different_reductions_are_reduced_where_they_part() -> None:
    s = Sketch()
    x, weight = s.leaf("x", [4, 3], PARTIAL), s.leaf("weight", [4])
    before = elementwise.scale(s.graph, x, 2.0, "before")
    left, right = elementwise.scale(s.graph, before, 2.0, "left"), elementwise.mul(s.graph, before, weight, "right")
    s.graph.output(norm.rms_norm(s.graph, left, weight, 1e-5, "left.normed"))
    s.graph.output(unary.unary(s.graph, right, "silu", "right.active"))
    assert met(s.infer()) == [("all_reduce", "before")]


def test_branches_inside_branches_are_reduced_once() -> None:
    s = Sketch()
    x = s.leaf("x", [4, 3], PARTIAL)
    top = elementwise.scale(s.graph, x, 2.0, "top")
    left, right = elementwise.scale(s.graph, top, 3.0, "left"), elementwise.scale(s.graph, top, 4.0, "right")
    for i, branch in enumerate((left, right)):
        for kind in ("silu", "tanh"):
            s.graph.output(unary.unary(s.graph, elementwise.scale(s.graph, branch, 5.0, f"{kind}.{i}"), kind, f"{kind}.{i}.active"))
    assert met(s.infer()) == [("all_reduce", "top")]


def test_a_link_that_is_an_output_is_reduced_itself() -> None:
    s = Sketch()
    x, weight = s.leaf("x", [4, 3], PARTIAL), s.leaf("weight", [4])
    shown = s.graph.output(elementwise.scale(s.graph, x, 2.0, "shown"))
    s.graph.output(norm.rms_norm(s.graph, elementwise.scale(s.graph, shown, 3.0, "after"), weight, 1e-5, "normed"))
    result = s.infer()
    assert met(result) == [("all_reduce", "shown")]
    assert [output.name for output in result.graph.outputs] == ["shown.all_reduce", "normed"]


def test_a_sum_that_nobody_needs_is_not_reduced() -> None:
    s = Sketch()
    x = s.leaf("x", [4, 3], PARTIAL)
    elementwise.scale(s.graph, x, 2.0, "unused")
    assert met(s.infer()) == []


def test_an_expert_mixture_is_reduced_once_after_its_weighted_sum() -> None:
    s = Sketch()
    total = None
    for expert in range(3):
        down, hidden = s.leaf(f"down.{expert}", [4, 5], split(0, [3, 1])), s.leaf(f"hidden.{expert}", [4, 2], split(0, [3, 1]))
        part = elementwise.scale(s.graph, matmul.matmul(s.graph, down, hidden, f"product.{expert}"), 0.5, f"part.{expert}")
        total = part if total is None else elementwise.add(s.graph, total, part, f"total.{expert}")
    assert total is not None
    s.graph.output(elementwise.add(s.graph, s.leaf("residual", [5, 2]), total, "out"))
    assert met(s.infer()) == [("all_reduce", "total.2")]


def test_a_view_with_gaps_is_reduced_before_it_is_taken() -> None:
    s = Sketch()
    x, k, table = s.leaf("x", [4, 3, 2], PARTIAL), s.leaf("k", [4, 8, 1]), s.graph.leaf("table", I32, [8, 1], Role.CACHE)
    sequences, positions = (s.graph.leaf(name, I32, [2], Role.INPUT) for name in ("sequences", "positions"))
    s.states |= {leaf: MIRRORED for leaf in (table, sequences, positions)}
    x.rows = Rows(s.leaf("count", [1]), 2)
    q = layout.permute(s.graph, elementwise.scale(s.graph, x, 2.0, "scaled"), [0, 2, 1, 3], "permuted")
    s.graph.output(attention.attention(s.graph, q, k, k, table, sequences, positions, scale=1.0, name="attended"))
    assert met(s.infer()) == [("all_reduce", "scaled")]


def test_outputs_are_gathered_and_kept_by_name() -> None:
    s = Sketch()
    weight, x = s.leaf("weight", [4, 7], split(1, [4, 3])), s.leaf("x", [4, 2])
    s.graph.output(matmul.matmul(s.graph, weight, x, "logits"))
    result = s.infer()
    assert met(result) == [("gather", "logits")]
    assert result.states[result.graph.outputs[0]] == MIRRORED
    assert result.graph.outputs[0].shape == (7, 2, 1, 1)


def test_an_output_that_is_cut_above_axis_0_is_an_error() -> None:
    s = Sketch()
    s.graph.output(elementwise.scale(s.graph, s.leaf("x", [4, 2], split(1, [1, 1])), 2.0, "y"))
    with pytest.raises(SplitError, match=r"no split rule for gather y.gather of y: axis 1: 1\|1"):
        s.infer()


def test_an_axis_is_gathered_only_where_the_policy_says_so() -> None:
    s = Sketch()
    x, weight = s.leaf("x", [4, 2], split(0, [3, 1])), s.leaf("weight", [4])
    s.graph.output(norm.rms_norm(s.graph, x, weight, 1e-5, "normed"))
    with pytest.raises(SplitError, match=r"rms_norm normed needs x whole, but it is cut \(axis 0: 3\|1\)"):
        s.infer()
    result = s.infer(lambda tensor: tensor.name == "x")
    assert met(result) == [("gather", "x")]
    assert result.states[result.graph.outputs[0]] == MIRRORED


def test_on_one_device_everything_is_mirrored() -> None:
    model = ModelGraph("llama", [1])
    result = infer_splits(model.graph, model.leaf_state, 1)
    assert result.graph is model.graph
    assert set(result.states.values()) == {MIRRORED}
    assert result.states.keys() == {*model.graph.leaves, *model.graph.nodes}


def test_a_state_that_does_not_fit_its_leaf_is_an_error() -> None:
    s = Sketch()
    s.leaf("x", [4, 2], split(0, [3, 2]))
    with pytest.raises(SplitError, match=r"x \[4, 2, 1, 1\] f32: the split .* covers 5 elements of axis 0, expected 4"):
        s.infer()


@pytest.mark.parametrize("proportions", [[1, 1], [1, 1, 1], [7, 3], [1, 0], [1, 1, 1, 1, 1, 1, 1]], ids=str)
@pytest.mark.parametrize(("architecture", "n_head_kv"), [("llama", 2), ("llama", 1), ("gemma3", 1)])
def test_a_model_meets_twice_per_layer_and_for_embedding_and_logits(architecture: str, n_head_kv: int, proportions: list[int]) -> None:
    model = ModelGraph(architecture, proportions, n_layer=3, n_head_kv=n_head_kv)
    result = infer_splits(model.graph, model.leaf_state, len(proportions))
    expected = [("all_reduce", "embedding.scaled" if architecture == "gemma3" else "embedding")]
    for layer in range(3):
        expected += [("all_reduce", f"blk.{layer}.attn_output"), ("all_reduce", f"blk.{layer}.ffn_down")]
    assert met(result) == [*expected, ("gather", "logits")]


# ---- properties ------------------------------------------------------------------------------------------------------------------------


@st.composite
def sums(draw: st.DrawFn) -> tuple[Sketch, list[Tensor]]:
    """Random graphs of [4, 3] tensors, some of which are sums over the devices at first."""
    s = Sketch()
    made = [s.leaf(f"x{i}", [4, 3], draw(st.sampled_from([MIRRORED, PARTIAL]))) for i in range(draw(st.integers(1, 3)))]
    for i in range(draw(st.integers(1, 12))):
        x, y = draw(st.sampled_from(made)), draw(st.sampled_from(made))
        op = draw(st.sampled_from(["scale", "silu", "add", "sub", "mul", "div", "view", "stored"]))
        if op == "scale":
            made.append(elementwise.scale(s.graph, x, 2.0, f"n{i}"))
        elif op == "silu":
            made.append(unary.unary(s.graph, x, "silu", f"n{i}"))
        elif op == "view":
            made.append(layout.reshape(s.graph, x, [4, 3], f"n{i}"))
        elif op == "stored":
            ids = s.graph.leaf(f"ids{i}", I32, [3], Role.INPUT)
            s.states[ids] = MIRRORED
            made.append(rows.get_rows(s.graph, x, ids, f"n{i}"))
        else:
            made.append(s.graph.apply(op, x, y, name=f"n{i}"))
    for tensor in draw(st.lists(st.sampled_from(made), min_size=1, max_size=2, unique=True)):
        s.graph.output(tensor)
    return s, made


@given(sums())
def test_every_sum_is_complete_before_an_operation_that_cannot_keep_it(case: tuple[Sketch, list[Tensor]]) -> None:
    s, _ = case
    result = s.infer()
    for node in result.graph.nodes:
        states = [result.states[source] for source in node.sources]
        if node.op == "unary":
            assert states[0].is_mirrored
        if node.op in ("add", "sub"):
            assert states[0].is_partial == states[1].is_partial == result.states[node].is_partial
        if node.op in ("mul", "div"):
            assert not states[1].is_partial or (node.op == "mul" and states[0].is_mirrored)
            assert result.states[node].is_partial == (states[0].is_partial or states[1].is_partial)
    assert all(result.states[output].is_mirrored for output in result.graph.outputs)
    assert len({node.sources[0] for node in result.collectives}) == len(result.collectives)


@given(sums())
def test_a_delayed_sum_flows_into_one_reduction(case: tuple[Sketch, list[Tensor]]) -> None:
    result = case[0].infer()
    ends: dict[Tensor, set[Tensor]] = {}
    for tensor in reversed([*result.graph.leaves, *result.graph.nodes]):
        if result.states[tensor].is_partial:
            readers = [node for node in result.graph.nodes if tensor in node.sources]
            ends[tensor] = set().union(*({node} if node.op == "all_reduce" else ends[node] for node in readers))
            assert len(ends[tensor]) <= 1, f"{tensor} is reduced in several places"
            if any(node.op == "all_reduce" for node in readers):
                assert len(readers) == 1, f"{tensor} is read as a summand beside its reduction"
