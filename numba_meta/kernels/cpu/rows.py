"""Rows by index: looked up in a table, and stored in the cells of a cache in the cache's type."""

from __future__ import annotations

import functools

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from numba_meta.dtypes import BF16, F16, F32, Q4_0, Q8_0, DType
from numba_meta.errors import ShapeError
from numba_meta.kernels.cpu.kernel import CpuKernel, Int, Ptr, cpu_kernel
from numba_meta.kernels.cpu.simd import (
    VF,
    VI,
    load_f32,
    load_i32,
    load_i64,
    pointer_ir,
    store_u16,
    vf_abs,
    vf_load,
    vf_max,
    vf_reduce_max,
    vf_splat,
    vf_store,
    vf_zero,
)
from numba_meta.kernels.cpu.simd_math import (
    I8,
    I32,
    const_ir,
    copy_halves,
    device_function,
    f16_bits,
    lanes_ir,
    share,
    stack_buffer,
    vf_load_part,
    vf_store_bf16,
    vf_store_f16,
    vf_store_part,
)

BLOCK = 128  # columns that stay with one thread: whole quantized blocks


@cpu_kernel
def get_rows_f32(  # type: ignore[no-untyped-def]
    thread, n_threads, table: Ptr, table_stride: Int, first_row: Int, n_table_rows: Int, ids: Ptr, y: Ptr, y_stride: Int, n: Int,
    n_rows: Ptr,
):  # fmt: skip
    """y[r] = row ids[r] - first_row of a float32 table of n_table_rows; zeros where another device holds the row. ids: int32."""
    blocks = (n + BLOCK - 1) // BLOCK
    total = load_i64(n_rows) * blocks
    for item in range(share(total, thread, n_threads), share(total, thread + 1, n_threads)):
        row = item // blocks
        i = (item - row * blocks) * BLOCK
        stop = min(n, i + BLOCK)
        index = load_i32(ids + 4 * row) - first_row
        held = index >= 0 and index < n_table_rows
        source, target = table + index * table_stride, y + row * y_stride
        while i < stop:
            count = min(16, stop - i)
            value = vf_zero()
            if held:
                value = vf_load(source + 4 * i) if count == 16 else vf_load_part(source + 4 * i, count)
            if count == 16:
                vf_store(target + 4 * i, value)
            else:
                vf_store_part(target + 4 * i, value, count)
            i += 16


# ---- one vector or block in a cache's type ---------------------------------------------------------------------------------------------

_half_buffer = stack_buffer(32)


@device_function
def _store_f32(x, target, i, count):  # type: ignore[no-untyped-def]
    if count == 16:
        vf_store(target + 4 * i, vf_load(x + 4 * i))
    else:
        vf_store_part(target + 4 * i, vf_load_part(x + 4 * i, count), count)


@device_function
def _store_f16(x, target, i, count):  # type: ignore[no-untyped-def]
    if count == 16:
        vf_store_f16(target + 2 * i, vf_load(x + 4 * i))
    else:
        buffer = _half_buffer()
        vf_store_f16(buffer, vf_load_part(x + 4 * i, count))
        copy_halves(buffer, target + 2 * i, count)


@device_function
def _store_bf16(x, target, i, count):  # type: ignore[no-untyped-def]
    if count == 16:
        vf_store_bf16(target + 2 * i, vf_load(x + 4 * i))
    else:
        buffer = _half_buffer()
        vf_store_bf16(buffer, vf_load_part(x + 4 * i, count))
        copy_halves(buffer, target + 2 * i, count)


@intrinsic
def _round_half_away(typingctx, x):  # type: ignore[no-untyped-def]
    """The nearest int32, halves away from zero: |x| < 2^22."""

    def codegen(c, b, s, a):  # type: ignore[no-untyped-def]
        whole = b.fptosi(a[0], VI.llvm)
        rest = b.fsub(a[0], b.sitofp(whole, VF.llvm))
        up = b.zext(b.fcmp_ordered(">=", rest, const_ir(VF.llvm, 0.5)), VI.llvm)
        down = b.zext(b.fcmp_ordered("<=", rest, const_ir(VF.llvm, -0.5)), VI.llvm)
        return b.sub(b.add(whole, up), down)

    return VI(VF), codegen


@intrinsic
def _store_i8(typingctx, address, x):  # type: ignore[no-untyped-def]
    """The low bytes of 16 int32."""

    def codegen(c, b, s, a):  # type: ignore[no-untyped-def]
        b.store(b.trunc(a[1], lanes_ir(I8)), pointer_ir(b, a[0], lanes_ir(I8)), align=1)
        return c.get_dummy_value()

    return types.void(types.int64, VI), codegen


@device_function
def _store_q8_0(x, target, i, count):  # type: ignore[no-untyped-def]
    """A block of 32: d = max |x| / 127 as float16, then round(x / d) as int8."""
    low, high = vf_load(x + 4 * i), vf_load(x + 4 * i + 64)
    d = vf_reduce_max(vf_max(vf_abs(low), vf_abs(high))) / np.float32(127.0)
    inverse = vf_splat(np.float32(1.0) / d if d != np.float32(0.0) else np.float32(0.0))
    place = target + i // 32 * 34
    store_u16(place, f16_bits(d))
    _store_i8(place + 2, _round_half_away(low * inverse))
    _store_i8(place + 18, _round_half_away(high * inverse))


@intrinsic
def _first_lane_equal(typingctx, x, y):  # type: ignore[no-untyped-def]
    """The first lane in which x == y, 16 if none."""

    def codegen(c, b, s, a):  # type: ignore[no-untyped-def]
        mask = b.bitcast(b.fcmp_ordered("==", a[0], a[1]), ir.IntType(16))
        found = b.or_(b.zext(mask, I32), ir.Constant(I32, 1 << 16))
        return b.sext(b.cttz(found, ir.Constant(ir.IntType(1), 1)), ir.IntType(64))

    return types.int64(VF, VF), codegen


@intrinsic
def _nibbles(typingctx, x, inverse):  # type: ignore[no-untyped-def]
    """x * inverse + 8.5 without its fraction, at most 15; product and sum are both rounded, as the gguf package does."""

    def codegen(c, b, s, a):  # type: ignore[no-untyped-def]
        value = b.fptosi(b.fadd(b.fmul(a[0], a[1]), const_ir(VF.llvm, 8.5)), VI.llvm)
        top = const_ir(VI.llvm, 15)
        return b.select(b.icmp_signed(">", value, top), top, value)

    return VI(VF, VF), codegen


@device_function
def _store_q4_0(x, target, i, count):  # type: ignore[no-untyped-def]
    """A block of 32: d = (the value of largest magnitude, the first of equals) / -8 as float16, then nibbles: 0..15 low, 16..31 high."""
    low, high = vf_load(x + 4 * i), vf_load(x + 4 * i + 64)
    largest = vf_splat(vf_reduce_max(vf_max(vf_abs(low), vf_abs(high))))
    lane = _first_lane_equal(vf_abs(low), largest)
    if lane == 16:
        lane += _first_lane_equal(vf_abs(high), largest)
    d = load_f32(x + 4 * (i + min(lane, 31))) / np.float32(-8.0)
    inverse = vf_splat(np.float32(1.0) / d if d != np.float32(0.0) else np.float32(0.0))
    place = target + i // 32 * 18
    store_u16(place, f16_bits(d))
    _store_i8(place + 2, _pack_nibbles(_nibbles(low, inverse), _nibbles(high, inverse)))


@intrinsic
def _pack_nibbles(typingctx, low, high):  # type: ignore[no-untyped-def]
    return VI(VI, VI), lambda c, b, s, a: b.or_(a[0], b.shl(a[1], const_ir(VI.llvm, 4)))


_STORES = {F32: (_store_f32, 16), F16: (_store_f16, 16), BF16: (_store_bf16, 16), Q8_0: (_store_q8_0, 32), Q4_0: (_store_q4_0, 32)}


@functools.cache
def store_rows_kernel(dtype: DType) -> CpuKernel:
    """The kernel that converts float32 rows and stores them: (x, x_stride, cells, cache, cell_stride, n, n_rows).

    Row r goes to cache + cells[r] * cell_stride (cells: int32; -1: the row is skipped), n elements in `dtype` as GGUF lays them out. For
    block types n must be a multiple of 32. float16 and bfloat16 are rounded to nearest even. ShapeError for other types.
    """
    if dtype not in _STORES:
        raise ShapeError(f"no kernel stores cache rows in {dtype.name}; use one of {', '.join(t.name for t in _STORES)}")
    store, step = _STORES[dtype]

    @cpu_kernel(name=f"set_rows_{dtype.name}")
    def kernel(thread, n_threads, x: Ptr, x_stride: Int, cells: Ptr, cache: Ptr, cell_stride: Int, n: Int, n_rows: Ptr):  # type: ignore[no-untyped-def]
        blocks = (n + BLOCK - 1) // BLOCK
        total = load_i64(n_rows) * blocks
        for item in range(share(total, thread, n_threads), share(total, thread + 1, n_threads)):
            row = item // blocks
            i = (item - row * blocks) * BLOCK
            stop = min(n, i + BLOCK)
            cell = load_i32(cells + 4 * row)
            if cell >= 0:
                while i < stop:
                    store(x + row * x_stride, cache + cell * cell_stride, i, min(step, stop - i))
                    i += step

    return kernel  # type: ignore[no-any-return]
