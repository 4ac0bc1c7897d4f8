"""What the graph of a step is made for and how its leaves are divided: the same for a context that runs it and a planner that does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from numba_meta.dtypes import DType
from numba_meta.models.architectures.builder import BatchShape
from numba_meta.models.cache.cells import CacheShape
from numba_meta.models.cache.transport import HostCacheOptions
from numba_meta.ops.transport import WindowShape
from numba_meta.split.policy import CutPlan
from numba_meta.split.state import MIRRORED, SplitState
from numba_meta.tensor import Role, Tensor

SMALL_ROWS = 16  # up to here a row's bits do not depend on its batch, and sequences may share one


def batch_shape(
    cache: CacheShape,
    cache_types: tuple[DType, DType],
    host_cache: HostCacheOptions | None,
    n_rows: int,
    n_outputs: int,
    windows: Mapping[bool, WindowShape],
) -> BatchShape:
    """The capacities of a step over a cache; `windows`: of what is delivered, none where the cache lies on the devices."""
    return BatchShape(
        n_rows=n_rows,
        n_outputs=n_outputs,
        n_sequences=cache.n_sequences,
        n_positions=cache.n_positions,
        n_cells=cache.n_stored_cells,
        n_window_cells=cache.n_window_cells * cache.n_sequences,
        cache_type_k=cache_types[0],
        cache_type_v=cache_types[1],
        n_device_layers=host_cache.n_device_layers if host_cache else None,
        windows=windows,
    )


def leaf_state(cuts: CutPlan) -> Callable[[Tensor], SplitState]:
    """How each leaf of a graph is divided: weights and caches as planned, all others mirrored."""

    def state(leaf: Tensor) -> SplitState:
        if leaf.role is Role.WEIGHT:
            return cuts.weight(leaf.name)
        kind, _, layer = leaf.name.partition(".")
        if kind in ("cache_k", "cache_v"):
            cut: SplitState = getattr(cuts.layers[int(layer)], kind)
            return cut
        return MIRRORED

    return state
