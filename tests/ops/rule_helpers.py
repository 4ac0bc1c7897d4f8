"""Leaves and rules without a graph's inference: one operation, states given by hand."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from numba_meta.dtypes import F32, DType
from numba_meta.errors import ShapeError, SplitError
from numba_meta.graph import Graph
from numba_meta.operation import NeedsGather, NeedsReduce, operation
from numba_meta.split.state import MIRRORED, PARTIAL, SplitState, split
from numba_meta.tensor import Role, Tensor

A0, A1, A2 = split(0, [3, 1]), split(1, [3, 1]), split(2, [3, 1])
__all__ = ["A0", "A1", "A2", "MIRRORED", "PARTIAL", "leaf", "rule", "check_refused", "check_reduces", "check_shape_error"]


def leaf(graph: Graph, name: str, *shape: int, dtype: DType = F32, role: Role = Role.INPUT) -> Tensor:
    return graph.leaf(name, dtype, shape, role)


def rule(node: Tensor, *states: SplitState) -> SplitState:
    """The state of a node for the states of its sources."""
    return operation(node.op).split(node, states)


def check_refused(node: Tensor, *states: SplitState) -> None:
    """There is no rule: one line names the operation, the node, and each source with its state."""
    with pytest.raises(SplitError) as caught:
        rule(node, *states)
    message = str(caught.value)
    assert "\n" not in message
    assert f"{node.op} {node.name}" in message
    for source, state in zip(node.sources, states, strict=True):
        assert f"{source.name}: {state}" in message


def check_reduces(node: Tensor, states: Sequence[SplitState], *sources: Tensor) -> None:
    """These sources, and no others, must be reduced first."""
    with pytest.raises(NeedsReduce) as caught:
        rule(node, *states)
    assert caught.value.sources == sources


def check_gathers(node: Tensor, states: Sequence[SplitState], *sources: Tensor) -> None:
    """These sources must be whole first."""
    with pytest.raises(NeedsGather) as caught:
        rule(node, *states)
    assert caught.value.sources == sources


def check_shape_error(match: str) -> pytest.RaisesExc[ShapeError]:
    """A `ShapeError` of one line that matches."""
    return pytest.raises(ShapeError, match=f"^[^\n]*{match}[^\n]*$")


def exactly(text: str) -> str:
    """A pattern that matches this text."""
    return re.escape(text)
