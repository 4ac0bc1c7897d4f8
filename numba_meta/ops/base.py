"""What shape rules and split rules have in common."""

from __future__ import annotations

from collections.abc import Sequence

from numba_meta.dtypes import F32, DType
from numba_meta.errors import ShapeError, SplitError
from numba_meta.operation import NeedsReduce, Params
from numba_meta.split.state import SplitState
from numba_meta.tensor import Rows, Tensor, contiguous_strides, format_shape, pad_shape


def new_tensor(
    op: str, name: str, shape: Sequence[int], sources: Sequence[Tensor], params: Params, dtype: DType = F32, rows: Rows | None = None
) -> Tensor:
    """A contiguous result with storage of its own."""
    full = pad_shape(shape)
    return Tensor(name, dtype, full, contiguous_strides(dtype, full), op, tuple(sources), dict(params), rows=rows)


def check(condition: bool, op: str, name: str, sources: Sequence[Tensor], expected: str) -> None:
    """Raises the `ShapeError` of a shape rule."""
    if not condition:
        given = ", ".join(f"{s.name} {s.dtype.name}{format_shape(s.shape)}" for s in sources)
        raise ShapeError(f"{op} {name}: {given} do not fit; expected {expected}")


def no_rule(node: Tensor, states: Sequence[SplitState]) -> SplitError:
    """The error for a combination that has no split rule."""
    given = ", ".join(f"{s.name}: {state}" for s, state in zip(node.sources, states, strict=True))
    return SplitError(f"no split rule for {node.op} {node.name} of {given}")


def reduce_partial(node: Tensor, states: Sequence[SplitState]) -> None:
    """Asks for a reduction of every PARTIAL source."""
    partial = [s for s, state in zip(node.sources, states, strict=True) if state.is_partial]
    if partial:
        raise NeedsReduce(*partial)
