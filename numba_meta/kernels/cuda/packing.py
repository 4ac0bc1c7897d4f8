"""Packs weights from the file's rows into the planes of `packed.py`, in numpy, some rows at a time.

The usual types have a short way, words at a time; the others go through their fields (`quants.split_blocks`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from numba_meta import dtypes
from numba_meta.dtypes import DType
from numba_meta.errors import ShapeError
from numba_meta.kernels.cuda.packed import BLOCK, FLOAT_TYPES, QUANT_LAYOUTS, QuantLayout, packed_bytes, planes, round_up_16
from numba_meta.kernels.quant_fields import extent_of
from numba_meta.quants import split_blocks

PART_ROWS = 1  # parts of a matrix that are packed one by one begin at multiples of this
_CHUNK_ELEMENTS = 1 << 18  # intermediate arrays that stay in the cache


@dataclass(frozen=True)
class PlaneArrays:
    """The planes of some rows, uint8: `quants` `[rows, bytes]`, the others `[rows, blocks, bytes of a block]`."""

    quants: np.ndarray
    high: np.ndarray
    scales: np.ndarray
    heads: np.ndarray

    def rows(self, part: slice) -> PlaneArrays:
        """Views of some of the rows."""
        return PlaneArrays(self.quants[part], self.high[part], self.scales[part], self.heads[part])


def pack(raw: np.ndarray, dtype: DType, out: np.ndarray) -> None:
    """Packs weights `raw` (uint8 `[n_out, row_bytes]`, rows at any stride, as in a GGUF file) into `out`, uint8, on the host.

    `out` must hold `packed_bytes` bytes; every one of them is written. Raises `ShapeError`.
    """
    n_out, k = extent_of(raw, dtype)
    needed = packed_bytes(dtype, n_out, k)
    if out.dtype != np.uint8 or out.nbytes < needed or not out.flags.c_contiguous:
        raise ShapeError(f"cannot pack into {out.nbytes} bytes of {out.dtype}; expected {needed} contiguous ones of uint8")
    pack_part(raw, dtype, out.reshape(-1)[:needed], 0, n_out)


def pack_part(raw: np.ndarray, dtype: DType, out: np.ndarray, first: int, n_out: int) -> None:
    """Packs `raw`, some of the `n_out` rows of a matrix from number `first` on, into its `out`, uint8 `[packed_bytes]`."""
    k = raw.shape[1] // dtype.block_bytes * dtype.block_size
    if dtype in FLOAT_TYPES:
        row_bytes = round_up_16(raw.shape[1])
        rows = out.reshape(n_out, row_bytes)[first : first + len(raw)]
        rows[:, : raw.shape[1]] = raw
        rows[:, raw.shape[1] :] = 0
        return
    layout = QUANT_LAYOUTS[dtype]
    arrays = plane_arrays(out, layout, n_out, k)
    pack_some = _SHORT.get(dtype, _pack_fields)
    step = max(1, _CHUNK_ELEMENTS // max(1, k))
    for begin in range(0, len(raw) if k else 0, step):
        end = min(begin + step, len(raw))
        pack_some(raw[begin:end], dtype, arrays.rows(slice(first + begin, first + end)))


def plane_arrays(packed: np.ndarray, layout: QuantLayout, n_out: int, k: int) -> PlaneArrays:
    """Views of the planes of `packed`; clears the gaps between them."""
    places = planes(layout, n_out, k)
    n_blocks = k // BLOCK

    def view(begin: int, end: int, n_bytes: int, per_row: int) -> np.ndarray:
        used = n_out * per_row * n_bytes
        packed[begin + used : end] = 0
        return packed[begin : begin + used].reshape(n_out, per_row, n_bytes)

    quants = view(0, places.high, layout.quant_bytes * n_blocks, 1)[:, 0]
    high = view(places.high, places.scales, layout.high_bytes, n_blocks)
    scales = view(places.scales, places.heads, layout.scale_bytes, n_blocks)
    return PlaneArrays(quants, high, scales, view(places.heads, places.end, layout.head_bytes, n_blocks // layout.super_blocks))


def _pack_fields(raw: np.ndarray, dtype: DType, to: PlaneArrays) -> None:
    """Any type, by its fields."""
    layout = QUANT_LAYOUTS[dtype]
    blocks = split_blocks(np.ascontiguousarray(raw), dtype)
    rows, n_blocks = raw.shape[0], blocks.quants.shape[1] // BLOCK
    stored = (blocks.quants.view(np.int8) + np.int8(layout.offset)).view(np.uint8).reshape(rows, n_blocks, BLOCK)
    if layout.bits == 8:
        _halves(stored, to.quants)
    else:
        nibbles = (stored[:, :, :16] & np.uint8(15)) | (stored[:, :, 16:] << np.uint8(4))
        to.quants.reshape(rows, n_blocks, 16)[:] = nibbles
    if layout.bits == 5:
        top = (stored >> np.uint8(4)).reshape(rows, n_blocks, 8, 4)
        to.high[:] = np.packbits(top, axis=2, bitorder="little")[:, :, 0]
    if layout.bits == 6:
        top = (stored >> np.uint8(4)).reshape(rows, n_blocks, 2, 4, 4)
        shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
        to.high.reshape(rows, n_blocks, 2, 4)[:] = np.bitwise_or.reduce(top << shifts, axis=3)
    head = to.heads if layout.has_scales else to.scales
    head[:, :, :2] = _bytes(blocks.scale, 2)
    if blocks.minimum is not None:
        head[:, :, 2:4] = _bytes(blocks.minimum, 2)
    if blocks.sub_scales is not None:
        to.scales[:, :, : layout.groups] = _bytes(blocks.sub_scales, 1).reshape(rows, n_blocks, layout.groups)
    if blocks.sub_minimums is not None:
        to.scales[:, :, layout.groups :] = blocks.sub_minimums.reshape(rows, n_blocks, layout.groups)


def _bytes(field: np.ndarray, size: int) -> np.ndarray:
    return np.ascontiguousarray(field).view(np.uint8).reshape(*field.shape, size)


def _halves(stored: np.ndarray, quants: np.ndarray) -> None:
    """`stored` `[rows, blocks, 32]`, 8 bits each."""
    rows, n_blocks = stored.shape[:2]
    to = quants.reshape(rows, 2, n_blocks, 16)
    to[:, 0], to[:, 1] = stored[:, :, :16], stored[:, :, 16:]


def _pack_legacy(raw: np.ndarray, dtype: DType, to: PlaneArrays) -> None:
    """Q4_0, Q4_1, Q5_0, Q5_1: scales, a word of fifth bits where there are 5, then nibbles in the order that is wanted."""
    begin = dtype.block_bytes - 16
    blocks = raw.reshape(raw.shape[0], -1, dtype.block_bytes)
    size = to.scales.shape[2]
    to.scales[:] = blocks[:, :, :size]
    to.quants.reshape(raw.shape[0], -1, 16)[:] = blocks[:, :, begin:]
    if begin > size:
        pairs = np.ascontiguousarray(blocks[:, :, size:begin]).view(np.uint16)  # [row, block, elements 0..15 or 16..31]
        spread = _spread_bits()
        to.high[:] = (spread[pairs[:, :, 0]] | spread[pairs[:, :, 1]] << np.uint32(4))[:, :, None].view(np.uint8)


@functools.cache
def _spread_bits() -> np.ndarray:
    """For each 16 bits the word whose byte j has bit 4g + j as its bit g: uint32 `[65536]`."""
    numbers, words = np.arange(1 << 16, dtype=np.uint32), np.zeros(1 << 16, np.uint32)
    for i in range(16):
        words |= (numbers >> np.uint32(i) & np.uint32(1)) << np.uint32(8 * (i % 4) + i // 4)
    return words


def _pack_q8_0(raw: np.ndarray, dtype: DType, to: PlaneArrays) -> None:
    blocks = raw.reshape(raw.shape[0], -1, dtype.block_bytes)
    to.scales[:] = blocks[:, :, :2]
    _halves(blocks[:, :, 2:], to.quants)


def _pack_q45_k(raw: np.ndarray, dtype: DType, to: PlaneArrays) -> None:
    """Q4_K and Q5_K. Nibbles lie in runs of 32 bytes: the low ones are one block, the high ones the next."""
    rows = raw.shape[0]
    blocks = raw.reshape(rows, -1, dtype.block_bytes)
    to.heads[:] = blocks[:, :, :4]
    first, second, third = (blocks[:, :, 4 + 4 * i : 8 + 4 * i] for i in range(3))
    scales = to.scales.reshape(rows, -1, 2, 4, 2)  # [row, super-block, blocks 0..3 or 4..7, block, scale or minimum]
    six, top = np.uint8(0x3F), np.uint8(0x30)
    scales[:, :, 0, :, 0], scales[:, :, 0, :, 1] = first & six, second & six
    scales[:, :, 1, :, 0] = (third & np.uint8(15)) | ((first >> np.uint8(2)) & top)
    scales[:, :, 1, :, 1] = (third >> np.uint8(4)) | ((second >> np.uint8(2)) & top)
    packed = to.quants.reshape(rows, -1, 4, 2, 16)  # [row, super-block, run, block of the run, byte]
    _nibble_runs(blocks[:, :, -128:].reshape(rows, -1, 4, 2, 16), packed[:, :, :, 0], packed[:, :, :, 1])
    if dtype == dtypes.Q5_K:
        words = _words(blocks[:, :, 16:48])  # bit i of byte j of word g: element 4g + j of block i
        high = to.high.view(np.uint32).reshape(rows, -1, 8)
        for i in range(8):
            high[:, :, i] = _gathered(words >> np.uint32(i) & np.uint32(0x01010101), 1)


def _pack_q6_k(raw: np.ndarray, dtype: DType, to: PlaneArrays) -> None:
    """In each half of a super-block the low nibbles of two runs of 32 bytes are blocks 0 and 1, the high ones blocks 2 and 3."""
    rows = raw.shape[0]
    blocks = raw.reshape(rows, -1, dtype.block_bytes)
    to.scales.reshape(rows, -1, 16)[:], to.heads[:] = blocks[:, :, 192:208], blocks[:, :, 208:]
    packed = to.quants.reshape(rows, -1, 2, 4, 16)  # [row, super-block, half, block, byte]
    _nibble_runs(blocks[:, :, :128].reshape(rows, -1, 2, 2, 2, 16), packed[:, :, :, :2], packed[:, :, :, 2:])
    words = _words(blocks[:, :, 128:192]).reshape(rows, -1, 2, 2, 4)  # [row, super-block, half, elements 0..15 or 16..31, word]
    high = to.high.view(np.uint32).reshape(rows, -1, 2, 4, 2)
    for i in range(4):
        high[:, :, :, i] = _gathered(words >> np.uint32(2 * i) & np.uint32(0x03030303), 2)


def _nibble_runs(runs: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
    """Runs of 32 bytes `[..., half, 16]`: the low nibbles to one block, the high ones to another, elements e and 16 + e in a byte."""
    first, second = runs[..., 0, :], runs[..., 1, :]
    low[:] = (first & np.uint8(15)) | (second << np.uint8(4))
    high[:] = (first >> np.uint8(4)) | (second & np.uint8(0xF0))


def _words(field: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(field).view(np.uint32)


def _gathered(words: np.ndarray, bits: int) -> np.ndarray:
    """Word g of the last axis, `bits` bits in each byte, at bits `bits * g`: one word for all."""
    result = words[..., 0].copy()
    for g in range(1, words.shape[-1]):
        result |= words[..., g] << np.uint32(bits * g)
    return result


_SHORT: dict[DType, Callable[[np.ndarray, DType, PlaneArrays], None]] = {
    **dict.fromkeys((dtypes.Q4_0, dtypes.Q4_1, dtypes.Q5_0, dtypes.Q5_1), _pack_legacy),
    dtypes.Q8_0: _pack_q8_0,
    **dict.fromkeys((dtypes.Q4_K, dtypes.Q5_K), _pack_q45_k),
    dtypes.Q6_K: _pack_q6_k,
}
