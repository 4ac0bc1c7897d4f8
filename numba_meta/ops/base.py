"""What an operation is: a shape rule, a split rule, how it looks on one device, and the kernels it binds to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from numba_meta.dtypes import F32, DType
from numba_meta.errors import ShapeError, SplitError
from numba_meta.split.state import SplitState
from numba_meta.tensor import Rows, Tensor, contiguous_strides, format_shape, pad_shape

if TYPE_CHECKING:
    from numba_meta.ops.lowering import Lowering

Params = Mapping[str, Any]


class NeedsReduce(Exception):
    """A rule's answer: these sources are PARTIAL and must be all-reduced before this operation."""

    def __init__(self, *sources: Tensor) -> None:
        self.sources = sources


class NeedsGather(Exception):
    """A rule's answer: these sources are split on axis 0 and must be whole before this operation (where the policy allows it)."""

    def __init__(self, *sources: Tensor) -> None:
        self.sources = sources


class Operation(ABC):
    """One operation. Subclasses are stateless; `register` makes an instance findable by name."""

    name: ClassVar[str]
    is_view: ClassVar[bool] = False  # the result shares a source's storage and nothing is computed

    @abstractmethod
    def result(self, name: str, sources: Sequence[Tensor], params: Params) -> Tensor:
        """Shape rule: the result for these sources. Raises `ShapeError`."""

    @abstractmethod
    def split(self, node: Tensor, states: Sequence[SplitState]) -> SplitState:
        """Split rule: the result's state for the sources' states.

        Raises `NeedsReduce` or `NeedsGather` where a source must be made whole first, `SplitError` where there is no rule.
        """

    def localize(self, node: Tensor, states: Sequence[SplitState], state: SplitState, device: int) -> Params:
        """The parameters of this node on one device; the default keeps them."""
        return node.params

    @abstractmethod
    def lower(self, node: Tensor, to: Lowering) -> None:
        """Emits the kernel calls that compute this node on one device, of whatever kind."""


_OPERATIONS: dict[str, Operation] = {}


def register(cls: type[Operation]) -> type[Operation]:
    """Class decorator: one instance, findable by its name."""
    _OPERATIONS[cls.name] = cls()
    return cls


def operation(name: str) -> Operation:
    """The operation of this name."""
    if name not in _OPERATIONS:
        raise ShapeError(f"there is no operation {name}; known are {', '.join(sorted(_OPERATIONS))}")
    return _OPERATIONS[name]


# ---- helpers of shape and split rules --------------------------------------------------------------------------------------------------


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
