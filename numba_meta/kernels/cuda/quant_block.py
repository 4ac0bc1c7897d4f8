"""One block of 32 packed weights of a row in registers, as the GPU's matrix products read it (layouts: `packed.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numba_meta.kernels.cuda import emit
from numba_meta.kernels.cuda.emit import KEEP, STREAM, Value
from numba_meta.kernels.cuda.packed import QuantLayout

_LOW4 = 0x0F0F0F0F


@dataclass
class QuantRow:
    """One row of packed weights: the addresses (int64) of its part of each plane, and how many bytes its half of 8-bit quants has."""

    b: Any
    layout: QuantLayout
    quants: Value
    second_half: Value
    high: Value
    scales: Value
    heads: Value

    @classmethod
    def at(cls, b: Any, layout: QuantLayout, w: Value, n_out: Value, n_blocks: Value, row: Value) -> QuantRow:
        """Row `row` of weights at `w`; the places of the planes are those of `packed.planes`."""

        def rounded(x: Value) -> Value:
            return b.and_(b.add(x, emit.i64(15)), emit.i64(-16))

        def times(x: Value, n: int) -> Value:
            return b.mul(x, emit.i64(n))

        all_blocks, first = b.mul(n_out, n_blocks), b.mul(row, n_blocks)
        high = times(all_blocks, layout.quant_bytes)
        scales = rounded(b.add(high, times(all_blocks, layout.high_bytes)))
        heads = rounded(b.add(scales, times(all_blocks, layout.scale_bytes)))
        quants = b.add(w, times(first, layout.quant_bytes))
        return cls(
            b,
            layout,
            quants,
            b.add(quants, times(n_blocks, 16)),
            b.add(w, b.add(high, times(first, layout.high_bytes))),
            b.add(w, b.add(scales, times(first, layout.scale_bytes))),
            b.add(w, b.add(heads, times(b.udiv(first, emit.i64(layout.super_blocks)), layout.head_bytes))),
        )

    def load(self, block: Value, ahead: int = 0) -> QuantBlock:
        """The block `block + ahead` (`ahead`: whole super-blocks, so that all addresses are one with different offsets)."""
        b, layout = self.b, self.layout

        def at(base: Value, n_bytes: int) -> Value:
            return b.add(base, b.mul(block, emit.i64(n_bytes)))

        quants = emit.load(b, at(self.quants, 16), 4, 16 * ahead, STREAM)
        if layout.bits == 8:
            quants += emit.load(b, at(self.second_half, 16), 4, 16 * ahead, STREAM)
        high = []
        if layout.high_bytes:
            high = emit.load(b, at(self.high, layout.high_bytes), layout.high_bytes // 4, layout.high_bytes * ahead, STREAM)
        n_bytes = layout.scale_bytes
        scales, heads = at(self.scales, n_bytes), None
        if n_bytes == 4:
            (small,) = emit.load(b, scales, 1, 4 * ahead, KEEP)
        else:
            small = emit.load_small(b, scales, "u16" if n_bytes == 2 else "u8", n_bytes * ahead)
        if layout.has_scales:
            address = b.add(self.heads, b.mul(b.lshr(block, emit.i64(3)), emit.i64(layout.head_bytes)))
            offset = ahead // layout.super_blocks * layout.head_bytes
            heads = emit.load_small(b, address, "u16", offset) if layout.head_bytes == 2 else emit.load(b, address, 1, offset, KEEP)[0]
        return QuantBlock(b, layout, quants, high, small, heads)


@dataclass
class QuantBlock:
    """The registers of a block (32 bits each)."""

    b: Any
    layout: QuantLayout
    quants: list[Value]
    high: list[Value]
    scales: Value
    heads: Value | None

    def quads(self, g: int) -> Value:
        """The stored quants of elements 4g..4g+3 as bytes: unsigned, signed where there are 8 bits."""
        b, layout = self.b, self.layout
        if layout.bits == 8:
            return self.quants[g]
        low = emit.bits(b, self.quants[g & 3], 4 * (g >> 2), _LOW4)
        if layout.bits == 5:
            return b.or_(low, emit.bits(b, self.high[0], g - 4, 0x10101010))
        if layout.bits == 6:
            return b.or_(low, emit.bits(b, self.high[g >> 2], 2 * (g & 3) - 4, 0x30303030))
        return low

    def scale(self, group: int) -> Value:
        """The float32 scale of a group."""
        d = emit.low_half(self.b, self.heads if self.layout.has_scales else self.scales)
        if not self.layout.has_scales:
            return d
        return emit.mul(self.b, d, emit.byte_float(self.b, self.scales, group, self.layout.has_signed_scales))

    def minimum(self, group: int) -> Value | None:
        """What is added to scale * quant in a group; None where the type has none."""
        b, layout = self.b, self.layout
        if not layout.has_minimum:
            return None
        if not layout.has_scales:
            return emit.high_half(b, self.scales)
        small = emit.byte_float(b, self.scales, layout.groups + group, False)
        return emit.mul(b, emit.high_half(b, self.heads), b.fsub(emit.f32(-0.0), small))

    def value(self, e: int, scale: Value, bias: Value) -> Value:
        """The weight of element e: fma(quant, scale, bias), the one rounding that the format has."""
        b = self.b
        quad = self.quads(e // 4)
        return emit.fma(b, emit.byte_float(b, quad, e % 4, self.layout.bits == 8), scale, bias)

    def bias(self, group: int, scale: Value) -> Value:
        """The minimum, or -(offset * scale), exact in float32."""
        minimum = self.minimum(group)
        return minimum if minimum is not None else emit.mul(self.b, scale, emit.f32(-float(self.layout.offset)))
