"""Root-mean-square norm over the columns of each row; with what comes before it (sums) and after it (8-bit activations) in one launch.

A block takes a row. A thread takes every so many groups of 4 columns; its first two stay in registers (all of them up to 8,192 columns).
Strides are in bytes; outputs may be inputs, but y none of another element size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from numba_meta.kernels.cuda.device import (
    add,
    cuda,
    device_function,
    load_i64,
    mul,
    start_next_kernel,
    types,
    wait_for_previous_kernel,
)
from numba_meta.kernels.cuda.kernel import CudaKernel, Float, Gpu, Int, Launch, Ptr, cuda_kernel
from numba_meta.kernels.cuda.lanes import MAX_THREADS, block_sum, load_4, squares_4, threads_for_two
from numba_meta.kernels.cuda.outputs import WARP_COLUMNS, write_f32, write_q8


def block_per_row(arguments: Mapping[str, Any], n_rows: int, gpu: Gpu) -> Launch:
    """A block for each row, as many threads as the columns need."""
    return Launch((n_rows * arguments.get("rows_per_token", 1), 1, 1), (threads_for_two(arguments["n"]), 1, 1))


# ---- groups of 4 columns, and a thread's first two of them -----------------------------------------------------------------------------


@device_function
def load_two(row, column, second, n, is_aligned):  # type: ignore[no-untyped-def]
    """A row's 4 columns from `column` on and those from `second` on; zeros beyond the n-th."""
    return load_4(row + 4 * column, n - column, is_aligned), load_4(row + 4 * second, n - second, is_aligned)


@device_function
def sum_4(x, y):  # type: ignore[no-untyped-def]
    """x + y of 4 columns."""
    return (add(x[0], y[0]), add(x[1], y[1]), add(x[2], y[2]), add(x[3], y[3]))


@device_function
def sum_two(x, y):  # type: ignore[no-untyped-def]
    """x + y of both groups."""
    return sum_4(x[0], y[0]), sum_4(x[1], y[1])


@device_function
def squares_two(x):  # type: ignore[no-untyped-def]
    """The sum of squares of both groups."""
    return squares_4(x[1], squares_4(x[0], np.float32(0.0)))


@device_function
def factor_of(total, n, eps):  # type: ignore[no-untyped-def]
    """1 / sqrt(mean + eps), from a sum of squares."""
    return np.float32(1.0) / math.sqrt(total / np.float32(n) + eps)


@device_function
def normalized_4(values, factor, weights):  # type: ignore[no-untyped-def]
    """(x * factor) * weight of 4 columns."""
    return (
        mul(mul(values[0], factor), weights[0]),
        mul(mul(values[1], factor), weights[1]),
        mul(mul(values[2], factor), weights[2]),
        mul(mul(values[3], factor), weights[3]),
    )


# ---- the kernels -----------------------------------------------------------------------------------------------------------------------


def _rms_norm(name: str, write: Callable[..., None]) -> CudaKernel:
    @cuda_kernel(name=name, launch=block_per_row, max_threads=MAX_THREADS)
    def kernel(x: Ptr, x_stride: Int, weight: Ptr, y: Ptr, y_stride: Int, n: Int, rows_per_token: Int, n_rows: Ptr, eps: Float):  # type: ignore[no-untyped-def]
        """y = x / sqrt(mean(x^2) + eps) * weight for `rows_per_token` rows (heads) of each live token.

        Reads 8 n bytes a row and writes y.
        """
        start_next_kernel()
        scratch = cuda.shared.array(32, types.float32)
        row, step, column = np.int64(cuda.blockIdx.x), 4 * np.int64(cuda.blockDim.x), 4 * np.int64(cuda.threadIdx.x)
        is_aligned = (x | x_stride | weight | y | y_stride) & 15 == 0
        source, target, second = x + row * x_stride, y + row * y_stride, column + step
        w = load_two(weight, column, second, n, is_aligned)  # no kernel writes it
        wait_for_previous_kernel()
        live = load_i64(n_rows) * rows_per_token
        v = load_two(source, column, second, n, is_aligned)  # while the row count is on its way: rows up to the capacity can be read
        if row >= live:
            return
        squares = squares_two(v)
        i = second + step
        while i < n:
            squares = squares_4(load_4(source + 4 * i, n - i, is_aligned), squares)
            i += step
        factor = factor_of(block_sum(squares, scratch), n, eps)
        write(target, column, normalized_4(v[0], factor, w[0]), n, is_aligned)
        if second & WARP_COLUMNS < n:
            write(target, second, normalized_4(v[1], factor, w[1]), n, is_aligned)
        i = second + step
        while i & WARP_COLUMNS < n:
            u, weights = load_4(source + 4 * i, n - i, is_aligned), load_4(weight + 4 * i, n - i, is_aligned)
            write(target, i, normalized_4(u, factor, weights), n, is_aligned)
            i += step

    return kernel


rms_norm = _rms_norm("rms_norm", write_f32)
rms_norm_quantize = _rms_norm("rms_norm_quantize", write_q8)  # rms_norm, then quantize_rows: y `q8` rows


def _add_rms_norm(name: str, write: Callable[..., None]) -> CudaKernel:
    @cuda_kernel(name=name, launch=block_per_row, max_threads=MAX_THREADS)
    def kernel(  # type: ignore[no-untyped-def]
        x: Ptr, x_stride: Int, other: Ptr, other_stride: Int, total: Ptr, total_stride: Int, weight: Ptr, y: Ptr, y_stride: Int, n: Int,
        n_rows: Ptr, eps: Float,
    ):  # fmt: skip
        """total = x + other, y = rms_norm(total). total may be x or other, y neither of the three. Reads 12 n bytes a row."""
        start_next_kernel()
        scratch = cuda.shared.array(32, types.float32)
        row, step, column = np.int64(cuda.blockIdx.x), 4 * np.int64(cuda.blockDim.x), 4 * np.int64(cuda.threadIdx.x)
        is_aligned = (x | x_stride | other | other_stride | total | total_stride | weight | y | y_stride) & 15 == 0
        a, b, c, target = x + row * x_stride, other + row * other_stride, total + row * total_stride, y + row * y_stride
        second = column + step
        w = load_two(weight, column, second, n, is_aligned)
        wait_for_previous_kernel()
        live = load_i64(n_rows)
        v, u = load_two(a, column, second, n, is_aligned), load_two(b, column, second, n, is_aligned)
        if row >= live:
            return
        v = sum_two(v, u)
        write_f32(c, column, v[0], n, is_aligned)
        write_f32(c, second, v[1], n, is_aligned)
        squares = squares_two(v)
        i = second + step
        while i < n:
            value = sum_4(load_4(a + 4 * i, n - i, is_aligned), load_4(b + 4 * i, n - i, is_aligned))
            write_f32(c, i, value, n, is_aligned)
            squares = squares_4(value, squares)
            i += step
        factor = factor_of(block_sum(squares, scratch), n, eps)
        write(target, column, normalized_4(v[0], factor, w[0]), n, is_aligned)
        if second & WARP_COLUMNS < n:
            write(target, second, normalized_4(v[1], factor, w[1]), n, is_aligned)
        i = second + step
        while i & WARP_COLUMNS < n:
            value, weights = load_4(c + 4 * i, n - i, is_aligned), load_4(weight + 4 * i, n - i, is_aligned)  # this thread wrote c
            write(target, i, normalized_4(value, factor, weights), n, is_aligned)
            i += step

    return kernel


add_rms_norm = _add_rms_norm("add_rms_norm", write_f32)  # add, then rms_norm
add_rms_norm_quantize = _add_rms_norm("add_rms_norm_quantize", write_q8)  # add, rms_norm, quantize_rows: y `q8` rows


def _norm_add_rms_norm(name: str, write: Callable[..., None]) -> CudaKernel:
    @cuda_kernel(name=name, launch=block_per_row, max_threads=MAX_THREADS)
    def kernel(  # type: ignore[no-untyped-def]
        x: Ptr, x_stride: Int, x_weight: Ptr, other: Ptr, other_stride: Int, total: Ptr, total_stride: Int, weight: Ptr, y: Ptr,
        y_stride: Int, n: Int, n_rows: Ptr, x_eps: Float, eps: Float,
    ):  # fmt: skip
        """total = rms_norm(x) + other, y = rms_norm(total). total may be x or other, y none of the three. Reads 16 n bytes a row."""
        start_next_kernel()
        scratch, scratch_of_x = cuda.shared.array(32, types.float32), cuda.shared.array(32, types.float32)
        row, step, column = np.int64(cuda.blockIdx.x), 4 * np.int64(cuda.blockDim.x), 4 * np.int64(cuda.threadIdx.x)
        places = x | x_stride | x_weight | other | other_stride | total | total_stride | weight | y | y_stride
        is_aligned = places & 15 == 0
        a, b, c, target = x + row * x_stride, other + row * other_stride, total + row * total_stride, y + row * y_stride
        second = column + step
        xw, w = load_two(x_weight, column, second, n, is_aligned), load_two(weight, column, second, n, is_aligned)
        wait_for_previous_kernel()
        live = load_i64(n_rows)
        v, u = load_two(a, column, second, n, is_aligned), load_two(b, column, second, n, is_aligned)
        if row >= live:
            return
        squares = squares_two(v)
        i = second + step
        while i < n:
            squares = squares_4(load_4(a + 4 * i, n - i, is_aligned), squares)
            i += step
        factor = factor_of(block_sum(squares, scratch_of_x), n, x_eps)
        v = sum_4(normalized_4(v[0], factor, xw[0]), u[0]), sum_4(normalized_4(v[1], factor, xw[1]), u[1])
        write_f32(c, column, v[0], n, is_aligned)
        write_f32(c, second, v[1], n, is_aligned)
        squares = squares_two(v)
        i = second + step
        while i < n:
            value = normalized_4(load_4(a + 4 * i, n - i, is_aligned), factor, load_4(x_weight + 4 * i, n - i, is_aligned))
            value = sum_4(value, load_4(b + 4 * i, n - i, is_aligned))
            write_f32(c, i, value, n, is_aligned)
            squares = squares_4(value, squares)
            i += step
        factor = factor_of(block_sum(squares, scratch), n, eps)
        write(target, column, normalized_4(v[0], factor, w[0]), n, is_aligned)
        if second & WARP_COLUMNS < n:
            write(target, second, normalized_4(v[1], factor, w[1]), n, is_aligned)
        i = second + step
        while i & WARP_COLUMNS < n:
            value, weights = load_4(c + 4 * i, n - i, is_aligned), load_4(weight + 4 * i, n - i, is_aligned)  # this thread wrote c
            write(target, i, normalized_4(value, factor, weights), n, is_aligned)
            i += step

    return kernel


norm_add_rms_norm = _norm_add_rms_norm("norm_add_rms_norm", write_f32)  # rms_norm, add, rms_norm
norm_add_rms_norm_quantize = _norm_add_rms_norm("norm_add_rms_norm_quantize", write_q8)  # and quantize_rows: y `q8` rows


@cuda_kernel(launch=block_per_row, max_threads=MAX_THREADS)
def center_rows(x: Ptr, x_stride: Int, y: Ptr, y_stride: Int, n: Int, rows_per_token: Int, n_rows: Ptr):  # type: ignore[no-untyped-def]
    """y = x - mean(x) for `rows_per_token` rows of each live token. Reads a row twice and writes it."""
    start_next_kernel()
    scratch = cuda.shared.array(32, types.float32)
    row, step, column = np.int64(cuda.blockIdx.x), 4 * np.int64(cuda.blockDim.x), 4 * np.int64(cuda.threadIdx.x)
    is_aligned = (x | x_stride | y | y_stride) & 15 == 0
    source, target = x + row * x_stride, y + row * y_stride
    wait_for_previous_kernel()
    if row >= load_i64(n_rows) * rows_per_token:
        return
    total = np.float32(0.0)
    i = column
    while i < n:
        v = load_4(source + 4 * i, n - i, is_aligned)
        total = add(total, add(add(v[0], v[1]), add(v[2], v[3])))
        i += step
    mean = block_sum(total, scratch) / np.float32(n)
    i = column
    while i < n:
        v = load_4(source + 4 * i, n - i, is_aligned)
        write_f32(target, i, (v[0] - mean, v[1] - mean, v[2] - mean, v[3] - mean), n, is_aligned)
        i += step


def all_kernels() -> list[CudaKernel]:
    """Every kernel of this module."""
    return [
        rms_norm, rms_norm_quantize, add_rms_norm, add_rms_norm_quantize, norm_add_rms_norm, norm_add_rms_norm_quantize, center_rows
    ]  # fmt: skip
