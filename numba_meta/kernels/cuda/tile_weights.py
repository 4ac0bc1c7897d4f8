"""32 weights of a row as float16 pairs in registers, for the tensor cores: what `matmul_tiles.py` puts into shared memory.

A quant becomes a half exactly (byte b under 0x64 is 1024 + b), then one multiplication by its scale, or one fused with its minimum; scales
of super-blocks are rounded to float16 first. bfloat16 is rounded to float16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from numba_meta import dtypes
from numba_meta.dtypes import DType
from numba_meta.kernels.cuda import emit
from numba_meta.kernels.cuda.emit import STREAM, Value
from numba_meta.kernels.cuda.packed import FLOAT_TYPES, QUANT_LAYOUTS, QuantLayout
from numba_meta.kernels.cuda.quant_block import QuantBlock, QuantRow


def _pair(value: float) -> Value:
    """A constant, twice."""
    return emit.i32(int(np.float16(value).view(np.uint16)) * 0x10001)


def _twice(b: Any, x: Value) -> Value:
    """A float32 as a float16, twice."""
    return emit.asm(b, emit.I32, "{.reg .b16 h; cvt.rn.f16.f32 h, $1; mov.b32 $0, {h, h};}", "=r,f", [x])


def pair_of(b: Any, low: Value, high: Value) -> Value:
    """Two float32 as float16."""
    text = "{.reg .b16 l, h; cvt.rn.f16.f32 l, $1; cvt.rn.f16.f32 h, $2; mov.b32 $0, {l, h};}"
    return emit.asm(b, emit.I32, text, "=r,f,f", [low, high])


@dataclass
class QuantTile:
    """One row of quantized weights, in blocks."""

    b: Any
    layout: QuantLayout
    row: QuantRow
    n_blocks: Value

    def load(self, block: Value) -> list[Value]:
        """The registers of a block; beyond the row those of its last one."""
        b = self.b
        last = b.sub(self.n_blocks, emit.i64(1))
        found = self.row.load(b.select(b.icmp_signed("<", block, last), block, last))
        return [*found.quants, *found.high, found.scales, *([] if found.heads is None else [found.heads])]

    def halves(self, registers: list[Value], block: Value) -> Halves:
        """The block of these registers; all zeros beyond the row."""
        layout = self.layout
        n_quants, n_high = layout.quant_bytes // 4, layout.high_bytes // 4
        quants, high, rest = registers[:n_quants], registers[n_quants : n_quants + n_high], registers[n_quants + n_high :]
        found = QuantBlock(self.b, layout, quants, high, rest[0], rest[1] if layout.has_scales else None)
        return Halves(self.b, layout, found, self.b.icmp_signed("<", block, self.n_blocks))


class Halves:
    """The 16 pairs of a block; scales are computed once."""

    def __init__(self, b: Any, layout: QuantLayout, block: QuantBlock, inside: Value) -> None:
        self.b, self.layout, self.block = b, layout, block
        self.scales = [self._kept(inside, self._scale(group)) for group in range(layout.groups)]
        self.minima = [self._kept(inside, self._minimum(group)) if layout.has_minimum else None for group in range(layout.groups)]

    def _kept(self, inside: Value, pair: Value) -> Value:
        return self.b.select(inside, pair, emit.i32(0))

    def _scale(self, group: int) -> Value:
        if self.layout.has_scales:
            return _twice(self.b, self.block.scale(group))
        return emit.permute(self.b, self.block.scales, emit.i32(0), 0x1010)

    def _minimum(self, group: int) -> Value:
        if self.layout.has_scales:
            return _twice(self.b, self.block.minimum(group))
        return emit.permute(self.b, self.block.scales, emit.i32(0), 0x3232)

    def chunk(self, j: int) -> list[Value]:
        """Elements 8j..8j+7 as 4 pairs."""
        return [pair for g in (2 * j, 2 * j + 1) for pair in self._quad(g)]

    def _quad(self, g: int) -> list[Value]:
        b, layout = self.b, self.layout
        quad, offset = self.block.quads(g), layout.offset
        if layout.bits == 8:
            quad, offset = b.xor(quad, emit.i32(0x80808080)), 128
        scale, minimum = (field[4 * g // layout.group] for field in (self.scales, self.minima))
        pairs = []
        for selector in (0x4140, 0x4342):
            raised = emit.permute(b, quad, emit.i32(0x64646464), selector)
            exact = emit.asm(b, emit.I32, "sub.rn.f16x2 $0, $1, $2;", "=r,r,r", [raised, _pair(1024 + offset)])
            if minimum is None:
                pairs.append(emit.asm(b, emit.I32, "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [exact, scale]))
            else:
                pairs.append(emit.asm(b, emit.I32, "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [exact, scale, minimum]))
        return pairs


@dataclass
class FloatTile:
    """One row of float16 or bfloat16 weights, in runs of 32; rows are whole chunks of 8, the last ones padded with zeros."""

    b: Any
    dtype: DType
    row: Value
    n_chunks: Value

    def load(self, block: Value) -> list[Value]:
        """The registers of a run; beyond the row those of its last chunk."""
        b, words = self.b, []
        last = b.sub(self.n_chunks, emit.i64(1))
        for j in range(4):
            chunk = b.add(b.mul(block, emit.i64(4)), emit.i64(j))
            chunk = b.select(b.icmp_signed("<", chunk, last), chunk, last)
            words += emit.load(b, b.add(self.row, b.mul(chunk, emit.i64(16))), 4, 0, STREAM)
        return words

    def halves(self, registers: list[Value], block: Value) -> FloatHalves:
        """The run of these registers; zeros beyond the row."""
        return FloatHalves(self.b, self.dtype, registers, self.b.mul(block, emit.i64(4)), self.n_chunks)


@dataclass
class FloatHalves:
    """The 16 pairs of a run, which begins at a chunk."""

    b: Any
    dtype: DType
    words: list[Value]
    first_chunk: Value
    n_chunks: Value

    def chunk(self, j: int) -> list[Value]:
        """Elements 8j..8j+7 as 4 pairs."""
        b = self.b
        inside = b.icmp_signed("<", b.add(self.first_chunk, emit.i64(j)), self.n_chunks)
        pairs = [self._halved(word) for word in self.words[4 * j : 4 * j + 4]]
        return [b.select(inside, pair, emit.i32(0)) for pair in pairs]

    def _halved(self, word: Value) -> Value:
        b = self.b
        if self.dtype is dtypes.F16:
            return word
        low, high = b.shl(word, emit.i32(16)), b.and_(word, emit.i32(0xFFFF0000))
        return pair_of(b, b.bitcast(low, emit.F32), b.bitcast(high, emit.F32))


def weight_row(b: Any, dtype: DType, w: Value, n_out: Value, k: Value, row: Value) -> QuantTile | FloatTile:
    """Row `row` of packed weights at w."""
    if dtype in FLOAT_TYPES:
        n_chunks = b.lshr(b.add(k, emit.i64(7)), emit.i64(3))
        return FloatTile(b, dtype, b.add(w, b.mul(row, b.mul(n_chunks, emit.i64(16)))), n_chunks)
    layout, n_blocks = QUANT_LAYOUTS[dtype], b.lshr(k, emit.i64(5))
    return QuantTile(b, layout, QuantRow.at(b, layout, w, n_out, n_blocks, row), n_blocks)
