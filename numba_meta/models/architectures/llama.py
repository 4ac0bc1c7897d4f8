"""Llama: pre-norm attention and gated feed-forward, rope over interleaved pairs. Also SmolLM2 and Mistral."""

from __future__ import annotations

from numba_meta.graph import Graph
from numba_meta.models.architectures.base import Architecture
from numba_meta.models.architectures.builder import GraphBuilder
from numba_meta.models.architectures.common import pre_norm_layers
from numba_meta.models.architectures.config import ModelConfig
from numba_meta.models.architectures.keys import Keys
from numba_meta.split.families import EXPERTS, dense


def read(keys: Keys) -> ModelConfig:
    """Files for long contexts (Llama 3.1 and later) bring a factor per rotated pair."""
    keys.refuse_experts()
    shape = keys.shape()
    rope = keys.rope(shape, interleaved=True, factors=keys.factors("rope_freqs.weight"))
    return keys.config(shape, keys.layers(shape, rope))


def build(b: GraphBuilder) -> Graph:
    """The graph of a step: logits `[n_vocab, outputs]`."""
    return b.logits(pre_norm_layers(b, b.embed()))


LLAMA = Architecture("llama", read, build, dense("llama", *EXPERTS))
