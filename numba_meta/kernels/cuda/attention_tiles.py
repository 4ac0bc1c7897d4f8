"""Tiles of 16 cells for tensor cores: rows of a cache copied to shared memory as they are, and read from there as f16 or bf16 fragments.

In `mma.m16n8k16` lane 4 g + t holds of A: rows g and g + 8, columns 2 t, 2 t + 1, 2 t + 8, 2 t + 9; of B: rows 2 t, 2 t + 1, 2 t + 8,
2 t + 9, column g; of C: rows g and g + 8, columns 2 t and 2 t + 1. Scores have A = K (a row is a cell) and B = Q (a column is a head); the
weighted sum has A = V transposed (a row is an element of the head, a column a cell) and B = the weights. Which element of a head goes with
which column of K, or row of V, is free: each type takes the order in which its bytes lie.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from numba_meta.dtypes import BF16, F16, Q4_0, Q8_0, DType
from numba_meta.kernels.cuda.attention_intrinsics import cell_address, filled_copy, mul_f16x2, shared_half, shared_word, sub_f16x2
from numba_meta.kernels.cuda.device import (
    add,
    cuda,
    device_function,
    fma,
    low_f16,
    mma_bf16,
    mma_f16,
    permute_bytes,
    shared_load_v4,
    types,
)

TILE = 16  # cells
QUERY_BYTES = 512  # of a step of 16 elements of Q for all lanes: high parts (2 registers), low parts (2)
_TYPES = (F16, BF16, Q8_0, Q4_0)
BIAS = np.int32(-0x7F7F7F80)  # 0x80808080: makes int8 unsigned
_EXPONENT = np.int32(0x64646464)  # above a byte x: the float16 1024 + x
BIAS_8 = np.int32(0x64806480)  # 1024 + 128, twice
BIAS_4 = np.int32(0x64086408)  # 1024 + 8, twice
NIBBLES = np.int32(0x0F0F0F0F)


@dataclass(frozen=True)
class StagedRow:
    """A row of one head in shared memory: its bytes, the bytes of a copied piece, the bytes from row to row."""

    n_bytes: int
    piece: int
    stride: int


def staged_row(dtype: DType, dim: int) -> StagedRow:
    """Rows lie an odd multiple of 16 bytes apart, so that 8 of them begin in different banks."""
    n = dtype.row_bytes(dim)
    return StagedRow(n, min(16, n & -n), 16 * (-(-n // 16) | 1))


def can_tile(dtype: DType, dim: int) -> bool:
    """Whether there are tiles for rows of this type."""
    return dtype in _TYPES and dim % 64 == 0 and staged_row(dtype, dim).piece >= 4


def mma_of(dtype: DType) -> Any:
    """The product for fragments of a cache type."""
    return mma_bf16 if dtype is BF16 else mma_f16


@functools.cache
def copy_quarter(dtype: DType, dim: int) -> Any:
    """A device function of a warp (shared, source, stride, cell, place): copies rows in the background, 8 lanes each.

    A lane's row goes to row `place` of the tile: that of its cell, or zeros if the cell is negative. What does not fill 8 pieces stays for
    `copy_rest`.
    """
    row = staged_row(dtype, dim)
    piece, shared_stride, copy, n = row.piece, row.stride, filled_copy[row.piece], row.n_bytes // row.piece // 8

    @device_function
    def copy_part(shared, source, stride, cell, place):  # type: ignore[no-untyped-def]
        lane = types.int32(cuda.threadIdx.x) & 7
        n_bytes = types.int32(piece if cell >= 0 else 0)
        begin = cell_address(source + lane * piece, max(cell, types.int32(0)), stride)
        target = shared + place * shared_stride + lane * piece
        for i in range(n):
            copy(target + 8 * piece * i, begin + 8 * piece * i, n_bytes)

    return copy_part


@functools.cache
def copy_rest(dtype: DType, dim: int) -> Any:
    """A device function of a warp (shared, source, stride, cell, lane): the ends of 16 rows; lane l < 16 takes row l, that of its cell."""
    row = staged_row(dtype, dim)
    n_rest = row.n_bytes // row.piece % 8
    piece, shared_stride, copy, rest_begin = row.piece, row.stride, filled_copy[row.piece], row.n_bytes - row.piece * n_rest

    @device_function
    def copy_ends(shared, source, stride, cell, lane):  # type: ignore[no-untyped-def]
        if n_rest > 0 and lane < TILE:
            n_bytes = types.int32(piece if cell >= 0 else 0)
            begin = cell_address(source + rest_begin, max(cell, types.int32(0)), stride)
            target = shared + lane * shared_stride + rest_begin
            for i in range(n_rest):
                copy(target + piece * i, begin + piece * i, n_bytes)

    return copy_ends


# ---- bytes to halves -------------------------------------------------------------------------------------------------------------------


@device_function
def _word_behind(address):  # type: ignore[no-untyped-def]
    """4 bytes from 2 behind a multiple of 4 on."""
    return permute_bytes(shared_word(address), shared_word(address + 4), 0x5432)


@device_function
def pairs_of_bytes(word, bias):  # type: ignore[no-untyped-def]
    """4 unsigned bytes as float16 without their bias: the first two, the last two."""
    return (
        sub_f16x2(permute_bytes(word, _EXPONENT, 0x4140), bias),
        sub_f16x2(permute_bytes(word, _EXPONENT, 0x4342), bias),
    )


@device_function
def _scaled_pairs(word, bias, d):  # type: ignore[no-untyped-def]
    """The same, each pair times a pair of scales."""
    low, high = pairs_of_bytes(word, bias)
    return mul_f16x2(low, d), mul_f16x2(high, d)


# ---- scores ----------------------------------------------------------------------------------------------------------------------------


def query_element(dtype: DType) -> Any:
    """A device function (step, t): the first of the 4 elements of Q that lane t gives in a step of 16."""
    if dtype in (F16, BF16):
        return device_function(lambda step, t: 32 * (step >> 1) + 4 * (step & 1) + 8 * t)
    return device_function(lambda step, t: 16 * step + 4 * t)


@functools.cache
def score_tile(dtype: DType, dim: int) -> Any:
    """A device function of a warp (keys, queries, lane): scores of 16 cells for 8 heads as a fragment C.

    keys: rows in shared memory; queries: QUERY_BYTES for each step. High and low parts of Q are summed apart.
    """
    stride, mma, zero = staged_row(dtype, dim).stride, mma_of(dtype), np.float32(0.0)
    if dtype in (F16, BF16):
        n = dim // 32

        @device_function
        def score(keys, queries, lane):  # type: ignore[no-untyped-def]
            first = keys + (lane >> 2) * stride + 16 * (lane & 3)
            queries = queries + 16 * lane
            h0, h1, h2, h3, l0, l1, l2, l3 = zero, zero, zero, zero, zero, zero, zero, zero
            for i in range(n):
                x0, x1, x2, x3 = shared_load_v4(first + 64 * i)
                y0, y1, y2, y3 = shared_load_v4(first + 8 * stride + 64 * i)
                q0, q1, r0, r1 = shared_load_v4(queries + 2 * QUERY_BYTES * i)
                h0, h1, h2, h3 = mma(x0, y0, x1, y1, q0, q1, h0, h1, h2, h3)
                l0, l1, l2, l3 = mma(x0, y0, x1, y1, r0, r1, l0, l1, l2, l3)
                q0, q1, r0, r1 = shared_load_v4(queries + 2 * QUERY_BYTES * i + QUERY_BYTES)
                h0, h1, h2, h3 = mma(x2, y2, x3, y3, q0, q1, h0, h1, h2, h3)
                l0, l1, l2, l3 = mma(x2, y2, x3, y3, r0, r1, l0, l1, l2, l3)
            return add(h0, l0), add(h1, l1), add(h2, l2), add(h3, l3)

        return score

    block_bytes, words_of = dtype.block_bytes, _key_words(dtype)
    n = dim // 64

    @device_function
    def score_block(first, second, queries, odd, c0, c1, c2, c3):  # type: ignore[no-untyped-def]
        """Adds a block of 32 elements: exact products of integers with Q, then the block's scales."""
        x0, x1, x2, x3 = words_of(first, odd)
        y0, y1, y2, y3 = words_of(second, odd)
        q0, q1, r0, r1 = shared_load_v4(queries)
        h0, h1, h2, h3 = mma(x0, y0, x1, y1, q0, q1, zero, zero, zero, zero)
        l0, l1, l2, l3 = mma(x0, y0, x1, y1, r0, r1, zero, zero, zero, zero)
        q0, q1, r0, r1 = shared_load_v4(queries + QUERY_BYTES)
        h0, h1, h2, h3 = mma(x2, y2, x3, y3, q0, q1, h0, h1, h2, h3)
        l0, l1, l2, l3 = mma(x2, y2, x3, y3, r0, r1, l0, l1, l2, l3)
        d, e = low_f16(shared_half(first)), low_f16(shared_half(second))
        return fma(add(h0, l0), d, c0), fma(add(h1, l1), d, c1), fma(add(h2, l2), e, c2), fma(add(h3, l3), e, c3)

    @device_function
    def score(keys, queries, lane):  # type: ignore[no-untyped-def]
        first = keys + (lane >> 2) * stride
        second = first + 8 * stride
        queries = queries + 16 * lane
        c0, c1, c2, c3 = zero, zero, zero, zero
        for i in range(n):
            at, q = 2 * block_bytes * i, queries + 4 * QUERY_BYTES * i
            c0, c1, c2, c3 = score_block(first + at, second + at, q, False, c0, c1, c2, c3)
            at += block_bytes
            c0, c1, c2, c3 = score_block(first + at, second + at, q + 2 * QUERY_BYTES, True, c0, c1, c2, c3)
        return c0, c1, c2, c3

    return score


def _key_words(dtype: DType) -> Any:
    """A device function (block, odd): 8 elements of a block of K as 4 pairs: 4 t .. 4 t + 3, then 16 behind them.

    Blocks begin 2 bytes behind a multiple of 4 where their number is odd.
    """

    if dtype is Q8_0:

        @device_function
        def words(block, odd):  # type: ignore[no-untyped-def]
            at = block + 4 * (types.int32(cuda.threadIdx.x) & 3)
            if odd:
                x, y = shared_word(at + 2), shared_word(at + 18)
            else:
                x, y = _word_behind(at), _word_behind(at + 16)
            x0, x1 = pairs_of_bytes(x ^ BIAS, BIAS_8)
            x2, x3 = pairs_of_bytes(y ^ BIAS, BIAS_8)
            return x0, x1, x2, x3

    else:

        @device_function
        def words(block, odd):  # type: ignore[no-untyped-def]
            at = block + 4 * (types.int32(cuda.threadIdx.x) & 3)
            x = shared_word(at + 2) if odd else _word_behind(at)
            x0, x1 = pairs_of_bytes(x & NIBBLES, BIAS_4)
            x2, x3 = pairs_of_bytes((x >> 4) & NIBBLES, BIAS_4)
            return x0, x1, x2, x3

    return words


# ---- weighted values -------------------------------------------------------------------------------------------------------------------


def value_element(dtype: DType) -> Any:
    """A device function (step, g): the element of V in row g of a fragment A of step `step`; the next one is in row g + 8."""
    if dtype in (F16, BF16):
        return device_function(lambda step, g: 64 * (step >> 2) + 2 * (step & 3) + 8 * g)
    if dtype is Q8_0:
        return device_function(lambda step, g: 32 * (step >> 1) + 2 * (step & 1) + 4 * g)
    return device_function(lambda step, g: 16 * step + 2 * g)


@functools.cache
def add_tile(dtype: DType, dim: int) -> Any:
    """A device function of a warp (values, lane, p0, p1, r0, r1, out): adds 16 cells' values times their weights for 8 heads.

    values: rows in shared memory; p, r: high and low parts of the weights as fragments B; out: a fragment C for each 16 elements.
    """
    stride, mma = staged_row(dtype, dim).stride, mma_of(dtype)

    @device_function
    def add_step(out, step, a0, a1, a2, a3, p0, p1, r0, r1):  # type: ignore[no-untyped-def]
        i = 4 * step
        c0, c1, c2, c3 = mma(a0, a1, a2, a3, p0, p1, out[i], out[i + 1], out[i + 2], out[i + 3])
        out[i], out[i + 1], out[i + 2], out[i + 3] = mma(a0, a1, a2, a3, r0, r1, c0, c1, c2, c3)

    if dtype in (F16, BF16):
        n = dim // 64

        @device_function
        def add_values(values, lane, p0, p1, r0, r1, out):  # type: ignore[no-untyped-def]
            first = values + 2 * (lane & 3) * stride + 16 * (lane >> 2)
            for i in range(n):
                w0, w1, w2, w3 = shared_load_v4(first + 128 * i)
                x0, x1, x2, x3 = shared_load_v4(first + stride + 128 * i)
                y0, y1, y2, y3 = shared_load_v4(first + 8 * stride + 128 * i)
                z0, z1, z2, z3 = shared_load_v4(first + 9 * stride + 128 * i)
                pairs = ((w0, x0, y0, z0), (w1, x1, y1, z1), (w2, x2, y2, z2), (w3, x3, y3, z3))
                for j in range(4):
                    w, x, y, z = pairs[j]
                    add_step(
                        out, 4 * i + j, permute_bytes(w, x, 0x5410), permute_bytes(w, x, 0x7632), permute_bytes(y, z, 0x5410),
                        permute_bytes(y, z, 0x7632), p0, p1, r0, r1,
                    )  # fmt: skip

        return add_values

    block_bytes, pair_of = dtype.block_bytes, _value_pairs(dtype)
    n = dim // 64

    @device_function
    def add_block(first, lane, odd, p0, p1, r0, r1, out, step):  # type: ignore[no-untyped-def]
        a0, a1, b0, b1 = pair_of(first, first + stride, lane >> 2, odd)
        a2, a3, b2, b3 = pair_of(first + 8 * stride, first + 9 * stride, lane >> 2, odd)
        add_step(out, step, a0, a1, a2, a3, p0, p1, r0, r1)
        add_step(out, step + 1, b0, b1, b2, b3, p0, p1, r0, r1)

    @device_function
    def add_values(values, lane, p0, p1, r0, r1, out):  # type: ignore[no-untyped-def]
        first = values + 2 * (lane & 3) * stride
        for i in range(n):
            add_block(first + 2 * block_bytes * i, lane, False, p0, p1, r0, r1, out, 4 * i)
            add_block(first + 2 * block_bytes * i + block_bytes, lane, True, p0, p1, r0, r1, out, 4 * i + 2)

    return add_values


def _value_pairs(dtype: DType) -> Any:
    """A device function (block of a cell, of the next cell, g, odd): 4 elements of both cells, scaled, a pair of cells for each.

    The elements are those of `value_element` for the block's two steps: g and g + 8 of the first, then of the second.
    """
    if dtype is Q8_0:

        @device_function
        def pairs(block, following, g, odd):  # type: ignore[no-untyped-def]
            if odd:
                x, y = shared_word(block + 2 + 4 * g), shared_word(following + 2 + 4 * g)
            else:
                x, y = _word_behind(block + 4 * g), _word_behind(following + 4 * g)
            x, y = x ^ BIAS, y ^ BIAS
            d = permute_bytes(shared_half(block), shared_half(following), 0x5410)
            a0, a1 = _scaled_pairs(permute_bytes(x, y, 0x5140), BIAS_8, d)
            b0, b1 = _scaled_pairs(permute_bytes(x, y, 0x7362), BIAS_8, d)
            return a0, a1, b0, b1

    else:

        @device_function
        def pairs(block, following, g, odd):  # type: ignore[no-untyped-def]
            x, y = shared_half(block + 2 + 2 * g), shared_half(following + 2 + 2 * g)
            both = permute_bytes(x, y, 0x5140)
            d = permute_bytes(shared_half(block), shared_half(following), 0x5410)
            a0, a1 = _scaled_pairs(both & NIBBLES, BIAS_4, d)
            b0, b1 = _scaled_pairs((both >> 4) & NIBBLES, BIAS_4, d)
            return a0, a1, b0, b1

    return pairs
