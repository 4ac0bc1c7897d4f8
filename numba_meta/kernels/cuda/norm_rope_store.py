"""As `rope_store.py`, for models that normalize the heads of Q and K before they are rotated.

The bits are those of `rms_norm` on Q's and K's heads, then the kernels that `rope_store_kernel` joins.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from numba_meta.dtypes import CACHE_TYPES, DType
from numba_meta.kernels.cuda.device import (
    add,
    cuda,
    device_function,
    fma,
    load_f32,
    load_i32,
    load_i64,
    mul,
    start_next_kernel,
    store_f32,
    types,
    wait_for_previous_kernel,
)
from numba_meta.kernels.cuda.kernel import CudaKernel, Float, Gpu, Int, Launch, Ptr, cuda_kernel
from numba_meta.kernels.cuda.lanes import squares_4, warp_sum
from numba_meta.kernels.cuda.norm import factor_of, load_two, normalized_4
from numba_meta.kernels.cuda.rope_store import pair_of_element, places_in_pairs, store_in_cell

THREADS = 128
HEADS = 4  # of a block: a warp takes a head
MOST_HEAD_DIM = 256  # two groups of 4 elements for each lane; larger heads need the kernels one by one


def _blocks_of_heads(arguments: Mapping[str, Any], n_rows: int, gpu: Gpu) -> Launch:
    """Rows along x; along y the blocks of Q's heads, then of K's, then of V's elements (a thread each)."""
    n_q, n_k = (-(-arguments[name] // HEADS) for name in ("n_head", "n_head_kv"))
    return Launch((n_rows, n_q + n_k + -(-arguments["n_v"] // THREADS), 1), (THREADS, 1, 1))


@device_function
def _load_head(source, weight, lane, head_dim):  # type: ignore[no-untyped-def]
    """A lane's elements of a head, and their weights: two groups of 4."""
    is_aligned = (source | weight) & 15 == 0
    column, second = 4 * lane, 4 * lane + 128
    return load_two(source, column, second, head_dim, is_aligned), load_two(weight, column, second, head_dim, is_aligned)


@device_function
def _normalize_head(elements, heads, warp, lane, head_dim, eps):  # type: ignore[no-untyped-def]
    """A warp's head, normalized, into its part of shared memory; sums in the order of `rms_norm`, where 128 columns are a warp's."""
    v, w = elements
    total = warp_sum(squares_4(v[0], np.float32(0.0)))
    if head_dim > 128:
        total = add(total, warp_sum(squares_4(v[1], np.float32(0.0))))
    factor = factor_of(total, head_dim, eps)
    low, high = normalized_4(v[0], factor, w[0]), normalized_4(v[1], factor, w[1])
    for j in range(4):
        heads[warp, 4 * lane + j] = low[j]
        heads[warp, 4 * lane + 128 + j] = high[j]
    cuda.syncwarp()


@functools.cache
def norm_rope_store_kernel(dtype: DType, interleaved: bool) -> CudaKernel:
    """The kernel for caches of K and V of one type: as `rope_store_kernel`, with q_weight, k_weight (float32 `[head_dim]`) and eps.

    head_dim: at most `MOST_HEAD_DIM`; for block types a multiple of 32. Raises `ShapeError` for a type that no cache has.
    """
    places, pair_of, put = places_in_pairs(interleaved), pair_of_element(interleaved), store_in_cell(dtype)
    name = f"norm_rope_{'interleaved' if interleaved else 'halves'}_store_{dtype.name}"

    @cuda_kernel(name=name, launch=_blocks_of_heads, max_threads=THREADS)
    def kernel(  # type: ignore[no-untyped-def]
        q: Ptr, q_stride: Int, q_head_stride: Int, q_weight: Ptr, q_out: Ptr, q_out_stride: Int, q_out_head_stride: Int, n_head: Int,
        k: Ptr, k_stride: Int, k_head_stride: Int, k_weight: Ptr, n_head_kv: Int, v: Ptr, v_stride: Int, n_v: Int, head_dim: Int,
        half: Int, table: Ptr, table_stride: Int, cells: Ptr, k_cache: Ptr, k_cell_stride: Int, v_cache: Ptr, v_cell_stride: Int,
        n_rows: Ptr, eps: Float,
    ):  # fmt: skip
        heads = cuda.shared.array((HEADS, MOST_HEAD_DIM), types.float32)
        start_next_kernel()
        wait_for_previous_kernel()
        live = load_i64(n_rows)
        row, block = np.int64(cuda.blockIdx.x), np.int64(cuda.blockIdx.y)
        warp, lane = np.int64(cuda.threadIdx.x) >> 5, np.int64(cuda.threadIdx.x) & 31
        cell = np.int64(load_i32(cells + 4 * row))
        # Both are asked for after the first loads: rows up to the capacity can be read, while the row count is on its way.
        is_live, is_stored = row < live, row < live and cell >= 0
        cosines = table + row * table_stride
        sines = cosines + 4 * half
        q_blocks, k_blocks = (n_head + HEADS - 1) // HEADS, (n_head_kv + HEADS - 1) // HEADS
        if block < q_blocks:
            head = block * HEADS + warp
            if head < n_head:
                elements = _load_head(q + row * q_stride + head * q_head_stride, q_weight, lane, head_dim)
                if not is_live:
                    return
                _normalize_head(elements, heads, warp, lane, head_dim, eps)
                target = q_out + row * q_out_stride + head * q_out_head_stride
                pair = lane
                while pair < half:
                    first, second = places(pair, half)
                    a, b = heads[warp, first], heads[warp, second]
                    c, s = load_f32(cosines + 4 * pair), load_f32(sines + 4 * pair)
                    store_f32(target + 4 * first, fma(a, c, -mul(b, s)))
                    store_f32(target + 4 * second, fma(a, s, mul(b, c)))
                    pair += 32
                e = 2 * half + lane
                while e < head_dim:
                    store_f32(target + 4 * e, heads[warp, e])
                    e += 32
        elif block < q_blocks + k_blocks:
            head = (block - q_blocks) * HEADS + warp
            if head < n_head_kv:
                elements = _load_head(k + row * k_stride + head * k_head_stride, k_weight, lane, head_dim)
                if not is_stored:
                    return
                _normalize_head(elements, heads, warp, lane, head_dim, eps)
                e = lane
                while e < head_dim:  # whole warps for block types, since head_dim is a multiple of 32
                    value = heads[warp, e]
                    if e < 2 * half:
                        pair, is_first = pair_of(e, half)
                        first, second = places(pair, half)
                        a, b = heads[warp, first], heads[warp, second]
                        c, s = load_f32(cosines + 4 * pair), load_f32(sines + 4 * pair)
                        value = fma(a, c, -mul(b, s)) if is_first else fma(a, s, mul(b, c))
                    put(k_cache + cell * k_cell_stride, head * head_dim + e, value)
                    e += 32
        else:
            i = (block - q_blocks - k_blocks) * THREADS + np.int64(cuda.threadIdx.x)
            if i < n_v:
                value = load_f32(v + row * v_stride + 4 * i)
                if is_stored:
                    put(v_cache + cell * v_cell_stride, i, value)

    return kernel


def all_kernels() -> list[CudaKernel]:
    """Every kernel of this module."""
    return [norm_rope_store_kernel(dtype, interleaved) for dtype in CACHE_TYPES for interleaved in (False, True)]
