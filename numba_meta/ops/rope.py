"""Rotary position embedding. The angles of a step are computed once and shared by all layers of a kind."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from numba_meta.dtypes import F32, I32
from numba_meta.graph import Graph
from numba_meta.lowering import Lowering
from numba_meta.operation import Operation, Params, register
from numba_meta.ops.base import check, new_tensor, no_rule, reduce_partial
from numba_meta.split.state import MIRRORED, SplitState
from numba_meta.tensor import Rows, Tensor


def rope_angles(graph: Graph, positions: Tensor, inverse_frequencies: Sequence[float], magnitude: float = 1.0, name: str = "") -> Tensor:
    """Cosines, then sines, of `positions * inverse_frequencies`, times `magnitude`: float32 `[2 * half, t]` for int32 positions `[t]`."""
    return graph.apply("rope_angles", positions, name=name, inverse_frequencies=tuple(inverse_frequencies), magnitude=magnitude)


def rope(graph: Graph, x: Tensor, angles: Tensor, interleaved: bool, name: str = "") -> Tensor:
    """Rotates the first `2 * half` dims of each head of x `[head_dim, heads, t]`: pairs (2i, 2i+1) if interleaved, else (i, i + half)."""
    return graph.apply("rope", x, angles, name=name, interleaved=interleaved)


@register
class RopeAngles(Operation):
    name = "rope_angles"

    def result(self, name: str, sources: Sequence[Tensor], params: Params) -> Tensor:
        (positions,) = sources
        check(positions.dtype == I32, "rope_angles", name, sources, "int32 positions [t]")
        rows = Rows(positions.rows.count, 1) if positions.rows else None
        return new_tensor("rope_angles", name, (2 * len(params["inverse_frequencies"]), positions.shape[0]), sources, params, rows=rows)

    def split(self, node: Tensor, states: Sequence[SplitState]) -> SplitState:
        if states[0].is_mirrored:
            return MIRRORED
        raise no_rule(node, states)

    def lower(self, node: Tensor, to: Lowering) -> None:
        kernel = to.kernels.rope.rope_angles
        frequencies = to.constant(f"{node.name}.inverse_frequencies", np.asarray(node.params["inverse_frequencies"], np.float64))
        to.call(
            kernel,
            reads=(node.sources[0], frequencies),
            writes=(node,),
            positions=node.sources[0],
            inverse_frequencies=frequencies,
            table=node,
            table_stride=node.strides[1],
            half=node.shape[0] // 2,
            magnitude=float(node.params["magnitude"]),
            n_rows=to.count(node),
        )


@register
class Rope(Operation):
    name = "rope"

    def result(self, name: str, sources: Sequence[Tensor], params: Params) -> Tensor:
        x, angles = sources
        fits = x.dtype == F32 and x.is_contiguous and x.shape[2] == angles.shape[1] and angles.shape[0] <= x.shape[0]
        check(fits, "rope", name, sources, "contiguous float32 x [head_dim, heads, t] and angles [2 * half, t] with 2 * half <= head_dim")
        return new_tensor("rope", name, x.shape, sources, params, rows=x.rows)

    def split(self, node: Tensor, states: Sequence[SplitState]) -> SplitState:
        reduce_partial(node, states)
        if states[1].is_mirrored and states[0].axis not in (0, 2):  # the angles span both of these
            return states[0]
        raise no_rule(node, states)

    def lower(self, node: Tensor, to: Lowering) -> None:
        kernels = to.kernels.rope
        x, angles = node.sources
        to.call(
            kernels.rope_interleaved if node.params["interleaved"] else kernels.rope_halves,
            reads=(x, angles),
            writes=(node,),
            x=x,
            x_stride=x.strides[2],
            x_head_stride=x.strides[1],
            y=node,
            y_stride=node.strides[2],
            y_head_stride=node.strides[1],
            table=angles,
            table_stride=angles.strides[1],
            n_head=x.shape[1],
            head_dim=x.shape[0],
            half=angles.shape[0] // 2,
            n_rows=to.count(node),
        )
