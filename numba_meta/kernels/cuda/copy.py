"""Copies of bytes: strided blocks, and zeros."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from numba_meta.kernels.cuda.device import (
    cuda,
    device_function,
    load_i32,
    load_i64,
    load_u8,
    load_v4,
    start_next_kernel,
    store_i32,
    store_u8,
    store_v4,
    wait_for_previous_kernel,
)
from numba_meta.kernels.cuda.kernel import CudaKernel, Gpu, Int, Launch, Ptr, cuda_kernel

THREADS = 256


@device_function
def copy_bytes(source, target, n_bytes, places, first, step):  # type: ignore[no-untyped-def]
    """This thread's part of n_bytes, which do not overlap: units number first, first + step, ...

    `places`: all addresses and pitches that vary among the copies of one launch, joined by `|`; it decides for 16, 4 or 1 bytes an access.
    """
    if places & 15 == 0:
        whole = n_bytes >> 4
        i = first
        while i + step < whole:  # two on their way at once
            a, b = load_v4(source + 16 * i), load_v4(source + 16 * (i + step))
            store_v4(target + 16 * i, a[0], a[1], a[2], a[3])
            store_v4(target + 16 * (i + step), b[0], b[1], b[2], b[3])
            i += 2 * step
        if i < whole:
            a = load_v4(source + 16 * i)
            store_v4(target + 16 * i, a[0], a[1], a[2], a[3])
        done = whole << 4
    elif places & 3 == 0:
        whole = n_bytes >> 2
        i = first
        while i < whole:
            store_i32(target + 4 * i, load_i32(source + 4 * i))
            i += step
        done = whole << 2
    else:
        done = 0 * n_bytes
    i = done + first
    while i < n_bytes:
        store_u8(target + i, load_u8(source + i))
        i += step


@device_function
def zero_bytes(target, n_bytes, places, first, step):  # type: ignore[no-untyped-def]
    """This thread's part of n_bytes of zeros; arguments as in `copy_bytes`."""
    zero = np.int32(0)
    done = 0 * n_bytes
    if places & 15 == 0:
        i = first
        while i < n_bytes >> 4:
            store_v4(target + 16 * i, zero, zero, zero, zero)
            i += step
        done = n_bytes >> 4 << 4
    i = done + first
    while i < n_bytes:
        store_u8(target + i, zero)
        i += step


def _lanes_for(n_bytes: int) -> int:
    """Threads that share a row of n_bytes: 16 bytes each, a power of two."""
    return max(1, min(THREADS, 1 << (-(-n_bytes // 16) - 1).bit_length()))


def _blocks_of_rows(arguments: Mapping[str, Any], n_rows: int, gpu: Gpu) -> Launch:
    lanes = _lanes_for(max(1, arguments["width"]))
    rows, parts = THREADS // lanes, -(-arguments["width"] // (16 * 4 * lanes))
    return Launch((-(-arguments["height"] // rows), min(parts, 65535), 1), (lanes, rows, 1))


@cuda_kernel(launch=_blocks_of_rows, max_threads=THREADS)
def copy_2d(source: Ptr, source_pitch: Int, destination: Ptr, destination_pitch: Int, width: Int, height: Int):  # type: ignore[no-untyped-def]
    """`height` rows of `width` bytes, a pitch (bytes) apart; the two must not overlap.

    A block takes several rows where they are short, a part of a long one; a thread 16 bytes at a time where everything is a multiple of it.
    """
    start_next_kernel()
    wait_for_previous_kernel()
    row = np.int64(cuda.blockIdx.x) * cuda.blockDim.y + cuda.threadIdx.y
    if row < height:
        first, step = np.int64(cuda.blockIdx.y) * cuda.blockDim.x + cuda.threadIdx.x, np.int64(cuda.gridDim.y) * cuda.blockDim.x
        places = source | source_pitch | destination | destination_pitch
        copy_bytes(source + row * source_pitch, destination + row * destination_pitch, width, places, first, step)


def _blocks_of_zeros(arguments: Mapping[str, Any], n_rows: int, gpu: Gpu) -> Launch:
    return Launch((n_rows, max(1, min(65535, -(-arguments["n_bytes"] // (16 * THREADS)))), 1), (THREADS, 1, 1))


@cuda_kernel(launch=_blocks_of_zeros, max_threads=THREADS)
def fill_zero(x: Ptr, x_stride: Int, n_bytes: Int, n_rows: Ptr):  # type: ignore[no-untyped-def]
    """Zero bytes in the first n_bytes of every live row. A thread writes 16 bytes at a time where everything is a multiple of it."""
    start_next_kernel()
    wait_for_previous_kernel()
    row = np.int64(cuda.blockIdx.x)
    if row < load_i64(n_rows):
        first, step = np.int64(cuda.blockIdx.y) * cuda.blockDim.x + cuda.threadIdx.x, np.int64(cuda.gridDim.y) * cuda.blockDim.x
        zero_bytes(x + row * x_stride, n_bytes, x | x_stride, first, step)


def all_kernels() -> list[CudaKernel]:
    """Every kernel of this module."""
    return [copy_2d, fill_zero]
