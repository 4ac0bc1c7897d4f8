"""What a policy is made of: facts about a model, and rules that say on which axis a tensor is cut and with which others.

A rule counts in *items* of its group (a KV head with its query heads, a neuron, a vocabulary row): all tensors of a group
are cut after the same items, however many elements an item takes in each of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from numba_meta.dtypes import DType
from numba_meta.split.state import MIRRORED_AXIS


class Described(Protocol):
    """Anything with a type and a shape (axis 0 first): `TensorFacts`, or a tensor as a model file describes it."""

    @property
    def dtype(self) -> DType: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class TensorFacts:
    """Type and shape (axis 0 first) of a tensor, without its data."""

    dtype: DType
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that decide its cuts, as its GGUF metadata gives them. Those that a model lacks are 0.

    `n_ff` counts the neurons of a dense feed-forward layer, `n_ff_expert` those of one routed expert, `n_ff_shared` those of
    all shared experts together. `delta_*` describe gated-delta layers, whose value heads come in equal groups per key
    head; `kda_head_dim` KDA layers, which have `n_head` heads; `mla_*` the heads of MLA layers, of which
    `mla_head_dim_nope` elements of K are not rotated. `d_conv` is the width of the short convolutions.
    """

    n_embd: int
    n_layer: int
    n_head: int
    n_head_kv: int
    head_dim_k: int
    head_dim_v: int
    n_ff: int
    n_vocab: int
    n_expert: int = 0
    n_ff_expert: int = 0
    n_ff_shared: int = 0
    d_conv: int = 0
    delta_heads_k: int = 0
    delta_heads_v: int = 0
    delta_head_dim_k: int = 0
    delta_head_dim_v: int = 0
    kda_head_dim: int = 0
    mla_head_dim_k: int = 0
    mla_head_dim_v: int = 0
    mla_head_dim_nope: int = 0


@dataclass(frozen=True)
class Part:
    """One segment of a tensor: elements per item under the name of a size in `Items.sizes`.

    `repeat` names how often the items of this part come in a row: value heads that are stored tile by tile, each tile
    with one head per key head, repeat as often as a key head has value heads.
    """

    size: str
    repeat: str = "one"


@dataclass(frozen=True)
class Rule:
    """Tensors whose name (without `blk.N.`) matches `pattern` in full: cut on `axis` with `group`, or mirrored."""

    pattern: str
    axis: int = MIRRORED_AXIS
    group: str = ""
    parts: tuple[Part, ...] = ()

    def matches(self, name: str) -> bool:
        """Whether this rule speaks of the tensor `name`."""
        return _compiled(self.pattern).fullmatch(name) is not None


@dataclass(frozen=True)
class Items:
    """What a group is counted in: `n` items called `name`, and the elements that one takes in each kind of part.

    A size of None means that such parts are mirrored. A cut must lie between `granule` items, besides what block sizes ask.
    """

    name: str
    n: int
    sizes: Mapping[str, int | None]
    granule: int = 1


@dataclass(frozen=True)
class LayerTable:
    """The rules of one kind of layer. `marker` is a pattern of a tensor that only this kind has ("" matches every layer).

    `mixer` is the group of its attention (or what stands for it). `states` are the rules of what is no weight: "q_heads" and
    "kv_heads", and what is kept per sequence, "cache_k", "cache_v", "conv_state" and "recurrent_state".
    """

    mixer: str
    rules: tuple[Rule, ...]
    states: Mapping[str, Rule]
    marker: str = ""


@dataclass(frozen=True)
class Family:
    """The policy of an architecture: its kinds of layers, told apart by their markers in this order, and the rules outside of layers."""

    name: str
    layers: tuple[LayerTable, ...]
    outside: tuple[Rule, ...]


def mirrored(pattern: str) -> Rule:
    """A rule for tensors that every device holds whole."""
    return Rule(pattern)


def cut(pattern: str, axis: int, group: str, *parts: str | Part) -> Rule:
    """A rule for tensors cut on `axis` with `group`, of one part or of several in a row."""
    return Rule(pattern, axis, group, tuple(Part(part) if isinstance(part, str) else part for part in parts))


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)
