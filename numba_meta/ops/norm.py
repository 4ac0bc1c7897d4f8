"""Normalization over axis 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from numba_meta.dtypes import F32
from numba_meta.graph import Graph
from numba_meta.ops.base import NeedsGather, Operation, Params, check, new_tensor, no_rule, reduce_partial, register
from numba_meta.split.state import SplitState
from numba_meta.tensor import Tensor

if TYPE_CHECKING:
    from numba_meta.schedule.lower import CpuLowering


def rms_norm(graph: Graph, x: Tensor, weight: Tensor, epsilon: float, name: str = "") -> Tensor:
    """`x / sqrt(mean(x²) + epsilon) * weight` over axis 0; weight float32 `[n]`."""
    return graph.apply("rms_norm", x, weight, name=name, epsilon=epsilon)


@register
class RmsNorm(Operation):
    name = "rms_norm"

    def result(self, name: str, sources: Sequence[Tensor], params: Params) -> Tensor:
        x, weight = sources
        fits = x.dtype == F32 and weight.dtype == F32 and weight.shape == (x.shape[0], 1, 1, 1) and x.is_contiguous
        check(fits, "rms_norm", name, sources, "contiguous float32 x [n, ...] and weight [n]")
        return new_tensor("rms_norm", name, x.shape, sources, params, rows=x.rows)

    def split(self, node: Tensor, states: Sequence[SplitState]) -> SplitState:
        x, weight = states
        reduce_partial(node, states)
        if not weight.is_mirrored:
            raise no_rule(node, states)
        if x.axis == 0:
            raise NeedsGather(node.sources[0])
        return x

    def lower_cpu(self, node: Tensor, to: CpuLowering) -> None:
        from numba_meta.kernels.cpu.norm import rms_norm as kernel

        x, weight = node.sources
        rows_per_token, count = to.norm_rows(x)
        to.call(
            kernel,
            reads=(x, weight),
            writes=(node,),
            x=x,
            x_stride=x.strides[1],
            weight=weight,
            y=node,
            y_stride=node.strides[1],
            n=x.shape[0],
            rows_per_token=rows_per_token,
            n_rows=count,
            eps=float(node.params["epsilon"]),
        )
