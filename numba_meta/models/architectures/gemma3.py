"""Gemma 3: norms before and after each block, norms of Q and K per head, five local layers to one global, GELU."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from numba_meta.graph import Graph
from numba_meta.models.architectures.base import Architecture
from numba_meta.models.architectures.keys import Keys
from numba_meta.models.builder import GraphBuilder
from numba_meta.models.config import ModelConfig, RopeConfig
from numba_meta.split.families import dense

_LAYERS_OF_27B = 62  # of this size alone scores are scaled by the width, and no key says so


@dataclass(frozen=True)
class Gemma3Config(ModelConfig):
    """`logit_softcap`: logits stay within so much of 0; 0 for none."""

    logit_softcap: float = 0.0


def read(keys: Keys) -> ModelConfig:
    """Files of the small models lack the pattern and the local base: five local layers, then a global one; base 10,000.

    Without a window every layer is global. Local layers have a rope base of their own, which no scaling touches.
    """
    shape = keys.shape()
    rope = keys.rope(shape, interleaved=False)
    scale = 1.0 / math.sqrt(shape.n_embd / shape.n_head if shape.n_layer == _LAYERS_OF_27B else shape.head_dim_k)
    layers = keys.layers(shape, rope, scale)
    window = keys.number("attention.sliding_window", 0, least=0)
    if window:
        base = keys.real("rope.freq_base_swa", 10000.0)
        local = keys.checked_rope(RopeConfig(rope.n_dims, base, interleaved=False), shape)
        sees_all = _global_layers(keys)
        layers = tuple(
            layer if is_global else replace(layer, rope=local, window=window) for layer, is_global in zip(layers, sees_all, strict=True)
        )
    return keys.config(shape, layers, Gemma3Config, logit_softcap=keys.real("final_logit_softcapping", 0.0))


def _global_layers(keys: Keys) -> tuple[bool, ...]:
    """Which layers have no window: those that an array of the file leaves out, or the last of every `pattern` (6), where 0 means none."""
    is_local = keys.flags_per_layer("attention.sliding_window_pattern")
    if is_local is not None:
        return tuple(not local for local in is_local)
    pattern = keys.number("attention.sliding_window_pattern", 6, least=0)
    return tuple(pattern > 0 and layer % pattern == pattern - 1 for layer in range(keys.n_layer))


def build(b: GraphBuilder) -> Graph:
    """The graph of a step: logits `[n_vocab, outputs]`."""
    shape = b.config.shape
    x = b.embed(math.sqrt(shape.n_embd))  # [n_embd, R]
    for i, layer in enumerate(b.config.layers):
        h = b.norm(x, f"blk.{i}.attn_norm.weight", f"attn_norm.{i}")
        q, k, v = b.heads_of(i, h)
        q = b.rotate(b.norm(q, f"blk.{i}.attn_q_norm.weight", f"q_norm.{i}"), layer.rope, f"q.{i}")
        k = b.rotate(b.norm(k, f"blk.{i}.attn_k_norm.weight", f"k_norm.{i}"), layer.rope, f"k.{i}")
        h = b.attend(i, q, k, v)  # [head_dim * n_head, R]
        x, h = b.only_outputs(i, x, h)
        h = b.project(h, f"blk.{i}.attn_output", shape.n_embd)
        x = b.add(x, b.norm(h, f"blk.{i}.post_attention_norm.weight", f"post_attention_norm.{i}"), f"attn_residual.{i}")
        h = b.norm(x, f"blk.{i}.ffn_norm.weight", f"ffn_norm.{i}")
        h = b.feed_forward(h, i, "geglu_tanh")
        x = b.add(x, b.norm(h, f"blk.{i}.post_ffw_norm.weight", f"post_ffw_norm.{i}"), f"ffn_residual.{i}")
    return b.logits(x, softcap=b.config_as(Gemma3Config).logit_softcap)


GEMMA3 = Architecture("gemma3", read, build, dense("gemma3"))
