"""Attention's step between its projections and itself in one launch: Q rotated, K rotated and stored in the cache, V stored.

The bits are those of `rope_halves` or `rope_interleaved` on Q and K, then `store_rows_kernel` on K and V.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from numba_meta.dtypes import CACHE_TYPES, DType
from numba_meta.errors import ShapeError
from numba_meta.kernels.cuda.device import (
    cuda,
    device_function,
    fma,
    load_f32,
    load_i32,
    load_i64,
    mul,
    start_next_kernel,
    store_f32,
    wait_for_previous_kernel,
)
from numba_meta.kernels.cuda.kernel import CudaKernel, Gpu, Int, Launch, Ptr, cuda_kernel
from numba_meta.kernels.cuda.rows import BLOCK_STORES, STORES

THREADS = 128


def _blocks(n: int) -> int:
    return -(-n // THREADS)


def _blocks_of_elements(arguments: Mapping[str, Any], n_rows: int, gpu: Gpu) -> Launch:
    """Rows along x; along y the blocks of Q (a thread a pair, or an element that is not rotated), then of K's elements, then of V's."""
    n_q = arguments["n_head"] * (arguments["head_dim"] - arguments["half"])
    n_k = arguments["n_head_kv"] * arguments["head_dim"]
    return Launch((n_rows, _blocks(n_q) + _blocks(n_k) + _blocks(arguments["n_v"]), 1), (THREADS, 1, 1))


@device_function
def _place_in_halves(pair, half):  # type: ignore[no-untyped-def]
    return pair, pair + half


@device_function
def _place_interleaved(pair, half):  # type: ignore[no-untyped-def]
    return 2 * pair, 2 * pair + 1


@device_function
def _pair_in_halves(e, half):  # type: ignore[no-untyped-def]
    is_first = e < half
    return (e if is_first else e - half), is_first


@device_function
def _pair_interleaved(e, half):  # type: ignore[no-untyped-def]
    return e >> 1, e & 1 == 0


def places_in_pairs(interleaved: bool) -> Any:
    """The device function (pair, half) -> the two elements of a head that it turns."""
    return _place_interleaved if interleaved else _place_in_halves


def pair_of_element(interleaved: bool) -> Any:
    """The device function (element, half) -> its pair, and whether it is the first one of it."""
    return _pair_interleaved if interleaved else _pair_in_halves


@functools.cache
def store_in_cell(dtype: DType) -> Any:
    """The device function (cell's address, i, value) that stores element i of a row in a cell; for block types all lanes of a warp call it.

    Raises `ShapeError` for a type that no cache has.
    """
    n_bytes = dtype.block_bytes
    if dtype not in CACHE_TYPES:
        raise ShapeError(f"no kernel stores cache rows in {dtype.name}; use one of {', '.join(t.name for t in CACHE_TYPES)}")
    if dtype.is_quantized:
        store_block = BLOCK_STORES[dtype]

        @device_function
        def put_in_block(cell, i, value):  # type: ignore[no-untyped-def]
            store_block(value, cell + i // 32 * n_bytes, i % 32)

        return put_in_block
    store = STORES[dtype]

    @device_function
    def put(cell, i, value):  # type: ignore[no-untyped-def]
        store(cell + i * n_bytes, value)

    return put


@functools.cache
def rope_store_kernel(dtype: DType, interleaved: bool) -> CudaKernel:
    """The kernel for caches of K and V of one type. Raises `ShapeError` for a type that no cache has.

    Q `[n_head, head_dim]` of each live row goes rotated to q_out (which may be q); K `[n_head_kv, head_dim]`, rotated, and V's row of n_v
    elements go to the row's cell of their caches (cells: int32; -1: not stored) in `dtype`. The first 2 * half elements of a head are
    rotated. Strides are in bytes. For block types the elements of K's row and n_v must be multiples of 32.
    """
    places, pair_of, put = places_in_pairs(interleaved), pair_of_element(interleaved), store_in_cell(dtype)

    @cuda_kernel(
        name=f"rope_{'interleaved' if interleaved else 'halves'}_store_{dtype.name}", launch=_blocks_of_elements, max_threads=THREADS
    )
    def kernel(  # type: ignore[no-untyped-def]
        q: Ptr, q_stride: Int, q_head_stride: Int, q_out: Ptr, q_out_stride: Int, q_out_head_stride: Int, n_head: Int,
        k: Ptr, k_stride: Int, k_head_stride: Int, n_head_kv: Int, v: Ptr, v_stride: Int, n_v: Int, head_dim: Int, half: Int,
        table: Ptr, table_stride: Int, cells: Ptr, k_cache: Ptr, k_cell_stride: Int, v_cache: Ptr, v_cell_stride: Int, n_rows: Ptr,
    ):  # fmt: skip
        start_next_kernel()
        wait_for_previous_kernel()
        live = load_i64(n_rows)
        row, thread = np.int64(cuda.blockIdx.x), np.int64(cuda.threadIdx.x)
        cell = np.int64(load_i32(cells + 4 * row))
        # Both are asked for as late as can be: rows up to the capacity can be read, while the row count is on its way.
        is_live, is_stored = row < live, row < live and cell >= 0
        cosines = table + row * table_stride
        sines = cosines + 4 * half
        per_head, n_k = head_dim - half, n_head_kv * head_dim
        block = np.int64(cuda.blockIdx.y)
        q_blocks, k_blocks = (n_head * per_head + THREADS - 1) // THREADS, (n_k + THREADS - 1) // THREADS
        if block < q_blocks:
            item = block * THREADS + thread
            if item < n_head * per_head:
                head = item // per_head
                pair = item - head * per_head
                source, target = q + row * q_stride + head * q_head_stride, q_out + row * q_out_stride + head * q_out_head_stride
                if pair < half:
                    first, second = places(pair, half)
                    a, b = load_f32(source + 4 * first), load_f32(source + 4 * second)
                    c, s = load_f32(cosines + 4 * pair), load_f32(sines + 4 * pair)
                    if is_live:
                        store_f32(target + 4 * first, fma(a, c, -mul(b, s)))
                        store_f32(target + 4 * second, fma(a, s, mul(b, c)))
                elif target != source and is_live:
                    store_f32(target + 4 * (half + pair), load_f32(source + 4 * (half + pair)))
        elif block < q_blocks + k_blocks:
            i = (block - q_blocks) * THREADS + thread
            if i < n_k:  # whole warps for block types, since n_k is a multiple of 32
                head = i // head_dim
                e = i - head * head_dim
                source = k + row * k_stride + head * k_head_stride
                value = np.float32(0.0)
                if e < 2 * half:
                    pair, is_first = pair_of(e, half)
                    first, second = places(pair, half)
                    a, b = load_f32(source + 4 * first), load_f32(source + 4 * second)
                    c, s = load_f32(cosines + 4 * pair), load_f32(sines + 4 * pair)
                    value = fma(a, c, -mul(b, s)) if is_first else fma(a, s, mul(b, c))
                else:
                    value = load_f32(source + 4 * e)
                if is_stored:
                    put(k_cache + cell * k_cell_stride, i, value)
        else:
            i = (block - q_blocks - k_blocks) * THREADS + thread
            if i < n_v:
                value = load_f32(v + row * v_stride + 4 * i)
                if is_stored:
                    put(v_cache + cell * v_cell_stride, i, value)

    return kernel


def all_kernels() -> list[CudaKernel]:
    """Every kernel of this module."""
    return [rope_store_kernel(dtype, interleaved) for dtype in CACHE_TYPES for interleaved in (False, True)]
