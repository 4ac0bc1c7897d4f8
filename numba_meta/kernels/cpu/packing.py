"""The kernels that pack weights from the file's rows into tiles (layouts: `packed.py`).

Reads every byte of `w` once and writes every byte of `out` once: `n_out * row_bytes` and `packed_bytes`.
"""

from __future__ import annotations

import functools

import numpy as np
from numba import njit

from numba_meta.dtypes import DType
from numba_meta.errors import ShapeError
from numba_meta.kernels.cpu.kernel import CpuKernel, Int, Ptr
from numba_meta.kernels.cpu.packed import FLOAT_TYPES, QUANT_LAYOUTS, QuantLayout, packed_bytes, tile_bytes
from numba_meta.kernels.cpu.packing_sources import SOURCES, Source
from numba_meta.kernels.cpu.simd import LANES, store_i32, store_i64, store_u8, store_u16
from numba_meta.kernels.cpu.simd_int8 import load_half_bits, load_quad
from numba_meta.kernels.quant_fields import extent_of

PART_ROWS = LANES  # parts of a matrix that are packed one by one begin at multiples of this
_LOW4, _LOW2, _LOW1 = 0x0F0F0F0F, 0x03030303, 0x01010101


def pack(raw: np.ndarray, dtype: DType, out: np.ndarray | int) -> None:
    """Packs weights `raw` (uint8 `[n_out, row_bytes]`, rows at any stride, as in a GGUF file) into `out` (an array or an address).

    `out` must hold `packed_bytes` bytes; every one of them is written. Raises `ShapeError`. To share the work among threads use
    `pack_kernel`.
    """
    n_out, k = extent_of(raw, dtype)
    needed = packed_bytes(dtype, n_out, k)
    if isinstance(out, np.ndarray) and (out.nbytes < needed or not out.flags.c_contiguous):
        raise ShapeError(f"cannot pack into {out.nbytes} bytes; expected {needed} contiguous ones")
    pack_kernel(dtype)(w=raw, row_stride=raw.strides[0], n_out=n_out, k=k, out=out)


def pack_part(rows: np.ndarray, dtype: DType, out: np.ndarray, first: int, n_out: int) -> None:
    """Packs `rows`, some of the `n_out` of a matrix from number `first` on (a multiple of PART_ROWS), into its `out`, as `pack` would."""
    k = extent_of(rows, dtype)[1]
    begin, end = packed_bytes(dtype, first, k), packed_bytes(dtype, first + len(rows), k)
    pack(rows, dtype, out.reshape(-1)[begin:end])


@functools.cache
def pack_kernel(dtype: DType) -> CpuKernel:
    """Packs rows of a type: parameters `w` (address of the first row), `row_stride` (bytes), `n_out`, `k`, `out`. Threads share tiles."""
    tile_bytes(dtype, 0)  # refuses a type that is none of weights
    return _float_packer(dtype) if dtype in FLOAT_TYPES else _quant_packer(dtype, QUANT_LAYOUTS[dtype], SOURCES[dtype])


@njit
def _share(n, thread, n_threads):  # type: ignore[no-untyped-def]
    return n * thread // n_threads, n * (thread + 1) // n_threads


@njit
def _clear(address, n_bytes):  # type: ignore[no-untyped-def]
    for i in range(n_bytes >> 3):
        store_i64(address + 8 * i, 0)


def _float_packer(dtype: DType) -> CpuKernel:
    size = dtype.block_bytes

    def pack_rows(thread: int, n_threads: int, w: Ptr, row_stride: Int, n_out: Int, k: Int, out: Ptr) -> None:
        begin, end = _share((n_out + LANES - 1) // LANES, thread, n_threads)
        for tile in range(begin, end):
            to = out + tile * (LANES * size) * k
            lanes = min(LANES, n_out - tile * LANES)
            if lanes < LANES:
                _clear(to, LANES * size * k)
            for lane in range(lanes):
                src, place = w + (tile * LANES + lane) * row_stride, to + lane * size
                for e in range(k):
                    if size == 4:
                        store_i32(place + e * (LANES * size), np.int32(load_quad(src + e * size)))
                    else:
                        store_u16(place + e * (LANES * size), load_half_bits(src + e * size))

    return CpuKernel(pack_rows, f"pack_float{8 * size}")


def _block_packer(layout: QuantLayout, source: Source):  # type: ignore[no-untyped-def]
    """A function that packs one lane of one super-block: `src` in the file, `to` in the tile."""
    bits, n_sub, head, block_bytes = layout.bits, layout.super_blocks, layout.head_bytes, layout.block_bytes
    per_block, has_scales, has_minimum = 32 // layout.group, layout.has_scales, layout.has_minimum
    minima, quants, high = per_block * LANES, layout.scale_bytes, layout.high_offset
    d, m, quad, unused = source.d, source.m, source.quad, njit(lambda src, i: 0)
    scale, minimum = source.scale or unused, source.minimum or unused

    @njit
    def pack_lane(src, to, lane):  # type: ignore[no-untyped-def]
        store_u16(to + 2 * lane, load_half_bits(src + d))
        if has_minimum:
            store_u16(to + 2 * (LANES + lane), load_half_bits(src + m))
        for sub in range(n_sub):
            block = to + head + sub * block_bytes
            if has_scales:
                for i in range(per_block):
                    store_u8(block + i * LANES + lane, np.uint8(scale(src, sub * per_block + i)))
                    if has_minimum:
                        store_u8(block + minima + i * LANES + lane, np.uint8(minimum(src, sub * per_block + i)))
            place, top0, top1 = block + 4 * lane, 0, 0
            for g in range(4):
                q0, q1 = quad(src, sub, g), quad(src, sub, g + 4)
                if bits == 8:
                    store_i32(place + quants + g * 64, np.int32(q0))
                    store_i32(place + quants + (g + 4) * 64, np.int32(q1))
                else:
                    store_i32(place + quants + g * 64, np.int32((q0 & _LOW4) | (q1 & _LOW4) << 4))
                if bits == 5:
                    top0 |= ((q0 >> 4) & _LOW1) << g | ((q1 >> 4) & _LOW1) << (g + 4)
                if bits == 6:
                    top0 |= ((q0 >> 4) & _LOW2) << 2 * g
                    top1 |= ((q1 >> 4) & _LOW2) << 2 * g
            if bits == 5 or bits == 6:
                store_i32(place + high, np.int32(top0))
            if bits == 6:
                store_i32(place + high + 64, np.int32(top1))

    return pack_lane


def _quant_packer(dtype: DType, layout: QuantLayout, source: Source) -> CpuKernel:
    pack_lane = _block_packer(layout, source)
    elements, file_bytes = dtype.block_size, dtype.block_bytes
    packed = layout.head_bytes + layout.super_blocks * layout.block_bytes

    def pack_rows(thread: int, n_threads: int, w: Ptr, row_stride: Int, n_out: Int, k: Int, out: Ptr) -> None:
        begin, end = _share((n_out + LANES - 1) // LANES, thread, n_threads)
        n_super = k // elements
        for tile in range(begin, end):
            to = out + tile * packed * n_super
            lanes = min(LANES, n_out - tile * LANES)
            if lanes < LANES:
                _clear(to, packed * n_super)
            for i in range(n_super):
                for lane in range(lanes):
                    pack_lane(w + (tile * LANES + lane) * row_stride + i * file_bytes, to + i * packed, lane)

    return CpuKernel(pack_rows, f"pack_{dtype.name}")
