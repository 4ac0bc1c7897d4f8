"""Sizes and tensors of small models of every family, as their GGUF files name them."""

from __future__ import annotations

from numba_meta.dtypes import F32, Q4_0, Q8_0, DType
from numba_meta.models.architectures import ARCHITECTURES
from numba_meta.split import families
from numba_meta.split.rules import ModelShape, TensorFacts

Tensors = dict[str, TensorFacts]
FAMILIES = {**families.FAMILIES, **{name: each.family for name, each in ARCHITECTURES.items()}}

SMOLLM2 = ModelShape(n_embd=576, n_layer=2, n_head=9, n_head_kv=3, head_dim_k=64, head_dim_v=64, n_ff=1536, n_vocab=49152)
GEMMA3 = ModelShape(n_embd=640, n_layer=2, n_head=4, n_head_kv=1, head_dim_k=256, head_dim_v=256, n_ff=2048, n_vocab=262144)
MOE = ModelShape(
    n_embd=256, n_layer=2, n_head=8, n_head_kv=2, head_dim_k=64, head_dim_v=64, n_ff=512, n_vocab=397,
    n_expert=6, n_ff_expert=128, n_ff_shared=64,
)  # fmt: skip
DELTA = ModelShape(
    n_embd=256, n_layer=2, n_head=8, n_head_kv=2, head_dim_k=64, head_dim_v=64, n_ff=512, n_vocab=397,
    n_expert=6, n_ff_expert=128, n_ff_shared=64,
    d_conv=4, delta_heads_k=4, delta_heads_v=8, delta_head_dim_k=32, delta_head_dim_v=64,
)  # fmt: skip
KIMI = ModelShape(
    n_embd=256, n_layer=2, n_head=8, n_head_kv=1, head_dim_k=96, head_dim_v=64, n_ff=512, n_vocab=397,
    n_expert=6, n_ff_expert=128, n_ff_shared=64, d_conv=4,
    kda_head_dim=64, mla_head_dim_k=96, mla_head_dim_v=64, mla_head_dim_nope=64,
)  # fmt: skip


def in_layers(n_layer: int, *layers: Tensors) -> Tensors:
    """Layer i gets the i-th of `layers`, beginning anew after the last."""
    return {f"blk.{i}.{name}": facts for i in range(n_layer) for name, facts in layers[i % len(layers)].items()}


def outside(shape: ModelShape, tied: bool = False) -> Tensors:
    tensors = {"token_embd.weight": TensorFacts(Q8_0, (shape.n_embd, shape.n_vocab)), "output_norm.weight": norm(shape.n_embd)}
    return tensors if tied else {**tensors, "output.weight": TensorFacts(Q8_0, (shape.n_embd, shape.n_vocab))}


def norm(n: int) -> TensorFacts:
    return TensorFacts(F32, (n,))


def attention(shape: ModelShape, dtype: DType = Q4_0, q_parts: int = 1) -> Tensors:
    q, kv_k, kv_v = shape.n_head * shape.head_dim_k, shape.n_head_kv * shape.head_dim_k, shape.n_head_kv * shape.head_dim_v
    return {
        "attn_norm.weight": norm(shape.n_embd),
        "attn_q.weight": TensorFacts(Q4_0, (shape.n_embd, q_parts * q)),
        "attn_k.weight": TensorFacts(Q4_0, (shape.n_embd, kv_k)),
        "attn_v.weight": TensorFacts(Q4_0, (shape.n_embd, kv_v)),
        "attn_output.weight": TensorFacts(dtype, (shape.n_head * shape.head_dim_v, shape.n_embd)),
    }


def fused_attention(shape: ModelShape, dtype: DType = Q4_0) -> Tensors:
    apart = attention(shape, dtype)
    rows = sum(apart.pop(f"attn_{part}.weight").shape[1] for part in "qkv")
    return {**apart, "attn_qkv.weight": TensorFacts(Q4_0, (shape.n_embd, rows)), "attn_qkv.bias": norm(rows)}


def biases(shape: ModelShape) -> Tensors:
    return {
        "attn_q.bias": norm(shape.n_head * shape.head_dim_k),
        "attn_k.bias": norm(shape.n_head_kv * shape.head_dim_k),
        "attn_v.bias": norm(shape.n_head_kv * shape.head_dim_v),
        "attn_output.bias": norm(shape.n_embd),
    }


def feed_forward(shape: ModelShape, down: DType = Q4_0) -> Tensors:
    return {
        "ffn_norm.weight": norm(shape.n_embd),
        "ffn_gate.weight": TensorFacts(Q4_0, (shape.n_embd, shape.n_ff)),
        "ffn_up.weight": TensorFacts(Q4_0, (shape.n_embd, shape.n_ff)),
        "ffn_down.weight": TensorFacts(down, (shape.n_ff, shape.n_embd)),
    }


def experts(shape: ModelShape, down: DType = Q4_0, fused: bool = False) -> Tensors:
    n_embd, n_ff, n_shared, n = shape.n_embd, shape.n_ff_expert, shape.n_ff_shared, shape.n_expert
    up = {"ffn_gate_up_exps.weight": 2 * n_ff} if fused else {"ffn_gate_exps.weight": n_ff, "ffn_up_exps.weight": n_ff}
    return {
        "ffn_norm.weight": norm(n_embd),
        "ffn_gate_inp.weight": TensorFacts(F32, (n_embd, n)),
        **{name: TensorFacts(Q4_0, (n_embd, rows, n)) for name, rows in up.items()},
        "ffn_down_exps.weight": TensorFacts(down, (n_ff, n_embd, n)),
        "ffn_gate_shexp.weight": TensorFacts(Q4_0, (n_embd, n_shared)),
        "ffn_up_shexp.weight": TensorFacts(Q4_0, (n_embd, n_shared)),
        "ffn_down_shexp.weight": TensorFacts(Q4_0, (n_shared, n_embd)),
    }


def delta(shape: ModelShape, dtype: DType = Q4_0) -> Tensors:
    keys, values = shape.delta_heads_k * shape.delta_head_dim_k, shape.delta_heads_v * shape.delta_head_dim_v
    return {
        "attn_norm.weight": norm(shape.n_embd),
        "attn_qkv.weight": TensorFacts(Q4_0, (shape.n_embd, 2 * keys + values)),
        "attn_gate.weight": TensorFacts(Q4_0, (shape.n_embd, values)),
        "ssm_alpha.weight": TensorFacts(F32, (shape.n_embd, shape.delta_heads_v)),
        "ssm_beta.weight": TensorFacts(F32, (shape.n_embd, shape.delta_heads_v)),
        "ssm_conv1d.weight": TensorFacts(F32, (shape.d_conv, 2 * keys + values)),
        "ssm_dt.bias": norm(shape.delta_heads_v),
        "ssm_a": norm(shape.delta_heads_v),
        "ssm_norm.weight": norm(shape.delta_head_dim_v),
        "ssm_out.weight": TensorFacts(dtype, (values, shape.n_embd)),
        "post_attention_norm.weight": norm(shape.n_embd),
    }


def kda(shape: ModelShape, dtype: DType = Q4_0) -> Tensors:
    n = shape.n_head * shape.kda_head_dim
    return {
        "attn_norm.weight": norm(shape.n_embd),
        **{f"attn_{part}.weight": TensorFacts(Q4_0, (shape.n_embd, n)) for part in "qkv"},
        **{f"ssm_conv1d_{part}.weight": TensorFacts(F32, (shape.d_conv, 1, n)) for part in "qkv"},
        **{f"ssm_{gate}_a.weight": TensorFacts(Q4_0, (shape.n_embd, shape.kda_head_dim)) for gate in "fg"},
        **{f"ssm_{gate}_b.weight": TensorFacts(Q4_0, (shape.kda_head_dim, n)) for gate in "fg"},
        "ssm_beta.weight": TensorFacts(F32, (shape.n_embd, shape.n_head)),
        "ssm_a": norm(shape.n_head),
        "ssm_dt.bias": norm(n),
        "ssm_norm.weight": norm(shape.kda_head_dim),
        "attn_output.weight": TensorFacts(dtype, (n, shape.n_embd)),
    }


def mla(shape: ModelShape, dtype: DType = Q4_0, latent: int = 128) -> Tensors:
    n, rotated = shape.n_head, shape.mla_head_dim_k - shape.mla_head_dim_nope
    return {
        "attn_norm.weight": norm(shape.n_embd),
        "attn_q_a.weight": TensorFacts(Q4_0, (shape.n_embd, 64)),
        "attn_q_a_norm.weight": norm(64),
        "attn_q_b.weight": TensorFacts(Q4_0, (64, n * shape.mla_head_dim_k)),
        "attn_kv_a_mqa.weight": TensorFacts(Q4_0, (shape.n_embd, latent + rotated)),
        "attn_kv_a_norm.weight": norm(latent),
        "attn_k_b.weight": TensorFacts(Q4_0, (shape.mla_head_dim_nope, latent, n)),
        "attn_v_b.weight": TensorFacts(Q4_0, (latent, shape.mla_head_dim_v, n)),
        "attn_output.weight": TensorFacts(dtype, (n * shape.mla_head_dim_v, shape.n_embd)),
    }
