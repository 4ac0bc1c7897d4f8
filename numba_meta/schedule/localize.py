"""One device's graph: the same operations on the pieces that the device holds."""

from __future__ import annotations

from dataclasses import dataclass

from numba_meta.errors import SplitError
from numba_meta.graph import Graph
from numba_meta.operation import operation
from numba_meta.schedule.infer import SplitGraph
from numba_meta.tensor import Rows, Tensor


@dataclass(frozen=True)
class DeviceGraph:
    """The graph of one device and, for every tensor of the whole graph, its simple tensor on this device.

    `device` counts among the devices of this process.
    """

    device: int
    graph: Graph
    simple: dict[Tensor, Tensor]


def localize(split: SplitGraph, device: int, position: int | None = None) -> DeviceGraph:
    """The graph that a device computes; `position`: its place among the devices of this process (None: `device`, all are here).

    A piece whose shape differs from what its state says is a `SplitError`."""
    graph = Graph(f"{split.graph.name}@{device}")
    simple: dict[Tensor, Tensor] = {}
    for leaf in split.graph.leaves:
        rows = Rows(simple[leaf.rows.count], leaf.rows.axis) if leaf.rows else None
        simple[leaf] = graph.leaf(leaf.name, leaf.dtype, split.states[leaf].piece_shape(leaf.shape, device), leaf.role, rows)
    for node in split.graph.nodes:
        op, state = operation(node.op), split.states[node]
        params = op.localize(node, [split.states[s] for s in node.sources], state, device)
        piece = op.result(node.name, [simple[s] for s in node.sources], params)
        expected = state.piece_shape(node.shape, device)
        if piece.shape != expected:
            raise SplitError(f"{node.op} {node.name}: device {device} gets a piece {list(piece.shape)}, but {state} means {list(expected)}")
        graph.nodes.append(piece)
        simple[node] = piece
    graph.outputs = [simple[output] for output in split.graph.outputs]
    return DeviceGraph(device if position is None else position, graph, simple)
