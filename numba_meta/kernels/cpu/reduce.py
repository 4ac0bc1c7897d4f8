"""Kernels between the pieces of a meta tensor: their sum, their concatenation; and the index of the largest column."""

from __future__ import annotations

import numpy as np

from numba_meta.kernels.cpu.kernel import Int, Ptr, cpu_kernel
from numba_meta.kernels.cpu.simd import (
    load_f32,
    load_i32,
    load_i64,
    store_i32,
    vf_load,
    vf_splat,
    vf_store,
    vi_splat,
    vi_store,
    vi_zero,
)
from numba_meta.kernels.cpu.simd_math import (
    device_function,
    share,
    stack_buffer,
    vf_load_part,
    vf_select_less,
    vf_store_part,
    vi_iota,
    vi_select_less,
)

BLOCK = 128  # columns that stay with one thread
GATHER_BLOCK = 1024


@cpu_kernel
def all_reduce(thread, n_threads, parts: Ptr, n_parts: Int, part_stride: Int, out: Ptr, out_stride: Int, n: Int, n_rows: Ptr):  # type: ignore[no-untyped-def]
    """out = ((part 0 + part 1) + part 2) ...; `parts` holds n_parts addresses (int64) of float32 rows. out may be a part."""
    blocks = (n + BLOCK - 1) // BLOCK
    total = load_i64(n_rows) * blocks
    item, end = share(total, thread, n_threads), share(total, thread + 1, n_threads)
    while item < end:
        row = item // blocks
        first = item - row * blocks
        last = min(blocks, first + end - item)
        i, stop = first * BLOCK, min(n, last * BLOCK)
        offset, target = row * part_stride, out + row * out_stride
        while i + 16 <= stop:
            value = vf_load(load_i64(parts) + offset + 4 * i)
            for part in range(1, n_parts):
                value = value + vf_load(load_i64(parts + 8 * part) + offset + 4 * i)
            vf_store(target + 4 * i, value)
            i += 16
        if i < stop:
            value = vf_load_part(load_i64(parts) + offset + 4 * i, stop - i)
            for part in range(1, n_parts):
                value = value + vf_load_part(load_i64(parts + 8 * part) + offset + 4 * i, stop - i)
            vf_store_part(target + 4 * i, value, stop - i)
        item += last - first


@device_function
def _copy_columns(source, target, n):  # type: ignore[no-untyped-def]
    i = 0
    while i + 16 <= n:
        vf_store(target + 4 * i, vf_load(source + 4 * i))
        i += 16
    if i < n:
        vf_store_part(target + 4 * i, vf_load_part(source + 4 * i, n - i), n - i)


@cpu_kernel
def gather_columns(thread, n_threads, parts: Ptr, widths: Ptr, strides: Ptr, n_parts: Int, out: Ptr, out_stride: Int, n_rows: Ptr):  # type: ignore[no-untyped-def]
    """Rows of the pieces side by side. int64 `[n_parts]`: addresses, widths in elements (0: nothing is read), row strides in bytes."""
    n = 0
    for part in range(n_parts):
        n += load_i64(widths + 8 * part)
    blocks = (n + GATHER_BLOCK - 1) // GATHER_BLOCK
    total = load_i64(n_rows) * blocks
    item, end = share(total, thread, n_threads), share(total, thread + 1, n_threads)
    while item < end:
        row = item // blocks
        first = item - row * blocks
        last = min(blocks, first + end - item)
        begin, stop = first * GATHER_BLOCK, min(n, last * GATHER_BLOCK)
        column = 0
        for part in range(n_parts):
            width = load_i64(widths + 8 * part)
            low, high = max(begin, column), min(stop, column + width)
            if low < high:
                source = load_i64(parts + 8 * part) + row * load_i64(strides + 8 * part) + 4 * (low - column)
                _copy_columns(source, out + row * out_stride + 4 * low, high - low)
            column += width
        item += last - first


_best_buffer, _index_buffer = stack_buffer(64), stack_buffer(64)


@cpu_kernel
def argmax_rows(thread, n_threads, x: Ptr, x_stride: Int, n: Int, ids: Ptr, n_rows: Ptr):  # type: ignore[no-untyped-def]
    """ids[r] (int32) = the lowest column that holds the largest value of row r; NaN never wins. One thread computes a row."""
    total = load_i64(n_rows)
    for row in range(share(total, thread, n_threads), share(total, thread + 1, n_threads)):
        source = x + row * x_stride
        best, where, index = vf_splat(np.float32(-np.inf)), vi_zero(), vi_iota()
        i = 0
        while i + 16 <= n:
            column = vf_load(source + 4 * i)
            where = vi_select_less(best, column, index, where)
            best = vf_select_less(best, column, column, best)
            index = index + vi_splat(np.int32(16))
            i += 16
        bests, wheres = _best_buffer(), _index_buffer()
        vf_store(bests, best)
        vi_store(wheres, where)
        top, at = load_f32(bests), load_i32(wheres)
        for lane in range(1, 16):
            value, index_of = load_f32(bests + 4 * lane), load_i32(wheres + 4 * lane)
            if value > top or (value == top and index_of < at):
                top, at = value, index_of
        for j in range(i, n):
            value = load_f32(source + 4 * j)
            if value > top:
                top, at = value, np.int32(j)
        store_i32(ids + 4 * row, at)
