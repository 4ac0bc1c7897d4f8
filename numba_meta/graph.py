"""Graphs: tensors in the order in which they are computed.

`Graph.apply` is the one way in: it asks the operation for the result's shape, so that a node that exists fits its sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numba_meta.dtypes import DType
from numba_meta.errors import ShapeError
from numba_meta.operation import operation
from numba_meta.tensor import Role, Rows, Tensor, contiguous_strides, pad_shape


class Graph:
    """Leaves and nodes of one computation. Nodes are in topological order: sources come before what reads them."""

    def __init__(self, name: str = "graph") -> None:
        self.name = name
        self.leaves: list[Tensor] = []
        self.nodes: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self._names: set[str] = set()

    def leaf(self, name: str, dtype: DType, shape: Sequence[int], role: Role, rows: Rows | None = None) -> Tensor:
        """A weight, input or cache tensor; contiguous. Raises `ShapeError` for an impossible shape or a name that is taken."""
        full = pad_shape(shape)
        tensor = Tensor(name, dtype, full, contiguous_strides(dtype, full), role=role, rows=rows)
        self._claim(name)
        self.leaves.append(tensor)
        return tensor

    def apply(self, op: str, *sources: Tensor, name: str = "", **params: Any) -> Tensor:
        """Adds the result of an operation. Raises `ShapeError`, and adds nothing, where the sources do not fit it or the name is taken."""
        tensor = operation(op).result(name or f"{op}_{len(self.nodes)}", sources, params)
        self._claim(tensor.name)
        self.nodes.append(tensor)
        return tensor

    def output(self, tensor: Tensor) -> Tensor:
        """Marks a tensor that the host reads after a step."""
        self.outputs.append(tensor)
        return tensor

    def _claim(self, name: str) -> None:
        if name in self._names:
            raise ShapeError(f"two tensors of {self.name} would be called {name}; names are unique in a graph")
        self._names.add(name)

    def __repr__(self) -> str:
        return f"<Graph {self.name}: {len(self.leaves)} leaves, {len(self.nodes)} nodes>"
