"""What an architecture is: a name, a reader of its keys, the graph of a step, and how its tensors are cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from numba_meta.graph import Graph
from numba_meta.models.architectures.builder import GraphBuilder
from numba_meta.models.architectures.config import ModelConfig
from numba_meta.models.architectures.keys import Keys
from numba_meta.split.rules import Described, Family

Parts = dict[str, tuple[tuple[str, int], ...]]


def fused_heads(config: ModelConfig, tensors: Mapping[str, Described]) -> Parts:
    """Q, K and V in one tensor, where a layer has none of its own for Q."""
    parts: Parts = {}
    dim_k, dim_v = config.shape.head_dim_k, config.shape.head_dim_v
    for i, layer in enumerate(config.layers):
        widths = (layer.n_head * dim_k, layer.n_head_kv * dim_k, layer.n_head_kv * dim_v)
        for kind in ("weight", "bias"):
            fused = f"blk.{i}.attn_qkv.{kind}"
            if fused in tensors and f"blk.{i}.attn_q.{kind}" not in tensors:
                parts[fused] = tuple((f"blk.{i}.attn_{part}.{kind}", n) for part, n in zip("qkv", widths, strict=True))
    return parts


@dataclass(frozen=True)
class Architecture:
    """`name`: what `general.architecture` says. `read` makes the configuration, `build` the graph: logits `[n_vocab, outputs]`.

    `parts`: which tensors of a file hold several that the graph reads apart, one after the other: name -> (name, outputs) of each.
    """

    name: str
    read: Callable[[Keys], ModelConfig]
    build: Callable[[GraphBuilder], Graph]
    family: Family
    parts: Callable[[ModelConfig, Mapping[str, Described]], Parts] = fused_heads
