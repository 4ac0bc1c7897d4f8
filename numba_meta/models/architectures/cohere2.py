"""Cohere 2 (Command R7B): attention and feed-forward side by side behind one layer norm; only local layers know positions."""

from __future__ import annotations

from dataclasses import dataclass

from numba_meta.graph import Graph
from numba_meta.models.architectures.base import Architecture
from numba_meta.models.architectures.builder import GraphBuilder
from numba_meta.models.architectures.common import local_layers
from numba_meta.models.architectures.config import ModelConfig
from numba_meta.models.architectures.keys import Keys
from numba_meta.split.families import dense


@dataclass(frozen=True)
class Cohere2Config(ModelConfig):
    """`logit_scale` multiplies the logits."""

    logit_scale: float = 1.0


def read(keys: Keys) -> ModelConfig:
    """Three local layers, then a global one without positions, unless the file has another pattern."""
    shape = keys.shape()
    rope = keys.rope(shape, interleaved=True)
    layers = local_layers(keys, keys.layers(shape, None), keys.number("attention.sliding_window"), rope, pattern=4)
    return keys.config(shape, layers, Cohere2Config, "attention.layer_norm_epsilon", logit_scale=keys.real("logit_scale"))


def build(b: GraphBuilder) -> Graph:
    """The graph of a step: logits `[n_vocab, outputs]`."""
    config = b.config_as(Cohere2Config)
    x = b.embed()  # [n_embd, R]
    for i, layer in enumerate(config.layers):
        n = b.layer_norm(x, f"blk.{i}.attn_norm.weight", f"attn_norm.{i}")
        q, k, v = b.heads_of(i, n)
        h = b.attend(i, b.rotate(q, layer.rope, f"q.{i}"), b.rotate(k, layer.rope, f"k.{i}"), v)  # [head_dim * n_head, R]
        x, h, n = b.only_outputs(i, x, h, n)
        x = b.add(x, b.project(h, f"blk.{i}.attn_output", config.shape.n_embd), f"attn_residual.{i}")
        x = b.add(x, b.feed_forward(n, i, "swiglu"), f"ffn_residual.{i}")
    return b.logits(x, scale=config.logit_scale, layer_norm=True)


COHERE2 = Architecture("cohere2", read, build, dense("cohere2"))
