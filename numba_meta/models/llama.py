"""Llama: pre-norm attention and gated feed-forward, rope over interleaved pairs. Also SmolLM2 and Mistral."""

from __future__ import annotations

from numba_meta.graph import Graph
from numba_meta.models.builder import GraphBuilder


def build(b: GraphBuilder) -> Graph:
    """The graph of a step: logits `[n_vocab, outputs]`."""
    shape, rope = b.config.shape, b.config.rope
    x = b.embed()  # [n_embd, R]
    for i in range(shape.n_layer):
        h = b.norm(x, f"blk.{i}.attn_norm.weight", f"attn_norm.{i}")
        q = b.heads(h, f"blk.{i}.attn_q", shape.n_head, shape.head_dim_k)
        k = b.heads(h, f"blk.{i}.attn_k", shape.n_head_kv, shape.head_dim_k)
        v = b.heads(h, f"blk.{i}.attn_v", shape.n_head_kv, shape.head_dim_v)
        q = b.rotate(q, rope, True, f"q.{i}")
        k = b.rotate(k, rope, True, f"k.{i}")
        h = b.attend(i, q, k, v)  # [head_dim * n_head, R]
        if i == shape.n_layer - 1:
            x, h = b.only_outputs(x, "outputs.x"), b.only_outputs(h, "outputs.attention")
        x = b.add(x, b.project(h, f"blk.{i}.attn_output", shape.n_embd), f"attn_residual.{i}")
        h = b.norm(x, f"blk.{i}.ffn_norm.weight", f"ffn_norm.{i}")
        x = b.add(x, b.feed_forward(h, i, "swiglu"), f"ffn_residual.{i}")
    return b.logits(x)
