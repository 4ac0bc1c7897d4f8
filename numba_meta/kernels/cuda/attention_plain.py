"""Attention without tensor cores, in float32, for every cache type and GPU: a warp takes a head of a row.

A warp walks 4 positions at a time, 8 lanes each: lane s of them holds elements 32 i + 4 s .. + 3 of the head, for every block i of 32. The
4 groups of lanes keep results of their own (positions that are 0, 1, 2, 3 modulo 4), which are joined at the end of a chunk.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from numba_meta.dtypes import BF16, F16, F32, Q4_0, Q8_0, DType
from numba_meta.kernels.code_cache import shown_cap
from numba_meta.kernels.cuda.attention_io import read_4
from numba_meta.kernels.cuda.attention_steps import (
    LOG2_E,
    LOWEST,
    cap_score,
    fold_factors,
    folded,
    head_tiles,
    quotient,
    record_bytes,
    row_chunks,
    tile_heads,
    with_sink,
)
from numba_meta.kernels.cuda.device import (
    add,
    cuda,
    device_function,
    exp2,
    fma,
    load_i32,
    load_i64,
    load_v4_f32,
    maximum,
    mul,
    store_f32,
    store_v4_f32,
    types,
)
from numba_meta.kernels.cuda.kernel import CudaKernel, Float, Gpu, Int, Launch, Ptr, cuda_kernel
from numba_meta.kernels.cuda.lanes import ALL_LANES

MAX_THREADS = 256  # 8 heads


def _warps(arguments: Any) -> int:
    return int(max(1, min(MAX_THREADS // 32, arguments["group"], arguments["n_head"])))


@functools.cache
def chunk_of_head(k_type: DType, v_type: DType, dim_k: int, dim_v: int, softcap: float) -> Any:
    """A device function of one warp: the positions begin..end of a chunk for one head.

    query: 4 elements per block of 32; out: the same of the weighted values, in every group of lanes. Gives the largest score (base 2) and
    the weight.
    """
    read_k, read_v, cap = read_4(k_type), read_4(v_type), cap_score(softcap)
    n_k, n_v, size_v = dim_k // 32, dim_v // 32, dim_v // 8

    @device_function
    def chunk(query, scale, k, k_stride, v, v_stride, table, begin, end, out):  # type: ignore[no-untyped-def]
        lane = types.int64(cuda.threadIdx.x & 31)
        s = lane & 7
        values = cuda.local.array(size_v, types.float32)
        m, weight = LOWEST, np.float32(0.0)
        for i in range(size_v):
            out[i] = np.float32(0.0)
        at = begin // 4 * 4
        while at < end:
            position = at + (lane >> 3)
            cell = types.int32(-1)
            if position >= begin and position < end:
                cell = load_i32(table + 4 * position)
            total = np.float32(0.0)
            if cell >= 0:
                for i in range(n_k):
                    x0, x1, x2, x3 = read_k(k + cell * k_stride, i, s)
                    total = fma(query[4 * i], x0, total)
                    total = fma(query[4 * i + 1], x1, total)
                    total = fma(query[4 * i + 2], x2, total)
                    total = fma(query[4 * i + 3], x3, total)
                for i in range(n_v):
                    values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3] = read_v(v + cell * v_stride, i, s)
            total = add(total, cuda.shfl_xor_sync(ALL_LANES, total, 4))
            total = add(total, cuda.shfl_xor_sync(ALL_LANES, total, 2))
            total = add(total, cuda.shfl_xor_sync(ALL_LANES, total, 1))
            if cell >= 0:
                score = cap(mul(total, scale))
                largest = maximum(m, score)
                by_old, p = exp2(m - largest), exp2(score - largest)
                m, weight = largest, fma(weight, by_old, p)
                for i in range(size_v):
                    out[i] = fma(p, values[i], mul(out[i], by_old))
            at += 4
        # The groups join as equals: (0, 1) and (2, 3), then both; products and sums that commute give every lane the same bits.
        for i in range(2):
            mask = 8 << i
            largest = maximum(m, cuda.shfl_xor_sync(ALL_LANES, m, mask))
            by = exp2(m - largest)
            m, weight = largest, mul(weight, by)
            weight = add(weight, cuda.shfl_xor_sync(ALL_LANES, weight, mask))
            for j in range(size_v):
                mine = mul(out[j], by)
                out[j] = add(mine, cuda.shfl_xor_sync(ALL_LANES, mine, mask))
        return m, weight

    return chunk


@functools.cache
def plain_chunks(k_type: DType, v_type: DType, dim_k: int, dim_v: int, softcap: float = 0.0) -> CudaKernel:
    """`attention_chunks` for every type: grid (chunk, tile of heads, row), a warp for each head."""
    chunk_of, record = chunk_of_head(k_type, v_type, dim_k, dim_v, softcap), record_bytes(dim_v)
    name = f"attention_chunks_{k_type.name}_{v_type.name}_{dim_k}_{dim_v}{shown_cap(softcap)}"
    n_k, n_v, size_k, size_v = dim_k // 32, dim_v // 32, dim_k // 8, dim_v // 8

    def launch(arguments: Any, n_rows: int, gpu: Gpu) -> Launch:
        grid = (arguments["n_chunks"], head_tiles(arguments), n_rows)
        return Launch(grid if all(grid) else (0, 0, 0), (32 * _warps(arguments), 1, 1))

    @cuda_kernel(name=name, launch=launch, max_threads=MAX_THREADS)
    def kernel(  # type: ignore[no-untyped-def]
        q: Ptr, q_stride: Int, q_head_stride: Int, k: Ptr, k_stride: Int, k_head_stride: Int, v: Ptr, v_stride: Int, v_head_stride: Int,
        cell_table: Ptr, table_stride: Int, positions: Ptr, sequences: Ptr, window: Int, n_head: Int, first_head: Int, group: Int,
        first_kv: Int, scale: Float, partial: Ptr, n_chunks: Int, n_rows: Ptr,
    ):  # fmt: skip
        index, tile, row = types.int64(cuda.blockIdx.x), types.int64(cuda.blockIdx.y), types.int64(cuda.blockIdx.z)
        if row >= load_i64(n_rows):
            return
        first, stop, size, first_chunk = row_chunks(positions, row, window)
        base = (first_chunk + index) * size
        begin, end = max(base, first), min(base + size, stop)
        kv, place, head_begin, head_end = tile_heads(tile, first_head, n_head, group)
        head = head_begin + (types.int64(cuda.threadIdx.x) >> 5)
        if begin >= end or head >= head_end:
            return
        s = types.int64(cuda.threadIdx.x & 7)
        query, out = cuda.local.array(size_k, types.float32), cuda.local.array(size_v, types.float32)
        for i in range(n_k):
            place_q = q + row * q_stride + head * q_head_stride + 128 * i + 16 * s
            query[4 * i], query[4 * i + 1], query[4 * i + 2], query[4 * i + 3] = load_v4_f32(place_q)
        m, weight = chunk_of(
            query, mul(scale, LOG2_E), k + (kv - first_kv) * k_head_stride, k_stride, v + (kv - first_kv) * v_head_stride, v_stride,
            cell_table + load_i32(sequences + 4 * row) * table_stride, begin, end, out,
        )  # fmt: skip
        target = partial + ((row * n_chunks + index) * n_head + head) * record
        if cuda.threadIdx.x & 31 < 8:
            for i in range(n_v):
                store_v4_f32(target + 128 * i + 16 * s, out[4 * i], out[4 * i + 1], out[4 * i + 2], out[4 * i + 3])
        if cuda.threadIdx.x & 31 == 0:
            store_f32(target + 4 * dim_v, m)
            store_f32(target + 4 * dim_v + 4, weight)

    return kernel


@functools.cache
def plain_rows(k_type: DType, v_type: DType, dim_k: int, dim_v: int, softcap: float = 0.0) -> CudaKernel:
    """`attention_rows` with the bits of `plain_chunks` and `combine_in_order`: grid (tile of heads, row), a warp for each head."""
    chunk_of = chunk_of_head(k_type, v_type, dim_k, dim_v, softcap)
    name = f"attention_rows_{k_type.name}_{v_type.name}_{dim_k}_{dim_v}{shown_cap(softcap)}"
    n_k, n_v, size_k, size_v = dim_k // 32, dim_v // 32, dim_k // 8, dim_v // 8

    def launch(arguments: Any, n_rows: int, gpu: Gpu) -> Launch:
        grid = (head_tiles(arguments), n_rows, 1)
        return Launch(grid if all(grid) else (0, 0, 0), (32 * _warps(arguments), 1, 1))

    @cuda_kernel(name=name, launch=launch, max_threads=MAX_THREADS)
    def kernel(  # type: ignore[no-untyped-def]
        q: Ptr, q_stride: Int, q_head_stride: Int, k: Ptr, k_stride: Int, k_head_stride: Int, v: Ptr, v_stride: Int, v_head_stride: Int,
        cell_table: Ptr, table_stride: Int, positions: Ptr, sequences: Ptr, window: Int, n_head: Int, first_head: Int, group: Int,
        first_kv: Int, scale: Float, sinks: Ptr, y: Ptr, y_stride: Int, y_head_stride: Int, scratch: Ptr, scratch_bytes: Int, n_rows: Ptr,
    ):  # fmt: skip
        tile, row = types.int64(cuda.blockIdx.x), types.int64(cuda.blockIdx.y)
        kv, place, head_begin, head_end = tile_heads(tile, first_head, n_head, group)
        head = head_begin + (types.int64(cuda.threadIdx.x) >> 5)
        if row >= load_i64(n_rows) or head >= head_end:
            return
        first, stop, size, first_chunk = row_chunks(positions, row, window)
        s = types.int64(cuda.threadIdx.x & 7)
        query, out = cuda.local.array(size_k, types.float32), cuda.local.array(size_v, types.float32)
        total = cuda.local.array(size_v, types.float32)
        for i in range(n_k):
            place_q = q + row * q_stride + head * q_head_stride + 128 * i + 16 * s
            query[4 * i], query[4 * i + 1], query[4 * i + 2], query[4 * i + 3] = load_v4_f32(place_q)
        for i in range(size_v):
            total[i] = np.float32(0.0)
        m, weight = LOWEST, np.float32(0.0)
        base = first_chunk * size
        while base < stop:
            part_m, part_weight = chunk_of(
                query, mul(scale, LOG2_E), k + (kv - first_kv) * k_head_stride, k_stride, v + (kv - first_kv) * v_head_stride, v_stride,
                cell_table + load_i32(sequences + 4 * row) * table_stride, max(base, first), min(base + size, stop), out,
            )  # fmt: skip
            m, by_total, by_part = fold_factors(m, part_m)
            weight = folded(weight, part_weight, by_total, by_part)
            for i in range(size_v):
                total[i] = folded(total[i], out[i], by_total, by_part)
            base += size
        weight = with_sink(weight, m, sinks, head)
        target = y + row * y_stride + head * y_head_stride
        if cuda.threadIdx.x & 31 < 8:
            for i in range(n_v):
                store_v4_f32(
                    target + 128 * i + 16 * s, quotient(total[4 * i], weight), quotient(total[4 * i + 1], weight),
                    quotient(total[4 * i + 2], weight), quotient(total[4 * i + 3], weight),
                )  # fmt: skip

    return kernel


def all_kernels() -> list[CudaKernel]:
    """Every type once, and the smallest and largest heads."""
    shapes = [(F32, F32, 32, 32), (F32, F32, 256, 256), (F16, BF16, 128, 64), (Q4_0, Q8_0, 256, 256)]
    capped = [plain_chunks(F16, F16, 64, 64, 50.0), plain_rows(F16, F16, 64, 64, 50.0)]
    return [make(*shape) for shape in shapes for make in (plain_chunks, plain_rows)] + capped
