"""Over axis 0: root-mean-square norm, the mean taken off, softmax; and the index of the largest element."""

from __future__ import annotations

from collections.abc import Sequence

from numba_meta.dtypes import F32, I32
from numba_meta.graph import Graph
from numba_meta.lowering import Lowering
from numba_meta.operation import NeedsGather, Operation, Params, register
from numba_meta.ops.base import check, new_tensor, no_rule, reduce_partial
from numba_meta.split.state import SplitState
from numba_meta.tensor import Rows, Tensor


def rms_norm(graph: Graph, x: Tensor, weight: Tensor, epsilon: float, name: str = "") -> Tensor:
    """`x / sqrt(mean(x²) + epsilon) * weight` over axis 0; weight float32 `[n]`."""
    return graph.apply("rms_norm", x, weight, name=name, epsilon=epsilon)


def center(graph: Graph, x: Tensor, name: str = "") -> Tensor:
    """`x - mean(x)` over axis 0; with `rms_norm` behind it a layer norm (Ba et al. 2016)."""
    return graph.apply("center", x, name=name)


def softmax(graph: Graph, x: Tensor, scale: float = 1.0, name: str = "") -> Tensor:
    """`exp(x * scale) / sum(exp(x * scale))` over axis 0."""
    return graph.apply("softmax", x, name=name, scale=scale)


def argmax(graph: Graph, x: Tensor, name: str = "") -> Tensor:
    """The index of the largest element of each row, the lowest of equal ones: int32 `[t]` from `[n, t]`."""
    return graph.apply("argmax", x, name=name)


def _over_rows(node: Tensor, states: Sequence[SplitState]) -> SplitState:
    """The source's state: it stays on any axis but 0, which must be whole; a sum must be complete."""
    reduce_partial(node, states)
    if states[0].axis == 0:
        raise NeedsGather(node.sources[0])
    return states[0]


@register
class RmsNorm(Operation):
    name = "rms_norm"

    def result(self, name: str, sources: Sequence[Tensor], params: Params) -> Tensor:
        x, weight = sources
        fits = x.dtype == F32 and weight.dtype == F32 and weight.shape == (x.shape[0], 1, 1, 1) and x.is_contiguous
        check(fits, "rms_norm", name, sources, "contiguous float32 x [n, ...] and weight [n]")
        return new_tensor("rms_norm", name, x.shape, sources, params, rows=x.rows)

    def split(self, node: Tensor, states: Sequence[SplitState]) -> SplitState:
        if not states[1].is_mirrored and not states[1].is_partial:
            raise no_rule(node, states)
        return _over_rows(node, states)

    def lower(self, node: Tensor, to: Lowering) -> None:
        kernel = to.kernels.norm.rms_norm
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


class _OverRows(Operation):
    """A result of the shape of its one source, whose rows must be whole."""

    def result(self, name: str, sources: Sequence[Tensor], params: Params) -> Tensor:
        (x,) = sources
        check(x.dtype == F32 and x.is_contiguous, self.name, name, sources, "contiguous float32 x [n, ...]")
        return new_tensor(self.name, name, x.shape, sources, params, rows=x.rows)

    def split(self, node: Tensor, states: Sequence[SplitState]) -> SplitState:
        return _over_rows(node, states)


@register
class Center(_OverRows):
    name = "center"

    def lower(self, node: Tensor, to: Lowering) -> None:
        (x,) = node.sources
        rows_per_token, count = to.norm_rows(x)
        strides = {"x_stride": x.strides[1], "y_stride": node.strides[1]}
        kernel = to.kernels.norm.center_rows
        to.call(kernel, reads=(x,), writes=(node,), x=x, y=node, n=x.shape[0], rows_per_token=rows_per_token, n_rows=count, **strides)


@register
class Softmax(_OverRows):
    name = "softmax"

    def lower(self, node: Tensor, to: Lowering) -> None:
        kernel = to.kernels.elementwise.softmax_rows
        (x,) = node.sources
        rows_per_token, count = to.norm_rows(x)
        check(rows_per_token == 1, "softmax", node.name, node.sources, "one row per token")
        strides = {"x_stride": x.strides[1], "out_stride": node.strides[1]}
        factor = float(node.params["scale"])
        to.call(kernel, reads=(x,), writes=(node,), x=x, out=node, n=x.shape[0], factor=factor, n_rows=count, **strides)


@register
class ArgMax(Operation):
    name = "argmax"

    def result(self, name: str, sources: Sequence[Tensor], params: Params) -> Tensor:
        (x,) = sources
        fits = x.dtype == F32 and x.is_contiguous and x.shape[2:] == (1, 1) and (x.rows is None or x.rows.axis == 1)
        check(fits, "argmax", name, sources, "contiguous float32 x [n, t]")
        rows = Rows(x.rows.count, 0) if x.rows else None
        return new_tensor("argmax", name, (x.shape[1],), sources, params, I32, rows)

    def split(self, node: Tensor, states: Sequence[SplitState]) -> SplitState:
        state = _over_rows(node, states)
        return state.on_axis(state.axis - 1)  # [n, t] becomes [t]

    def lower(self, node: Tensor, to: Lowering) -> None:
        kernel = to.kernels.reduce.argmax_rows
        (x,) = node.sources
        to.call(kernel, reads=(x,), writes=(node,), x=x, x_stride=x.strides[1], n=x.shape[0], ids=node, n_rows=to.count(x))
