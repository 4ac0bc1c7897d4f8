"""Tensors one after the other along an axis."""

from __future__ import annotations

from collections.abc import Sequence

from numba_meta.graph import Graph
from numba_meta.lowering import Lowering
from numba_meta.operation import Operation, Params, register
from numba_meta.ops.base import check, new_tensor, no_rule, reduce_partial
from numba_meta.split.state import MIRRORED, SplitState
from numba_meta.tensor import Tensor


def concat(graph: Graph, parts: Sequence[Tensor], axis: int, name: str = "") -> Tensor:
    """The parts side by side on one axis; their other extents and their types are equal."""
    return graph.apply("concat", *parts, name=name, axis=axis)


@register
class Concat(Operation):
    """`params["cut"]`: on a device, the axis on which MIRRORED parts are cut to join split ones, and the ranges of it."""

    name = "concat"

    def result(self, name: str, sources: Sequence[Tensor], params: Params) -> Tensor:
        axis = params["axis"]
        fits = 0 <= axis < 4 and len(sources) > 0 and len({s.dtype for s in sources}) == 1
        check(fits, "concat", name, sources, f"tensors of one type and an axis 0 to 3, not {axis}")
        cut_axis, ranges, mirrored = params.get("cut", (None, (), ()))
        shapes = [list(s.shape) for s in sources]
        for index in mirrored:
            shapes[index][cut_axis] = sum(stop - start for start, stop in ranges)
        others = {(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}
        check(len(others) == 1, "concat", name, sources, f"equal extents on all axes but {axis}")
        shape = [*shapes[0][:axis], sum(shape[axis] for shape in shapes), *shapes[0][axis + 1 :]]
        rows = sources[0].rows
        keep = rows is not None and rows.axis != axis and all(s.rows == rows for s in sources)
        return new_tensor("concat", name, shape, sources, params, sources[0].dtype, rows if keep else None)

    def split(self, node: Tensor, states: Sequence[SplitState]) -> SplitState:
        reduce_partial(node, states)
        cut = next((state for state in states if state.is_split), MIRRORED)
        alike = all(state.is_mirrored or (state.axis == cut.axis and state.same_cuts(cut)) for state in states)
        if not alike or cut.axis == node.params["axis"]:
            raise no_rule(node, states)
        return cut

    def localize(self, node: Tensor, states: Sequence[SplitState], state: SplitState, device: int) -> Params:
        mirrored = tuple(i for i, s in enumerate(states) if s.is_mirrored)
        return {**node.params, "cut": (state.axis, state.ranges(device), mirrored)} if state.is_split else node.params

    def lower(self, node: Tensor, to: Lowering) -> None:
        axis = node.params["axis"]
        cut_axis, ranges, mirrored = node.params.get("cut", (None, (), ()))
        at = [0, 0, 0, 0]  # where the next part begins in the result
        for index, part in enumerate(node.sources):
            if index in mirrored:
                at[cut_axis] = 0
                for start, stop in ranges:
                    first, shape = [0, 0, 0, 0], list(part.shape)
                    first[cut_axis], shape[cut_axis] = start, stop - start
                    to.copy_part(part, first, node, at, shape)
                    at[cut_axis] += stop - start
                at[cut_axis] = 0
            elif part.n_elements:
                to.copy_part(part, [0, 0, 0, 0], node, at, part.shape)
            at[axis] += part.shape[axis]
