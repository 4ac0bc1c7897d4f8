"""Rotary positions: a table of cosines and sines per row, and the rotation of the heads by it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from numba_meta.kernels.cuda.device import (
    cuda,
    device_function,
    fma,
    load_f32,
    load_f64,
    load_i32,
    load_i64,
    mul,
    start_next_kernel,
    store_f32,
    wait_for_previous_kernel,
)
from numba_meta.kernels.cuda.kernel import CudaKernel, Float, Gpu, Int, Launch, Ptr, cuda_kernel

THREADS = 128


def _blocks_of_angles(arguments: Mapping[str, Any], n_rows: int, gpu: Gpu) -> Launch:
    return Launch((n_rows, -(-arguments["half"] // 32), 1), (32, 1, 1))


@cuda_kernel(launch=_blocks_of_angles, max_threads=32)
def rope_angles(positions: Ptr, inverse_frequencies: Ptr, table: Ptr, table_stride: Int, half: Int, magnitude: Float, n_rows: Ptr):  # type: ignore[no-untyped-def]
    """table[r] = cos, then sin, of position * inverse frequency (float64), times magnitude: `half` float32 each. positions: int32.

    A thread computes one angle of a row.
    """
    start_next_kernel()
    wait_for_previous_kernel()
    row, i = np.int64(cuda.blockIdx.x), np.int64(cuda.blockIdx.y) * 32 + cuda.threadIdx.x
    if row < load_i64(n_rows) and i < half:
        angle = np.float64(load_i32(positions + 4 * row)) * load_f64(inverse_frequencies + 8 * i)
        place = table + row * table_stride + 4 * i
        store_f32(place, np.float32(math.cos(angle) * np.float64(magnitude)))
        store_f32(place + 4 * half, np.float32(math.sin(angle) * np.float64(magnitude)))


def heads_per_block(half: int) -> tuple[int, int]:
    """(Threads that share the pairs of a head, heads of a block)."""
    lanes = max(8, min(THREADS, 1 << (half - 1).bit_length()))
    return lanes, THREADS // lanes


def _blocks_of_heads(arguments: Mapping[str, Any], n_rows: int, gpu: Gpu) -> Launch:
    lanes, heads = heads_per_block(arguments["half"])
    return Launch((n_rows, -(-arguments["n_head"] // heads), 1), (lanes, heads, 1))


@device_function
def _rotate_head(source, target, cosines, sines, head_dim, half, first, second, pitch, is_live):  # type: ignore[no-untyped-def]
    """Rotates the pairs of a head that this thread takes: pair i at byte pitch * i, its second half `second` bytes on; copies the rest."""
    i = first
    while i < half:
        a, b = load_f32(source + pitch * i), load_f32(source + pitch * i + second)
        c, s = load_f32(cosines + 4 * i), load_f32(sines + 4 * i)
        if not is_live:  # asked this late since rows up to the capacity can be read, while the row count is on its way
            return
        store_f32(target + pitch * i, fma(a, c, -mul(b, s)))
        store_f32(target + pitch * i + second, fma(a, s, mul(b, c)))
        i += cuda.blockDim.x
    if target != source and is_live:
        i = 2 * half + first
        while i < head_dim:
            store_f32(target + 4 * i, load_f32(source + 4 * i))
            i += cuda.blockDim.x


def _rope(name: str, pitch: int, second_of: Any) -> CudaKernel:
    """Rotates pairs of each head by the row's angles: pair i at byte pitch * i, its second half `second_of(half)` bytes on.

    Columns from 2 * half on are copied. y may be x. A block takes some heads of a row, a thread a pair.
    """

    @cuda_kernel(name=name, launch=_blocks_of_heads, max_threads=THREADS)
    def kernel(  # type: ignore[no-untyped-def]
        x: Ptr, x_stride: Int, x_head_stride: Int, y: Ptr, y_stride: Int, y_head_stride: Int, table: Ptr, table_stride: Int, n_head: Int,
        head_dim: Int, half: Int, n_rows: Ptr,
    ):  # fmt: skip
        start_next_kernel()
        wait_for_previous_kernel()
        row, head = np.int64(cuda.blockIdx.x), np.int64(cuda.blockIdx.y) * cuda.blockDim.y + cuda.threadIdx.y
        is_live = row < load_i64(n_rows)
        if head < n_head:
            source, target = x + row * x_stride + head * x_head_stride, y + row * y_stride + head * y_head_stride
            cosines, thread = table + row * table_stride, np.int64(cuda.threadIdx.x)
            _rotate_head(source, target, cosines, cosines + 4 * half, head_dim, half, thread, second_of(half), pitch, is_live)

    return kernel


@device_function
def _half_a_head_on(half):  # type: ignore[no-untyped-def]
    return 4 * half


@device_function
def _next_element(half):  # type: ignore[no-untyped-def]
    return np.int64(4)


rope_halves = _rope("rope_halves", 4, _half_a_head_on)  # pairs (i, i + half)
rope_interleaved = _rope("rope_interleaved", 8, _next_element)  # pairs (2i, 2i + 1)


def all_kernels() -> list[CudaKernel]:
    """Every kernel of this module."""
    return [rope_angles, rope_halves, rope_interleaved]
