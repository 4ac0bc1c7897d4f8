"""Layers that several architectures share: how they are built, and which of them have a sliding window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from numba_meta.models.architectures.builder import GraphBuilder
from numba_meta.models.architectures.config import LayerSpec, RopeConfig
from numba_meta.models.architectures.keys import Keys
from numba_meta.tensor import Tensor


def local_layers(keys: Keys, layers: Sequence[LayerSpec], window: int, rope: RopeConfig | None, pattern: int) -> tuple[LayerSpec, ...]:
    """`layers`, of which the local ones have this window and these positions.

    Which are local: those that an array of the file names, or all but the last of every `pattern` layers (0: all), which a number in the
    file replaces.
    """
    is_local = keys.flags_per_layer("attention.sliding_window_pattern")
    if is_local is None:
        pattern = keys.number("attention.sliding_window_pattern", pattern, least=0)
        is_local = tuple(pattern == 0 or layer % pattern < pattern - 1 for layer in range(keys.n_layer))
    return tuple(replace(layer, rope=rope, window=window) if local else layer for layer, local in zip(layers, is_local, strict=True))


def pre_norm_layers(b: GraphBuilder, x: Tensor, *, head_norms: bool = False, residual_scale: float = 1.0) -> Tensor:
    """Norm and attention, norm and gated feed-forward (SwiGLU), each added to the residual stream `[n_embd, R]`; the rows that give logits.

    `head_norms`: each head of Q and K is normed before its rotation. `residual_scale` multiplies what a layer adds.
    """
    for i, layer in enumerate(b.config.layers):
        h = b.norm(x, f"blk.{i}.attn_norm.weight", f"attn_norm.{i}")
        q, k, v = b.heads_of(i, h, head_norms)
        h = b.attend(i, b.rotate(q, layer.rope, f"q.{i}"), b.rotate(k, layer.rope, f"k.{i}"), v)  # [head_dim * n_head, R]
        x, h = b.only_outputs(i, x, h)
        h = b.project(h, f"blk.{i}.attn_output", x.shape[0])
        x = b.add(x, b.scaled(h, residual_scale, f"attn_scaled.{i}"), f"attn_residual.{i}")
        h = b.norm(x, f"blk.{i}.ffn_norm.weight", f"ffn_norm.{i}")
        h = b.feed_forward(h, i, "swiglu")
        x = b.add(x, b.scaled(h, residual_scale, f"ffn_scaled.{i}"), f"ffn_residual.{i}")
    return x


def sandwiched_layers(b: GraphBuilder, x: Tensor, *, head_norms: bool = False, softcap: float = 0.0) -> Tensor:
    """As Gemma has them: a norm before and after attention, before and after the feed-forward part (GELU); the rows that give logits.

    `softcap` bounds scores of attention (0: none).
    """
    for i, layer in enumerate(b.config.layers):
        h = b.norm(x, f"blk.{i}.attn_norm.weight", f"attn_norm.{i}")
        q, k, v = b.heads_of(i, h, head_norms)
        h = b.attend(i, b.rotate(q, layer.rope, f"q.{i}"), b.rotate(k, layer.rope, f"k.{i}"), v, softcap)  # [head_dim * n_head, R]
        x, h = b.only_outputs(i, x, h)
        h = b.project(h, f"blk.{i}.attn_output", x.shape[0])
        x = b.add(x, b.norm(h, f"blk.{i}.post_attention_norm.weight", f"post_attention_norm.{i}"), f"attn_residual.{i}")
        h = b.norm(x, f"blk.{i}.ffn_norm.weight", f"ffn_norm.{i}")
        h = b.feed_forward(h, i, "geglu_tanh")
        x = b.add(x, b.norm(h, f"blk.{i}.post_ffw_norm.weight", f"post_ffw_norm.{i}"), f"ffn_residual.{i}")
    return x
