"""Gemma 3: norms before and after each block, norms of Q and K per head, five local layers to one global, GELU."""

from __future__ import annotations

import math
from dataclasses import dataclass

from numba_meta.graph import Graph
from numba_meta.models.architectures.base import Architecture
from numba_meta.models.architectures.builder import GraphBuilder
from numba_meta.models.architectures.common import local_layers, sandwiched_layers
from numba_meta.models.architectures.config import ModelConfig, RopeConfig
from numba_meta.models.architectures.keys import Keys
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
    if window := keys.number("attention.sliding_window", 0, least=0):
        local = keys.checked_rope(RopeConfig(rope.n_dims, keys.real("rope.freq_base_swa", 10000.0)), shape)
        layers = local_layers(keys, layers, window, local, pattern=6)
    return keys.config(shape, layers, Gemma3Config, logit_softcap=keys.real("final_logit_softcapping", 0.0))


def build(b: GraphBuilder) -> Graph:
    """The graph of a step: logits `[n_vocab, outputs]`."""
    config = b.config_as(Gemma3Config)
    x = sandwiched_layers(b, b.embed(math.sqrt(config.shape.n_embd)), head_norms=True)
    return b.logits(x, softcap=config.logit_softcap)


GEMMA3 = Architecture("gemma3", read, build, dense("gemma3"))
