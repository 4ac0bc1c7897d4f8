"""The second half of attention for single steps: the records of a row's chunks become its result."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from numba_meta.kernels.cuda.attention_steps import LOWEST, MOST_CHUNKS, fold_factors, folded, quotient, record_bytes, row_chunks
from numba_meta.kernels.cuda.device import cuda, device_function, load_f32, load_i64, load_v4_f32, maximum, store_f32, types
from numba_meta.kernels.cuda.kernel import CudaKernel, Gpu, Int, Launch, Ptr, cuda_kernel
from numba_meta.kernels.cuda.lanes import ALL_LANES

THREADS = 256
MOST = MOST_CHUNKS + 1  # a window may begin within a chunk
PLACES = 96  # MOST in whole warps
LOADS = 8  # quadruples that a thread asks for at once


@device_function
def _largest_before(x, carried):  # type: ignore[no-untyped-def]
    """For each lane the largest of `carried` and the lanes before it; and that of all lanes."""
    lane = cuda.threadIdx.x & 31
    x = maximum(x, carried)
    for i in range(5):
        before = cuda.shfl_up_sync(ALL_LANES, x, 1 << i)
        x = maximum(x, before) if lane >= 1 << i else x
    before = cuda.shfl_up_sync(ALL_LANES, x, 1)
    return before if lane > 0 else carried, cuda.shfl_sync(ALL_LANES, x, 31)


@functools.cache
def attention_combine(head_dim_v: int) -> CudaKernel:
    """Folds the records of `attention_chunks` in the order of their chunks: y[row][head] = weighted values / sum of weights.

    A row that attends to nothing gets zeros. y: a row every `y_stride` bytes, a head every `y_head_stride`. Grid (part of a head, head,
    row); a block brings the part of all records to shared memory, then a thread folds one element.
    """
    record = record_bytes(head_dim_v)
    n_part = next(n for n in (128, 64, 32) if head_dim_v % n == 0)  # elements of a block
    quads, n_shared = n_part // 4, MOST * n_part
    batch = 4 * LOADS

    def launch(arguments: Any, n_rows: int, gpu: Gpu) -> Launch:
        grid = (head_dim_v // n_part, arguments["n_head"], n_rows)
        return Launch(grid if all(grid) else (0, 0, 0), (THREADS, 1, 1))

    @cuda_kernel(name=f"attention_combine_{head_dim_v}", launch=launch, max_threads=THREADS)
    def kernel(  # type: ignore[no-untyped-def]
        partial: Ptr, n_chunks: Int, positions: Ptr, window: Int, n_head: Int, y: Ptr, y_stride: Int, y_head_stride: Int, n_rows: Ptr
    ):
        part, head, row = types.int64(cuda.blockIdx.x), types.int64(cuda.blockIdx.y), types.int64(cuda.blockIdx.z)
        thread = types.int64(cuda.threadIdx.x)
        parts = cuda.shared.array(n_shared, types.float32)
        by_total, by_part = cuda.shared.array(PLACES, types.float32), cuda.shared.array(PLACES, types.float32)
        weights, values = cuda.shared.array(PLACES, types.float32), cuda.local.array(batch, types.float32)
        live = load_i64(n_rows)
        first, stop, shift = row_chunks(positions, row, window)
        if row >= live:
            return
        n = ((stop - 1) >> shift) - (first >> shift) + 1 if first < stop else types.int64(0)
        source, step = partial + (row * n_chunks * n_head + head) * record, n_head * record
        begin = source + 4 * n_part * part
        at = thread
        while at < n * quads:
            for i in range(LOADS):
                place = min(at + THREADS * i, n * quads - 1)
                values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3] = load_v4_f32(
                    begin + place // quads * step + 16 * (place % quads)
                )
            for i in range(LOADS):
                place = at + THREADS * i
                if place < n * quads:
                    for j in range(4):
                        parts[4 * place + j] = values[4 * i + j]
            at += THREADS * LOADS
        if thread < 32:
            largest = LOWEST  # of the chunks before these 32
            for i in range(PLACES // 32):
                at, m, weight = thread + 32 * i, LOWEST, np.float32(0.0)
                if at < n:
                    m, weight = load_f32(source + at * step + 4 * head_dim_v), load_f32(source + at * step + 4 * head_dim_v + 4)
                before, largest = _largest_before(m, largest)
                weights[at] = weight
                _, by_total[at], by_part[at] = fold_factors(before, m)
        cuda.syncthreads()
        if thread < n_part:
            total, weight = np.float32(0.0), np.float32(0.0)
            for i in range(n):
                total = folded(total, parts[i * n_part + thread], by_total[i], by_part[i])
                weight = folded(weight, weights[i], by_total[i], by_part[i])
            store_f32(y + row * y_stride + head * y_head_stride + 4 * (n_part * part + thread), quotient(total, weight))

    return kernel


def all_kernels() -> list[CudaKernel]:
    """The usual head sizes, and each size of a part."""
    return [attention_combine(dim) for dim in (32, 64, 96, 128, 256)]
