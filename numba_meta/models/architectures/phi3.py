"""Phi-3: a Llama whose files hold Q, K and V in one tensor, gate and up in another, with factors of rope for short and long contexts."""

from __future__ import annotations

from collections.abc import Mapping

from numba_meta.graph import Graph
from numba_meta.models.architectures.base import Architecture, Parts, fused_heads
from numba_meta.models.architectures.builder import GraphBuilder
from numba_meta.models.architectures.common import pre_norm_layers
from numba_meta.models.architectures.config import ModelConfig
from numba_meta.models.architectures.keys import Keys
from numba_meta.split.families import dense
from numba_meta.split.rules import Described


def read(keys: Keys) -> ModelConfig:
    """Part of each head may stay unrotated. A sliding window, which some files name, is not applied: llama.cpp does not, either."""
    shape = keys.shape()
    return keys.config(shape, keys.layers(shape, keys.rope(shape, interleaved=False, has_long=True)))


def parts(config: ModelConfig, tensors: Mapping[str, Described]) -> Parts:
    """Besides Q, K and V: `ffn_up` holds the gate, then what it gates."""
    found = fused_heads(config, tensors)
    for i, layer in enumerate(config.layers):
        if f"blk.{i}.ffn_gate.weight" not in tensors:
            found[f"blk.{i}.ffn_up.weight"] = ((f"blk.{i}.ffn_gate.weight", layer.n_ff), (f"blk.{i}.ffn_up.weight", layer.n_ff))
    return found


def build(b: GraphBuilder) -> Graph:
    """The graph of a step: logits `[n_vocab, outputs]`."""
    return b.logits(pre_norm_layers(b, b.embed()), may_have_bias=True)


PHI3 = Architecture("phi3", read, build, dense("phi3"), parts)
