"""Views and copies that change the order or the shape, not the values."""

from __future__ import annotations

import math
from collections.abc import Sequence

from numba_meta.graph import Graph
from numba_meta.lowering import Lowering
from numba_meta.operation import Operation, Params, register
from numba_meta.ops.base import check, new_tensor, no_rule
from numba_meta.split.state import Segment, SplitState, cut_points
from numba_meta.tensor import Rows, Shape, Tensor, contiguous_strides, format_shape, pad_shape


def reshape(graph: Graph, x: Tensor, shape: Sequence[int], name: str = "") -> Tensor:
    """A contiguous tensor under another shape of as many elements; a view. Tokens lie along the last axis of `shape`, if x has them."""
    return graph.apply("reshape", x, name=name, shape=pad_shape(shape), rows_axis=len(shape) - 1)


def permute(graph: Graph, x: Tensor, axes: Sequence[int], name: str = "") -> Tensor:
    """Axis i of x becomes axis `axes[i]` of the result; a view."""
    return graph.apply("permute", x, name=name, axes=tuple(axes))


def slice_axis(graph: Graph, x: Tensor, axis: int, start: int, stop: int, name: str = "") -> Tensor:
    """The range `[start, stop)` of one axis; a view with the same strides."""
    return graph.apply("slice", x, name=name, axis=axis, start=start, stop=stop)


def contiguous(graph: Graph, x: Tensor, name: str = "") -> Tensor:
    """A copy without gaps."""
    return graph.apply("contiguous", x, name=name)


class _View(Operation):
    is_view = True

    def lower(self, node: Tensor, to: Lowering) -> None:
        """Nothing is computed."""


def _view(op: str, name: str, x: Tensor, params: Params, shape: Shape, strides: Shape, offset: int, rows: Rows | None) -> Tensor:
    return Tensor(name, x.dtype, shape, strides, op, (x,), dict(params), x.role, x, offset, rows)


def reshaped_state(state: SplitState, old: Shape, new: Shape, tokens: tuple[int, int] | None = None) -> SplitState | None:
    """The state of a reshaped tensor, or None where the cut falls inside an element of every axis.

    In flat elements the cut repeats with a period: the elements below the axis times the sum of the extents. An axis can be cut so if its
    stride divides every cut and it spans whole periods; more than one period inside it becomes a repeat count. Where several axes can
    (extents of 1, all on one device), the one that spans as much as the old axis did is meant. `tokens` is the token axis before and
    after: a cut below it stays below it.
    """
    if not state.is_split or (old == new and (tokens is None or tokens[0] == tokens[1])):
        return state
    simple = len(state.segments) == 1
    inner, unit = math.prod(old[: state.axis]), math.prod(old[: state.axis + 1])
    period = inner * sum(state.segments[0].extents) if simple else unit
    found: list[tuple[tuple[bool, bool, bool, int], SplitState]] = []
    for axis in _same_side(state.axis, tokens):
        stride, span = math.prod(new[:axis]), math.prod(new[: axis + 1])
        if not span or not period or span % period or any(inner * e % stride for segment in state.segments for e in segment.extents):
            continue
        repeats = [1 if simple else segment.repeat for segment in state.segments]
        moved = tuple(Segment(tuple(inner * e // stride for e in s.extents), n) for s, n in zip(state.segments, repeats, strict=True))
        likeness = (span == period, span == unit, tokens is not None or new[axis] > 1, axis)
        found.append((likeness, SplitState(axis, moved).repeated(span // period)))
    return max(found, key=lambda pair: pair[0])[1] if found else None


def _same_side(axis: int, tokens: tuple[int, int] | None) -> range:
    """The axes of the result that lie on the same side of the token axis as `axis` does in the source."""
    if tokens is None:
        return range(4)
    before, after = tokens
    if axis == before:
        return range(after, after + 1)
    return range(after) if axis < before else range(after + 1, 4)


@register
class Reshape(_View):
    name = "reshape"

    def result(self, name: str, sources: Sequence[Tensor], params: Params) -> Tensor:
        (x,) = sources
        shape = params["shape"]
        fits = x.is_contiguous and math.prod(shape) == x.n_elements
        check(fits, "reshape", name, sources, f"a contiguous tensor of as many elements as {format_shape(shape)}")
        check(shape[0] % x.dtype.block_size == 0, "reshape", name, sources, f"whole blocks on axis 0 of {format_shape(shape)}")
        rows = _moved_rows(x, shape, params["rows_axis"])
        return _view("reshape", name, x, params, shape, contiguous_strides(x.dtype, shape), 0, rows)

    def split(self, node: Tensor, states: Sequence[SplitState]) -> SplitState:
        (x,) = node.sources
        tokens = (x.rows.axis, node.rows.axis) if x.rows and node.rows else None
        state = reshaped_state(states[0], x.shape, node.shape, tokens)
        if state is None:
            raise no_rule(node, states)
        state.validate(node.shape, node.dtype, node.name)
        return state

    def localize(self, node: Tensor, states: Sequence[SplitState], state: SplitState, device: int) -> Params:
        return {**node.params, "shape": state.piece_shape(node.shape, device)}


def _moved_rows(x: Tensor, shape: Shape, axis: int) -> Rows | None:
    """The token axis keeps its extent and what lies below it. It is named, not found: heads and tokens may both be one."""
    if x.rows is None or shape[axis] != x.shape[x.rows.axis] or math.prod(shape[:axis]) != math.prod(x.shape[: x.rows.axis]):
        return None
    return Rows(x.rows.count, axis)


@register
class Permute(_View):
    name = "permute"

    def result(self, name: str, sources: Sequence[Tensor], params: Params) -> Tensor:
        (x,) = sources
        axes = params["axes"]
        check(sorted(axes) == [0, 1, 2, 3], "permute", name, sources, f"each of the axes 0, 1, 2, 3 once, not {axes}")
        check(axes[0] == 0 or x.dtype.block_size == 1, "permute", name, sources, "blocks to stay on axis 0")
        order = [axes.index(axis) for axis in range(4)]
        shape, strides = tuple(x.shape[i] for i in order), tuple(x.strides[i] for i in order)
        rows = Rows(x.rows.count, axes[x.rows.axis]) if x.rows else None
        return _view("permute", name, x, params, pad_shape(shape), pad_shape(strides), 0, rows)

    def split(self, node: Tensor, states: Sequence[SplitState]) -> SplitState:
        return states[0].on_axis(node.params["axes"][states[0].axis]) if states[0].is_split else states[0]


@register
class Slice(_View):
    name = "slice"

    def result(self, name: str, sources: Sequence[Tensor], params: Params) -> Tensor:
        (x,) = sources
        axis, start, stop = params["axis"], params["start"], params["stop"]
        block = x.dtype.block_size if axis == 0 else 1
        fits = 0 <= start <= stop <= x.shape[axis] and start % block == 0 and stop % block == 0
        check(fits, "slice", name, sources, f"a range in whole blocks of axis {axis}, not [{start}, {stop})")
        shape = pad_shape([stop - start if i == axis else n for i, n in enumerate(x.shape)])
        offset = start // block * x.strides[axis]
        rows = x.rows if x.rows and x.rows.axis != axis else None
        return _view("slice", name, x, params, shape, x.strides, offset, rows)

    def split(self, node: Tensor, states: Sequence[SplitState]) -> SplitState:
        state, axis = states[0], node.params["axis"]
        if not state.is_split or state.axis != axis:
            return state
        segment = _sub_range(state, node.params["start"], node.params["stop"])
        if segment is None:
            raise no_rule(node, states)
        return SplitState(axis, (segment,))

    def localize(self, node: Tensor, states: Sequence[SplitState], state: SplitState, device: int) -> Params:
        source, axis = states[0], node.params["axis"]
        if not source.is_split or source.axis != axis:
            return node.params
        ranges = source.ranges(device)
        start, stop = (sum(max(0, min(end, at) - begin) for begin, end in ranges) for at in (node.params["start"], node.params["stop"]))
        return {**node.params, "start": start, "stop": stop}


def _sub_range(state: SplitState, start: int, stop: int) -> Segment | None:
    """How a sub-range of the cut axis is cut; None where it lies in no one segment, or holds more than one period but not whole ones."""
    begin = 0
    for segment in state.segments:
        first, last, period = start - begin, stop - begin, sum(segment.extents)
        begin += segment.total
        if first < 0 or last > segment.total or period == 0:
            continue
        if first % period == 0 == last % period and first < last:
            return Segment(segment.extents, (last - first) // period)
        low = first - first % period
        if last - low <= period:
            cuts = [min(max(cut + low, first), last) for cut in cut_points(segment.extents)]
            return Segment(tuple(b - a for a, b in zip(cuts[:-1], cuts[1:], strict=True)))
    return None


@register
class Contiguous(Operation):
    name = "contiguous"

    def result(self, name: str, sources: Sequence[Tensor], params: Params) -> Tensor:
        (x,) = sources
        return new_tensor("contiguous", name, x.shape, sources, params, x.dtype, rows=x.rows)

    def split(self, node: Tensor, states: Sequence[SplitState]) -> SplitState:
        return states[0]

    def lower(self, node: Tensor, to: Lowering) -> None:
        to.copy(node.sources[0], node)
