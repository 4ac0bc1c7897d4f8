"""Rows by index: looked up in a table, and stored in the cells of a cache in the cache's type. The bytes are those of the CPU's kernels."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from numba_meta.dtypes import BF16, CACHE_TYPES, F16, F32, Q4_0, Q8_0, DType
from numba_meta.errors import ShapeError
from numba_meta.kernels.cuda.device import (
    add,
    cuda,
    device_function,
    f16_bits,
    load_f32,
    load_i32,
    load_i64,
    mul,
    store_bf16,
    store_f16,
    store_f32,
    store_u8,
    store_u16,
    types,
)
from numba_meta.kernels.cuda.kernel import CudaKernel, Gpu, Int, Launch, Ptr, cuda_kernel
from numba_meta.kernels.cuda.lanes import ALL_LANES, warp_max

THREADS = 256
STORES = {F32: store_f32, F16: store_f16, BF16: store_bf16}


def _thread_per_element(arguments: Mapping[str, Any], n_rows: int, gpu: Gpu) -> Launch:
    """Rows along y, at most 65,535 of them."""
    return Launch((-(-arguments["n"] // THREADS), n_rows, 1) if n_rows else (0, 0, 0), (THREADS, 1, 1))


@cuda_kernel(launch=_thread_per_element, max_threads=THREADS)
def get_rows_f32(  # type: ignore[no-untyped-def]
    table: Ptr, table_stride: Int, first_row: Int, n_table_rows: Int, ids: Ptr, y: Ptr, y_stride: Int, n: Int, n_rows: Ptr
):
    """y[r] = row ids[r] - first_row of a float32 table of n_table_rows; zeros where another device holds the row. ids: int32.

    A thread takes one element. Reads and writes 4 n bytes a row.
    """
    row, i = np.int64(cuda.blockIdx.y), np.int64(cuda.grid(1))
    if i < n and row < load_i64(n_rows):
        index = load_i32(ids + 4 * row) - first_row
        value = np.float32(0.0)
        if index >= 0 and index < n_table_rows:
            value = load_f32(table + index * table_stride + 4 * i)
        store_f32(y + row * y_stride + 4 * i, value)


@device_function
def _round_half_away(x):  # type: ignore[no-untyped-def]
    """The nearest int32, halves away from zero: |x| < 2^22."""
    whole = types.int32(x)
    rest = x - types.float32(whole)
    up = types.int32(1) if rest >= np.float32(0.5) else types.int32(0)
    down = types.int32(1) if rest <= np.float32(-0.5) else types.int32(0)
    return types.int32(whole + up - down)


@device_function
def _inverse(d):  # type: ignore[no-untyped-def]
    return np.float32(1.0) / d if d != np.float32(0.0) else np.float32(0.0)


@device_function
def _store_q8_0(x, block, lane):  # type: ignore[no-untyped-def]
    """A block of 32, an element per lane: d = max |x| / 127 as float16, then round(x / d) as int8."""
    d = warp_max(abs(x)) / np.float32(127.0)
    if lane == 0:
        store_u16(block, f16_bits(d))
    store_u8(block + 2 + lane, _round_half_away(mul(x, _inverse(d))))


@device_function
def _store_q4_0(x, block, lane):  # type: ignore[no-untyped-def]
    """A block of 32: d = (the value of largest magnitude, the first of equals) / -8 as float16, then nibbles: 0..15 low, 16..31 high."""
    magnitude = abs(x)
    largest = warp_max(magnitude)
    first = cuda.ffs(cuda.ballot_sync(ALL_LANES, magnitude == largest)) - 1
    d = cuda.shfl_sync(ALL_LANES, x, first) / np.float32(-8.0)
    # Product and sum are both rounded, as the gguf package does.
    nibble = min(types.int32(15), types.int32(add(mul(x, _inverse(d)), np.float32(8.5))))
    high = cuda.shfl_down_sync(ALL_LANES, nibble, 16)
    if lane == 0:
        store_u16(block, f16_bits(d))
    if lane < 16:
        store_u8(block + 2 + lane, nibble | high << 4)


BLOCK_STORES = {Q8_0: _store_q8_0, Q4_0: _store_q4_0}


@functools.cache
def store_rows_kernel(dtype: DType) -> CudaKernel:
    """The kernel that converts float32 rows and stores them: (x, x_stride, cells, cache, cell_stride, n, n_rows).

    Row r goes to cache + cells[r] * cell_stride (cells: int32; -1: the row is skipped), n elements in `dtype` as GGUF lays them out. For
    block types n must be a multiple of 32. float16 and bfloat16 are rounded to nearest even. ShapeError for other types. A thread takes one
    element, a warp one block.
    """
    if dtype not in CACHE_TYPES:
        raise ShapeError(f"no kernel stores cache rows in {dtype.name}; use one of {', '.join(t.name for t in CACHE_TYPES)}")
    name = f"set_rows_{dtype.name}"
    if dtype.is_quantized:
        store_block, block_bytes = BLOCK_STORES[dtype], dtype.block_bytes

        @cuda_kernel(name=name, launch=_thread_per_element, max_threads=THREADS)
        def kernel(x: Ptr, x_stride: Int, cells: Ptr, cache: Ptr, cell_stride: Int, n: Int, n_rows: Ptr):  # type: ignore[no-untyped-def]
            row, i = np.int64(cuda.blockIdx.y), np.int64(cuda.grid(1))
            if i < n and row < load_i64(n_rows):  # whole warps, since n is a multiple of 32
                cell = load_i32(cells + 4 * row)
                if cell >= 0:
                    block = cache + cell * cell_stride + i // 32 * block_bytes
                    store_block(load_f32(x + row * x_stride + 4 * i), block, i % 32)
    else:
        store, n_bytes = STORES[dtype], dtype.block_bytes

        @cuda_kernel(name=name, launch=_thread_per_element, max_threads=THREADS)
        def kernel(x: Ptr, x_stride: Int, cells: Ptr, cache: Ptr, cell_stride: Int, n: Int, n_rows: Ptr):  # type: ignore[no-untyped-def]
            row, i = np.int64(cuda.blockIdx.y), np.int64(cuda.grid(1))
            if i < n and row < load_i64(n_rows):
                cell = load_i32(cells + 4 * row)
                if cell >= 0:
                    store(cache + cell * cell_stride + n_bytes * i, load_f32(x + row * x_stride + 4 * i))

    return kernel


def all_kernels() -> list[CudaKernel]:
    """Every kernel of this module."""
    return [get_rows_f32, *(store_rows_kernel(dtype) for dtype in CACHE_TYPES)]
