"""Qwen2: a Llama with rope over halves, and biases of Q, K, V and of the head where the file has them."""

from __future__ import annotations

from numba_meta.graph import Graph
from numba_meta.models.architectures.base import Architecture
from numba_meta.models.architectures.builder import GraphBuilder
from numba_meta.models.architectures.common import pre_norm_layers
from numba_meta.models.architectures.config import ModelConfig
from numba_meta.models.architectures.keys import Keys
from numba_meta.split.families import dense


def read(keys: Keys) -> ModelConfig:
    """Nothing beyond what all have."""
    shape = keys.shape()
    return keys.config(shape, keys.layers(shape, keys.rope(shape, interleaved=False)))


def build(b: GraphBuilder) -> Graph:
    """The graph of a step: logits `[n_vocab, outputs]`."""
    return b.logits(pre_norm_layers(b, b.embed()), may_have_bias=True)


QWEN2 = Architecture("qwen2", read, build, dense("qwen2"))
