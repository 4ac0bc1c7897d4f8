"""Quantization of activations to 8 bits, for the products of quantized weights (block layout: `packed.ACTIVATION_*`)."""

from __future__ import annotations

import functools

import numpy as np

from numba_meta.kernels.cpu.kernel import CpuKernel, Int, Ptr
from numba_meta.kernels.cpu.packed import (
    ACTIVATION_BLOCK_BYTES,
    ACTIVATION_MINUS_HALF_SUMS,
    ACTIVATION_MINUS_SUM,
    ACTIVATION_SCALE,
    ACTIVATION_SCALED_SUM,
    BLOCK,
)
from numba_meta.kernels.cpu.simd import load_i64, store_f32, store_i32, vf_abs, vf_load, vf_max, vf_reduce_max, vf_splat, vf_sum, vi_sum
from numba_meta.kernels.cpu.simd_int8 import round_to_int, store_bytes

_SMALLEST = np.float32(1e-30)  # below it 127 / largest nears infinity; such a block counts as zero


def quantize_rows(thread: int, n_threads: int, x: Ptr, x_stride: Int, y: Ptr, y_stride: Int, n: Int, n_rows: Ptr) -> None:
    """x: float32 rows of n elements (whole blocks of 32) -> y: `q8` rows; strides in bytes; the live row count is read at `n_rows`.

    Per block: scale = largest |x| / 127, quant = x * (127 / largest |x|) to the nearest, ties to even. A block of zeros has scale 0, one
    with a value that is not finite has scale NaN. Threads share (row, block) pairs. Reads 4 n and writes 1.625 n bytes a row.
    """
    per_row = n // BLOCK
    total = load_i64(n_rows) * per_row
    begin, end = total * thread // n_threads, total * (thread + 1) // n_threads
    row, block = 0, 0
    if begin < end:
        row, block = begin // per_row, begin % per_row
    for _ in range(begin, end):
        src, to = x + row * x_stride + block * (4 * BLOCK), y + row * y_stride + block * ACTIVATION_BLOCK_BYTES
        v0, v1 = vf_load(src), vf_load(src + 64)
        largest = vf_reduce_max(vf_max(vf_abs(v0), vf_abs(v1)))
        zero = vf_splat(np.float32(0.0))
        poison = vf_sum(v0 * zero) + vf_sum(v1 * zero)  # NaN where a value is not finite, else 0
        scale, inverse = np.float32(0.0), np.float32(0.0)
        if largest > _SMALLEST:
            scale, inverse = largest / np.float32(127.0), np.float32(127.0) / largest
        q0, q1 = round_to_int(v0 * vf_splat(inverse)), round_to_int(v1 * vf_splat(inverse))
        scale = scale + poison
        store_bytes(to, q0)
        store_bytes(to + 16, q1)
        sum0, sum1 = vi_sum(q0), vi_sum(q1)
        store_f32(to + ACTIVATION_SCALE, scale)
        store_f32(to + ACTIVATION_SCALED_SUM, scale * np.float32(sum0 + sum1))
        store_i32(to + ACTIVATION_MINUS_SUM, np.int32(-(sum0 + sum1)))
        store_i32(to + ACTIVATION_MINUS_HALF_SUMS, np.int32(-sum0))
        store_i32(to + ACTIVATION_MINUS_HALF_SUMS + 4, np.int32(-sum1))
        block += 1
        if block == per_row:
            row, block = row + 1, 0


@functools.cache
def quantize_kernel(form: str = "q8") -> CpuKernel:
    """The kernel that makes activation rows of a form, the one quantized form that CPUs read."""
    assert form == "q8"
    return CpuKernel(quantize_rows, "quantize_rows")
