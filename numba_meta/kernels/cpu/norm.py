"""Over the columns of each row: root-mean-square norm, and the mean taken off."""

from __future__ import annotations

import numpy as np

from numba_meta.kernels.cpu.kernel import Float, Int, Ptr, cpu_kernel
from numba_meta.kernels.cpu.simd import fma, load_i64, vf_load, vf_splat, vf_store, vf_sum, vf_zero
from numba_meta.kernels.cpu.simd_math import device_function, share, sqrt_f32, vf_load_part, vf_store_part


@device_function
def sum_of_squares(x, n):  # type: ignore[no-untyped-def]
    """The sum of squares of n float32: four sums of 16 lanes over every 64 columns, the rest to the first, joined in pairs and halves."""
    s0, s1, s2, s3 = vf_zero(), vf_zero(), vf_zero(), vf_zero()
    i = 0
    while i + 64 <= n:
        v0, v1, v2, v3 = vf_load(x + 4 * i), vf_load(x + 4 * i + 64), vf_load(x + 4 * i + 128), vf_load(x + 4 * i + 192)
        s0, s1, s2, s3 = fma(v0, v0, s0), fma(v1, v1, s1), fma(v2, v2, s2), fma(v3, v3, s3)
        i += 64
    while i + 16 <= n:
        v0 = vf_load(x + 4 * i)
        s0 = fma(v0, v0, s0)
        i += 16
    if i < n:
        v0 = vf_load_part(x + 4 * i, n - i)
        s0 = fma(v0, v0, s0)
    return vf_sum((s0 + s1) + (s2 + s3))


@cpu_kernel
def rms_norm(  # type: ignore[no-untyped-def]
    thread, n_threads, x: Ptr, x_stride: Int, weight: Ptr, y: Ptr, y_stride: Int, n: Int, rows_per_token: Int, n_rows: Ptr, eps: Float
):
    """y = x / sqrt(mean(x^2) + eps) * weight for `rows_per_token` rows (heads) of each live token, strides in bytes; y may be x."""
    total = load_i64(n_rows) * rows_per_token
    for row in range(share(total, thread, n_threads), share(total, thread + 1, n_threads)):
        source, target = x + row * x_stride, y + row * y_stride
        factor = vf_splat(np.float32(1.0) / sqrt_f32(sum_of_squares(source, n) / np.float32(n) + eps))
        i = 0
        while i + 16 <= n:
            vf_store(target + 4 * i, (vf_load(source + 4 * i) * factor) * vf_load(weight + 4 * i))
            i += 16
        if i < n:
            value = (vf_load_part(source + 4 * i, n - i) * factor) * vf_load_part(weight + 4 * i, n - i)
            vf_store_part(target + 4 * i, value, n - i)


@device_function
def sum_of_columns(x, n):  # type: ignore[no-untyped-def]
    """The sum of n float32, in the order of `sum_of_squares`."""
    s0, s1, s2, s3 = vf_zero(), vf_zero(), vf_zero(), vf_zero()
    i = 0
    while i + 64 <= n:
        s0, s1 = s0 + vf_load(x + 4 * i), s1 + vf_load(x + 4 * i + 64)
        s2, s3 = s2 + vf_load(x + 4 * i + 128), s3 + vf_load(x + 4 * i + 192)
        i += 64
    while i + 16 <= n:
        s0 = s0 + vf_load(x + 4 * i)
        i += 16
    if i < n:
        s0 = s0 + vf_load_part(x + 4 * i, n - i)
    return vf_sum((s0 + s1) + (s2 + s3))


@cpu_kernel
def center_rows(  # type: ignore[no-untyped-def]
    thread, n_threads, x: Ptr, x_stride: Int, y: Ptr, y_stride: Int, n: Int, rows_per_token: Int, n_rows: Ptr
):
    """y = x - mean(x) for `rows_per_token` rows of each live token, strides in bytes; y may be x."""
    total = load_i64(n_rows) * rows_per_token
    for row in range(share(total, thread, n_threads), share(total, thread + 1, n_threads)):
        source, target = x + row * x_stride, y + row * y_stride
        mean = vf_splat(sum_of_columns(source, n) / np.float32(n))
        i = 0
        while i + 16 <= n:
            vf_store(target + 4 * i, vf_load(source + 4 * i) - mean)
            i += 16
        if i < n:
            vf_store_part(target + 4 * i, vf_load_part(source + 4 * i, n - i) - mean, n - i)
