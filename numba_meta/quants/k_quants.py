"""Blocks of 256 elements with small integer scales per group of 16 or 32: q2_k, q3_k, q4_k, q5_k, q6_k.

Layouts in bytes, in order (`d`, `dmin` float16; `sc` the groups' scales and minimums; `qs`/`ql` low bits, `qh` high bits):
q2_k = sc 16, qs 64, d, dmin; q3_k = qh 32, qs 64, sc 12, d; q4_k = d, dmin, sc 12, qs 128;
q5_k = d, dmin, sc 12, qh 32, qs 128; q6_k = ql 128, qh 64, sc 16, d.
"""

from __future__ import annotations

import numpy as np

from numba_meta import dtypes
from numba_meta.quants.blocks import Blocks, ByteArray, bit_fields, halves


def _scales_and_minimums(packed: ByteArray) -> tuple[ByteArray, ByteArray]:
    """The eight 6-bit scales and eight 6-bit minimums that q4_k and q5_k pack into 12 bytes; each [n_blocks, 8].

    Bytes 0..3 hold scales 0..3 in their low six bits, bytes 4..7 minimums 0..3. Scale `4 + i` has its low four bits in the low
    half of byte `8 + i` and its high two bits on top of byte `i`; minimum `4 + i` in the high half and on top of byte `4 + i`.
    """
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    six, top = np.uint8(0x3F), np.uint8(0x30)
    late_scales = (third & np.uint8(0x0F)) | ((first >> np.uint8(2)) & top)
    late_minimums = (third >> np.uint8(4)) | ((second >> np.uint8(2)) & top)
    return np.hstack([first & six, late_scales]), np.hstack([second & six, late_minimums])


def split_q2_k(blocks: ByteArray) -> Blocks:
    """[n_blocks, 84] bytes; quants uint8 in 0..3, 16 groups of 16 with 4-bit scales and minimums."""
    scales = blocks[:, :16]
    return Blocks(
        dtypes.Q2_K,
        bit_fields(blocks[:, 16:80], 32, 2),
        halves(blocks, 80),
        halves(blocks, 82),
        scales & np.uint8(0x0F),
        scales >> np.uint8(4),
    )


def split_q3_k(blocks: ByteArray) -> Blocks:
    """[n_blocks, 110] bytes; quants int8 in -4..3, 16 groups of 16 with scales in -32..31.

    Scale `i` has its low four bits in nibble `i // 8` of byte `i % 8` and its high two in pair `i // 4` of byte `8 + i % 4`.
    """
    low = bit_fields(blocks[:, 32:96], 32, 2)
    high = bit_fields(blocks[:, :32], 32, 1)  # a set bit means that 4 is not taken off
    quants = (low | (high << np.uint8(2))).view(np.int8) - np.int8(4)
    packed = blocks[:, 96:108]
    scales = bit_fields(packed[:, :8], 8, 4) | (bit_fields(packed[:, 8:], 4, 2) << np.uint8(4))
    return Blocks(dtypes.Q3_K, quants, halves(blocks, 108), sub_scales=scales.view(np.int8) - np.int8(32))


def split_q4_k(blocks: ByteArray) -> Blocks:
    """[n_blocks, 144] bytes; quants uint8 in 0..15, 8 groups of 32 with 6-bit scales and minimums."""
    scales, minimums = _scales_and_minimums(blocks[:, 4:16])
    return Blocks(dtypes.Q4_K, bit_fields(blocks[:, 16:], 32, 4), halves(blocks, 0), halves(blocks, 2), scales, minimums)


def split_q5_k(blocks: ByteArray) -> Blocks:
    """[n_blocks, 176] bytes; quants uint8 in 0..31, 8 groups of 32 with 6-bit scales and minimums."""
    scales, minimums = _scales_and_minimums(blocks[:, 4:16])
    quants = bit_fields(blocks[:, 48:], 32, 4) | (bit_fields(blocks[:, 16:48], 32, 1) << np.uint8(4))
    return Blocks(dtypes.Q5_K, quants, halves(blocks, 0), halves(blocks, 2), scales, minimums)


def split_q6_k(blocks: ByteArray) -> Blocks:
    """[n_blocks, 210] bytes; quants int8 in -32..31, 16 groups of 16 with int8 scales."""
    stored = bit_fields(blocks[:, :128], 64, 4) | (bit_fields(blocks[:, 128:192], 32, 2) << np.uint8(4))
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    return Blocks(dtypes.Q6_K, stored.view(np.int8) - np.int8(32), halves(blocks, 208), sub_scales=scales)


SPLITTERS = {
    dtypes.Q2_K: split_q2_k,
    dtypes.Q3_K: split_q3_k,
    dtypes.Q4_K: split_q4_k,
    dtypes.Q5_K: split_q5_k,
    dtypes.Q6_K: split_q6_k,
}
