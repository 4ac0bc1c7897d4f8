"""Functions of one element: activations, clamps, a scale with a bias."""

from __future__ import annotations

from collections.abc import Sequence

from numba_meta.dtypes import F32
from numba_meta.graph import Graph
from numba_meta.lowering import Lowering
from numba_meta.operation import Operation, Params, register
from numba_meta.ops.base import check, new_tensor, reduce_partial
from numba_meta.split.state import SplitState
from numba_meta.tensor import Tensor

KINDS = ("silu", "gelu_tanh", "gelu_erf", "relu", "relu_squared", "sigmoid", "tanh", "exp", "clamp", "softcap", "scale_add")


def unary(graph: Graph, x: Tensor, kind: str, name: str = "") -> Tensor:
    """An activation of each element; kind is one of KINDS that takes no numbers."""
    return graph.apply("unary", x, name=name, kind=kind, p=0.0, q=0.0)


def clamp(graph: Graph, x: Tensor, low: float, high: float, name: str = "") -> Tensor:
    """x, at least `low` and at most `high`."""
    return graph.apply("unary", x, name=name, kind="clamp", p=low, q=high)


def softcap(graph: Graph, x: Tensor, cap: float, name: str = "") -> Tensor:
    """`cap * tanh(x / cap)`."""
    return graph.apply("unary", x, name=name, kind="softcap", p=cap, q=0.0)


def scale_add(graph: Graph, x: Tensor, factor: float, bias: float, name: str = "") -> Tensor:
    """`x * factor + bias`. Unlike a plain scale this is not linear: summands are added up first."""
    return graph.apply("unary", x, name=name, kind="scale_add", p=factor, q=bias)


@register
class Unary(Operation):
    name = "unary"

    def result(self, name: str, sources: Sequence[Tensor], params: Params) -> Tensor:
        (x,) = sources
        fits = x.dtype == F32 and x.is_contiguous and params["kind"] in KINDS
        check(fits, "unary", name, sources, f"a contiguous float32 tensor and a kind of {KINDS}, not {params['kind']}")
        return new_tensor("unary", name, x.shape, sources, params, rows=x.rows)

    def split(self, node: Tensor, states: Sequence[SplitState]) -> SplitState:
        reduce_partial(node, states)
        return states[0]

    def lower(self, node: Tensor, to: Lowering) -> None:
        kernels = to.kernels.elementwise
        (x,) = node.sources
        n, stride = to.row_extent(x)
        numbers = {"p": float(node.params["p"]), "q": float(node.params["q"])}
        kernel = getattr(kernels, node.params["kind"])
        places = {"x": x, "x_stride": stride, "out": node, "out_stride": stride, "n": n, "n_rows": to.count(node)}
        to.call(kernel, reads=(x,), writes=(node,), **places, **numbers)
