"""Matrix products with a weight: `y[n, t] = sum over k of W[k, n] * x[k, t]`."""

from __future__ import annotations

from collections.abc import Sequence

from numba_meta.dtypes import F32
from numba_meta.errors import DeviceError
from numba_meta.graph import Graph
from numba_meta.lowering import Lowering
from numba_meta.operation import NeedsGather, Operation, Params, register
from numba_meta.ops.base import check, new_tensor, no_rule, reduce_partial
from numba_meta.split.state import MIRRORED, PARTIAL, SplitState
from numba_meta.tensor import Tensor


def matmul(graph: Graph, weight: Tensor, x: Tensor, name: str = "") -> Tensor:
    """`[n, t]` from a weight `[k, n]` and activations `[k, t]`; with an axis 2, one product per index of it (per head)."""
    return graph.apply("matmul", weight, x, name=name)


@register
class MatMul(Operation):
    name = "matmul"

    def result(self, name: str, sources: Sequence[Tensor], params: Params) -> Tensor:
        weight, x = sources
        fits = weight.shape[0] == x.shape[0] and weight.shape[2:] == x.shape[2:] and x.dtype == F32
        fits = fits and weight.rows is None and (x.rows is None or x.rows.axis != 0)
        check(fits, "matmul", name, sources, "W [k, n] and float32 x [k, t] with the same k")
        return new_tensor("matmul", name, (weight.shape[1], x.shape[1], *x.shape[2:]), sources, params, rows=x.rows)

    def split(self, node: Tensor, states: Sequence[SplitState]) -> SplitState:
        weight, x = states
        reduce_partial(node, states)
        if weight.is_mirrored and x.is_mirrored:
            return MIRRORED
        if weight.axis == 1 and x.is_mirrored:
            return weight.on_axis(0)  # column parallel
        if weight.axis == 0 and x.axis == 0 and weight.same_cuts(x):
            return PARTIAL  # row parallel
        if weight.axis == 1 and x.axis == 0:
            raise NeedsGather(node.sources[1])  # column parallel from pieces of the inputs, where the policy gathers
        if weight.is_mirrored and x.axis == 1:
            return x
        if weight.axis == 2 == x.axis and weight.same_cuts(x):
            return x
        raise no_rule(node, states)

    def lower(self, node: Tensor, to: Lowering) -> None:
        weight, x = node.sources
        if node.shape[2] * node.shape[3] != 1:
            raise DeviceError(f"matmul {node.name}: devices multiply by one matrix, not one per head {node.shape}")
        columns = to.kernels.matmul.choose_columns(node.shape[1])
        activation, activation_stride = to.activation(x, weight.dtype, columns)
        kernel = to.kernels.matmul.matmul_kernel(weight.dtype, to.exact, columns)
        to.call(
            kernel,
            reads=(weight, activation),
            writes=(node,),
            w=weight,
            x=activation,
            x_stride=activation_stride,
            y=node,
            y_stride=node.strides[1],
            n_out=node.shape[0],
            k=weight.shape[0],
            n_rows=to.count(node),
        )
