"""The second half of attention for single steps: the records of a row's chunks become its result."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from numba_meta.kernels.cuda.attention_steps import LOWEST, MOST_CHUNKS, chunks_of_row, quotient, record_bytes, with_sink
from numba_meta.kernels.cuda.device import (
    add,
    bits_float,
    cuda,
    device_function,
    exp2,
    float_bits,
    fma,
    load_i64,
    load_v2_f32,
    load_v4_f32,
    maximum,
    mul,
    shared_address,
    shared_load_v4,
    shared_store_v4,
    types,
)
from numba_meta.kernels.cuda.kernel import CudaKernel, Gpu, Int, Launch, Ptr, cuda_kernel
from numba_meta.kernels.cuda.lanes import ALL_LANES, warp_max, warp_sum
from numba_meta.kernels.cuda.outputs import write_f32, write_q8

WARPS = 8
MOST = MOST_CHUNKS + 1  # a window may begin within a chunk
assert MOST_CHUNKS <= 32, "a lane for each record, and one more record"


@device_function
def _shared_4(address):  # type: ignore[no-untyped-def]
    """4 float32 from shared memory."""
    x0, x1, x2, x3 = shared_load_v4(address)
    return bits_float(x0), bits_float(x1), bits_float(x2), bits_float(x3)


@functools.cache
def attention_combine(head_dim_v: int, quantized: bool = False) -> CudaKernel:
    """`attention_combine`, or with what quantizes its rows: grid (part of a head, head, row).

    The warps of a block share the records, whose parts each lane adds up in registers; then they meet. A block asks for its part of all
    records that there can be before it knows how many there are: what lies beyond is not used.
    """
    record = record_bytes(head_dim_v)
    n_part = next(n for n in (128, 64, 32) if head_dim_v % n == 0)  # elements of a block
    quads = n_part // 4
    at_once = 32 // quads  # records that a warp reads at a time
    n_loads, n_shared = -(-MOST // (WARPS * at_once)), WARPS * n_part
    n_values = 4 * n_loads
    write = write_q8 if quantized else write_f32

    def launch(arguments: Any, n_rows: int, gpu: Gpu) -> Launch:
        grid = (head_dim_v // n_part, arguments["n_head"], n_rows)
        return Launch(grid if all(grid) else (0, 0, 0), (32 * WARPS, 1, 1))

    @cuda_kernel(name=f"attention_combine{'_quantize' * quantized}_{head_dim_v}", launch=launch, max_threads=32 * WARPS)
    def kernel(  # type: ignore[no-untyped-def]
        partial: Ptr, n_chunks: Int, positions: Ptr, window: Int, n_head: Int, sinks: Ptr, y: Ptr, y_stride: Int, y_head_stride: Int,
        n_rows: Ptr,
    ):  # fmt: skip
        part, head, row = types.int64(cuda.blockIdx.x), types.int64(cuda.blockIdx.y), types.int64(cuda.blockIdx.z)
        lane, warp = types.int32(cuda.threadIdx.x & 31), types.int32(cuda.threadIdx.x >> 5)
        sums = shared_address(cuda.shared.array(n_shared, types.int32, alignment=16))
        values = cuda.local.array(n_values, types.float32)
        source, step = partial + (row * n_chunks * n_head + head) * record, n_head * record
        begin = source + 4 * n_part * part + 16 * (lane % quads)
        first_place, last = warp * at_once + lane // quads, n_chunks - 1
        for i in range(n_loads):
            at = begin + min(first_place + WARPS * at_once * i, last) * step
            values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3] = load_v4_f32(at)
        m, weight = load_v2_f32(source + min(lane, last) * step + 4 * head_dim_v)
        m_behind, weight_behind = load_v2_f32(source + min(32, last) * step + 4 * head_dim_v)
        live = load_i64(n_rows)
        n = types.int32(chunks_of_row(positions, row, window))
        if row >= live:
            return
        m, weight = (m, weight) if lane < n else (LOWEST, np.float32(0.0))
        m_behind, weight_behind = (m_behind, weight_behind) if n > 32 else (LOWEST, np.float32(0.0))
        largest = warp_max(maximum(m, m_behind))
        factor, factor_behind = exp2(m - largest), exp2(m_behind - largest)
        total_weight = fma(factor_behind, weight_behind, warp_sum(mul(factor, weight)))
        x0, x1, x2, x3 = np.float32(0.0), np.float32(0.0), np.float32(0.0), np.float32(0.0)
        for i in range(n_loads):
            place = first_place + WARPS * at_once * i
            by = cuda.shfl_sync(ALL_LANES, factor, place & 31)
            by = by if place < 32 else factor_behind
            if place < n:
                x0, x1 = fma(values[4 * i], by, x0), fma(values[4 * i + 1], by, x1)
                x2, x3 = fma(values[4 * i + 2], by, x2), fma(values[4 * i + 3], by, x3)
        for distance in (16, 8):
            if distance >= quads:
                x0, x1 = add(x0, cuda.shfl_xor_sync(ALL_LANES, x0, distance)), add(x1, cuda.shfl_xor_sync(ALL_LANES, x1, distance))
                x2, x3 = add(x2, cuda.shfl_xor_sync(ALL_LANES, x2, distance)), add(x3, cuda.shfl_xor_sync(ALL_LANES, x3, distance))
        if lane < quads:
            shared_store_v4(sums + 4 * n_part * warp + 16 * lane, float_bits(x0), float_bits(x1), float_bits(x2), float_bits(x3))
        cuda.syncthreads()
        if warp > 0:
            return
        x0, x1, x2, x3 = _shared_4(sums + 16 * (lane % quads))
        for other in range(1, WARPS):
            y0, y1, y2, y3 = _shared_4(sums + 4 * n_part * other + 16 * (lane % quads))
            x0, x1, x2, x3 = add(x0, y0), add(x1, y1), add(x2, y2), add(x3, y3)
        total_weight = with_sink(total_weight, largest, sinks, head)
        result = quotient(x0, total_weight), quotient(x1, total_weight), quotient(x2, total_weight), quotient(x3, total_weight)
        column = n_part * part + 4 * lane
        if quantized:  # a row of all heads
            n_columns = n_head * head_dim_v
            write(y + row * y_stride, head * head_dim_v + column if lane < quads else n_columns, result, n_columns, True)
        else:
            target = y + row * y_stride + head * y_head_stride
            write(target, column if lane < quads else types.int64(head_dim_v), result, types.int64(head_dim_v), target & 15 == 0)

    return kernel


def all_kernels() -> list[CudaKernel]:
    """The usual head sizes, and each size of a part."""
    return [attention_combine(dim, quantized) for quantized in (False, True) for dim in (32, 64, 96, 128, 256)]
