"""Qwen3: heads of a width of their own, and a norm of each head of Q and K before rope over halves."""

from __future__ import annotations

from numba_meta.graph import Graph
from numba_meta.models.architectures.base import Architecture
from numba_meta.models.architectures.builder import GraphBuilder
from numba_meta.models.architectures.common import pre_norm_layers
from numba_meta.models.architectures.qwen2 import read
from numba_meta.split.families import dense


def build(b: GraphBuilder) -> Graph:
    """The graph of a step: logits `[n_vocab, outputs]`."""
    return b.logits(pre_norm_layers(b, b.embed(), head_norms=True))


QWEN3 = Architecture("qwen3", read, build, dense("qwen3"))
