"""Element by element: sums, products, scales, activations."""

from __future__ import annotations

from collections.abc import Sequence

from numba_meta.dtypes import F32
from numba_meta.graph import Graph
from numba_meta.lowering import Lowering
from numba_meta.operation import NeedsGather, Operation, Params, register
from numba_meta.ops.base import check, new_tensor, no_rule, reduce_partial
from numba_meta.split.state import PARTIAL, SplitState
from numba_meta.tensor import Tensor

GLU_KINDS = ("swiglu", "geglu_tanh", "geglu_erf", "reglu", "sigmoid_gate")


def add(graph: Graph, x: Tensor, y: Tensor, name: str = "") -> Tensor:
    """`x + y`; y may have extent 1 where x has more (a bias)."""
    return graph.apply("add", x, y, name=name)


def mul(graph: Graph, x: Tensor, y: Tensor, name: str = "") -> Tensor:
    """`x * y`; y may have extent 1 where x has more."""
    return graph.apply("mul", x, y, name=name)


def scale(graph: Graph, x: Tensor, factor: float, name: str = "") -> Tensor:
    """`x * factor`."""
    return graph.apply("scale", x, name=name, factor=factor)


def glu(graph: Graph, gate: Tensor, up: Tensor, kind: str, name: str = "") -> Tensor:
    """`activation(gate) * up`; kind is one of GLU_KINDS."""
    return graph.apply("glu", gate, up, name=name, kind=kind)


class _Binary(Operation):
    """`x op y` where y is as large as x or broadcasts along some axes of it."""

    def result(self, name: str, sources: Sequence[Tensor], params: Params) -> Tensor:
        x, y = sources
        fits = x.dtype == F32 == y.dtype and all(m in (1, n) for n, m in zip(x.shape, y.shape, strict=True))
        fits = fits and x.is_contiguous and y.is_contiguous
        check(fits, self.name, name, sources, "contiguous float32 tensors, the second broadcast to the first")
        return new_tensor(self.name, name, x.shape, sources, params, rows=x.rows)

    def lower(self, node: Tensor, to: Lowering) -> None:
        kernels = to.kernels.elementwise
        x, y = node.sources
        n, x_stride = to.row_extent(x)
        whole = y.shape == x.shape
        fits = whole or (y.n_elements == n and y.rows is None)
        check(fits, self.name, node.name, node.sources, "a second tensor of one row or of all rows")
        to.call(
            getattr(kernels, self.name),
            reads=(x, y),
            writes=(node,),
            x=x,
            x_stride=x_stride,
            y=y,
            y_stride=x_stride if whole else 0,
            out=node,
            out_stride=x_stride,
            n=n,
            n_rows=to.count(node),
        )


def _broadcast(node: Tensor, states: Sequence[SplitState]) -> SplitState | None:
    """The state where both are cut alike, or y is MIRRORED and does not span the axis on which x is cut; None for all others.

    Only y broadcasts (the shape rule), so a MIRRORED x spans every axis on which y can be cut.
    """
    x, y = states
    if x.axis == y.axis and x.same_cuts(y) and not x.is_partial:
        return x
    if x.is_split and y.is_mirrored and node.sources[1].shape[x.axis] == 1:
        return x
    return None


class _Sum(_Binary):
    def split(self, node: Tensor, states: Sequence[SplitState]) -> SplitState:
        x, y = states
        if x.is_partial and y.is_partial:
            return PARTIAL
        reduce_partial(node, states)
        state = _broadcast(node, states)
        if state is None:
            cut = [source for source, s in zip(node.sources, states, strict=True) if s.axis == 0]
            if len(cut) == 1 and (x.is_mirrored or y.is_mirrored):
                raise NeedsGather(*cut)  # a MIRRORED operand that spans the split axis, where the policy gathers
            raise no_rule(node, states)
        return state


class _Product(_Binary):
    def split(self, node: Tensor, states: Sequence[SplitState]) -> SplitState:
        x, y = states
        if x.is_partial and y.is_mirrored:
            return PARTIAL
        if self.name == "mul" and y.is_partial and x.is_mirrored:
            return PARTIAL
        reduce_partial(node, states)
        state = _broadcast(node, states)
        if state is None:
            raise no_rule(node, states)
        return state


@register
class Add(_Sum):
    name = "add"


@register
class Sub(_Sum):
    name = "sub"


@register
class Mul(_Product):
    name = "mul"


@register
class Div(_Product):
    name = "div"


@register
class Scale(Operation):
    name = "scale"

    def result(self, name: str, sources: Sequence[Tensor], params: Params) -> Tensor:
        (x,) = sources
        check(x.dtype == F32 and x.is_contiguous, "scale", name, sources, "a contiguous float32 tensor")
        return new_tensor("scale", name, x.shape, sources, params, rows=x.rows)

    def split(self, node: Tensor, states: Sequence[SplitState]) -> SplitState:
        return states[0]

    def lower(self, node: Tensor, to: Lowering) -> None:
        kernel = to.kernels.elementwise.scale
        (x,) = node.sources
        n, stride = to.row_extent(x)
        strides = {"x_stride": stride, "out_stride": stride}
        factor = float(node.params["factor"])
        to.call(kernel, reads=(x,), writes=(node,), x=x, out=node, n=n, p=factor, q=0.0, n_rows=to.count(node), **strides)


@register
class Glu(Operation):
    name = "glu"

    def result(self, name: str, sources: Sequence[Tensor], params: Params) -> Tensor:
        gate, up = sources
        fits = gate.dtype == F32 == up.dtype and gate.shape == up.shape and gate.is_contiguous and up.is_contiguous
        check(fits and params["kind"] in GLU_KINDS, "glu", name, sources, f"two equal contiguous float32 tensors and a kind of {GLU_KINDS}")
        return new_tensor("glu", name, gate.shape, sources, params, rows=gate.rows)

    def split(self, node: Tensor, states: Sequence[SplitState]) -> SplitState:
        reduce_partial(node, states)
        gate, up = states
        if gate.axis != up.axis or not gate.same_cuts(up):
            raise no_rule(node, states)
        return gate

    def lower(self, node: Tensor, to: Lowering) -> None:
        kernels = to.kernels.elementwise
        gate, up = node.sources
        n, stride = to.row_extent(gate)
        to.call(
            getattr(kernels, node.params["kind"]),
            reads=(gate, up),
            writes=(node,),
            x=gate,
            x_stride=stride,
            y=up,
            y_stride=stride,
            out=node,
            out_stride=stride,
            n=n,
            n_rows=to.count(node),
        )
