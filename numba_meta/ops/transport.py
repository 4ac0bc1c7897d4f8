"""Between the host and the devices: delivering the window of a host-resident cache, writing new rows back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from numba_meta.dtypes import I32, I64
from numba_meta.graph import Graph
from numba_meta.lowering import Lowering
from numba_meta.operation import Operation, Params, register
from numba_meta.ops.base import check, new_tensor, no_rule
from numba_meta.split.state import SplitState
from numba_meta.tensor import Role, Tensor


class WindowShape(NamedTuple):
    """What a delivery has room for: cells of each of so many streams; and the most that can come."""

    n_cells: int
    n_streams: int
    n_cells_full: int
    n_streams_full: int

    @property
    def capacity(self) -> int:
        """Cells in all."""
        return self.n_cells * self.n_streams


def deliver(
    graph: Graph,
    cache: Tensor,
    streams: Tensor,
    n_streams: Tensor,
    n_cells: Tensor,
    layer: int,
    part: str,
    window: WindowShape,
    name: str = "",
) -> Tensor:
    """The window `[n, capacity]` of a host-resident cache `[n, cells]` on the devices.

    The first `n_cells` cells of each stream that `streams` (int32) names, one stream after the other. `layer` and `part` (k or v) say which
    slot of the ring holds it.
    """
    return graph.apply("deliver", cache, streams, n_streams, n_cells, name=name, layer=layer, part=part, **window._asdict())


def write_back(graph: Graph, cache: Tensor, window: Tensor, slot_cells: Tensor, cells: Tensor, layer: int, name: str = "") -> Tensor:
    """Copies this step's rows, stored in a window at `slot_cells`, to their `cells` of the host-resident cache; a view of the cache."""
    return graph.apply("write_back", cache, window, slot_cells, cells, name=name, layer=layer)


@register
class Deliver(Operation):
    name = "deliver"

    def result(self, name: str, sources: Sequence[Tensor], params: Params) -> Tensor:
        cache, streams, n_streams, n_cells = sources
        fits = cache.role is Role.HOST and streams.dtype == I32 and n_streams.dtype == I64 == n_cells.dtype
        check(fits, "deliver", name, sources, "a host-resident cache [n, cells], int32 streams, int64 counts of streams and cells")
        return new_tensor("deliver", name, (cache.shape[0], params["n_cells"] * params["n_streams"]), sources, params, cache.dtype)

    def split(self, node: Tensor, states: Sequence[SplitState]) -> SplitState:
        cache, *counts = states
        if all(state.is_mirrored for state in counts) and (cache.is_mirrored or cache.axis == 0):
            return cache  # the destination takes the state of the cache
        raise no_rule(node, states)

    def lower(self, node: Tensor, to: Lowering) -> None:
        to.transport.deliver(node)


@register
class WriteBack(Operation):
    name = "write_back"

    def result(self, name: str, sources: Sequence[Tensor], params: Params) -> Tensor:
        cache, window, slot_cells, cells = sources
        fits = cache.role is Role.HOST and window.dtype == cache.dtype and window.shape[0] == cache.shape[0]
        fits = fits and slot_cells.dtype == I32 == cells.dtype
        check(fits, "write_back", name, sources, "a host-resident cache, a window of it, int32 cells")
        return Tensor(name, cache.dtype, cache.shape, cache.strides, "write_back", tuple(sources), dict(params), cache.role, cache)

    def split(self, node: Tensor, states: Sequence[SplitState]) -> SplitState:
        cache, window, *cells = states
        if cache == window and all(state.is_mirrored for state in cells):
            return cache
        raise no_rule(node, states)

    def lower(self, node: Tensor, to: Lowering) -> None:
        to.transport.write_back(node)
