"""Blocks of 32 elements: q8_0, q4_0, q4_1, q5_0, q5_1. Each block has a float16 scale, the `_1` types a float16 minimum too.

Layouts in bytes (`d` scale, `m` minimum, `qh` fifth bits, `qs` nibbles: byte `i` holds element `i` low and `i + 16` high):
q8_0 = d 2, int8 32; q4_0 = d 2, qs 16; q4_1 = d 2, m 2, qs 16; q5_0 = d 2, qh 4, qs 16; q5_1 = d 2, m 2, qh 4, qs 16.
Nibbles of the `_0` types are stored with an offset of half their range.
"""

from __future__ import annotations

import numpy as np

from numba_meta import dtypes
from numba_meta.quants.blocks import Blocks, ByteArray, bit_fields, halves


def _fifth_bits(blocks: ByteArray, start: int) -> ByteArray:
    """Bit `i` of the four bytes at `start`, moved to bit 4, for element `i`: [n_blocks, 32]."""
    bits = np.unpackbits(np.ascontiguousarray(blocks[:, start : start + 4]), axis=-1, bitorder="little")
    return bits << np.uint8(4)


def split_q8_0(blocks: ByteArray) -> Blocks:
    """[n_blocks, 34] bytes; quants int8 in -128..127."""
    return Blocks(dtypes.Q8_0, np.ascontiguousarray(blocks[:, 2:]).view(np.int8), halves(blocks, 0))


def split_q4_0(blocks: ByteArray) -> Blocks:
    """[n_blocks, 18] bytes; quants int8 in -8..7."""
    return Blocks(dtypes.Q4_0, bit_fields(blocks[:, 2:], 16, 4).view(np.int8) - np.int8(8), halves(blocks, 0))


def split_q4_1(blocks: ByteArray) -> Blocks:
    """[n_blocks, 20] bytes; quants uint8 in 0..15."""
    return Blocks(dtypes.Q4_1, bit_fields(blocks[:, 4:], 16, 4), halves(blocks, 0), halves(blocks, 2))


def split_q5_0(blocks: ByteArray) -> Blocks:
    """[n_blocks, 22] bytes; quants int8 in -16..15."""
    stored = bit_fields(blocks[:, 6:], 16, 4) | _fifth_bits(blocks, 2)
    return Blocks(dtypes.Q5_0, stored.view(np.int8) - np.int8(16), halves(blocks, 0))


def split_q5_1(blocks: ByteArray) -> Blocks:
    """[n_blocks, 24] bytes; quants uint8 in 0..31."""
    stored = bit_fields(blocks[:, 8:], 16, 4) | _fifth_bits(blocks, 4)
    return Blocks(dtypes.Q5_1, stored, halves(blocks, 0), halves(blocks, 2))


SPLITTERS = {
    dtypes.Q8_0: split_q8_0,
    dtypes.Q4_0: split_q4_0,
    dtypes.Q4_1: split_q4_1,
    dtypes.Q5_0: split_q5_0,
    dtypes.Q5_1: split_q5_1,
}
