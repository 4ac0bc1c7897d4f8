"""Cut plans of hybrids: gated delta rule beside attention, KDA beside MLA."""

from __future__ import annotations

from dataclasses import replace
from math import lcm

import numpy as np
import pytest
from split.model_tensors import DELTA, FAMILIES, KIMI, attention, delta, experts, feed_forward, in_layers, kda, mla, outside

from numba_meta.dtypes import F32, Q4_0, Q4_K, DType
from numba_meta.errors import SplitError
from numba_meta.split.pieces import take_piece
from numba_meta.split.policy import CutPlan, plan_cuts
from numba_meta.split.rules import TensorFacts
from numba_meta.split.state import MIRRORED, Segment, SplitState, split, split_segments


def delta_plan(architecture: str, parts: tuple[int, ...], dtype: DType = Q4_0) -> CutPlan:
    layers = {**delta(DELTA, dtype), **experts(DELTA)}, {**attention(DELTA, q_parts=2), **experts(DELTA)}
    return plan_cuts(FAMILIES[architecture], DELTA, {**outside(DELTA), **in_layers(2, *layers)}, parts)


def test_gated_delta_with_value_heads_beside_their_key_head() -> None:
    plan = delta_plan("qwen3next", (3, 1))
    assert [layer.mixer for layer in plan.layers] == ["delta", "attention"]
    qkv = [(96, 32), (96, 32), (384, 128)]  # 3 and 1 key heads of 32, 6 and 2 value heads of 64
    assert plan.weight("blk.0.attn_qkv.weight") == split_segments(1, qkv)
    assert plan.weight("blk.0.ssm_conv1d.weight") == split_segments(1, qkv)
    assert plan.weight("blk.0.attn_gate.weight") == split(1, (384, 128))
    assert plan.weight("blk.0.ssm_out.weight") == split(0, (384, 128))
    assert plan.weight("blk.0.ssm_alpha.weight") == split(1, (6, 2))
    assert plan.weight("blk.0.ssm_a") == plan.weight("blk.0.ssm_dt.bias") == split(0, (6, 2))
    assert plan.weight("blk.0.ssm_norm.weight") == MIRRORED
    recurrent = plan.layers[0]
    assert recurrent.conv_state == split_segments(0, [(288, 96), (288, 96), (1152, 384)])
    assert recurrent.recurrent_state == split(0, (6 * 32 * 64, 2 * 32 * 64))
    assert recurrent.q_heads == split(2, (3, 1)) and recurrent.kv_heads == split(2, (6, 2))
    assert recurrent.cache_k is None and plan.layers[1].conv_state is None
    assert plan.weight("blk.1.attn_q.weight") == split(1, (1024, 0))  # query and gate, 2 x 64 for each of 8 heads
    assert plan.weight("blk.1.attn_output.weight") == split(0, (512, 0))


def test_gated_delta_with_value_heads_in_tiles() -> None:
    """Value head i belongs to key head i modulo their number; on every device the same holds for its own heads."""
    plan = delta_plan("qwen35", (3, 1))
    assert plan.weight("blk.0.attn_gate.weight") == split(1, (192, 64), repeat=2)
    assert plan.weight("blk.0.ssm_beta.weight") == split(1, (3, 1), repeat=2)
    assert plan.layers[0].recurrent_state == split(0, (3 * 32 * 64, 32 * 64), repeat=2)
    assert plan.layers[0].conv_state == SplitState(0, (Segment((288, 96)), Segment((288, 96)), Segment((576, 192), 2)))
    heads = plan.layers[0].kv_heads
    key_of_value = np.arange(8) % 4
    for device in (0, 1):
        keys = take_piece(np.arange(4), split(0, (3, 1)), device)
        held = take_piece(key_of_value, heads.on_axis(0), device)
        assert held.tolist() == [keys[i % len(keys)] for i in range(len(held))]


def test_tiles_meet_blocks_one_tile_at_a_time() -> None:
    # Beside each other 2 value heads of 64 are 128 elements per key head; in tiles each head of 64 stands alone.
    assert delta_plan("qwen3next", (1, 1), Q4_K).group("delta", 0).unit == 2
    assert delta_plan("qwen35", (1, 1), Q4_K).group("delta", 0).unit == 4


def kimi_plan(parts: tuple[int, ...], dtype: DType = Q4_0, kda_head_dim: int = 64, v_head_dim: int = 64) -> CutPlan:
    shape = replace(KIMI, kda_head_dim=kda_head_dim, mla_head_dim_v=v_head_dim)
    layers = {**kda(shape, dtype), **feed_forward(shape)}, {**mla(shape, dtype), **experts(shape)}
    return plan_cuts(FAMILIES["kimi-linear"], shape, {**outside(shape), **in_layers(2, *layers)}, parts)


@pytest.mark.parametrize("dtype", [F32, Q4_0, Q4_K])
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_granules_of_kda(dtype: DType, head_dim: int) -> None:
    granule = lcm(lcm(dtype.block_size, 128), head_dim)
    plan = kimi_plan((1, 1), dtype, kda_head_dim=head_dim)
    n = 8 * head_dim
    # Equal parts of 8 heads, cut at half of the granules with ties to even.
    first = round(-(-n // granule) / 2) * granule
    extents = (min(first, n), n - min(first, n))
    assert plan.group("kda", 0).unit * head_dim == granule
    for name in ("attn_q", "attn_k", "attn_v", "ssm_f_b", "ssm_g_b"):
        assert plan.weight(f"blk.0.{name}.weight") == split(1, extents)
    for part in "qkv":
        assert plan.weight(f"blk.0.ssm_conv1d_{part}.weight") == split(2, extents)
    assert plan.weight("blk.0.ssm_dt.bias") == plan.weight("blk.0.attn_output.weight") == split(0, extents)
    assert plan.weight("blk.0.ssm_a") == split(0, extents).divided(head_dim)
    assert plan.weight("blk.0.ssm_beta.weight") == split(1, extents).divided(head_dim)
    layer = plan.layers[0]
    assert layer.conv_state == split_segments(0, [extents] * 3).scaled(KIMI.d_conv - 1)
    assert layer.recurrent_state == split(0, extents).scaled(head_dim)
    assert layer.q_heads == split(2, extents).divided(head_dim)
    assert plan.weight("blk.0.ssm_f_a.weight") == plan.weight("blk.0.ssm_norm.weight") == MIRRORED


@pytest.mark.parametrize(("dtype", "v_head_dim", "unit"), [(Q4_0, 64, 1), (Q4_K, 64, 4), (Q4_K, 128, 2), (Q4_K, 32, 8), (Q4_0, 16, 2)])
def test_granules_of_mla(dtype: DType, v_head_dim: int, unit: int) -> None:
    assert unit == lcm(v_head_dim, dtype.block_size) // v_head_dim
    plan = kimi_plan((3, 1), dtype, v_head_dim=v_head_dim)
    assert plan.group("mla", 1).unit == unit
    heads = round(8 / unit * 0.75) * unit
    extents = (heads, 8 - heads)
    assert plan.layers[1].q_heads == split(2, extents)
    assert plan.weight("blk.1.attn_q_b.weight") == split(1, extents).scaled(96)
    assert plan.weight("blk.1.attn_k_b.weight") == plan.weight("blk.1.attn_v_b.weight") == split(2, extents)
    assert plan.weight("blk.1.attn_output.weight") == split(0, extents).scaled(v_head_dim)
    assert plan.weight("blk.1.attn_kv_a_mqa.weight") == plan.weight("blk.1.attn_q_a.weight") == MIRRORED
    layer = plan.layers[1]
    assert layer.cache_k == layer.cache_v == layer.kv_heads == MIRRORED and layer.conv_state is None


def test_shared_experts_of_the_hybrid() -> None:
    plan = kimi_plan((1, 1))
    assert plan.weight("blk.1.ffn_gate_shexp.weight") == split(1, (32, 32))
    assert plan.weight("blk.1.ffn_down_shexp.weight") == split(0, (32, 32))
    assert plan.weight("blk.0.ffn_down.weight") == split(0, (256, 256))


def test_latent_up_projection_that_is_not_split_in_two() -> None:
    layer = mla(KIMI)
    del layer["attn_k_b.weight"], layer["attn_v_b.weight"]
    layer["attn_kv_b.weight"] = TensorFacts(Q4_0, (128, 8 * (64 + 64)))
    plan = plan_cuts(FAMILIES["kimi-linear"], KIMI, {**outside(KIMI), **in_layers(2, {**layer, **experts(KIMI)})}, (3, 1))
    assert plan.weight("blk.0.attn_kv_b.weight") == split(1, (768, 256))


@pytest.mark.parametrize("shape", [(1, 8), (1, 8, 1, 1)])
def test_one_number_per_head_as_a_column(shape: tuple[int, ...]) -> None:
    layer = {**kda(KIMI), **feed_forward(KIMI), "ssm_a": TensorFacts(F32, shape)}
    plan = plan_cuts(FAMILIES["kimi-linear"], KIMI, {**outside(KIMI), **in_layers(2, layer)}, (3, 1))
    assert plan.weight("blk.0.ssm_a") == split(1, (6, 2))


def test_wrong_sizes_of_hybrids_are_errors() -> None:
    tensors = {**outside(DELTA), **in_layers(2, {**delta(DELTA), **experts(DELTA)})}
    with pytest.raises(SplitError, match="8 value heads over 3 key heads"):
        plan_cuts(FAMILIES["qwen35"], replace(DELTA, delta_heads_k=3), tensors, (1, 1))
    with pytest.raises(SplitError, match="KDA heads of 0 elements"):
        plan_cuts(FAMILIES["kimi-linear"], replace(KIMI, kda_head_dim=0), in_layers(2, {**kda(KIMI), **feed_forward(KIMI)}), (1, 1))
