"""Tensors: what is computed, without any memory.

A tensor has up to four axes; axis 0 varies fastest (the row of a weight), as in GGUF files. Strides are in bytes; a block type's
stride on axis 0 is the bytes of one block. A tensor is a leaf (weight, input, cache) or the result of an operation on other tensors; a view
shares the storage of the tensor it looks at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from numba_meta.dtypes import DType
from numba_meta.errors import ShapeError

Shape = tuple[int, int, int, int]


class Role(Enum):
    """Where a leaf's bytes come from and how long they stay."""

    NODE = "node"  # computed in a step, lives in the workspace
    WEIGHT = "weight"  # read from the model file, constant
    INPUT = "input"  # written by the host before each step
    CACHE = "cache"  # persists from step to step on the devices, written by steps
    HOST = "host"  # the same in host memory: reaches the devices by deliveries


@dataclass(frozen=True)
class Rows:
    """The axis along which tokens lie, and the int64 input that holds how many of them are live in this step.

    A graph is planned for a capacity of rows; a step computes only the live ones, so one recording serves every batch up to the capacity.
    """

    count: Tensor
    axis: int


@dataclass(eq=False)
class Tensor:
    """A tensor of a graph. `rows` is None where no axis counts tokens (weights, tables)."""

    name: str
    dtype: DType
    shape: Shape
    strides: Shape
    op: str = ""
    sources: tuple[Tensor, ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)
    role: Role = Role.NODE
    view_of: Tensor | None = None
    view_offset: int = 0  # bytes from the start of view_of
    rows: Rows | None = None

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def n_bytes(self) -> int:
        """Bytes from the start of the first block to the end of the last one, with the gaps between them; 0 without elements."""
        if self.n_elements == 0:
            return 0
        blocks = (self.shape[0] // self.dtype.block_size, *self.shape[1:])
        last = sum((n - 1) * stride for n, stride in zip(blocks, self.strides, strict=True))
        return last + self.dtype.block_bytes

    @property
    def is_contiguous(self) -> bool:
        return self.strides == contiguous_strides(self.dtype, self.shape)

    @property
    def storage(self) -> Tensor:
        """The tensor that owns the bytes."""
        return self if self.view_of is None else self.view_of.storage

    @property
    def storage_offset(self) -> int:
        """Bytes from the start of the storage."""
        return 0 if self.view_of is None else self.view_offset + self.view_of.storage_offset

    def __repr__(self) -> str:
        what = f" = {self.op}({', '.join(s.name for s in self.sources)})" if self.op else f" {self.role.value}"
        return f"<{self.name}: {self.dtype.name}{format_shape(self.shape)}{what}>"


def pad_shape(shape: Sequence[int]) -> Shape:
    """A shape of one to four extents as four; missing axes have extent 1."""
    if not 1 <= len(shape) <= 4 or any(n < 0 for n in shape):
        raise ShapeError(f"a shape has one to four extents of at least 0, not {tuple(shape)}")
    n0, n1, n2, n3 = (*shape, *(1,) * (4 - len(shape)))
    return (n0, n1, n2, n3)


def contiguous_strides(dtype: DType, shape: Shape) -> Shape:
    """Strides in bytes without gaps."""
    row = dtype.row_bytes(shape[0])
    return (dtype.block_bytes, row, row * shape[1], row * shape[1] * shape[2])


def format_shape(shape: Shape) -> str:
    """`[576, 9, 4]`: without trailing extents of 1."""
    n = 4
    while n > 1 and shape[n - 1] == 1:
        n -= 1
    return str(list(shape[:n]))
