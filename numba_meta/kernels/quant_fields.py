"""What packed quantized weights are made of, on every kind of device; how the parts lie in memory is each kind's own (`packed.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from numba_meta import dtypes
from numba_meta.dtypes import DType
from numba_meta.errors import ShapeError

BLOCK = 32  # elements of k per block, for weights and activations alike
FLOAT_TYPES = (dtypes.F32, dtypes.F16, dtypes.BF16)


@dataclass(frozen=True)
class QuantFields:
    """A packed quantized type. `offset` is subtracted from the stored quants; `super_blocks` blocks share `d` and `m`."""

    name: str
    bits: int
    offset: int
    has_minimum: bool = False
    super_blocks: int = 1  # blocks of 32 per super-block
    group: int = BLOCK  # elements that share a scale

    @property
    def has_scales(self) -> bool:
        """Whether `d` is refined by 8-bit scales."""
        return self.super_blocks > 1


Fields = TypeVar("Fields", bound=QuantFields)


def first_of_layout(dtype: DType, layouts: Mapping[DType, Fields]) -> DType:
    """The first type that is packed as this one is: types of one layout share their kernels."""
    if dtype not in layouts:
        return dtype
    return next(other for other, layout in layouts.items() if layout is layouts[dtype])


def extent_of(raw: np.ndarray, dtype: DType) -> tuple[int, int]:
    """(rows, elements of each) of weights as a file holds them, uint8 `[rows, row_bytes]`. Raises `ShapeError` for anything else."""
    if raw.dtype != np.uint8 or raw.ndim != 2 or raw.shape[1] % dtype.block_bytes or (raw.size and raw.strides[1] != 1):
        raise ShapeError(f"cannot pack {raw.dtype} {raw.shape} as {dtype}; expected uint8 rows of blocks of {dtype.block_bytes} bytes")
    return raw.shape[0], raw.shape[1] // dtype.block_bytes * dtype.block_size
