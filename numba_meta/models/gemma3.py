"""Gemma 3: norms before and after each block, norms of Q and K per head, five local layers to one global, GELU."""

from __future__ import annotations

from numba_meta.graph import Graph
from numba_meta.models.builder import GraphBuilder


def build(b: GraphBuilder) -> Graph:
    """The graph of a step: logits `[n_vocab, outputs]`."""
    shape = b.config.shape
    x = b.embed()  # [n_embd, R], times sqrt(n_embd)
    for i in range(shape.n_layer):
        rope = b.config.rope_local if b.config.windows[i] else b.config.rope
        h = b.norm(x, f"blk.{i}.attn_norm.weight", f"attn_norm.{i}")
        q = b.heads(h, f"blk.{i}.attn_q", shape.n_head, shape.head_dim_k)
        k = b.heads(h, f"blk.{i}.attn_k", shape.n_head_kv, shape.head_dim_k)
        v = b.heads(h, f"blk.{i}.attn_v", shape.n_head_kv, shape.head_dim_v)
        q = b.rotate(b.norm(q, f"blk.{i}.attn_q_norm.weight", f"q_norm.{i}"), rope, False, f"q.{i}")
        k = b.rotate(b.norm(k, f"blk.{i}.attn_k_norm.weight", f"k_norm.{i}"), rope, False, f"k.{i}")
        h = b.attend(i, q, k, v)  # [head_dim * n_head, R]
        if i == shape.n_layer - 1:
            x, h = b.only_outputs(x, "outputs.x"), b.only_outputs(h, "outputs.attention")
        h = b.project(h, f"blk.{i}.attn_output", shape.n_embd)
        x = b.add(x, b.norm(h, f"blk.{i}.post_attention_norm.weight", f"post_attention_norm.{i}"), f"attn_residual.{i}")
        h = b.norm(x, f"blk.{i}.ffn_norm.weight", f"ffn_norm.{i}")
        h = b.feed_forward(h, i, "geglu_tanh")
        x = b.add(x, b.norm(h, f"blk.{i}.post_ffw_norm.weight", f"post_ffw_norm.{i}"), f"ffn_residual.{i}")
    return b.logits(x)
