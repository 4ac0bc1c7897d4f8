"""The second half of exact attention for single steps: records are folded one after the other, as a prompt's chunks are."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from numba_meta.kernels.cuda.attention_intrinsics import shared_word
from numba_meta.kernels.cuda.attention_steps import (
    LOWEST,
    MOST_CHUNKS,
    chunks_of_row,
    fold_factors,
    folded,
    quotient,
    record_bytes,
    with_sink,
)
from numba_meta.kernels.cuda.device import (
    bits_float,
    cuda,
    device_function,
    float_bits,
    load_i64,
    load_v2_f32,
    load_v4,
    maximum,
    shared_address,
    shared_load_v4,
    shared_store_v4,
    store_f32,
    types,
)
from numba_meta.kernels.cuda.kernel import CudaKernel, Gpu, Int, Launch, Ptr, cuda_kernel
from numba_meta.kernels.cuda.lanes import ALL_LANES

THREADS = 256
MOST = MOST_CHUNKS + 1  # a window may begin within a chunk
PLACES = 32 * (-(-MOST // 32))  # in whole warps
AT_ONCE = 8  # records that a thread reads before it folds them


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
def combine_in_order(head_dim_v: int) -> CudaKernel:
    """`attention_combine` with the bits of the exact `attention_rows`: grid (part of a head, head, row).

    A block asks for its part of all records that there can be before it knows how many there are: what lies beyond is not used. Then a
    thread folds one element.
    """
    record = record_bytes(head_dim_v)
    n_part = next(n for n in (128, 64, 32) if head_dim_v % n == 0)  # elements of a block
    quads = n_part // 4
    n_loads = -(-MOST * quads // THREADS)
    n_values, parts_bytes = 4 * n_loads, 4 * n_part * (n_loads * THREADS // quads)
    n_shared, n_places = (parts_bytes + 16 * PLACES) // 4, PLACES // 32

    def launch(arguments: Any, n_rows: int, gpu: Gpu) -> Launch:
        grid = (head_dim_v // n_part, arguments["n_head"], n_rows)
        return Launch(grid if all(grid) else (0, 0, 0), (THREADS, 1, 1))

    @cuda_kernel(name=f"attention_in_order_{head_dim_v}", launch=launch, max_threads=THREADS)
    def kernel(  # type: ignore[no-untyped-def]
        partial: Ptr, n_chunks: Int, positions: Ptr, window: Int, n_head: Int, sinks: Ptr, y: Ptr, y_stride: Int, y_head_stride: Int,
        n_rows: Ptr,
    ):  # fmt: skip
        part, head, row = types.int64(cuda.blockIdx.x), types.int64(cuda.blockIdx.y), types.int64(cuda.blockIdx.z)
        thread = types.int32(cuda.threadIdx.x)
        shared = shared_address(cuda.shared.array(n_shared, types.int32, alignment=16))
        factors = shared + parts_bytes  # of each record: of the total, of the part; its weight; the largest score so far
        values = cuda.local.array(n_values, types.int32)
        source, step = partial + (row * n_chunks * n_head + head) * record, n_head * record
        begin = source + 4 * n_part * part
        for i in range(n_loads):
            place = THREADS * i + thread
            at = begin + min(place // quads, n_chunks - 1) * step + 16 * (place % quads)
            values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3] = load_v4(at)
        m, weight = cuda.local.array(n_places, types.float32), cuda.local.array(n_places, types.float32)
        if thread < 32:
            for i in range(n_places):
                at = source + min(32 * i + thread, n_chunks - 1) * step + 4 * head_dim_v
                m[i], weight[i] = load_v2_f32(at)
        live = load_i64(n_rows)
        n = types.int32(chunks_of_row(positions, row, window))
        if row >= live:
            return
        for i in range(n_loads):
            place = 16 * (THREADS * i + thread)
            shared_store_v4(shared + place, values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3])
        if thread < 32:
            largest = LOWEST  # of the chunks before these 32
            for i in range(n_places):
                at = 32 * i + thread
                m[i], weight[i] = (m[i], weight[i]) if at < n else (LOWEST, np.float32(0.0))
                before, largest = _largest_before(m[i], largest)
                so_far, by_total, by_part = fold_factors(before, m[i])
                shared_store_v4(
                    factors + 16 * at, float_bits(by_total), float_bits(by_part), float_bits(weight[i]), float_bits(so_far)
                )  # fmt: skip
        cuda.syncthreads()
        if thread < n_part:
            total, weight_sum = np.float32(0.0), np.float32(0.0)
            at = types.int32(0)
            while at < n:
                for i in range(AT_ONCE):
                    by_total, by_part, weight_part, _ = shared_load_v4(factors + 16 * (at + i))
                    value = bits_float(shared_word(shared + 4 * (n_part * (at + i) + thread)))
                    if at + i < n:
                        total = folded(total, value, bits_float(by_total), bits_float(by_part))
                        weight_sum = folded(weight_sum, bits_float(weight_part), bits_float(by_total), bits_float(by_part))
                at += AT_ONCE
            if sinks != 0 and n > 0:
                weight_sum = with_sink(weight_sum, bits_float(shared_word(factors + 16 * (n - 1) + 12)), sinks, head)
            store_f32(y + row * y_stride + head * y_head_stride + 4 * (n_part * part + thread), quotient(total, weight_sum))

    return kernel


def all_kernels() -> list[CudaKernel]:
    """The usual head sizes, and each size of a part."""
    return [combine_in_order(dim) for dim in (32, 64, 96, 128, 256)]
