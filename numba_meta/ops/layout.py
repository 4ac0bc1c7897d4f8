"""Views and copies that change the order or the shape, not the values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from numba_meta.graph import Graph
from numba_meta.ops.base import Operation, Params, check, new_tensor, no_rule, register
from numba_meta.split.state import Segment, SplitState
from numba_meta.tensor import Rows, Shape, Tensor, contiguous_strides, pad_shape

if TYPE_CHECKING:
    from numba_meta.schedule.lower import CpuLowering


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

    def lower_cpu(self, node: Tensor, to: CpuLowering) -> None:
        """Nothing is computed."""


def _view(op: str, name: str, x: Tensor, params: Params, shape: Shape, strides: Shape, offset: int, rows: Rows | None) -> Tensor:
    return Tensor(name, x.dtype, shape, strides, op, (x,), dict(params), x.role, x, offset, rows)


def reshaped_state(state: SplitState, old: Shape, new: Shape) -> SplitState | None:
    """The state of a reshaped tensor, or None where the cut falls inside an element of every axis.

    In flat elements the cut repeats with a period: the elements below the axis times the sum of the extents. It moves to the highest axis whose
    stride divides every cut and which spans whole periods; more than one period inside it becomes a repeat count.
    """
    if not state.is_split:
        return state
    inner = math.prod(old[: state.axis])
    unit = math.prod(old[: state.axis + 1])  # of one period of all the segments
    simple = len(state.segments) == 1
    period = inner * sum(state.segments[0].extents) if simple else unit
    for axis in reversed(range(4)):
        stride = math.prod(new[:axis])
        span = stride * new[axis]
        if new[axis] == 1 or span == 0 or span % period:
            continue
        if any(inner * extent % stride for segment in state.segments for extent in segment.extents):
            continue
        if not simple and span != period:
            continue
        segments = tuple(
            Segment(tuple(inner * extent // stride for extent in segment.extents), span // period if simple else segment.repeat)
            for segment in state.segments
        )
        return SplitState(axis, segments)
    return None


@register
class Reshape(_View):
    name = "reshape"

    def result(self, name: str, sources: Sequence[Tensor], params: Params) -> Tensor:
        (x,) = sources
        shape = params["shape"]
        check(x.is_contiguous and math.prod(shape) == x.n_elements, "reshape", name, sources, f"a contiguous tensor of {math.prod(shape)} elements")
        return _view("reshape", name, x, params, shape, contiguous_strides(x.dtype, shape), 0, _moved_rows(x, shape, params["rows_axis"]))

    def split(self, node: Tensor, states: Sequence[SplitState]) -> SplitState:
        state = reshaped_state(states[0], node.sources[0].shape, node.shape)
        if state is None:
            raise no_rule(node, states)
        return state

    def localize(self, node: Tensor, states: Sequence[SplitState], state: SplitState, device: int) -> Params:
        return {**node.params, "shape": state.piece_shape(node.shape, device)}


def _moved_rows(x: Tensor, shape: Shape, axis: int) -> Rows | None:
    """The token axis keeps its extent. It is named, not found: heads and tokens may both be one."""
    if x.rows is None or shape[axis] != x.shape[x.rows.axis]:
        return None
    return Rows(x.rows.count, axis)


@register
class Permute(_View):
    name = "permute"

    def result(self, name: str, sources: Sequence[Tensor], params: Params) -> Tensor:
        (x,) = sources
        axes = params["axes"]
        check(sorted(axes) == [0, 1, 2, 3], "permute", name, sources, "each of the axes 0, 1, 2, 3 once")
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
        check(fits, "slice", name, sources, f"a range of axis {axis} in whole blocks, not [{start}, {stop})")
        shape = pad_shape([stop - start if i == axis else n for i, n in enumerate(x.shape)])
        offset = start // block * x.strides[axis]
        rows = x.rows if x.rows and x.rows.axis != axis else None
        return _view("slice", name, x, params, shape, x.strides, offset, rows)

    def split(self, node: Tensor, states: Sequence[SplitState]) -> SplitState:
        state, axis = states[0], node.params["axis"]
        if not state.is_split or state.axis != axis:
            return state
        segment = _segment_at(state, node.params["start"], node.params["stop"])
        if segment is None:
            raise no_rule(node, states)
        return SplitState(axis, (state.segments[segment],))

    def localize(self, node: Tensor, states: Sequence[SplitState], state: SplitState, device: int) -> Params:
        source, axis = states[0], node.params["axis"]
        if not source.is_split or source.axis != axis:
            return node.params
        index = _segment_at(source, node.params["start"], node.params["stop"])
        assert index is not None
        held = [segment.extents[device] * segment.repeat for segment in source.segments]
        return {**node.params, "start": sum(held[:index]), "stop": sum(held[: index + 1])}


def _segment_at(state: SplitState, start: int, stop: int) -> int | None:
    """The index of the segment that a sub-range covers; None where it is not exactly one."""
    at = 0
    for index, segment in enumerate(state.segments):
        end = at + sum(segment.extents) * segment.repeat
        if (at, end) == (start, stop):
            return index
        at = end
    return None


@register
class Contiguous(Operation):
    name = "contiguous"

    def result(self, name: str, sources: Sequence[Tensor], params: Params) -> Tensor:
        (x,) = sources
        return new_tensor("contiguous", name, x.shape, sources, params, x.dtype, rows=x.rows)

    def split(self, node: Tensor, states: Sequence[SplitState]) -> SplitState:
        return states[0]

    def lower_cpu(self, node: Tensor, to: CpuLowering) -> None:
        to.copy(node.sources[0], node)
