"""Activations in the forms that matrix products read: 8-bit blocks, or float16 rows for the tensor cores (layouts: `packed.py`)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from numba_meta.errors import UsageError
from numba_meta.kernels.cuda.device import (
    add,
    bits_float,
    cuda,
    device_function,
    f16_bits,
    float_bits,
    load_f32,
    load_i64,
    load_v4_f32,
    maximum,
    mul,
    round_to_int,
    store_f32,
    store_i32,
    types,
)
from numba_meta.kernels.cuda.kernel import CudaKernel, Gpu, Int, Launch, Ptr, cuda_kernel

_SMALLEST = 1e-30  # below it 127 / largest nears infinity; such a block counts as zero
_THREADS = 128
_ROW_THREADS = 256
_ROW_WARPS = _ROW_THREADS // 32


@device_function
def _largest_of_8_lanes(x):  # type: ignore[no-untyped-def]
    for distance in (1, 2, 4):
        x = maximum(x, cuda.shfl_xor_sync(0xFFFFFFFF, x, distance))
    return x


@device_function
def _sum_of_4_lanes(x):  # type: ignore[no-untyped-def]
    x += cuda.shfl_xor_sync(0xFFFFFFFF, x, 1)
    return x + cuda.shfl_xor_sync(0xFFFFFFFF, x, 2)


@device_function
def quantize_quad(x0, x1, x2, x3, y, block, e, k):  # type: ignore[no-untyped-def]
    """One of 8 lanes that quantize a block of 32 into the `q8` row at `y`, of k elements; every lane of the warp must call it.

    x0..x3: elements e..e+3 of the block (e = 4 * (lane & 7)); scale = largest |x| / 127, quant = x * (127 / largest |x|) to the nearest,
    ties to even. A block of zeros has scale 0, one with a value that is not finite has scale NaN. `block` -1: nothing is written.
    """
    largest = _largest_of_8_lanes(maximum(maximum(abs(x0), abs(x1)), maximum(abs(x2), abs(x3))))
    zero = types.float32(0.0)
    poison = add(add(mul(x0, zero), mul(x1, zero)), add(mul(x2, zero), mul(x3, zero)))  # NaN where a value is not finite, else 0
    poison = add(poison, cuda.shfl_xor_sync(0xFFFFFFFF, poison, 1))
    poison = add(poison, cuda.shfl_xor_sync(0xFFFFFFFF, poison, 2))
    poison = add(poison, cuda.shfl_xor_sync(0xFFFFFFFF, poison, 4))
    scale, inverse = zero, zero
    if largest > types.float32(_SMALLEST):
        scale, inverse = largest / types.float32(127.0), types.float32(127.0) / largest
    q0, q1 = round_to_int(mul(x0, inverse)), round_to_int(mul(x1, inverse))
    q2, q3 = round_to_int(mul(x2, inverse)), round_to_int(mul(x3, inverse))
    half = _sum_of_4_lanes(q0 + q1 + q2 + q3)
    whole = half + cuda.shfl_xor_sync(0xFFFFFFFF, half, 4)
    if block >= 0:
        quad = (q0 & 255) | ((q1 & 255) << 8) | ((q2 & 255) << 16) | (q3 << 24)
        place = y + 16 * block + (e & 15)
        if e >= 16:
            place += k >> 1
        store_i32(place, types.int32(quad))
        if e == 0:
            store_f32(y + k + 8 * block, add(scale, poison))
            store_i32(y + k + 8 * block + 4, types.int32((whole & 0xFFFF) | (half << 16)))


def _quantize_launch(arguments: Mapping[str, Any], n_rows: int, gpu: Gpu) -> Launch:
    return Launch((-(-arguments["n"] // (4 * _THREADS)), n_rows, 1), (_THREADS, 1, 1))


@cuda_kernel(launch=_quantize_launch, max_threads=_THREADS)
def quantize_rows(x: Ptr, x_stride: Int, y: Ptr, y_stride: Int, n: Int, n_rows: Ptr) -> None:
    """x: float32 rows of n elements (whole blocks of 32, at multiples of 16 bytes) -> y: `q8` rows; strides in bytes.

    grid (512 elements of a row each, rows), block of 128 threads of 4 elements. Reads 4 n and writes 1.25 n bytes a row.
    """
    row = types.int64(cuda.blockIdx.y)
    if row >= load_i64(n_rows):
        return
    lane = types.int64(cuda.blockIdx.x) * _THREADS + types.int64(cuda.threadIdx.x)
    block = lane >> 3
    x0 = x1 = x2 = x3 = types.float32(0.0)
    if 4 * lane < n:
        x0, x1, x2, x3 = load_v4_f32(x + row * x_stride + 16 * lane)
    else:
        block = types.int64(-1)
    quantize_quad(x0, x1, x2, x3, y + row * y_stride, block, 4 * (lane & 7), n)


def _half_launch(arguments: Mapping[str, Any], n_rows: int, gpu: Gpu) -> Launch:
    return Launch((n_rows, 1, 1), (_ROW_THREADS, 1, 1))


@cuda_kernel(launch=_half_launch, max_threads=_ROW_THREADS)
def half_rows(x: Ptr, x_stride: Int, y: Ptr, y_stride: Int, n: Int, n_rows: Ptr) -> None:
    """x: float32 rows of n elements -> y: `f16` rows, each with the power of two as its scale that brings the largest |x| to 2^14..2^15.

    One block a row; zeros to a whole 16 bytes. A row of zeros has scale 1, one with a value that is not finite scale NaN. Reads 4 n (twice,
    then from the cache) and writes 2 n bytes a row.
    """
    row = types.int64(cuda.blockIdx.x)
    if row >= load_i64(n_rows):
        return
    src, to = x + row * x_stride, y + row * y_stride
    thread = types.int64(cuda.threadIdx.x)
    largest, poison = types.float32(0.0), types.float32(0.0)
    for i in range(thread, n, _ROW_THREADS):
        value = load_f32(src + 4 * i)
        largest = maximum(largest, abs(value))
        poison = add(poison, mul(value, types.float32(0.0)))
    for distance in (16, 8, 4, 2, 1):
        largest = maximum(largest, cuda.shfl_xor_sync(0xFFFFFFFF, largest, distance))
        poison = add(poison, cuda.shfl_xor_sync(0xFFFFFFFF, poison, distance))
    found = cuda.shared.array((2, _ROW_WARPS), types.float32)
    if thread & 31 == 0:
        found[0, thread >> 5] = largest
        found[1, thread >> 5] = poison
    cuda.syncthreads()
    for i in range(_ROW_WARPS):
        largest = maximum(largest, found[0, i])
        poison = add(poison, found[1, i])
    exponent = (float_bits(largest) >> 23) - 14  # of the scale, biased as in a float32
    if largest == types.float32(0.0):
        exponent = types.int32(127)
    exponent = min(max(exponent, types.int32(1)), types.int32(240))
    scale = bits_float(types.int32(exponent << 23))
    inverse = bits_float(types.int32((254 - exponent) << 23))
    end = (n + 7) & -8  # whole chunks of 16 bytes: what follows the row is zero, as products read it
    for i in range(2 * thread, end, 2 * _ROW_THREADS):
        low = high = types.float32(0.0)
        if i < n:
            low = mul(load_f32(src + 4 * i), inverse)
        if i + 1 < n:
            high = mul(load_f32(src + 4 * i + 4), inverse)
        store_i32(to + 2 * i, f16_bits(low) | f16_bits(high) << 16)
    if thread == 0:
        store_f32(to + 2 * end, add(scale, poison))


@functools.cache
def quantize_kernel(form: str = "q8") -> CudaKernel:
    """The kernel that brings rows to a form: `quantize_rows` for `q8`, `half_rows` for `f16`; both have the same parameters."""
    kernels = {"q8": quantize_rows, "f16": half_rows}
    if form not in kernels:
        raise UsageError(f"activations are quantized to {' or '.join(kernels)}, not {form!r}")
    return kernels[form]


def all_kernels() -> list[CudaKernel]:
    """Every kernel of this module."""
    return [quantize_kernel("q8"), quantize_kernel("f16")]
