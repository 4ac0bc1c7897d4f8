"""Cut plans of dense models and mixtures: what is cut with what, in which unit, and that the pieces compute the whole."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from split.model_tensors import (
    DELTA,
    FAMILIES,
    GEMMA3,
    MOE,
    SMOLLM2,
    attention,
    biases,
    experts,
    feed_forward,
    fused_attention,
    in_layers,
    norm,
    outside,
)

from numba_meta.dtypes import F16, F32, Q4_0, Q4_K, Q6_K, Q8_0, DType
from numba_meta.errors import SplitError
from numba_meta.models.files.gguf import read_gguf
from numba_meta.split.cut import cut_extents
from numba_meta.split.families import group_items
from numba_meta.split.pieces import take_piece
from numba_meta.split.policy import CutPlan, describe_cuts, plan_cuts
from numba_meta.split.rules import ModelShape, TensorFacts
from numba_meta.split.state import MIRRORED, split, split_segments


def dense(shape: ModelShape, down: DType = Q4_0, out: DType = Q4_0, tied: bool = False) -> dict[str, TensorFacts]:
    return {**outside(shape, tied), **in_layers(shape.n_layer, {**attention(shape, out), **feed_forward(shape, down)})}


def test_heads_of_a_llama_over_two_devices() -> None:
    plan = plan_cuts(FAMILIES["llama"], SMOLLM2, dense(SMOLLM2), (55, 45))
    assert plan.weight("blk.1.attn_q.weight") == split(1, (384, 192))
    assert plan.weight("blk.1.attn_k.weight") == plan.weight("blk.1.attn_v.weight") == split(1, (128, 64))
    assert plan.weight("blk.1.attn_output.weight") == split(0, (384, 192))
    assert plan.weight("blk.1.ffn_up.weight") == plan.weight("blk.1.ffn_gate.weight") == split(1, (832, 704))
    assert plan.weight("blk.1.ffn_down.weight") == split(0, (832, 704))
    assert plan.weight("token_embd.weight") == plan.weight("output.weight") == split(1, (27034, 22118))
    assert plan.weight("blk.1.attn_norm.weight") == plan.weight("output_norm.weight") == MIRRORED
    layer = plan.layers[1]
    assert layer.q_heads == split(2, (6, 3)) and layer.kv_heads == split(2, (2, 1))
    assert layer.cache_k == layer.cache_v == split(0, (128, 64))
    assert plan.n_devices == 2 and len(plan.layers) == 2 and list(plan.weights) == list(dense(SMOLLM2))


def test_more_devices_than_kv_heads_leave_some_empty() -> None:
    plan = plan_cuts(FAMILIES["llama"], SMOLLM2, dense(SMOLLM2), (1, 1, 1, 1))
    assert plan.layers[0].kv_heads == split(2, (1, 1, 0, 1))
    assert plan.weight("blk.0.attn_q.weight") == split(1, (192, 192, 0, 192))


def test_one_kv_head_is_mirrored_and_query_heads_are_cut() -> None:
    tensors = {**dense(GEMMA3, Q6_K, Q4_K, tied=True), **in_layers(2, {"attn_q_norm.weight": norm(256), "post_ffw_norm.weight": norm(640)})}
    plan = plan_cuts(FAMILIES["gemma3"], GEMMA3, tensors, (1, 1, 1))
    assert plan.weight("blk.0.attn_q.weight") == split(1, (256, 512, 256))
    assert plan.weight("blk.0.attn_output.weight") == split(0, (256, 512, 256))
    assert plan.weight("blk.0.attn_k.weight") == plan.weight("blk.0.attn_v.weight") == MIRRORED
    assert plan.weight("blk.0.attn_q_norm.weight") == plan.weight("blk.0.post_ffw_norm.weight") == MIRRORED
    layer = plan.layers[0]
    assert layer.q_heads == split(2, (1, 2, 1))
    assert layer.kv_heads == layer.cache_k == layer.cache_v == MIRRORED
    assert plan.group("feed_forward", 0).unit == 256
    assert plan.weight("token_embd.weight") == split(1, (87381, 87382, 87381))


def test_one_device_has_nothing_to_cut() -> None:
    plan = plan_cuts(FAMILIES["llama"], SMOLLM2, dense(SMOLLM2), (1,))
    assert set(plan.weights.values()) == {MIRRORED}
    assert plan.layers[0].q_heads == plan.layers[0].cache_k == MIRRORED
    assert plan.group("attention", 0).extents == (3,)


def test_all_on_one_of_two_devices() -> None:
    plan = plan_cuts(FAMILIES["llama"], SMOLLM2, dense(SMOLLM2), (1, 0))
    assert plan.weight("blk.0.attn_q.weight") == split(1, (576, 0))
    assert plan.weight("token_embd.weight") == split(1, (49152, 0))


def test_blocks_of_32_and_of_256_in_one_model() -> None:
    shape = ModelShape(n_embd=256, n_layer=2, n_head=24, n_head_kv=8, head_dim_k=64, head_dim_v=64, n_ff=1536, n_vocab=397)
    mixed = {**attention(shape, Q4_K), **feed_forward(shape, Q6_K)}, {**attention(shape), **feed_forward(shape)}
    plan = plan_cuts(FAMILIES["llama"], shape, {**outside(shape), **in_layers(2, *mixed)}, (55, 45))
    # 3 query heads of 64 are 192 elements: only 4 KV heads fill blocks of 256.
    assert plan.group("attention", 0).unit == 4 and plan.layers[0].kv_heads == split(2, (4, 4))
    assert plan.group("attention", 1).unit == 1 and plan.layers[1].kv_heads == split(2, (4, 4))
    assert plan.group("feed_forward", 0).unit == 256 and plan.weight("blk.0.ffn_up.weight") == split(1, (768, 768))
    assert plan.group("feed_forward", 1).unit == 32 and plan.weight("blk.1.ffn_up.weight") == split(1, (832, 704))
    assert plan.weight("output.weight") == split(1, (218, 179))


def test_a_block_wider_than_a_query_head_enlarges_its_unit() -> None:
    shape = ModelShape(n_embd=256, n_layer=1, n_head=8, n_head_kv=1, head_dim_k=64, head_dim_v=64, n_ff=512, n_vocab=397)
    plan = plan_cuts(FAMILIES["llama"], shape, dense(shape, out=Q4_K), (1, 1, 1))
    assert plan.group("attention", 0).unit == 4 and plan.layers[0].q_heads == split(2, (4, 0, 4))


@given(
    n_head_kv=st.integers(1, 6),
    group=st.integers(1, 4),
    dim=st.sampled_from([16, 64, 80, 128]),
    out=st.sampled_from([F32, Q8_0, Q4_K]),
    cache=st.sampled_from([F16, Q8_0]),
    parts=st.lists(st.integers(0, 5), min_size=2, max_size=5).filter(any),
)
def test_the_unit_is_the_least_one_that_keeps_blocks_whole(
    n_head_kv: int, group: int, dim: int, out: DType, cache: DType, parts: list[int]
) -> None:
    # More heads, until whole rows fill their blocks.
    if n_head_kv == 1:
        group = next(n for n in range(group, 1000) if n * dim % out.block_size == 0)
    else:
        n_head_kv = next(n for n in range(n_head_kv, 1000) if n * group * dim % out.block_size == n * dim % cache.block_size == 0)
    shape = ModelShape(64, n_layer=1, n_head=n_head_kv * group, n_head_kv=n_head_kv, head_dim_k=dim, head_dim_v=dim, n_ff=32, n_vocab=8)
    plan = plan_cuts(FAMILIES["llama"], shape, dense(shape, out=out), parts, cache_types=(cache, F16))
    decided = plan.group("attention", 0)
    if n_head_kv == 1:
        fits = [unit for unit in range(1, 257) if unit * dim % out.block_size == 0]
    else:
        fits = [unit for unit in range(1, 257) if unit * group * dim % out.block_size == 0 and unit * dim % cache.block_size == 0]
    assert decided.unit == min(fits)
    assert decided.extents == cut_extents(decided.n_items, decided.unit, parts)
    plan.layers[0].cache_k.validate((n_head_kv * dim,), cache)  # type: ignore[union-attr]


def test_fused_qkv_is_cut_in_segments() -> None:
    shape = SMOLLM2
    tensors = {**outside(shape), **in_layers(2, {**fused_attention(shape), **feed_forward(shape)})}
    plan = plan_cuts(FAMILIES["qwen2"], shape, tensors, (1, 1))
    parts = [(384, 192), (128, 64), (128, 64)]
    assert plan.weight("blk.0.attn_qkv.weight") == split_segments(1, parts)
    assert plan.weight("blk.0.attn_qkv.bias") == split_segments(0, parts)
    rows = np.arange(960)[:, None]
    assert take_piece(rows, plan.weight("blk.0.attn_qkv.weight"), 1)[[0, 192, 256], 0].tolist() == [384, 576 + 128, 768 + 128]


def test_fused_qkv_with_one_kv_head_stays_on_one_device() -> None:
    tensors = {**outside(GEMMA3), **in_layers(2, {**fused_attention(GEMMA3), **feed_forward(GEMMA3)})}
    plan = plan_cuts(FAMILIES["qwen2"], GEMMA3, tensors, (1, 1, 1))
    assert plan.layers[0].q_heads == split(2, (0, 4, 0)) and plan.layers[0].kv_heads == split(2, (0, 1, 0))
    assert plan.layers[0].cache_k == split(0, (0, 256, 0))
    assert plan.weight("blk.0.attn_qkv.weight") == split_segments(1, [(0, 1024, 0), (0, 256, 0), (0, 256, 0)])


def test_biases_and_head_norms() -> None:
    layer = {**attention(SMOLLM2), **biases(SMOLLM2), **feed_forward(SMOLLM2), "attn_k_norm.weight": norm(64)}
    plan = plan_cuts(FAMILIES["qwen3"], SMOLLM2, {**outside(SMOLLM2), **in_layers(2, layer)}, (2, 1))
    assert plan.weight("blk.0.attn_q.bias") == split(0, (384, 192))
    assert plan.weight("blk.0.attn_k.bias") == plan.weight("blk.0.attn_v.bias") == split(0, (128, 64))
    assert plan.weight("blk.0.attn_output.bias") == plan.weight("blk.0.attn_k_norm.weight") == MIRRORED


def moe_plan(parts: tuple[int, ...], down: DType = Q4_0, fused: bool = False) -> CutPlan:
    tensors = {**outside(MOE), **in_layers(2, {**attention(MOE), **experts(MOE, down, fused)})}
    return plan_cuts(FAMILIES["qwen3moe"], MOE, tensors, parts)


def test_experts_are_cut_inside_their_rows() -> None:
    plan = moe_plan((1, 1, 1))
    assert plan.weight("blk.0.ffn_gate_exps.weight") == split(1, (32, 64, 32))
    assert plan.weight("blk.0.ffn_down_exps.weight") == split(0, (32, 64, 32))
    assert plan.weight("blk.0.ffn_gate_inp.weight") == MIRRORED
    assert plan.weight("blk.0.ffn_up_shexp.weight") == split(1, (32, 0, 32))
    assert plan.weight("blk.0.ffn_down_shexp.weight") == split(0, (32, 0, 32))
    assert moe_plan((3, 1), fused=True).weight("blk.0.ffn_gate_up_exps.weight") == split_segments(1, [(96, 32), (96, 32)])


def test_experts_too_narrow_to_cut_are_dealt_whole() -> None:
    # 128 neurons are 4 blocks of 32: too few for 5 devices.
    plan = moe_plan((1, 1, 1, 1, 1))
    for name in ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"):
        assert plan.weight(f"blk.0.{name}.weight") == split(2, (1, 1, 2, 1, 1))
    assert plan.group("experts", 0).items == "expert"
    # A device that wants no part does not make them too narrow.
    assert moe_plan((1, 1, 1, 1, 0)).weight("blk.0.ffn_down_exps.weight") == split(0, (32, 32, 32, 32, 0))
    fused = moe_plan((1, 1, 1, 1, 1), fused=True)
    assert fused.weight("blk.0.ffn_gate_up_exps.weight") == split(2, (1, 1, 2, 1, 1))


@given(st.lists(st.fractions(0, 9, max_denominator=9), min_size=2, max_size=5).filter(any))
def test_pieces_compute_the_whole(parts: list[Fraction]) -> None:
    """Feed-forward and attention weights in pieces: what the devices compute adds up to what one computes."""
    shape = ModelShape(n_embd=32, n_layer=1, n_head=6, n_head_kv=3, head_dim_k=32, head_dim_v=32, n_ff=96, n_vocab=8)
    plan = plan_cuts(FAMILIES["llama"], shape, dense(shape), parts)
    rng = np.random.default_rng(len(parts))
    x = rng.standard_normal(32)
    weights = {name: rng.standard_normal(facts.shape[::-1]) for name, facts in dense(shape).items()}

    def compute(w: dict[str, np.ndarray], group: int) -> np.ndarray:
        hidden = np.tanh(w["ffn_gate"] @ x) * (w["ffn_up"] @ x)
        q, k, v = ((w[f"attn_{part}"] @ x).reshape(-1, 32) for part in "qkv")
        heads = np.array([np.tanh(q[i] @ k[i // group]) * v[i // group] for i in range(len(q))]).reshape(-1)
        return w["ffn_down"] @ hidden + w["attn_output"] @ heads

    names = ("ffn_gate", "ffn_up", "ffn_down", "attn_q", "attn_k", "attn_v", "attn_output")
    whole = compute({name: weights[f"blk.0.{name}.weight"] for name in names}, 2)
    summands = []
    for device in range(len(parts)):
        pieces = {name: take_piece(weights[f"blk.0.{name}.weight"], plan.weight(f"blk.0.{name}.weight"), device) for name in names}
        summands.append(compute(pieces, 2))
    assert np.allclose(sum(summands), whole, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_real_models_are_cut_whole(name: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(f"{name}_path")
    with read_gguf(path) as file:
        keys = {key.partition(".")[2]: value for key, value in file.metadata.items()}
        n_head = keys["attention.head_count"]
        n_embd = keys["embedding_length"]
        dim = keys.get("attention.key_length", n_embd // n_head)
        n_vocab = file.tensor("token_embd.weight").shape[1]
        shape = ModelShape(
            n_embd, keys["block_count"], n_head, keys["attention.head_count_kv"], dim, dim, keys["feed_forward_length"], n_vocab
        )
        for parts in [(1, 1), (70, 30), (1, 1, 1), (1,) * 6]:
            plan = plan_cuts(FAMILIES[file.architecture], shape, file.tensors, parts)
            cut_bytes = 0
            for tensor_name, tensor in file.tensors.items():
                state = plan.weight(tensor_name)
                if state.is_split:
                    pieces = [state.piece_shape(tensor.shape, device) for device in range(len(parts))]
                    assert sum(np.prod(piece) for piece in pieces) == np.prod(tensor.shape)
                    cut_bytes += tensor.n_bytes
            # What every device holds is norms, and K and V where they have one head.
            assert cut_bytes > 0.97 * file.n_tensor_bytes


def test_cuts_print_in_one_line_per_group() -> None:
    lines = describe_cuts(plan_cuts(FAMILIES["llama"], SMOLLM2, dense(SMOLLM2), (55, 45)))
    assert lines == (
        "vocabulary: 49152 x row, unit 1: 27034|22118",
        "attention of layers 0-1: 3 x KV head with 3 query heads, unit 1: 2|1",
        "feed forward of layers 0-1: 1536 x neuron, unit 32: 832|704",
    )
    mixed = {**attention(SMOLLM2), **feed_forward(SMOLLM2, Q4_K)}, {**attention(SMOLLM2), **feed_forward(SMOLLM2)}
    plan = plan_cuts(FAMILIES["llama"], SMOLLM2, {**outside(SMOLLM2), **in_layers(2, *mixed)}, (55, 45))
    assert describe_cuts(plan)[2:] == (
        "feed forward of layer 0: 1536 x neuron, unit 256: 768|768",
        "feed forward of layer 1: 1536 x neuron, unit 32: 832|704",
    )


def test_plans_are_data() -> None:
    a, b = (plan_cuts(FAMILIES["llama"], SMOLLM2, dense(SMOLLM2), (2, 1)) for _ in range(2))
    assert a == b and a != plan_cuts(FAMILIES["llama"], SMOLLM2, dense(SMOLLM2), (1, 2))
    with pytest.raises(TypeError):
        a.weights["output.weight"] = MIRRORED  # type: ignore[index]


def test_what_has_no_rule_is_an_error() -> None:
    tensors = dense(SMOLLM2)
    cases: list[tuple[str, ModelShape, dict[str, TensorFacts], str]] = [
        ("llama", SMOLLM2, {**tensors, "blk.1.attn_odd.weight": norm(4)}, r"blk\.1\.attn_odd\.weight: the policy for llama has no rule"),
        ("llama", SMOLLM2, {**tensors, "odd.weight": norm(4)}, r"odd\.weight: the policy for llama has no rule"),
        ("llama", SMOLLM2, {**tensors, "blk.2.attn_norm.weight": norm(4)}, r"blk\.2\.attn_norm\.weight: .* expected layers 0 to 1"),
        ("llama", GEMMA3, tensors, r"token_embd\.weight \[576, 49152\]: expected rows of 640"),
        ("llama", SMOLLM2, {**tensors, "blk.0.attn_q.weight": TensorFacts(Q4_0, (576, 512))}, r"blk\.0\.attn_q\.weight \[576, 512\] q4_0"),
        ("llama", ModelShape(576, 2, 9, 2, 64, 64, 1536, 49152), tensors, "9 query heads over 2 KV heads"),
    ]
    for architecture, shape, given_tensors, words in cases:
        with pytest.raises(SplitError, match=words) as caught:
            plan_cuts(FAMILIES[architecture], shape, given_tensors, (1, 1))
        assert "\n" not in str(caught.value)
    plan = plan_cuts(FAMILIES["llama"], SMOLLM2, tensors, (1, 1))
    with pytest.raises(SplitError, match=r"blk\.9\.attn_q\.weight"):
        plan.weight("blk.9.attn_q.weight")
    with pytest.raises(SplitError, match="group experts of layer 0"):
        plan.group("experts", 0)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_tables_are_sound(architecture: str) -> None:
    """The last kind of layer takes what the others leave, and every size that a rule names exists in its group."""
    family = FAMILIES[architecture]
    shape = replace(DELTA, kda_head_dim=64, mla_head_dim_k=96, mla_head_dim_v=64, mla_head_dim_nope=64)
    assert [bool(table.marker) for table in family.layers] == [True] * (len(family.layers) - 1) + [False]
    for table in family.layers:
        assert {"q_heads", "kv_heads"} <= set(table.states)
        for rule in (*table.rules, *table.states.values(), *family.outside):
            assert (rule.axis >= 0) == bool(rule.group) == bool(rule.parts)
            for part in rule.parts:
                assert {part.size, part.repeat} <= set(group_items(rule.group, shape).sizes)
