"""Where devices meet: all-reduce of summands, gathering of pieces. The planner inserts these; models do not write them."""

from __future__ import annotations

from collections.abc import Sequence

from numba_meta.dtypes import F32
from numba_meta.lowering import Lowering
from numba_meta.operation import Operation, Params, register
from numba_meta.ops.base import check, new_tensor, no_rule
from numba_meta.split.state import MIRRORED, SplitState
from numba_meta.tensor import Tensor


@register
class AllReduce(Operation):
    """The sum over the devices of a PARTIAL tensor, on every device, added in device order."""

    name = "all_reduce"

    def result(self, name: str, sources: Sequence[Tensor], params: Params) -> Tensor:
        (x,) = sources
        check(x.is_contiguous and x.dtype == F32, "all_reduce", name, sources, "a contiguous float32 tensor")
        return new_tensor("all_reduce", name, x.shape, sources, params, x.dtype, rows=x.rows)

    def split(self, node: Tensor, states: Sequence[SplitState]) -> SplitState:
        if states[0].is_partial:
            return MIRRORED
        raise no_rule(node, states)

    def lower(self, node: Tensor, to: Lowering) -> None:
        to.all_reduce(node.sources[0], node)


@register
class Gather(Operation):
    """The pieces of a tensor split on axis 0, joined on every device."""

    name = "gather"

    def result(self, name: str, sources: Sequence[Tensor], params: Params) -> Tensor:
        (x,) = sources
        check(x.is_contiguous and x.dtype == F32 and x.shape[2:] == (1, 1), "gather", name, sources, "contiguous float32 rows [n, t]")
        return new_tensor("gather", name, params.get("shape", x.shape), sources, params, x.dtype, rows=x.rows)

    def split(self, node: Tensor, states: Sequence[SplitState]) -> SplitState:
        if states[0].axis == 0 and len(states[0].segments) == 1 and states[0].segments[0].repeat == 1:
            return MIRRORED
        raise no_rule(node, states)

    def localize(self, node: Tensor, states: Sequence[SplitState], state: SplitState, device: int) -> Params:
        return {**node.params, "shape": node.shape}

    def lower(self, node: Tensor, to: Lowering) -> None:
        to.gather(node.sources[0], node)
