"""The inner part of the CPU's matrix products as LLVM code: one tile of 16 weight rows times a few activation rows, over all of k.

Each output has one order of operations, whatever is computed beside it (`[lane]` is the weight row, c the activation row):

    fast   per scale group: s = sum of quant * xq (int32, exact);  acc = fma(float(s) * scale, x.scale, acc), then with a minimum
           acc = fma(minimum, x.scaled_sum, acc)
    exact  per block of 32: p_j = sum over k = j mod 2 of fma(w[k], x[k], p_j), w[k] the dequantized weight;  acc = acc + (p_0 + p_1)
    float  as exact; what remains of k after whole blocks of 32 is one sum more: p = sum of fma(w[k], x[k], p);  acc = acc + p

Code is emitted by loops in Python that run at compile time: blocks are unrolled, accumulators live in registers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from numba_meta import dtypes
from numba_meta.dtypes import DType
from numba_meta.kernels.cpu.isa import Isa
from numba_meta.kernels.cpu.packed import (
    ACTIVATION_BLOCK_BYTES,
    ACTIVATION_MINUS_HALF_SUMS,
    ACTIVATION_MINUS_SUM,
    ACTIVATION_SCALE,
    ACTIVATION_SCALED_SUM,
    BLOCK,
    FLOAT_TYPES,
    QUANT_LAYOUTS,
    QuantLayout,
)
from numba_meta.kernels.cpu.simd import LANES, VF, VI, pointer_ir
from numba_meta.kernels.cpu.simd_int8 import (
    IntSum,
    bf16_to_f32_ir,
    broadcast_ir,
    constant_ir,
    fma_ir,
    half_to_f32_ir,
    load_ir,
    vector_of,
)

_i8, _i16, _i32, _i64, _f32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()


def _int(value: int) -> ir.Constant:
    return ir.Constant(_i64, value)


def _halves(b: ir.IRBuilder, address: ir.Value, offset: int, isa: Isa) -> ir.Value:
    """16 float16 as float32."""
    return half_to_f32_ir(b, load_ir(b, address, vector_of(_i16), offset, align=2), isa)


@dataclass
class Tile:
    """What the code of one tile works on: an IR builder, moving addresses, accumulators per column (all stack slots, later registers)."""

    b: ir.IRBuilder
    isa: Isa
    weights: ir.Value  # slot of i64: where the next weights are
    activations: ir.Value  # slot of i64: how many bytes of each activation row are done
    rows: list[ir.Value]  # address of each column's activation row
    sums: list[ir.Value]  # slot of 16 float32 per column

    def row(self, column: int) -> ir.Value:
        """The address of the next activations of a column."""
        return self.b.add(self.rows[column], self.b.load(self.activations))

    def advance(self, slot: ir.Value, n_bytes: int) -> None:
        """Moves an address on."""
        self.b.store(self.b.add(self.b.load(slot), _int(n_bytes)), slot)

    @contextmanager
    def loop(self, count: ir.Value) -> Iterator[None]:
        """A loop that runs `count` times."""
        with cgutils.for_range(self.b, count, intp=_i64):
            yield


# ---- quantized weights -----------------------------------------------------------------------------------------------------------------


@dataclass
class QuantBlock:
    """16 rows by 32 elements at `address`, with `d` and `m` of the super-block."""

    b: ir.IRBuilder
    layout: QuantLayout
    address: ir.Value
    d: ir.Value
    m: ir.Value | None

    def _quads(self, offset: int) -> ir.Value:
        return load_ir(self.b, self.address, VI.llvm, offset, align=4)

    def _shifted(self, v: ir.Value, left: int, mask: int) -> ir.Value:
        if left:
            shift = self.b.shl if left > 0 else self.b.lshr
            v = shift(v, constant_ir(_i32, abs(left)))
        return self.b.and_(v, constant_ir(_i32, mask))

    def quads(self, g: int) -> ir.Value:
        """The unsigned quants of elements 4g..4g+3, as bytes."""
        layout = self.layout
        if layout.bits == 8:
            return self._quads(layout.scale_bytes + 64 * g)
        low = self._shifted(self._quads(layout.scale_bytes + 64 * (g & 3)), -4 * (g >> 2), 0x0F0F0F0F)
        if layout.bits == 5:
            return self.b.or_(low, self._shifted(self._quads(layout.high_offset), 4 - g, 0x10101010))
        if layout.bits == 6:
            return self.b.or_(low, self._shifted(self._quads(layout.high_offset + 64 * (g >> 2)), 4 - 2 * (g & 3), 0x30303030))
        return low

    def scale(self, group: int) -> ir.Value:
        """float32 scales of a group."""
        if not self.layout.has_scales:
            return self.d
        widen = self.b.sext if self.layout.offset else self.b.zext
        small = load_ir(self.b, self.address, vector_of(_i8), LANES * group)
        return self.b.fmul(self.d, self.b.sitofp(widen(small, VI.llvm), VF.llvm))

    def minimum(self, group: int) -> ir.Value | None:
        """What is added to scale * quant in a group, before the offset is thought of; None where the type has none."""
        if self.m is None or not self.layout.has_scales:
            return self.m
        small = load_ir(self.b, self.address, vector_of(_i8), LANES * (BLOCK // self.layout.group + group))
        minus = self.b.sub(constant_ir(_i32, 0), self.b.zext(small, VI.llvm))
        return self.b.fmul(self.m, self.b.sitofp(minus, VF.llvm))

    def bias(self, group: int, scale: ir.Value) -> ir.Value:
        """The same with the offset in it: value = fma(quant, scale, bias), exact but for the one rounding that the format has."""
        minimum = self.minimum(group)
        return minimum if minimum is not None else self.b.fmul(scale, constant_ir(_f32, -self.layout.offset))


def _fast_block(t: Tile, block: QuantBlock) -> None:
    b, layout = t.b, block.layout
    per_group = layout.group // 4
    rows = [t.row(c) for c in range(len(t.rows))]
    for group in range(BLOCK // layout.group):
        scale, minimum = block.scale(group), block.minimum(group)
        ints = [IntSum(b, t.isa, layout.bits, layout.offset, partial(_minus_sum, b, layout, row, group)) for row in rows]
        for g in range(group * per_group, (group + 1) * per_group):
            quads = block.quads(g)
            for total, row in zip(ints, rows, strict=True):
                total.add(quads, broadcast_ir(b, row, 4 * g, _i32))
        for total, row, slot in zip(ints, rows, t.sums, strict=True):
            scaled = b.fmul(b.sitofp(total.total(), VF.llvm), scale)
            acc = fma_ir(b, scaled, broadcast_ir(b, row, ACTIVATION_SCALE, _f32), b.load(slot))
            if minimum is not None:
                acc = fma_ir(b, minimum, _scaled_sum(b, layout, row, group), acc)
            b.store(acc, slot)


def _minus_sum(b: ir.IRBuilder, layout: QuantLayout, row: ir.Value, group: int) -> ir.Value:
    """-(sum of the activation's quants) over a group."""
    place = ACTIVATION_MINUS_SUM if layout.group == BLOCK else ACTIVATION_MINUS_HALF_SUMS + 4 * group
    return broadcast_ir(b, row, place, _i32)


def _scaled_sum(b: ir.IRBuilder, layout: QuantLayout, row: ir.Value, group: int) -> ir.Value:
    """The sum of the activations of a group."""
    if layout.group == BLOCK:
        return broadcast_ir(b, row, ACTIVATION_SCALED_SUM, _f32)
    minus = broadcast_ir(b, row, ACTIVATION_MINUS_HALF_SUMS + 4 * group, _i32)
    total = b.sitofp(b.sub(constant_ir(_i32, 0), minus), VF.llvm)
    return b.fmul(total, broadcast_ir(b, row, ACTIVATION_SCALE, _f32))


def _exact_block(t: Tile, block: QuantBlock) -> None:
    layout = block.layout
    groups = []
    for group in range(BLOCK // layout.group):
        scale = block.scale(group)
        groups.append((scale, block.bias(group, scale)))

    def weight(k: int) -> ir.Value:
        scale, bias = groups[k // layout.group]
        quads = block.quads(k // 4)
        moved = block.b.lshr(quads, constant_ir(_i32, 8 * (k % 4))) if k % 4 else quads
        quant = block.b.sitofp(block.b.and_(moved, constant_ir(_i32, 255)), VF.llvm)
        return fma_ir(block.b, quant, scale, bias)

    _block_sums(t, weight)


def _block_sums(t: Tile, weight: Callable[[int], ir.Value]) -> None:
    """acc = acc + (p_0 + p_1) over 32 elements, `weight(k)` giving 16 rows of element k."""
    b = t.b
    rows = [t.row(c) for c in range(len(t.rows))]
    partials: list[list[Any]] = [[None, None] for _ in rows]
    for k in range(BLOCK):
        w = weight(k)
        for p, row in zip(partials, rows, strict=True):
            x = broadcast_ir(b, row, 4 * k, _f32)
            p[k % 2] = fma_ir(b, w, x, constant_ir(_f32, 0.0) if p[k % 2] is None else p[k % 2])
    for p, total in zip(partials, t.sums, strict=True):
        b.store(b.fadd(b.load(total), b.fadd(*p)), total)


def _quant_tile(t: Tile, layout: QuantLayout, k: ir.Value, exact: bool) -> None:
    b = t.b
    body = _exact_block if exact else _fast_block
    with t.loop(b.udiv(k, _int(BLOCK * layout.super_blocks))):
        head = b.load(t.weights)
        d = _halves(b, head, 0, t.isa)
        m = _halves(b, head, 2 * LANES, t.isa) if layout.has_minimum else None
        t.advance(t.weights, layout.head_bytes)
        with t.loop(_int(layout.super_blocks)):
            body(t, QuantBlock(b, layout, b.load(t.weights), d, m))
            t.advance(t.weights, layout.block_bytes)
            t.advance(t.activations, 4 * BLOCK if exact else ACTIVATION_BLOCK_BYTES)


# ---- float weights ---------------------------------------------------------------------------------------------------------------------


def _float_tile(t: Tile, dtype: DType, k: ir.Value) -> None:
    b, step = t.b, LANES * dtype.block_bytes

    def load(address: ir.Value, e: int) -> ir.Value:
        if dtype is dtypes.F32:
            return load_ir(b, address, VF.llvm, e * step, align=4)
        if dtype is dtypes.F16:
            return _halves(b, address, e * step, t.isa)
        return bf16_to_f32_ir(b, load_ir(b, address, vector_of(_i16), e * step, align=2))

    with t.loop(b.udiv(k, _int(BLOCK))):
        address = b.load(t.weights)
        _block_sums(t, lambda e: load(address, e))
        t.advance(t.weights, BLOCK * step)
        t.advance(t.activations, 4 * BLOCK)
    rest = [cgutils.alloca_once_value(b, constant_ir(_f32, 0.0)) for _ in t.sums]
    with t.loop(b.urem(k, _int(BLOCK))):
        w = load(b.load(t.weights), 0)
        for c, slot in enumerate(rest):
            b.store(fma_ir(b, w, broadcast_ir(b, t.row(c), 0, _f32), b.load(slot)), slot)
        t.advance(t.weights, step)
        t.advance(t.activations, 4)
    for slot, total in zip(rest, t.sums, strict=True):
        b.store(b.fadd(b.load(total), b.load(slot)), total)


# ---- the whole tile --------------------------------------------------------------------------------------------------------------------


def _store_columns(t: Tile, outputs: list[ir.Value], lanes: ir.Value) -> None:
    """Stores the sums; a last tile of fewer than 16 rows stores only `lanes` of them."""
    b = t.b
    with b.if_else(b.icmp_signed("==", lanes, _int(LANES))) as (whole, cut):
        with whole:
            for total, y in zip(t.sums, outputs, strict=True):
                b.store(b.load(total), pointer_ir(b, y, VF.llvm), align=4)
        with cut:
            for total, y in zip(t.sums, outputs, strict=True):
                spilled = cgutils.alloca_once_value(b, b.load(total))
                lane_values = b.bitcast(spilled, _f32.as_pointer())
                with cgutils.for_range(b, lanes, intp=_i64) as lane:
                    value = b.load(b.gep(lane_values, [lane.index]))
                    b.store(value, b.gep(pointer_ir(b, y, _f32), [lane.index]), align=4)


def tile_product(dtype: DType, exact: bool, columns: int, isa: Isa) -> Any:
    """The intrinsic `tile(w, k, x, x_stride, n, y, y_stride, lanes)`: rows 0..n-1 of x times one tile at `w`, to rows of y.

    1 <= n <= columns; columns from n on compute row n-1 once more and store the same bits, so that every row takes the same path.
    """

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        w, k, x, x_stride, n, y, y_stride, lanes = args
        last = b.sub(n, _int(1))

        def of_column(base: ir.Value, stride: ir.Value, c: int) -> ir.Value:
            index = b.select(b.icmp_signed("<", _int(c), last), _int(c), last)
            return b.add(base, b.mul(index, stride))

        t = Tile(
            b,
            isa,
            cgutils.alloca_once_value(b, w),
            cgutils.alloca_once_value(b, _int(0)),
            [of_column(x, x_stride, c) for c in range(columns)],
            [cgutils.alloca_once_value(b, constant_ir(_f32, 0.0)) for _ in range(columns)],
        )
        if dtype in FLOAT_TYPES:
            _float_tile(t, dtype, k)
        else:
            _quant_tile(t, QUANT_LAYOUTS[dtype], k, exact)
        _store_columns(t, [of_column(y, y_stride, c) for c in range(columns)], lanes)
        return context.get_dummy_value()

    def tile(typingctx, w, k, x, x_stride, n, y, y_stride, lanes):  # type: ignore[no-untyped-def]
        return types.void(*[types.int64] * 8), codegen

    return intrinsic(tile)
