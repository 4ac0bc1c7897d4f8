"""Granite: a Llama whose embedding, residuals, scores and logits are scaled by numbers of the file."""

from __future__ import annotations

from dataclasses import dataclass

from numba_meta.graph import Graph
from numba_meta.models.architectures.base import Architecture
from numba_meta.models.architectures.builder import GraphBuilder
from numba_meta.models.architectures.common import pre_norm_layers
from numba_meta.models.architectures.config import ModelConfig
from numba_meta.models.architectures.keys import Keys
from numba_meta.split.families import dense


@dataclass(frozen=True)
class GraniteConfig(ModelConfig):
    """`logit_scale` divides the logits, the others multiply."""

    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0


def read(keys: Keys) -> ModelConfig:
    """A scale of 0, or none, is 1; scores without a scale of their own are divided by sqrt(head_dim)."""
    shape = keys.shape()
    logit_scale = keys.real("logit_scale")
    if logit_scale == 0:
        raise keys.error(f"{keys.name_of('logit_scale')} is 0, which divides the logits; expected another number")
    rope = keys.rope(shape, interleaved=True) if keys.flag("rope.scaling.finetuned", True) else None
    layers = keys.layers(shape, rope, keys.real("attention.scale", 0.0) or None)
    return keys.config(
        shape,
        layers,
        GraniteConfig,
        embedding_scale=keys.real("embedding_scale", 0.0) or 1.0,
        residual_scale=keys.real("residual_scale", 0.0) or 1.0,
        logit_scale=logit_scale,
    )


def build(b: GraphBuilder) -> Graph:
    """The graph of a step: logits `[n_vocab, outputs]`."""
    config = b.config_as(GraniteConfig)
    x = pre_norm_layers(b, b.embed(config.embedding_scale), residual_scale=config.residual_scale)
    return b.logits(x, scale=1.0 / config.logit_scale)


GRANITE = Architecture("granite", read, build, dense("granite"))
