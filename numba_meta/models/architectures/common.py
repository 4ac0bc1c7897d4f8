"""Layers that several architectures share."""

from __future__ import annotations

from numba_meta.models.builder import GraphBuilder
from numba_meta.tensor import Tensor


def pre_norm_layers(b: GraphBuilder, x: Tensor, *, head_norms: bool = False, residual_scale: float = 1.0) -> Tensor:
    """Norm and attention, norm and gated feed-forward (SwiGLU), each added to the residual stream `[n_embd, R]`; the rows that give logits.

    `head_norms`: each head of Q and K is normed before its rotation. `residual_scale` multiplies what a layer adds.
    """
    for i, layer in enumerate(b.config.layers):
        h = b.norm(x, f"blk.{i}.attn_norm.weight", f"attn_norm.{i}")
        q, k, v = b.heads_of(i, h)
        if head_norms:
            q = b.norm(q, f"blk.{i}.attn_q_norm.weight", f"q_norm.{i}")
            k = b.norm(k, f"blk.{i}.attn_k_norm.weight", f"k_norm.{i}")
        h = b.attend(i, b.rotate(q, layer.rope, f"q.{i}"), b.rotate(k, layer.rope, f"k.{i}"), v)  # [head_dim * n_head, R]
        x, h = b.only_outputs(i, x, h)
        h = b.project(h, f"blk.{i}.attn_output", x.shape[0])
        x = b.add(x, b.scaled(h, residual_scale, f"attn_scaled.{i}"), f"attn_residual.{i}")
        h = b.norm(x, f"blk.{i}.ffn_norm.weight", f"ffn_norm.{i}")
        h = b.feed_forward(h, i, "swiglu")
        x = b.add(x, b.scaled(h, residual_scale, f"ffn_scaled.{i}"), f"ffn_residual.{i}")
    return x
