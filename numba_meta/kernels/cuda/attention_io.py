"""Reading the rows of a KV cache: 4 elements of one head of one cell at a time, from any cache type to float32."""

from __future__ import annotations

import functools
from typing import Any

from numba_meta.dtypes import BF16, CACHE_TYPES, F16, F32, Q8_0, DType
from numba_meta.errors import ShapeError
from numba_meta.kernels.cuda.device import (
    bits_float,
    device_function,
    high_bf16,
    high_f16,
    load_f16,
    load_u16,
    load_v2_once,
    load_v4_once,
    low_bf16,
    low_f16,
    types,
)

MAX_HEAD_DIM = 256


def check_cache_row(dtype: DType, dim: int) -> None:
    """ShapeError unless attention reads rows of `dim` elements of this type."""
    if dtype not in CACHE_TYPES:
        raise ShapeError(f"attention does not read a cache in {dtype.name}; use f32, f16, bf16, q8_0 or q4_0")
    if dim < 32 or dim % 32 or dim > MAX_HEAD_DIM:
        raise ShapeError(f"CUDA attention has no kernel for heads of {dim} elements; they must be a multiple of 32 up to {MAX_HEAD_DIM}")


@device_function
def _signed_byte(bits, shift):  # type: ignore[no-untyped-def]
    """A byte of 32 bits, `shift` bits from the top, as float32."""
    return types.float32(types.int32(bits << shift) >> 24)


@functools.cache
def read_4(dtype: DType) -> Any:
    """A device function (row, block, lane): elements 32 * block + 4 * lane ... of a row as 4 float32, lane 0 to 7.

    `row` is a multiple of 16 bytes in f32, of 8 in f16 and bf16, of 2 in the block types.
    """
    if dtype is F32:

        @device_function
        def read(row, block, lane):  # type: ignore[no-untyped-def]
            a, b, c, d = load_v4_once(row + 128 * block + 16 * lane)
            return bits_float(a), bits_float(b), bits_float(c), bits_float(d)

    elif dtype is F16:

        @device_function
        def read(row, block, lane):  # type: ignore[no-untyped-def]
            a, b = load_v2_once(row + 64 * block + 8 * lane)
            return low_f16(a), high_f16(a), low_f16(b), high_f16(b)

    elif dtype is BF16:

        @device_function
        def read(row, block, lane):  # type: ignore[no-untyped-def]
            a, b = load_v2_once(row + 64 * block + 8 * lane)
            return low_bf16(a), high_bf16(a), low_bf16(b), high_bf16(b)

    elif dtype is Q8_0:

        @device_function
        def read(row, block, lane):  # type: ignore[no-untyped-def]
            place = row + 34 * block
            d, a, b = load_f16(place), load_u16(place + 2 + 4 * lane), load_u16(place + 4 + 4 * lane)
            return _signed_byte(a, 24) * d, _signed_byte(a, 16) * d, _signed_byte(b, 24) * d, _signed_byte(b, 16) * d

    else:

        @device_function
        def read(row, block, lane):  # type: ignore[no-untyped-def]
            place = row + 18 * block  # 16 bytes behind the scale: elements 0 to 15 low, 16 to 31 high
            d, a, b = load_f16(place), load_u16(place + 2 + 4 * (lane & 3)), load_u16(place + 4 + 4 * (lane & 3))
            shift = lane & 4
            a, b = a >> shift, b >> shift
            return (
                types.float32(types.int32(a & 15) - 8) * d,
                types.float32(types.int32(a >> 8 & 15) - 8) * d,
                types.float32(types.int32(b & 15) - 8) * d,
                types.float32(types.int32(b >> 8 & 15) - 8) * d,
            )

    return read
