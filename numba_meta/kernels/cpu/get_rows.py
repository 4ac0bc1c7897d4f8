"""Rows of a packed table as float32: token embeddings (layouts: `packed.py`).

Values are those of `numba_meta.quants.dequantize`, bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from numba import njit

from numba_meta import dtypes
from numba_meta.dtypes import DType
from numba_meta.kernels.cpu.isa import Isa, detect
from numba_meta.kernels.cpu.kernel import CpuKernel, Int, Ptr
from numba_meta.kernels.cpu.packed import BLOCK, FLOAT_TYPES, QUANT_LAYOUTS, QuantLayout, same_layout, tile_bytes
from numba_meta.kernels.cpu.simd import LANES, bits_f32, load_f32, load_i8, load_i32, load_i64, load_u8, load_u16, store_f32
from numba_meta.kernels.cpu.simd_int8 import half_f32, half_f32_portable


def get_rows_kernel(dtype: DType, isa: Isa | None = None) -> CpuKernel:
    """Looks rows up in a table `w` packed as `dtype`, `[count, k]`: y[r] = table[ids[r] - first], or zeros where that is not in the table.

    Parameters: `w`; `ids` int32; `first`, `count`, the part of the vocabulary that the table holds; `k`; `y` float32 rows, `y_stride` bytes
    apart; `n_rows` address of the live row count (int64). Threads share (row, 32 elements) pairs.
    """
    tile_bytes(dtype, 0)  # refuses a type that is none of weights
    return _get_rows_kernel(same_layout(dtype), min(detect(), isa) if isa is not None else detect())


@functools.cache
def _get_rows_kernel(dtype: DType, isa: Isa) -> CpuKernel:
    block = _float_block(dtype, isa) if dtype in FLOAT_TYPES else _quant_block(QUANT_LAYOUTS[dtype], isa)
    unit_elements, unit_bytes = dtype.block_size, tile_bytes(dtype, dtype.block_size)

    def get_rows(thread: int, n_threads: int, w: Ptr, ids: Ptr, first: Int, count: Int, k: Int, y: Ptr, y_stride: Int, n_rows: Ptr) -> None:
        per_row = (k + BLOCK - 1) // BLOCK
        total = load_i64(n_rows) * per_row
        stride = k // unit_elements * unit_bytes
        for item in range(total * thread // n_threads, total * (thread + 1) // n_threads):
            row, i = item // per_row, item % per_row
            index = np.int64(load_i32(ids + 4 * row)) - first
            to, n = y + row * y_stride + 4 * BLOCK * i, min(BLOCK, k - BLOCK * i)
            if index < 0 or index >= count:
                for e in range(n):
                    store_f32(to + 4 * e, np.float32(0.0))
            else:
                block(w + index // LANES * stride, index % LANES, i, n, to)

    name = dtype.name if dtype in FLOAT_TYPES else QUANT_LAYOUTS[dtype].name
    return CpuKernel(get_rows, f"get_rows_{name}_{isa.name.lower()}")


def _half(isa: Isa) -> Callable[[int], float]:
    return half_f32 if isa >= Isa.AVX2 else half_f32_portable  # type: ignore[no-any-return]


def _float_block(dtype: DType, isa: Isa) -> Callable[..., None]:
    """Up to 32 elements of one row: `block(tile, lane, i, n, to)` for elements 32 i and on."""
    size, is_f32, is_f16, half = dtype.block_bytes, dtype is dtypes.F32, dtype is dtypes.F16, _half(isa)

    @njit
    def block(tile, lane, i, n, to):  # type: ignore[no-untyped-def]
        for e in range(n):
            place = tile + ((BLOCK * i + e) * LANES + lane) * size
            if is_f32:
                value = load_f32(place)
            elif is_f16:
                value = half(load_u16(place))
            else:
                value = bits_f32(np.int32(np.uint32(load_u16(place)) << np.uint32(16)))
            store_f32(to + 4 * e, value)

    return block  # type: ignore[no-any-return]


def _quant_block(layout: QuantLayout, isa: Isa) -> Callable[..., None]:
    """32 elements of one row: `block(tile, lane, i, n, to)` for block i."""
    bits, offset, group, n_sub, half = layout.bits, layout.offset, layout.group, layout.super_blocks, _half(isa)
    head, block_bytes, has_minimum, has_scales = layout.head_bytes, layout.block_bytes, layout.has_minimum, layout.has_scales
    quants, high, minima = layout.scale_bytes, layout.high_offset, BLOCK // layout.group * LANES

    @njit
    def quant(at, lane, e):  # type: ignore[no-untyped-def]
        """The stored quant of element e; `g` and `j` as in the layout."""
        g, j = e >> 2, 4 * lane + (e & 3)
        if bits == 8:
            return np.int32(load_u8(at + quants + 64 * g + j))
        low = (np.int32(load_u8(at + quants + 64 * (g & 3) + j)) >> 4 * (g >> 2)) & 15
        if bits == 5:
            return low | ((np.int32(load_u8(at + high + j)) >> g) & 1) << 4
        if bits == 6:
            return low | ((np.int32(load_u8(at + high + 64 * (g >> 2) + j)) >> 2 * (g & 3)) & 3) << 4
        return low

    @njit
    def block(tile, lane, i, n, to):  # type: ignore[no-untyped-def]
        start = tile + i // n_sub * (head + n_sub * block_bytes)
        at = start + head + i % n_sub * block_bytes
        scale, minimum = half(load_u16(start + 2 * lane)), np.float32(0.0)
        if has_minimum:
            minimum = half(load_u16(start + 2 * (LANES + lane)))
        for e in range(BLOCK):
            s, m = scale, minimum
            if has_scales:
                place = at + e // group * LANES + lane
                s = scale * (np.float32(load_i8(place)) if offset else np.float32(load_u8(place)))
                if has_minimum:
                    m = -(minimum * np.float32(load_u8(place + minima)))
            value = s * np.float32(np.int32(quant(at, lane, e)) - np.int32(offset))
            store_f32(to + 4 * e, value + m if has_minimum else value)

    return block  # type: ignore[no-any-return]
