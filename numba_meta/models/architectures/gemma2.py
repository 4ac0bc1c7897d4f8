"""Gemma 2: norms before and after each block, every other layer local, scores and logits capped, GELU."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from numba_meta.graph import Graph
from numba_meta.models.architectures.base import Architecture
from numba_meta.models.architectures.builder import GraphBuilder
from numba_meta.models.architectures.common import local_layers, sandwiched_layers
from numba_meta.models.architectures.config import ModelConfig
from numba_meta.models.architectures.keys import Keys
from numba_meta.split.families import dense

_LAYERS_OF_27B = 46  # of this size alone scores are scaled by the width, and no key says so


@dataclass(frozen=True)
class Gemma2Config(ModelConfig):
    """`score_softcap`, `logit_softcap`: scores and logits stay within so much of 0."""

    score_softcap: float = 50.0
    logit_softcap: float = 30.0


def read(keys: Keys) -> ModelConfig:
    """Caps and window have usual values where the file has none; the first of two layers is local."""
    shape = keys.shape()
    rope = keys.rope(shape, interleaved=False)
    scale = 1.0 / math.sqrt(shape.n_embd / shape.n_head if shape.n_layer == _LAYERS_OF_27B else shape.head_dim_k)
    window = keys.number("attention.sliding_window", 4096)
    own = replace(rope, base=keys.real("rope.freq_base_swa", rope.base))
    layers = local_layers(keys, keys.layers(shape, rope, scale), window, keys.checked_rope(own, shape), pattern=2)
    return keys.config(
        shape,
        layers,
        Gemma2Config,
        score_softcap=keys.real("attn_logit_softcapping", 50.0),
        logit_softcap=keys.real("final_logit_softcapping", 30.0),
    )


def build(b: GraphBuilder) -> Graph:
    """The graph of a step: logits `[n_vocab, outputs]`."""
    config = b.config_as(Gemma2Config)
    x = sandwiched_layers(b, b.embed(math.sqrt(config.shape.n_embd)), softcap=config.score_softcap)
    return b.logits(x, softcap=config.logit_softcap)


GEMMA2 = Architecture("gemma2", read, build, dense("gemma2"))
