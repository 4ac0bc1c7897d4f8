"""How the packer reads the blocks of each quantized type, as GGUF files hold them (layouts: ggml's `block_q4_0` and so on).

A source gives, for the block at address `src`: `quad(src, block, g)`, the unsigned quants of elements 4g..4g+3 of a sub-block of 32 as the
4 bytes of an integer, and for super-blocks `scale(src, i)` and `minimum(src, i)` of group i as 8-bit integers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numba import njit

from numba_meta import dtypes
from numba_meta.dtypes import DType
from numba_meta.kernels.cpu.simd import load_u8
from numba_meta.kernels.cpu.simd_int8 import load_half_bits, load_quad

_LOW4, _LOW2, _LOW1 = 0x0F0F0F0F, 0x03030303, 0x01010101
_IQ4_CODEBOOK = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_IQ4_LOW, _IQ4_HIGH = (np.uint64(sum((v + 128) << 8 * i for i, v in enumerate(_IQ4_CODEBOOK[s : s + 8]))) for s in (0, 8))


@dataclass(frozen=True)
class Source:
    """Byte offsets of `d` and `m` in a block (`m` -1: none), and the functions described above."""

    d: int
    m: int
    quad: Callable[[int, int, int], int]
    scale: Callable[[int, int], int] | None = None
    minimum: Callable[[int, int], int] | None = None


def _nibbles(quants: int) -> Callable[[int, int, int], int]:
    """16 bytes per 32 elements: the first half in the low nibbles."""

    @njit
    def quad(src, block, g):  # type: ignore[no-untyped-def]
        return (np.int64(load_quad(src + quants + 16 * block + 4 * (g & 3))) >> 4 * (g >> 2)) & _LOW4

    return quad


def _five_bits(high: int, quants: int) -> Callable[[int, int, int], int]:
    """Nibbles, and the fifth bits of 32 elements in one word."""
    nibbles = _nibbles(quants)

    @njit
    def quad(src, block, g):  # type: ignore[no-untyped-def]
        bits = (np.int64(load_quad(src + high)) >> 4 * g) & 15
        return nibbles(src, block, g) | ((bits * 0x00204081) & _LOW1) << 4  # bit j to the lowest bit of byte j

    return quad


@njit
def _q8_quad(src, block, g):  # type: ignore[no-untyped-def]
    return np.int64(load_quad(src + 2 + 4 * g)) ^ 0x80808080


def _iq4(quants: int) -> Callable[[int, int, int], int]:
    """Nibbles that choose from the codebook."""
    nibbles = _nibbles(quants)

    @njit
    def quad(src, block, g):  # type: ignore[no-untyped-def]
        codes, result = nibbles(src, block, g), 0
        for j in range(4):
            code = (codes >> 8 * j) & 15
            table = _IQ4_HIGH if code >= 8 else _IQ4_LOW
            result |= np.int64((table >> np.uint64(8 * (code & 7))) & np.uint64(255)) << 8 * j
        return result

    return quad


@njit
def _q4_k_quad(src, block, g):  # type: ignore[no-untyped-def]
    return (np.int64(load_quad(src + 16 + 32 * (block >> 1) + 4 * g)) >> 4 * (block & 1)) & _LOW4


@njit
def _q5_k_quad(src, block, g):  # type: ignore[no-untyped-def]
    low = (np.int64(load_quad(src + 48 + 32 * (block >> 1) + 4 * g)) >> 4 * (block & 1)) & _LOW4
    return low | ((np.int64(load_quad(src + 16 + 4 * g)) >> block) & _LOW1) << 4


@njit
def _q4_k_scale(src, i):  # type: ignore[no-untyped-def]
    if i < 4:
        return np.int64(load_u8(src + 4 + i)) & 63
    return np.int64(load_u8(src + 8 + i)) & 15 | (np.int64(load_u8(src + i)) >> 6) << 4


@njit
def _q4_k_minimum(src, i):  # type: ignore[no-untyped-def]
    if i < 4:
        return np.int64(load_u8(src + 8 + i)) & 63
    return np.int64(load_u8(src + 8 + i)) >> 4 | (np.int64(load_u8(src + 4 + i)) >> 6) << 4


@njit
def _q6_k_quad(src, block, g):  # type: ignore[no-untyped-def]
    half, part = block >> 2, block & 3
    low = (np.int64(load_quad(src + 64 * half + 32 * (part & 1) + 4 * g)) >> 4 * (part >> 1)) & _LOW4
    return low | ((np.int64(load_quad(src + 128 + 32 * half + 4 * g)) >> 2 * part) & _LOW2) << 4


@njit
def _q6_k_scale(src, i):  # type: ignore[no-untyped-def]
    return np.int64(load_u8(src + 192 + i))


@njit
def _q3_k_quad(src, block, g):  # type: ignore[no-untyped-def]
    low = (np.int64(load_quad(src + 32 + 32 * (block >> 2) + 4 * g)) >> 2 * (block & 3)) & _LOW2
    high = (np.int64(load_quad(src + 4 * g)) >> block) & _LOW1
    return low + 4 * high + 0x1C1C1C1C  # quant - 4, stored with an offset of 32


@njit
def _q3_k_scale(src, i):  # type: ignore[no-untyped-def]
    low = (np.int64(load_u8(src + 96 + (i & 7))) >> 4 * (i >> 3)) & 15
    high = (np.int64(load_u8(src + 104 + (i & 3))) >> 2 * (i >> 2)) & 3
    return (low | high << 4) - 32


@njit
def _q2_k_quad(src, block, g):  # type: ignore[no-untyped-def]
    return (np.int64(load_quad(src + 16 + 32 * (block >> 2) + 4 * g)) >> 2 * (block & 3)) & _LOW2


@njit
def _q2_k_scale(src, i):  # type: ignore[no-untyped-def]
    return np.int64(load_u8(src + i)) & 15


@njit
def _q2_k_minimum(src, i):  # type: ignore[no-untyped-def]
    return np.int64(load_u8(src + i)) >> 4


@njit
def _iq4_xs_scale(src, i):  # type: ignore[no-untyped-def]
    low = (np.int64(load_u8(src + 4 + (i >> 1))) >> 4 * (i & 1)) & 15
    return (low | ((np.int64(load_half_bits(src + 2)) >> 2 * i) & 3) << 4) - 32


SOURCES: dict[DType, Source] = {
    dtypes.Q4_0: Source(0, -1, _nibbles(2)),
    dtypes.Q4_1: Source(0, 2, _nibbles(4)),
    dtypes.Q5_0: Source(0, -1, _five_bits(2, 6)),
    dtypes.Q5_1: Source(0, 2, _five_bits(4, 8)),
    dtypes.Q8_0: Source(0, -1, _q8_quad),
    dtypes.IQ4_NL: Source(0, -1, _iq4(2)),
    dtypes.Q4_K: Source(0, 2, _q4_k_quad, _q4_k_scale, _q4_k_minimum),
    dtypes.Q5_K: Source(0, 2, _q5_k_quad, _q4_k_scale, _q4_k_minimum),
    dtypes.Q6_K: Source(208, -1, _q6_k_quad, _q6_k_scale),
    dtypes.Q3_K: Source(108, -1, _q3_k_quad, _q3_k_scale),
    dtypes.Q2_K: Source(80, 82, _q2_k_quad, _q2_k_scale, _q2_k_minimum),
    dtypes.IQ4_XS: Source(0, -1, _iq4(8), _iq4_xs_scale),
}
