"""The inner part of the matrix-vector products as LLVM code: some rows of weights times some rows of activations, by one warp or several.

A row of weights is cut into units: a block of 32 elements of a quantized type, 16 bytes of a float type. Spans of 128 units go to the
warps of a row in turn; in a span lane l has units l, 32 + l, 64 + l, 96 + l. Each lane keeps one sum for each output:

    fast   per scale group: s = sum of quant * xq (int32, exact);  acc = fma(float(s) * scale, x.scale, acc), then with a minimum
           acc = fma(minimum, x.scale * float(sum of xq), acc)
    exact  p_j = sum over k = j mod 2 of fma(w[k], x[k], p_j), w[k] the dequantized weight;  acc = acc + (p_0 + p_1)
    float  acc = fma(w[k], x[k], acc) for the unit's elements in turn

then lanes 16, 8, 4, 2, 1 apart add their sums, and warps in turn. So an output's bits depend on its own row, activations and k alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numba_meta import dtypes
from numba_meta.dtypes import DType
from numba_meta.kernels.cuda import emit
from numba_meta.kernels.cuda.api import intrinsic, types
from numba_meta.kernels.cuda.emit import STREAM, Value
from numba_meta.kernels.cuda.kernel import EARLY
from numba_meta.kernels.cuda.packed import FLOAT_TYPES, QUANT_LAYOUTS, QuantLayout
from numba_meta.kernels.cuda.quant_block import QuantBlock, QuantRow

SPAN = 128  # units of a span
_LANES, _IN_FLIGHT = 32, SPAN // 32


def unit_elements(dtype: DType) -> int:
    """Elements of k in a unit."""
    return 16 // dtype.block_bytes if dtype in FLOAT_TYPES else 32


@dataclass
class FastUnits:
    """Quantized weights times quantized activations (`q8`)."""

    b: Any
    layout: QuantLayout
    rows: list[QuantRow]
    x: list[Value]  # address of each row of activations
    k: Value

    def load(self, unit: Value, ahead: int) -> list[QuantBlock]:
        return [row.load(unit, ahead) for row in self.rows]

    def columns(self, unit: Value, ahead: int) -> list[Callable[[], Any]]:
        b = self.b

        def read(x: Value) -> tuple[list[Value], Value, Value]:
            first = b.add(x, b.mul(unit, emit.i64(16)))
            quants = emit.load(b, first, 4, 16 * ahead) + emit.load(b, b.add(first, b.lshr(self.k, emit.i64(1))), 4, 16 * ahead)
            scale, sums = emit.load(b, b.add(b.add(x, self.k), b.mul(unit, emit.i64(8))), 2, 8 * ahead)
            return quants, b.bitcast(scale, emit.F32), sums

        return [lambda x=x: read(x) for x in self.x]  # type: ignore[misc]

    def accumulate(self, block: QuantBlock, column: tuple[list[Value], Value, Value], acc: Value) -> Value:
        b, layout = self.b, self.layout
        quants, x_scale, sums = column
        per_group = layout.group // 4
        for group in range(layout.groups):
            x_sum = _group_sum(b, layout, sums, group) if layout.offset or layout.has_minimum else None
            total = b.mul(x_sum, emit.i32(-layout.offset)) if layout.offset else emit.i32(0)
            for g in range(group * per_group, (group + 1) * per_group):
                total = emit.dp4a(b, block.quads(g), quants[g], total)
            acc = emit.fma(b, emit.mul(b, emit.float_of(b, total), block.scale(group)), x_scale, acc)
            minimum = block.minimum(group)
            if minimum is not None:
                acc = emit.fma(b, minimum, emit.mul(b, x_scale, emit.float_of(b, x_sum)), acc)
        return acc


def _group_sum(b: Any, layout: QuantLayout, sums: Value, group: int) -> Value:
    """The sum of the activation's quants over a group, from the pair of int16 (all 32, the first 16)."""
    whole = b.sext(b.trunc(sums, emit.I16), emit.I32)
    if layout.groups == 1:
        return whole
    first = b.ashr(sums, emit.i32(16))
    return first if group == 0 else b.sub(whole, first)


@dataclass
class ExactUnits:
    """Dequantized weights times float32 activations, blocks of 32."""

    b: Any
    layout: QuantLayout
    rows: list[QuantRow]
    x: list[Value]

    def load(self, unit: Value, ahead: int) -> list[QuantBlock]:
        return [row.load(unit, ahead) for row in self.rows]

    def columns(self, unit: Value, ahead: int) -> list[Callable[[], Any]]:
        b = self.b

        def read(x: Value) -> list[Value]:
            place = b.add(x, b.mul(unit, emit.i64(128)))
            words = [word for j in range(8) for word in emit.load(b, place, 4, 128 * ahead + 16 * j)]
            return [b.bitcast(word, emit.F32) for word in words]

        return [lambda x=x: read(x) for x in self.x]  # type: ignore[misc]

    def accumulate(self, block: QuantBlock, column: list[Value], acc: Value) -> Value:
        b = self.b
        sums = [emit.f32(0.0), emit.f32(0.0)]
        for group in range(self.layout.groups):
            scale = block.scale(group)
            bias = block.bias(group, scale)
            for e in range(group * self.layout.group, (group + 1) * self.layout.group):
                sums[e % 2] = emit.fma(b, block.value(e, scale, bias), column[e], sums[e % 2])
        return emit.add(b, acc, emit.add(b, sums[0], sums[1]))


@dataclass
class FloatUnits:
    """Float weights times float32 activations. `guarded`: rows of activations at any multiple of 4 bytes, of any length."""

    b: Any
    dtype: DType
    rows: list[Value]  # address of each row of weights
    x: list[Value]
    k: Value
    guarded: bool

    def load(self, unit: Value, ahead: int) -> list[list[Value]]:
        offset = self.b.mul(unit, emit.i64(16))
        return [self._floats(emit.load(self.b, self.b.add(row, offset), 4, 16 * ahead, STREAM)) for row in self.rows]

    def _floats(self, words: list[Value]) -> list[Value]:
        b = self.b
        if self.dtype is dtypes.F32:
            return [b.bitcast(word, emit.F32) for word in words]
        if self.dtype is dtypes.F16:
            return [half(b, word) for word in words for half in (emit.low_half, emit.high_half)]
        pairs = [(b.shl(word, emit.i32(16)), b.and_(word, emit.i32(0xFFFF0000))) for word in words]
        return [b.bitcast(word, emit.F32) for pair in pairs for word in pair]

    def columns(self, unit: Value, ahead: int) -> list[Callable[[], Any]]:
        b, n = self.b, unit_elements(self.dtype)

        def read(x: Value) -> list[Value]:
            place = b.add(x, b.mul(unit, emit.i64(4 * n)))
            words = [word for j in range(n // 4) for word in emit.load(b, place, 4, 4 * n * ahead + 16 * j)]
            return [b.bitcast(word, emit.F32) for word in words]

        def read_guarded(x: Value) -> list[Value]:
            values = []
            for j in range(n):
                element = b.add(b.mul(unit, emit.i64(n)), emit.i64(j))
                inside = b.icmp_signed("<", element, self.k)
                place = b.add(x, b.mul(b.select(inside, element, emit.i64(0)), emit.i64(4)))
                value = b.bitcast(emit.load(b, place, 1)[0], emit.F32)
                values.append(b.select(inside, value, emit.f32(0.0)))
            return values

        return [lambda x=x: (read_guarded if self.guarded else read)(x) for x in self.x]  # type: ignore[misc]

    def accumulate(self, weights: list[Value], column: list[Value], acc: Value) -> Value:
        for w, x in zip(weights, column, strict=True):
            acc = emit.fma(self.b, w, x, acc)
        return acc


@dataclass
class Walk:
    """One warp's way over the units of a row: `sums[row][column]` are variables, `base` the variable of the first unit of the next step."""

    b: Any
    units: Any
    n_units: Value
    lane: Value
    jump: Value  # units from the end of a span to this warp's next span
    base: Value
    sums: list[list[Value]]

    def step(self, count: int, clamped: bool) -> None:
        """`count` units of each lane from `base` on; clamped: lanes beyond the row read its last unit and leave it out."""
        b = self.b
        first = b.add(b.load(self.base), self.lane)
        places = []
        for u in range(count):
            unit, ahead, inside = first, 32 * u, None
            if clamped:
                unit, ahead = b.add(first, emit.i64(32 * u)), 0
                inside = b.icmp_signed("<", unit, self.n_units)
                unit = b.select(inside, unit, b.sub(self.n_units, emit.i64(1)))
            places.append((unit, ahead, inside))
        weights = [self.units.load(unit, ahead) for unit, ahead, _ in places]
        emit.wait_for_previous(b)  # weights do not change; activations come from there
        in_turn = emit.compiling_for() < EARLY  # else more loads on their way are worth more registers
        for u, (rows, (unit, ahead, inside)) in enumerate(zip(weights, places, strict=True)):
            for c, read in enumerate(self.units.columns(unit, ahead)):
                if c or (u and in_turn):
                    emit.keep_order(b)
                column = read()
                for r, row in enumerate(rows):
                    before = b.load(self.sums[r][c])
                    after = self.units.accumulate(row, column, before)
                    b.store(after if inside is None else b.select(inside, after, before), self.sums[r][c])

    def several_in_flight(self) -> None:
        """All units, the loads of a span at once."""
        b = self.b
        step = b.add(self.jump, emit.i64(SPAN))

        def advance() -> None:
            b.store(b.add(b.load(self.base), step), self.base)

        def whole_span() -> Value:
            return b.icmp_signed("<=", b.add(b.load(self.base), emit.i64(SPAN)), self.n_units)

        with emit.loop_while(b, whole_span):
            self.step(_IN_FLIGHT, False)
            advance()
        rest = b.sub(self.n_units, b.load(self.base))
        with b.if_then(b.icmp_signed(">", rest, emit.i64(0))):
            with b.if_else(b.icmp_signed("<=", rest, emit.i64(_LANES))) as (one, several):
                with one:
                    self.step(1, True)
                with several:
                    self.step(_IN_FLIGHT, True)

    def one_by_one(self) -> None:
        """All units, the loads of one (of each row) at once."""
        b = self.b
        with emit.loop_while(b, lambda: b.icmp_signed("<", b.load(self.base), self.n_units)):
            self.step(1, True)
            base = b.add(b.load(self.base), emit.i64(_LANES))
            at_end = b.icmp_signed("==", b.and_(base, emit.i64(SPAN - 1)), emit.i64(0))
            b.store(b.select(at_end, b.add(base, self.jump), base), self.base)


def rows_product(dtype: DType, exact: bool, n_rows: int, n_columns: int) -> Any:
    """The intrinsic `product(w, n_out, k, row, x, x_stride, column, rows, lane, part, n_parts)` -> float32.

    Weight rows `row..` (`n_rows` of them, those from n_out on are computed as the last one) times activation rows `column..` (`n_columns`,
    those from `rows` on as the last one), by warp `part` of `n_parts`: lane r * n_columns + c gets this warp's sum for row r and column c.
    """

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        w, n_out, k, row, x, x_stride, column, rows, lane, part, n_parts = args

        def clamped(first: Value, i: int, count: Value) -> Value:
            index, last = b.add(first, emit.i64(i)), b.sub(count, emit.i64(1))
            return b.select(b.icmp_signed("<", index, last), index, last)

        emit.start_next(b)
        weight_rows = [clamped(row, r, n_out) for r in range(n_rows)]
        x_rows = [b.add(x, b.mul(column if n_columns == 1 else clamped(column, c, rows), x_stride)) for c in range(n_columns)]
        elements = emit.i64(unit_elements(dtype))
        n_units = b.udiv(b.add(k, b.sub(elements, emit.i64(1))), elements)
        base = emit.slot(b, b.mul(part, emit.i64(SPAN)))
        sums = [[emit.slot(b, emit.f32(0.0)) for _ in range(n_columns)] for _ in range(n_rows)]
        jump = b.mul(b.sub(n_parts, emit.i64(1)), emit.i64(SPAN))

        def walk(units: Any) -> Walk:
            return Walk(b, units, n_units, lane, jump, base, sums)

        def go(units: Any) -> None:
            if n_columns == 1 and not isinstance(units, ExactUnits):  # those have 8 loads of activations each
                walk(units).several_in_flight()
            else:
                walk(units).one_by_one()

        if dtype in FLOAT_TYPES:
            row_bytes = b.mul(n_units, emit.i64(16))
            places = [b.add(w, b.mul(r, row_bytes)) for r in weight_rows]
            odd = b.or_(b.and_(b.or_(x, x_stride), emit.i64(15)), b.urem(k, elements))
            with b.if_else(b.icmp_signed("==", odd, emit.i64(0))) as (aligned, other):
                with aligned:
                    go(FloatUnits(b, dtype, places, x_rows, k, False))
                with other:
                    walk(FloatUnits(b, dtype, places, x_rows, k, True)).one_by_one()
        else:
            layout = QUANT_LAYOUTS[dtype]
            quant_rows = [QuantRow.at(b, layout, w, n_out, n_units, r) for r in weight_rows]
            go(ExactUnits(b, layout, quant_rows, x_rows) if exact else FastUnits(b, layout, quant_rows, x_rows, k))
        emit.wait_for_previous(b)  # also where there was nothing to add: results may lie where the kernel before reads
        own = emit.f32(0.0)
        for i, place in enumerate(place for row_sums in sums for place in row_sums):
            total = emit.sum_of_warp(b, b.load(place))
            own = b.select(b.icmp_signed("==", lane, emit.i64(i)), total, own)
        return own

    signature = types.float32(*[types.int64] * 11)

    def product(typingctx, w, n_out, k, row, x, x_stride, column, rows, lane, part, n_parts):  # type: ignore[no-untyped-def]
        return signature, codegen

    return intrinsic(product)
