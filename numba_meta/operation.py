"""What an operation is: a shape rule, a split rule, how it looks on one device, and the kernels it binds to. `ops/` has them all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from numba_meta.errors import ShapeError
from numba_meta.lowering import Lowering
from numba_meta.split.state import SplitState
from numba_meta.tensor import Tensor

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
