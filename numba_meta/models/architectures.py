"""Which function builds the graph of a step, by the architecture that a file names."""

from __future__ import annotations

from numba_meta.graph import Graph
from numba_meta.models import gemma3, llama
from numba_meta.models.builder import GraphBuilder
from numba_meta.models.config import ModelConfig

_BUILDERS = {"llama": llama.build, "gemma3": gemma3.build}


def build_graph(config: ModelConfig, builder: GraphBuilder) -> Graph:
    """The graph of a step of this model."""
    return _BUILDERS[config.architecture](builder)
