"""Llama: pre-norm attention and gated feed-forward, rope over interleaved pairs. Also SmolLM2 and Mistral."""

from __future__ import annotations

from numba_meta.graph import Graph
from numba_meta.models.architectures.base import Architecture
from numba_meta.models.architectures.keys import Keys
from numba_meta.models.builder import GraphBuilder
from numba_meta.models.config import ModelConfig
from numba_meta.split.families import EXPERTS, dense


def read(keys: Keys) -> ModelConfig:
    """Files for long contexts (Llama 3.1 and later) bring a factor per rotated pair."""
    keys.refuse_experts()
    shape = keys.shape()
    rope = keys.rope(shape, interleaved=True, factors=keys.factors("rope_freqs.weight"))
    return keys.config(shape, keys.layers(shape, rope))


def build(b: GraphBuilder) -> Graph:
    """The graph of a step: logits `[n_vocab, outputs]`."""
    shape = b.config.shape
    x = b.embed()  # [n_embd, R]
    for i, layer in enumerate(b.config.layers):
        h = b.norm(x, f"blk.{i}.attn_norm.weight", f"attn_norm.{i}")
        q = b.heads(h, f"blk.{i}.attn_q", layer.n_head, shape.head_dim_k)
        k = b.heads(h, f"blk.{i}.attn_k", layer.n_head_kv, shape.head_dim_k)
        v = b.heads(h, f"blk.{i}.attn_v", layer.n_head_kv, shape.head_dim_v)
        h = b.attend(i, b.rotate(q, layer.rope, f"q.{i}"), b.rotate(k, layer.rope, f"k.{i}"), v)  # [head_dim * n_head, R]
        if i == shape.n_layer - 1:
            x, h = b.only_outputs(x, "outputs.x"), b.only_outputs(h, "outputs.attention")
        x = b.add(x, b.project(h, f"blk.{i}.attn_output", shape.n_embd), f"attn_residual.{i}")
        h = b.norm(x, f"blk.{i}.ffn_norm.weight", f"ffn_norm.{i}")
        x = b.add(x, b.feed_forward(h, i, "swiglu"), f"ffn_residual.{i}")
    return b.logits(x)


LLAMA = Architecture("llama", read, build, dense("llama", *EXPERTS))
