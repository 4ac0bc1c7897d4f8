"""Causal attention over a paged KV cache, for single steps (`attention_chunks`, `attention_combine`) and for prompts (`attention_rows`).

A row at position p of sequence s attends to the positions max(0, p - window + 1) .. p (window 0: from 0 on) that have a cell in
`cell_table[s]`. Positions are walked in chunks; how many positions a chunk has depends on how many the row attends to, on nothing else. A
chunk gives the largest score m, the sum l of e^(score - m), and the values weighted by e^(score - m); chunks are folded in the order of
their index. So the bits of a row do not depend on the rows and heads beside it, on the capacity of a recording, or on where cells lie
(those of a prompt on tensor cores may). Cells that no row attends to are never multiplied by anything.

Parameters are those of the CPU's kernels: `q` float32, a row (token) every `q_stride` bytes, a head every `q_head_stride`, all of them
multiples of 16; `k`, `v`: cells every `k_stride`, `v_stride` bytes, KV heads every `k_head_stride`, `v_head_stride`; `cell_table` int32
`[sequence][position]`, a sequence every `table_stride` bytes, -1: no cell; `positions`, `sequences` int32 `[row]`; `n_head` query heads, of
which head h is head first_head + h of the model and reads KV head (first_head + h) // group - first_kv of the cache.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from numba_meta.dtypes import F16, DType
from numba_meta.kernels.cuda.attention_decode import can_decode, decode_variants
from numba_meta.kernels.cuda.attention_io import check_cache_row
from numba_meta.kernels.cuda.attention_plain import plain_chunks, plain_rows
from numba_meta.kernels.cuda.attention_prompt import can_prompt, prompt_rows
from numba_meta.kernels.cuda.attention_steps import (
    LOWEST,
    MIN_CHUNK,
    MOST_CHUNKS,
    fold_factors,
    folded,
    quotient,
    record_bytes,
    row_chunks,
)
from numba_meta.kernels.cuda.device import cuda, load_f32, load_i64, store_f32, types
from numba_meta.kernels.cuda.kernel import CudaKernel, Gpu, Int, Launch, Ptr, cuda_kernel
from numba_meta.kernels.cuda.variants import VariantKernel

__all__ = [
    "attention_chunks", "attention_combine", "attention_rows", "attention_rows_scratch_bytes", "attention_scratch_bytes", "chunks_needed",
]  # fmt: skip


def chunks_needed(n_positions: int, window: int = 0) -> int:
    """Chunks that a row at a position below n_positions may touch: the `n_chunks` of its scratch."""
    whole = min(-(-n_positions // MIN_CHUNK), MOST_CHUNKS)
    return whole + 1 if 0 < window < n_positions else whole


def attention_scratch_bytes(max_rows: int, n_head: int, head_dim_v: int, n_chunks: int) -> int:
    """Bytes of `partial` for `attention_chunks`: rows x chunks x heads."""
    return max_rows * n_chunks * n_head * record_bytes(head_dim_v)


def attention_rows_scratch_bytes(head_dim_k: int, head_dim_v: int) -> int:
    """Bytes of scratch for `attention_rows`: none."""
    return 0


@functools.cache
def attention_chunks(k_type: DType, v_type: DType, head_dim_k: int, head_dim_v: int, exact: bool = False) -> CudaKernel:
    """The kernel of single steps: every (row, chunk, head) gives its record to `partial` `[row][chunk from the row's first][head]`.

    `n_chunks` is the extent of `partial`: at least the chunks that any row touches. Caches in f32 are read in float32 throughout; others by
    tensor cores, unless `exact`, which gives the bits of the exact `attention_rows`.
    """
    dims = (head_dim_k, head_dim_v)
    check_cache_row(k_type, head_dim_k)
    check_cache_row(v_type, head_dim_v)
    plain = plain_chunks(k_type, v_type, *dims)
    if exact or not can_decode(k_type, v_type, *dims):
        return plain
    return VariantKernel(plain.name, [*decode_variants(k_type, v_type, *dims), plain])


@functools.cache
def attention_rows(k_type: DType, v_type: DType, head_dim_k: int, head_dim_v: int, exact: bool = False) -> CudaKernel:
    """The kernel of prompts: y[row][head] (float32, strides in bytes) for any rows; quick where neighbouring rows are of one sequence.

    `scratch` is not used. Caches in f32 are read in float32 throughout, and others if `exact`; then the bits are those of the exact
    `attention_chunks` with `attention_combine`. Others are read by tensor cores as f16.
    """
    dims = (head_dim_k, head_dim_v)
    check_cache_row(k_type, head_dim_k)
    check_cache_row(v_type, head_dim_v)
    plain = plain_rows(k_type, v_type, *dims)
    if exact or not can_prompt(k_type, v_type, *dims):
        return plain
    return VariantKernel(plain.name, [prompt_rows(k_type, v_type, *dims), plain])


LOADS = 16  # records that a thread of `attention_combine` asks for at once
MOST = MOST_CHUNKS + 1  # a window may begin within a chunk


@functools.cache
def attention_combine(head_dim_v: int) -> CudaKernel:
    """Folds the records of `attention_chunks` in the order of their chunks: y[row][head] = weighted values / sum of weights.

    A row that attends to nothing gets zeros. y: a row every `y_stride` bytes, a head every `y_head_stride`. Grid (head, row), a thread for
    each element.
    """
    record = record_bytes(head_dim_v)

    def launch(arguments: Any, n_rows: int, gpu: Gpu) -> Launch:
        grid = (arguments["n_head"], n_rows, 1)
        return Launch(grid if all(grid) else (0, 0, 0), (head_dim_v, 1, 1))

    @cuda_kernel(name=f"attention_combine_{head_dim_v}", launch=launch, max_threads=head_dim_v)
    def kernel(  # type: ignore[no-untyped-def]
        partial: Ptr, n_chunks: Int, positions: Ptr, window: Int, n_head: Int, y: Ptr, y_stride: Int, y_head_stride: Int, n_rows: Ptr
    ):
        head, row, i = types.int64(cuda.blockIdx.x), types.int64(cuda.blockIdx.y), types.int64(cuda.threadIdx.x)
        if row >= load_i64(n_rows):
            return
        by_total, by_part = cuda.shared.array(MOST, types.float32), cuda.shared.array(MOST, types.float32)
        largest, weights = cuda.shared.array(MOST, types.float32), cuda.shared.array(MOST, types.float32)
        values = cuda.local.array(LOADS, types.float32)
        first, stop, shift = row_chunks(positions, row, window)
        n = ((stop - 1) >> shift) - (first >> shift) + 1 if first < stop else types.int64(0)
        source, step = partial + (row * n_chunks * n_head + head) * record, n_head * record
        at = i
        while at < n:
            largest[at] = load_f32(source + at * step + 4 * head_dim_v)
            weights[at] = load_f32(source + at * step + 4 * head_dim_v + 4)
            at += head_dim_v
        cuda.syncthreads()
        at = i
        while at < n:  # the largest score of the chunks before this one
            m = LOWEST
            for j in range(at):
                m = max(m, largest[j])
            _, by_total[at], by_part[at] = fold_factors(m, largest[at])
            at += head_dim_v
        cuda.syncthreads()
        total, weight = np.float32(0.0), np.float32(0.0)
        at = types.int64(0)
        while at < n:
            for j in range(LOADS):
                values[j] = load_f32(source + min(at + j, n - 1) * step + 4 * i)
            for j in range(LOADS):
                if at + j < n:
                    total = folded(total, values[j], by_total[at + j], by_part[at + j])
                    weight = folded(weight, weights[at + j], by_total[at + j], by_part[at + j])
            at += LOADS
        store_f32(y + row * y_stride + head * y_head_stride + 4 * i, quotient(total, weight))

    return kernel


def all_kernels() -> list[CudaKernel]:
    """Kernels of this module for the usual head sizes."""
    attention_chunks(F16, F16, 128, 128), attention_rows(F16, F16, 128, 128)
    return [attention_combine(dim) for dim in (32, 64, 96, 128, 256)]
