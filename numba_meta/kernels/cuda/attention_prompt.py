"""Attention for prompts on tensor cores: a block takes some (row, head) pairs of one KV head and walks the positions they attend to.

K and V of N positions at a time lie in shared memory as f16, converted once for all pairs; a warp takes 16 pairs. Q, K, V and the weights
are rounded to f16 (what is larger than it holds is clamped), sums are float32. Pairs go row by row, so that rows at positions of one
sequence that follow each other share what they attend to; other rows are walked one such run after the other.

A position that a pair does not attend to weighs 0 for it, if another pair of the run attends to it; others are never read.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from numba_meta.dtypes import BF16, F16, Q4_0, Q8_0, DType
from numba_meta.kernels.code_cache import shown_cap
from numba_meta.kernels.cuda.attention_halves import stage_row
from numba_meta.kernels.cuda.attention_intrinsics import cell_address, shared_word
from numba_meta.kernels.cuda.attention_steps import LOG2_E, LOWEST, cap_score, first_attended, quotient, with_sink
from numba_meta.kernels.cuda.device import (
    async_commit,
    async_wait_all,
    cuda,
    device_function,
    exp2,
    load_i32,
    load_i64,
    load_matrix_x4,
    load_matrix_x4_transposed,
    load_v2_f32,
    maximum,
    mma_f16,
    mul,
    pack_f16,
    shared_address,
    shared_store_i32,
    store_f32,
    types,
)
from numba_meta.kernels.cuda.kernel import CudaKernel, Float, Gpu, Int, Launch, Ptr, cuda_kernel
from numba_meta.kernels.cuda.lanes import ALL_LANES

WARPS = 4  # 16 pairs each


def half_stride(dim: int) -> int:
    """Bytes from row to row of f16 in shared memory: an odd multiple of 16, so that 8 rows begin in different banks."""
    return 16 * (dim // 8 | 1)


def can_prompt(k_type: DType, v_type: DType, dim_k: int, dim_v: int) -> bool:
    """Whether `prompt_rows` reads these rows."""
    return {k_type, v_type} <= {F16, BF16, Q8_0, Q4_0} and dim_k % 32 == 0 == dim_v % 32


@device_function
def _range_of(positions, row, window):  # type: ignore[no-untyped-def]
    """(first, last) attended position of a row."""
    position = np.int64(load_i32(positions + 4 * row))
    return types.int32(first_attended(position, window)), types.int32(position)


@device_function
def _end_of_run(sequences, positions, begin, end):  # type: ignore[no-untyped-def]
    """The end of the rows from `begin` on, before `end`, that are of one sequence at positions that follow each other."""
    lane = types.int32(cuda.threadIdx.x & 31)
    sequence, position = load_i32(sequences + 4 * begin), load_i32(positions + 4 * begin)
    row = types.int32(begin + 1)
    while row < end:
        at = row + lane
        is_other = at < end and (load_i32(sequences + 4 * at) != sequence or load_i32(positions + 4 * at) - position != at - begin)
        others = cuda.ballot_sync(ALL_LANES, is_other)
        if others != 0:
            return types.int32(row + cuda.ffs(others) - 1)
        row = types.int32(row + 32)
    return end


@functools.cache
def prompt_rows(k_type: DType, v_type: DType, dim_k: int, dim_v: int, warps: int = WARPS, softcap: float = 0.0) -> CudaKernel:
    """`attention_rows` on tensor cores: grid (tile of pairs, the last ones first; KV head)."""
    n_pairs, threads = 16 * warps, 32 * warps
    n = 64 if {dim_k, dim_v} <= {64, 128} else 32  # positions at a time
    stride_k, stride_v = half_stride(dim_k), half_stride(dim_v)
    keys_at = n_pairs * stride_k
    values_at = keys_at + n * stride_k
    cells_at = values_at + n * stride_v
    ranges_at = cells_at + 4 * n  # first and last attended position of each pair
    n_shared = ranges_at + 8 * n_pairs
    steps_k, steps_v, n_tiles, n_scores, n_out = dim_k // 16, n // 16, n // 8, n // 2, dim_v // 2
    pairs_v, per_row = dim_v // 16, threads // n  # threads of a row
    stage_k, stage_v = stage_row(k_type, dim_k, per_row), stage_row(v_type, dim_v, per_row)
    name = f"attention_prompt_{k_type.name}_{v_type.name}_{dim_k}_{dim_v}_{warps}{shown_cap(softcap)}"
    cap, capped = cap_score(softcap), softcap > 0

    def launch(arguments: Any, n_rows: int, gpu: Gpu) -> Launch:
        first, n_head, group = arguments["first_head"], arguments["n_head"], arguments["group"]
        if not n_head or not n_rows:
            return Launch((0, 0, 0), (threads, 1, 1))
        n_kv = (first + n_head - 1) // group + 1 - first // group
        return Launch((-(-n_rows * min(group, n_head) // n_pairs), n_kv, 1), (threads, 1, 1), n_shared)

    @device_function
    def store_queries(shared, q, q_stride, q_head_stride, pair, pairs, n_heads, scale):  # type: ignore[no-untyped-def]
        """Q of the block's pairs times scale as f16; zeros beyond the last one."""
        at = types.int32(cuda.threadIdx.x)
        while at < n_pairs * (dim_k // 2):
            place, element = at // (dim_k // 2), 2 * (at % (dim_k // 2))
            x, y = np.float32(0.0), np.float32(0.0)
            if pair + place < pairs:
                row = (pair + place) // n_heads
                x, y = load_v2_f32(q + row * q_stride + (pair + place - row * n_heads) * q_head_stride + 4 * element)
            shared_store_i32(shared + place * stride_k + 2 * element, pack_f16(mul(x, scale), mul(y, scale)))
            at += threads

    @device_function
    def store_ranges(shared, positions, window, pair, pairs, n_heads, begin, stop):  # type: ignore[no-untyped-def]
        """What each pair attends to in the run of rows begin .. stop - 1; nothing for those of other rows."""
        place = types.int32(cuda.threadIdx.x)
        if place < n_pairs:
            row = (pair + place) // n_heads
            first, last = types.int32(0), types.int32(-1)
            if pair + place < pairs and row >= begin and row < stop:
                first, last = _range_of(positions, row, window)
            shared_store_i32(shared + ranges_at + 8 * place, first)
            shared_store_i32(shared + ranges_at + 8 * place + 4, last)

    @device_function
    def stage(shared, k, k_stride, v, v_stride, table, start, lowest, highest):  # type: ignore[no-untyped-def]
        """K and V of the positions start .. start + n - 1 in shared memory; zeros where no row attends to any, or there is no cell."""
        place, part = types.int32(cuda.threadIdx.x) // per_row, types.int32(cuda.threadIdx.x) % per_row
        position, cell = types.int32(start + place), types.int32(-1)
        if position >= lowest and position <= highest:
            cell = load_i32(table + 4 * types.int64(position))
        if part == 0:
            shared_store_i32(shared + cells_at + 4 * place, cell)
        stage_k(shared + keys_at + place * stride_k, cell_address(k, max(cell, types.int32(0)), k_stride), cell >= 0, part)
        stage_v(shared + values_at + place * stride_v, cell_address(v, max(cell, types.int32(0)), v_stride), cell >= 0, part)
        return cell

    @cuda_kernel(name=name, launch=launch, max_threads=threads, capability=(8, 0))
    def kernel(  # type: ignore[no-untyped-def]
        q: Ptr, q_stride: Int, q_head_stride: Int, k: Ptr, k_stride: Int, k_head_stride: Int, v: Ptr, v_stride: Int, v_head_stride: Int,
        cell_table: Ptr, table_stride: Int, positions: Ptr, sequences: Ptr, window: Int, n_head: Int, first_head: Int, group: Int,
        first_kv: Int, scale: Float, sinks: Ptr, y: Ptr, y_stride: Int, y_head_stride: Int, scratch: Ptr, scratch_bytes: Int, n_rows: Ptr,
    ):  # fmt: skip
        kv = first_head // group + types.int64(cuda.blockIdx.y)
        head_begin, head_end = max(types.int64(0), kv * group - first_head), min(n_head, (kv + 1) * group - first_head)
        n_heads = types.int32(head_end - head_begin)
        pairs, pair = types.int32(load_i64(n_rows) * n_heads), types.int32((cuda.gridDim.x - 1 - cuda.blockIdx.x) * n_pairs)
        if pair >= pairs:
            return
        lane, warp = types.int32(cuda.threadIdx.x & 31), types.int32(cuda.threadIdx.x >> 5)
        g, t = lane >> 2, lane & 3
        shared = shared_address(cuda.shared.array(0, types.int32))
        k, v = k + (kv - first_kv) * k_head_stride, v + (kv - first_kv) * v_head_stride
        q, y = q + head_begin * q_head_stride, y + head_begin * y_head_stride
        store_queries(shared, q, q_stride, q_head_stride, pair, pairs, n_heads, mul(scale, LOG2_E))

        # Addresses that ldmatrix takes from this lane.
        queries = shared + (16 * warp + (lane & 15)) * stride_k + 16 * (lane >> 4)
        keys = shared + keys_at + ((lane & 7) + 8 * (lane >> 4)) * stride_k + 16 * (lane >> 3 & 1)
        values = shared + values_at + (lane & 15) * stride_v + 16 * (lane >> 4)
        ranges = shared + ranges_at + 8 * (16 * warp + g)
        out, scores = cuda.local.array(n_out, types.float32), cuda.local.array(n_scores, types.float32)
        for i in range(n_out):
            out[i] = np.float32(0.0)
        m0, m1, weight0, weight1 = LOWEST, LOWEST, np.float32(0.0), np.float32(0.0)
        pair0 = types.int32(pair + 16 * warp + g)
        begin, end = types.int32(pair // n_heads), types.int32((min(pair + n_pairs, pairs) - 1) // n_heads + 1)
        while begin < end:
            stop = _end_of_run(sequences, positions, begin, end)
            lowest, highest = _range_of(positions, begin, window)
            highest = types.int32(highest + stop - 1 - begin)
            table = cell_table + load_i32(sequences + 4 * begin) * table_stride
            cuda.syncthreads()  # the ranges before these are read
            store_ranges(shared, positions, window, pair, pairs, n_heads, begin, stop)
            start = types.int32(lowest // n * n)
            while start <= highest:
                cuda.syncthreads()  # the tile before this one is read
                cell = stage(shared, k, k_stride, v, v_stride, table, start, lowest, highest)
                async_commit()
                async_wait_all()
                holes = cuda.syncthreads_or(types.int32(1) if cell < 0 else types.int32(0))
                for i in range(n_scores):
                    scores[i] = np.float32(0.0)
                for step in range(steps_k):
                    a0, a1, a2, a3 = load_matrix_x4(queries + 32 * step)
                    for i in range(n_tiles // 2):
                        b0, b1, c0, c1 = load_matrix_x4(keys + 16 * i * stride_k + 32 * step)
                        j = 8 * i
                        scores[j], scores[j + 1], scores[j + 2], scores[j + 3] = mma_f16(
                            a0, a1, a2, a3, b0, b1, scores[j], scores[j + 1], scores[j + 2], scores[j + 3]
                        )
                        j = 8 * i + 4
                        scores[j], scores[j + 1], scores[j + 2], scores[j + 3] = mma_f16(
                            a0, a1, a2, a3, c0, c1, scores[j], scores[j + 1], scores[j + 2], scores[j + 3]
                        )
                if capped:
                    for i in range(n_scores):
                        scores[i] = cap(scores[i])
                from0, to0 = shared_word(ranges), shared_word(ranges + 4)
                from1, to1 = shared_word(ranges + 64), shared_word(ranges + 68)
                if holes or start < from0 or start < from1 or start + n - 1 > to0 or start + n - 1 > to1:
                    for i in range(n_tiles):
                        for c in range(2):
                            position = start + 8 * i + 2 * t + c
                            has_cell = shared_word(shared + cells_at + 4 * (8 * i + 2 * t + c)) >= 0
                            if not has_cell or position < from0 or position > to0:
                                scores[4 * i + c] = -np.float32(np.inf)
                            if not has_cell or position < from1 or position > to1:
                                scores[4 * i + 2 + c] = -np.float32(np.inf)
                largest0, largest1 = m0, m1
                for i in range(n_tiles):
                    largest0 = maximum(largest0, maximum(scores[4 * i], scores[4 * i + 1]))
                    largest1 = maximum(largest1, maximum(scores[4 * i + 2], scores[4 * i + 3]))
                largest0 = maximum(largest0, cuda.shfl_xor_sync(ALL_LANES, largest0, 1))
                largest0 = maximum(largest0, cuda.shfl_xor_sync(ALL_LANES, largest0, 2))
                largest1 = maximum(largest1, cuda.shfl_xor_sync(ALL_LANES, largest1, 1))
                largest1 = maximum(largest1, cuda.shfl_xor_sync(ALL_LANES, largest1, 2))
                by0, by1 = exp2(m0 - largest0), exp2(m1 - largest1)
                m0, m1, weight0, weight1 = largest0, largest1, mul(weight0, by0), mul(weight1, by1)
                for i in range(n_out // 4):
                    out[4 * i], out[4 * i + 1] = mul(out[4 * i], by0), mul(out[4 * i + 1], by0)
                    out[4 * i + 2], out[4 * i + 3] = mul(out[4 * i + 2], by1), mul(out[4 * i + 3], by1)
                for i in range(n_tiles):
                    for c in range(2):
                        scores[4 * i + c] = exp2(scores[4 * i + c] - m0)
                        scores[4 * i + 2 + c] = exp2(scores[4 * i + 2 + c] - m1)
                        weight0, weight1 = weight0 + scores[4 * i + c], weight1 + scores[4 * i + 2 + c]
                for step in range(steps_v):
                    j = 8 * step
                    a0, a1 = pack_f16(scores[j], scores[j + 1]), pack_f16(scores[j + 2], scores[j + 3])
                    a2, a3 = pack_f16(scores[j + 4], scores[j + 5]), pack_f16(scores[j + 6], scores[j + 7])
                    for i in range(pairs_v):
                        b0, b1, c0, c1 = load_matrix_x4_transposed(values + 16 * step * stride_v + 32 * i)
                        j = 8 * i
                        out[j], out[j + 1], out[j + 2], out[j + 3] = mma_f16(
                            a0, a1, a2, a3, b0, b1, out[j], out[j + 1], out[j + 2], out[j + 3]
                        )
                        j = 8 * i + 4
                        out[j], out[j + 1], out[j + 2], out[j + 3] = mma_f16(
                            a0, a1, a2, a3, c0, c1, out[j], out[j + 1], out[j + 2], out[j + 3]
                        )
                start = types.int32(start + n)
            begin = stop

        weight0, weight1 = weight0 + cuda.shfl_xor_sync(ALL_LANES, weight0, 1), weight1 + cuda.shfl_xor_sync(ALL_LANES, weight1, 1)
        weight0, weight1 = weight0 + cuda.shfl_xor_sync(ALL_LANES, weight0, 2), weight1 + cuda.shfl_xor_sync(ALL_LANES, weight1, 2)
        row0, row1 = pair0 // n_heads, (pair0 + 8) // n_heads
        head0, head1 = pair0 - row0 * n_heads, pair0 + 8 - row1 * n_heads  # those of pairs beyond the last one are heads, too
        weight0 = with_sink(weight0, m0, sinks, head_begin + head0)
        weight1 = with_sink(weight1, m1, sinks, head_begin + head1)
        target0, target1 = y + row0 * y_stride + head0 * y_head_stride + 8 * t, y + row1 * y_stride + head1 * y_head_stride + 8 * t
        for i in range(n_out // 4):
            if pair0 < pairs:
                store_f32(target0 + 32 * i, quotient(out[4 * i], weight0))
                store_f32(target0 + 32 * i + 4, quotient(out[4 * i + 1], weight0))
            if pair0 + 8 < pairs:
                store_f32(target1 + 32 * i, quotient(out[4 * i + 2], weight1))
                store_f32(target1 + 32 * i + 4, quotient(out[4 * i + 3], weight1))

    return kernel


def all_kernels() -> list[CudaKernel]:
    """Every type and the usual head sizes."""
    shapes = [(F16, F16, 64, 64), (F16, F16, 128, 128), (F16, F16, 256, 256), (BF16, BF16, 128, 128), (Q8_0, Q8_0, 128, 128)]
    shapes += [(Q4_0, Q4_0, 256, 256), (Q4_0, BF16, 96, 32)]
    return [prompt_rows(*shape) for shape in shapes] + [prompt_rows(F16, F16, 256, 256, softcap=50.0)]
