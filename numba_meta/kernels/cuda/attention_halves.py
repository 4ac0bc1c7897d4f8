"""Rows of a cache as float16 in shared memory, converted on the way from any type."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from numba_meta.dtypes import BF16, F16, Q8_0, DType
from numba_meta.kernels.cuda.attention_intrinsics import filled_copy, mul_f16x2
from numba_meta.kernels.cuda.attention_tiles import BIAS, BIAS_4, BIAS_8, NIBBLES, pairs_of_bytes
from numba_meta.kernels.cuda.device import (
    device_function,
    high_bf16,
    load_u16,
    load_v4_once,
    low_bf16,
    pack_f16,
    permute_bytes,
    shared_store_v4,
    types,
)

_LARGEST = np.float32(65504.0)


@device_function
def _clamped(x):  # type: ignore[no-untyped-def]
    """x within what float16 holds; NaN is kept."""
    x = _LARGEST if x > _LARGEST else x
    return -_LARGEST if x < -_LARGEST else x


@device_function
def _halves(pair):  # type: ignore[no-untyped-def]
    """Two bfloat16 as float16."""
    return pack_f16(_clamped(low_bf16(pair)), _clamped(high_bf16(pair)))


@device_function
def _word(address):  # type: ignore[no-untyped-def]
    """4 bytes at a multiple of 2."""
    return permute_bytes(load_u16(address), load_u16(address + 2), 0x5410)


@functools.cache
def _eight(dtype: DType) -> Any:
    """A device function (row, i): elements 8 i .. 8 i + 7 as 4 pairs of float16."""
    if dtype is BF16:

        @device_function
        def read(row, i):  # type: ignore[no-untyped-def]
            x0, x1, x2, x3 = load_v4_once(row + 16 * i)
            return _halves(x0), _halves(x1), _halves(x2), _halves(x3)

    elif dtype is Q8_0:

        @device_function
        def read(row, i):  # type: ignore[no-untyped-def]
            block = row + (i >> 2) * 34
            d = load_u16(block)
            d = permute_bytes(d, d, 0x1010)
            at = block + 2 + 8 * (i & 3)
            x0, x1 = pairs_of_bytes(_word(at) ^ BIAS, BIAS_8)
            x2, x3 = pairs_of_bytes(_word(at + 4) ^ BIAS, BIAS_8)
            return mul_f16x2(x0, d), mul_f16x2(x1, d), mul_f16x2(x2, d), mul_f16x2(x3, d)

    else:

        @device_function
        def read(row, i):  # type: ignore[no-untyped-def]
            block = row + (i >> 2) * 18  # elements 0 to 15 low, 16 to 31 high
            d = load_u16(block)
            d = permute_bytes(d, d, 0x1010)
            at, shift = block + 2 + 8 * (i & 1), 2 * (i & 2)
            x0, x1 = pairs_of_bytes((_word(at) >> shift) & NIBBLES, BIAS_4)
            x2, x3 = pairs_of_bytes((_word(at + 4) >> shift) & NIBBLES, BIAS_4)
            return mul_f16x2(x0, d), mul_f16x2(x1, d), mul_f16x2(x2, d), mul_f16x2(x3, d)

    return read


@functools.cache
def stage_row(dtype: DType, dim: int, threads: int) -> Any:
    """A device function (shared, row, is_there, thread): one of `threads` threads writes its part of a row; zeros where it is not there.

    Rows of f16 are copied in the background.
    """
    n = dim // 8 // threads
    if dtype is F16:
        copy = filled_copy[16]

        @device_function
        def stage(shared, row, is_there, thread):  # type: ignore[no-untyped-def]
            n_bytes = types.int32(16 if is_there else 0)
            for j in range(n):
                i = threads * j + thread
                copy(shared + 16 * i, row + 16 * i, n_bytes)

    else:
        read, zero = _eight(dtype), np.int32(0)

        @device_function
        def stage(shared, row, is_there, thread):  # type: ignore[no-untyped-def]
            for j in range(n):
                i = threads * j + thread
                if is_there:
                    x0, x1, x2, x3 = read(row, i)
                    shared_store_v4(shared + 16 * i, x0, x1, x2, x3)
                else:
                    shared_store_v4(shared + 16 * i, zero, zero, zero, zero)

    return stage
