"""Causal attention over a paged KV cache, for single steps (`attention_chunks`, `attention_combine`) and for prompts (`attention_rows`).

A row at position p of sequence s attends to the positions max(0, p - window + 1) .. p (window 0: from 0 on) that have a cell in
`cell_table[s]`. Positions are walked in chunks at multiples of 256. A chunk gives the largest score m, the sum l of e^(score - m), and the
values weighted by e^(score - m); chunks are folded in the order of their index. Each of these sums has one order, which depends on nothing
but the positions, so that every path gives the same bits. Cells that are not attended are never multiplied by anything. With a `softcap`
a score is softcap * tanh(score / softcap).

Parameters that the kernels share: `q` float32, a row (token) every `q_stride` bytes, a head every `q_head_stride`; `k`, `v`: cells every
`k_stride`, `v_stride` bytes, KV heads every `k_head_stride`, `v_head_stride`; `cell_table` int32 `[sequence][position]`, a sequence every
`table_stride` bytes, -1: no cell; `positions`, `sequences` int32 `[row]`; `n_head` query heads, of which head h is head first_head + h of
the model and reads KV head (first_head + h) // group - first_kv of the cache; `sinks` float32 `[n_head]` (0: none), scores that take part
in a row's sum of weights and have no value.
"""

from __future__ import annotations

import functools

import numpy as np

from numba_meta.dtypes import DType
from numba_meta.kernels.code_cache import shown_cap
from numba_meta.kernels.cpu.attention_io import check_cache_row, n_vectors
from numba_meta.kernels.cpu.attention_prompt import attention_rows, attention_rows_scratch_bytes
from numba_meta.kernels.cpu.attention_steps import (
    CHUNK,
    HEADS_AT_ONCE,
    IOTA_BYTES,
    chunk_heads,
    fill_iota,
    first_attended,
    fold,
    with_sink,
    write_result,
)
from numba_meta.kernels.cpu.kernel import CpuKernel, Float, Int, Ptr, cpu_kernel
from numba_meta.kernels.cpu.simd import load_f32, load_i32, load_i64, vf_store, vf_zero
from numba_meta.kernels.cpu.simd_math import share, stack_buffer

__all__ = [
    "attention_chunks", "attention_combine", "attention_rows", "attention_rows_scratch_bytes", "attention_scratch_bytes", "chunks_needed",
]  # fmt: skip

RECORD_EXTRA = 64  # bytes behind a chunk's weighted values: m, l


def record_bytes(head_dim_v: int) -> int:
    """Bytes of what a chunk gives for one head of one row: weighted values, m, l."""
    return 64 * n_vectors(head_dim_v) + RECORD_EXTRA


def attention_scratch_bytes(max_rows: int, n_head: int, head_dim_v: int, n_chunks: int) -> int:
    """Bytes of `partial` for `attention_chunks`: rows x chunks x heads."""
    return max_rows * n_chunks * n_head * record_bytes(head_dim_v)


def chunks_needed(n_positions: int, window: int = 0) -> int:
    """Chunks that a row at a position below n_positions may touch: the `n_chunks` of its scratch."""
    whole = -(-n_positions // CHUNK)
    return min(whole, -(-window // CHUNK) + 1) if window else whole


_iota_buffer = stack_buffer(IOTA_BYTES)


def attention_chunks(
    k_type: DType, v_type: DType, head_dim_k: int, head_dim_v: int, exact: bool = False, softcap: float = 0.0
) -> CpuKernel:
    """The kernel of single steps: every (row, chunk, head) gives its record to `partial` `[row][chunk from the row's first][head]`.

    `n_chunks` is the extent of `partial`: at least the chunks that any row touches. Work is shared by cost (positions), at the grain of a
    chunk of one head; heads of a KV head that fall to one thread share the loads of K and V. float32 throughout, whether `exact` or not.
    """
    return _chunks_kernel(k_type, v_type, head_dim_k, head_dim_v, softcap)


@functools.cache
def _chunks_kernel(k_type: DType, v_type: DType, head_dim_k: int, head_dim_v: int, softcap: float) -> CpuKernel:
    check_cache_row(k_type, head_dim_k)
    check_cache_row(v_type, head_dim_v)
    heads_of_chunk = chunk_heads(k_type, v_type, head_dim_k, head_dim_v, softcap)
    record = record_bytes(head_dim_v)

    @cpu_kernel(name=f"attention_chunks_{k_type.name}_{v_type.name}_{head_dim_k}_{head_dim_v}{shown_cap(softcap)}")
    def kernel(  # type: ignore[no-untyped-def]
        thread, n_threads, q: Ptr, q_stride: Int, q_head_stride: Int, k: Ptr, k_stride: Int, k_head_stride: Int,
        v: Ptr, v_stride: Int, v_head_stride: Int, cell_table: Ptr, table_stride: Int, positions: Ptr, sequences: Ptr,
        window: Int, n_head: Int, first_head: Int, group: Int, first_kv: Int, scale: Float, partial: Ptr, n_chunks: Int, n_rows: Ptr,
    ):  # fmt: skip
        rows = load_i64(n_rows)
        cost, low_chunk, high_chunk = 0, 1 << 40, -1
        for row in range(rows):
            position = np.int64(load_i32(positions + 4 * row))
            if position >= 0:
                first = first_attended(position, window)
                cost += (position + 1 - first) * n_head
                low_chunk, high_chunk = min(low_chunk, first // CHUNK), max(high_chunk, position // CHUNK)
        mine, next_one = share(cost, thread, n_threads), share(cost, thread + 1, n_threads)
        iota = _iota_buffer()
        fill_iota(iota)
        done = 0  # cost of the (chunk, row, head) triples before this one
        for chunk in range(low_chunk, high_chunk + 1):
            base = chunk * CHUNK
            for row in range(rows):
                position = np.int64(load_i32(positions + 4 * row))
                first = first_attended(position, window)
                begin, end = max(0, first - base), min(CHUNK, position + 1 - base)
                if begin >= end:
                    continue
                keys = end - begin
                head = max(0, (mine - done + keys - 1) // keys)
                stop = min(n_head, max(0, (next_one - done + keys - 1) // keys))
                done += keys * n_head
                table = cell_table + load_i32(sequences + 4 * row) * table_stride + 4 * base
                records = partial + (row * n_chunks + chunk - first // CHUNK) * n_head * record
                while head < stop:
                    n = min(stop - head, HEADS_AT_ONCE)
                    heads_of_chunk(
                        head, head + n, first_head, group, first_kv, q + row * q_stride, q_head_stride, k, k_stride, k_head_stride, v,
                        v_stride, v_head_stride, table, begin, end, scale, records, iota,
                    )  # fmt: skip
                    head += n
            if done >= next_one:
                break

    return kernel  # type: ignore[no-any-return]


@functools.cache
def attention_combine(head_dim_v: int, exact: bool = False) -> CpuKernel:
    """Folds the records of `attention_chunks` in the order of their chunks: y[row][head] = weighted values / sum of weights.

    A row that attends to nothing gets zeros. y: a row every `y_stride` bytes, a head every `y_head_stride`. One kernel, `exact` or not.
    """
    record, vectors = record_bytes(head_dim_v), n_vectors(head_dim_v)
    total_buffer, write = stack_buffer(record), write_result(head_dim_v)

    @cpu_kernel(name=f"attention_combine_{head_dim_v}")
    def kernel(  # type: ignore[no-untyped-def]
        thread, n_threads, partial: Ptr, n_chunks: Int, positions: Ptr, window: Int, n_head: Int, sinks: Ptr,
        y: Ptr, y_stride: Int, y_head_stride: Int, n_rows: Ptr,
    ):  # fmt: skip
        items = load_i64(n_rows) * n_head
        total = total_buffer()
        for item in range(share(items, thread, n_threads), share(items, thread + 1, n_threads)):
            row = item // n_head
            head = item - row * n_head
            position = np.int64(load_i32(positions + 4 * row))
            m, weight = np.float32(-np.inf), np.float32(0.0)
            for i in range(vectors):
                vf_store(total + 64 * i, vf_zero())
            if position >= 0:
                for chunk in range(position // CHUNK - first_attended(position, window) // CHUNK + 1):
                    part = partial + ((row * n_chunks + chunk) * n_head + head) * record
                    m, weight = fold(vectors, part, load_f32(part + 64 * vectors), load_f32(part + 64 * vectors + 4), total, m, weight)
            write(total, with_sink(weight, m, sinks, head), y + row * y_stride + head * y_head_stride)

    return kernel  # type: ignore[no-any-return]
