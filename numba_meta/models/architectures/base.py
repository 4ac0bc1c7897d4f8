"""What an architecture is: a name, a reader of its keys, the graph of a step, and how its tensors are cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from numba_meta.graph import Graph
from numba_meta.models.architectures.keys import Keys
from numba_meta.models.builder import GraphBuilder
from numba_meta.models.config import ModelConfig
from numba_meta.split.rules import Family


@dataclass(frozen=True)
class Architecture:
    """`name`: what `general.architecture` says. `read` makes the configuration, `build` the graph: logits `[n_vocab, outputs]`."""

    name: str
    read: Callable[[Keys], ModelConfig]
    build: Callable[[GraphBuilder], Graph]
    family: Family
