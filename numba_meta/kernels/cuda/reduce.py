"""Kernels between the pieces of a meta tensor: their sum, their concatenation; and the index of the largest column."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from numba_meta.kernels.cuda.copy import copy_bytes
from numba_meta.kernels.cuda.device import cuda, device_function, load_i64, start_next_kernel, store_i32, types, wait_for_previous_kernel
from numba_meta.kernels.cuda.elementwise import blocks_of_columns
from numba_meta.kernels.cuda.kernel import CudaKernel, Gpu, Int, Launch, Ptr, cuda_kernel
from numba_meta.kernels.cuda.lanes import ALL_LANES, MAX_THREADS, load_4, store_4, threads_for
from numba_meta.kernels.cuda.norm import sum_4

THREADS = 128


@device_function
def first_parts(parts, n_parts):  # type: ignore[no-untyped-def]
    """The addresses of the first two parts (the only one twice): both on their way before either is used."""
    return load_i64(parts), load_i64(parts + 8 * min(1, n_parts - 1))


@device_function
def sum_of_parts_4(parts, n_parts, first, second, offset, left, part_stride):  # type: ignore[no-untyped-def]
    """((part 0 + part 1) + part 2) ... of 4 columns at a byte offset; zeros beyond the first `left`. first, second: of `first_parts`."""
    a = load_4(first + offset, left, (first | part_stride) & 15 == 0)
    b = load_4(second + offset, left, (second | part_stride) & 15 == 0)
    if n_parts > 1:
        a = sum_4(a, b)
    for part in range(2, n_parts):
        place = load_i64(parts + 8 * part)
        a = sum_4(a, load_4(place + offset, left, (place | part_stride) & 15 == 0))
    return a


@cuda_kernel(launch=blocks_of_columns, max_threads=THREADS)
def all_reduce(parts: Ptr, n_parts: Int, part_stride: Int, out: Ptr, out_stride: Int, n: Int, n_rows: Ptr):  # type: ignore[no-untyped-def]
    """out = ((part 0 + part 1) + part 2) ...; `parts` holds n_parts addresses (int64) of float32 rows. out may be a part.

    A part may lie in another device's memory. A block takes a row's next 512 columns, a thread 4 of them. Reads 4 n n_parts bytes a row.
    """
    start_next_kernel()
    wait_for_previous_kernel()
    live = load_i64(n_rows)
    row, i = np.int64(cuda.blockIdx.x), 4 * (np.int64(cuda.blockIdx.y) * cuda.blockDim.x + cuda.threadIdx.x)
    first, second = first_parts(parts, n_parts)
    if row < live:
        a = sum_of_parts_4(parts, n_parts, first, second, row * part_stride + 4 * i, n - i, part_stride)
        store_4(out + row * out_stride + 4 * i, a, n - i, (out | out_stride) & 15 == 0)


def _blocks_of_pieces(arguments: Mapping[str, Any], n_rows: int, gpu: Gpu) -> Launch:
    # The widths lie in device memory: a row of the output bounds their sum. Where one row is all, its stride may be anything.
    n_bytes = max(1, arguments["out_stride"])
    return Launch((n_rows, min(256, -(-n_bytes // (16 * THREADS))), 1), (THREADS, 1, 1))


@cuda_kernel(launch=_blocks_of_pieces, max_threads=THREADS)
def gather_columns(parts: Ptr, widths: Ptr, strides: Ptr, n_parts: Int, out: Ptr, out_stride: Int, n_rows: Ptr):  # type: ignore[no-untyped-def]
    """Rows of the pieces side by side. int64 `[n_parts]`: addresses, widths in elements (0: nothing is read), row strides in bytes.

    All threads of a row share each piece, 16 bytes at a time where it and its place are multiples of it.
    """
    start_next_kernel()
    wait_for_previous_kernel()
    row = np.int64(cuda.blockIdx.x)
    if row < load_i64(n_rows):
        first, step = np.int64(cuda.blockIdx.y) * cuda.blockDim.x + cuda.threadIdx.x, np.int64(cuda.gridDim.y) * cuda.blockDim.x
        target = out + row * out_stride
        for part in range(n_parts):
            width, stride, piece = load_i64(widths + 8 * part), load_i64(strides + 8 * part), load_i64(parts + 8 * part)
            source = piece + row * stride
            copy_bytes(source, target, 4 * width, source | target, first, step)
            target += 4 * width


@device_function
def _best_of_4(values, i, n, best, where):  # type: ignore[no-untyped-def]
    """The best one of columns i..i+3, further right than those before, and of what was best so far."""
    if i < n and values[0] > best:
        best, where = values[0], np.int32(i)
    if i + 1 < n and values[1] > best:
        best, where = values[1], np.int32(i + 1)
    if i + 2 < n and values[2] > best:
        best, where = values[2], np.int32(i + 2)
    if i + 3 < n and values[3] > best:
        best, where = values[3], np.int32(i + 3)
    return best, where


@device_function
def _better(value, index, best, where):  # type: ignore[no-untyped-def]
    """Whether a value goes before the best one so far: larger, or as large and further left. NaN does not."""
    return value > best or (value == best and index < where)


@device_function
def _best_of_warp(best, where):  # type: ignore[no-untyped-def]
    """The largest value of a warp and its lowest index, in every lane."""
    distance = 16
    while distance > 0:
        value, index = cuda.shfl_xor_sync(ALL_LANES, best, distance), cuda.shfl_xor_sync(ALL_LANES, where, distance)
        if _better(value, index, best, where):
            best, where = value, index
        distance >>= 1
    return best, where


def _block_per_row(arguments: Mapping[str, Any], n_rows: int, gpu: Gpu) -> Launch:
    return Launch((n_rows, 1, 1), (threads_for(arguments["n"]), 1, 1))


@cuda_kernel(launch=_block_per_row, max_threads=MAX_THREADS)
def argmax_rows(x: Ptr, x_stride: Int, n: Int, ids: Ptr, n_rows: Ptr):  # type: ignore[no-untyped-def]
    """ids[r] (int32) = the lowest column that holds the largest value of row r; NaN never wins. A block computes a row."""
    start_next_kernel()
    wait_for_previous_kernel()
    bests, wheres = cuda.shared.array(32, types.float32), cuda.shared.array(32, types.int32)
    row, step, i = np.int64(cuda.blockIdx.x), 4 * np.int64(cuda.blockDim.x), 4 * np.int64(cuda.threadIdx.x)
    if row >= load_i64(n_rows):
        return
    source = x + row * x_stride
    is_aligned = (x | x_stride) & 15 == 0
    best, where = np.float32(-np.inf), np.int32(0)
    while i < n:
        # Four groups on their way at once: one block has to hide the memory's latency.
        u, v = load_4(source + 4 * i, n - i, is_aligned), load_4(source + 4 * (i + step), n - i - step, is_aligned)
        w, z = (
            load_4(source + 4 * (i + 2 * step), n - i - 2 * step, is_aligned),
            load_4(source + 4 * (i + 3 * step), n - i - 3 * step, is_aligned),
        )
        best, where = _best_of_4(u, i, n, best, where)
        best, where = _best_of_4(v, i + step, n, best, where)
        best, where = _best_of_4(w, i + 2 * step, n, best, where)
        best, where = _best_of_4(z, i + 3 * step, n, best, where)
        i += 4 * step
    best, where = _best_of_warp(best, where)
    lane, n_warps = cuda.threadIdx.x & 31, cuda.blockDim.x >> 5
    if lane == 0:
        bests[cuda.threadIdx.x >> 5], wheres[cuda.threadIdx.x >> 5] = best, where
    cuda.syncthreads()
    if cuda.threadIdx.x < 32:
        best, where = np.float32(-np.inf), np.int32(0)
        if lane < n_warps:
            best, where = bests[lane], wheres[lane]
        best, where = _best_of_warp(best, where)
        if lane == 0:
            store_i32(ids + 4 * row, where)


def all_kernels() -> list[CudaKernel]:
    """Every kernel of this module."""
    return [all_reduce, gather_columns, argmax_rows]
