"""More vector intrinsics: half-precision conversions, exp, tanh, erfc, selections, parts of vectors, and how threads share work.

Functions that end in `_ir` build LLVM code and serve other intrinsics; the rest are called in kernels. Polynomial coefficients are minimax
fits (Lawson iteration in float64, rounded to float32), errors measured in tests/kernels/cpu/test_simd_math.py.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from numba_meta.kernels.cpu import isa
from numba_meta.kernels.cpu.simd import (
    LANES,
    VF,
    VI,
    declare_ir,
    load_i32,
    load_u16,
    pointer_ir,
    store_i32,
    store_u16,
    vf_load,
    vf_store,
    vf_zero,
)

I8, I16, I32, I64, F16, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.HalfType(), ir.FloatType()
device_function = njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)  # a function that kernels call


def lanes_ir(element: ir.Type, n_lanes: int = LANES) -> ir.Type:
    """IR: the type of a vector of `n_lanes` elements."""
    return ir.VectorType(element, n_lanes)


def const_ir(kind: ir.Type, value: float) -> ir.Constant:
    """IR: a constant scalar, or a vector with it in all lanes. A float constant is rounded to float32 first."""
    element = kind.element if isinstance(kind, ir.VectorType) else kind
    plain = float(np.float32(value)) if isinstance(element, ir.FloatType) else value
    return ir.Constant(kind, [plain] * kind.count) if isinstance(kind, ir.VectorType) else ir.Constant(kind, plain)


def _like(kind: ir.Type, element: ir.Type) -> ir.Type:
    return ir.VectorType(element, kind.count) if isinstance(kind, ir.VectorType) else element


def call_ir(builder: ir.IRBuilder, name: str, *arguments: ir.Value) -> ir.Value:
    """IR: the LLVM intrinsic `llvm.<name>` for the arguments' common float32 type."""
    kind = arguments[0].type
    suffix = f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"
    return builder.call(declare_ir(builder, f"llvm.{name}.{suffix}", kind, [kind] * len(arguments)), arguments)


def fma_ir(builder: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    """IR: x * y + z with one rounding."""
    return call_ir(builder, "fma", x, y, z)


# ---- half precision --------------------------------------------------------------------------------------------------------------------


def _has_f16() -> bool:
    """Whether the CPU converts float16; elsewhere LLVM would call library functions that the process may not have."""
    return "f16c" in isa.target_features() or platform.machine().lower() in ("aarch64", "arm64")


def f32_from_f16_ir(b: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """IR: float16 bits (i16 scalar or vector) as float32; exact."""
    t32, tf = _like(bits.type, I32), _like(bits.type, F32)
    if _has_f16():
        return b.fpext(b.bitcast(bits, _like(bits.type, F16)), tf)
    wide = b.zext(bits, t32)
    magnitude = b.and_(wide, const_ir(t32, 0x7FFF))
    sign = b.shl(b.and_(wide, const_ir(t32, 0x8000)), const_ir(t32, 16))
    shifted = b.shl(magnitude, const_ir(t32, 13))
    normal = b.add(shifted, const_ir(t32, (127 - 15) << 23))
    special = b.add(shifted, const_ir(t32, (255 - 31) << 23))  # infinity and NaN
    subnormal = b.bitcast(b.fmul(b.sitofp(magnitude, tf), const_ir(tf, 2.0**-24)), t32)
    result = b.select(b.icmp_signed(">=", magnitude, const_ir(t32, 0x7C00)), special, normal)
    result = b.select(b.icmp_signed("<", magnitude, const_ir(t32, 0x400)), subnormal, result)
    return b.bitcast(b.or_(result, sign), tf)


def f16_from_f32_ir(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """IR: float32 as float16 bits (i16), to nearest even."""
    t16, t32, tf = _like(x.type, I16), _like(x.type, I32), x.type
    if _has_f16():
        return b.bitcast(b.fptrunc(x, _like(x.type, F16)), t16)
    bits = b.bitcast(x, t32)
    sign = b.and_(b.lshr(bits, const_ir(t32, 16)), const_ir(t32, 0x8000))
    magnitude = b.and_(bits, const_ir(t32, 0x7FFFFFFF))
    odd = b.and_(b.lshr(magnitude, const_ir(t32, 13)), const_ir(t32, 1))
    rounded = b.add(b.add(magnitude, odd), const_ir(t32, 0xFFF - ((127 - 15) << 23)))
    normal = b.lshr(rounded, const_ir(t32, 13))
    normal = b.select(b.icmp_signed(">=", magnitude, const_ir(t32, 0x477FF000)), const_ir(t32, 0x7C00), normal)  # from 65520 on
    # The unit of 0.5 in float32 is that of float16's subnormals, so the addition rounds to it.
    half = const_ir(tf, 0.5)
    subnormal = b.sub(b.bitcast(b.fadd(b.bitcast(magnitude, tf), half), t32), const_ir(t32, 0x3F000000))
    result = b.select(b.icmp_signed("<", magnitude, const_ir(t32, 0x38800000)), subnormal, normal)
    quiet = b.or_(b.and_(b.lshr(magnitude, const_ir(t32, 13)), const_ir(t32, 0x3FF)), const_ir(t32, 0x7E00))
    result = b.select(b.icmp_signed(">", magnitude, const_ir(t32, 0x7F800000)), quiet, result)
    return b.trunc(b.or_(result, sign), t16)


def f32_from_bf16_ir(b: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """IR: bfloat16 bits (i16) as float32; exact."""
    t32 = _like(bits.type, I32)
    return b.bitcast(b.shl(b.zext(bits, t32), const_ir(t32, 16)), _like(bits.type, F32))


def bf16_from_f32_ir(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """IR: float32 as bfloat16 bits (i16), to nearest even; NaN stays NaN."""
    t16, t32 = _like(x.type, I16), _like(x.type, I32)
    bits = b.bitcast(x, t32)
    odd = b.and_(b.lshr(bits, const_ir(t32, 16)), const_ir(t32, 1))
    rounded = b.lshr(b.add(b.add(bits, odd), const_ir(t32, 0x7FFF)), const_ir(t32, 16))
    quiet = b.or_(b.lshr(bits, const_ir(t32, 16)), const_ir(t32, 0x40))
    return b.trunc(b.select(b.fcmp_unordered("uno", x, x), quiet, rounded), t16)


def _half_load(convert: Callable[..., Any]) -> Any:
    def load(typingctx, address):  # type: ignore[no-untyped-def]
        return VF(types.int64), lambda c, b, s, a: convert(b, b.load(pointer_ir(b, a[0], lanes_ir(I16)), align=2))

    return intrinsic(load)


def _half_store(convert: Callable[..., Any]) -> Any:
    def store(typingctx, address, value):  # type: ignore[no-untyped-def]
        def codegen(c, b, s, a):  # type: ignore[no-untyped-def]
            b.store(convert(b, a[1]), pointer_ir(b, a[0], lanes_ir(I16)), align=2)
            return c.get_dummy_value()

        return types.void(types.int64, VF), codegen

    return intrinsic(store)


vf_load_f16, vf_load_bf16 = _half_load(f32_from_f16_ir), _half_load(f32_from_bf16_ir)
vf_store_f16, vf_store_bf16 = _half_store(f16_from_f32_ir), _half_store(bf16_from_f32_ir)


@intrinsic
def f16_bits(typingctx, x):  # type: ignore[no-untyped-def]
    """A float32 as float16 bits (uint16), to nearest even."""
    return types.uint16(types.float32), lambda c, b, s, a: f16_from_f32_ir(b, a[0])


@intrinsic
def bits_f16(typingctx, bits):  # type: ignore[no-untyped-def]
    """float16 bits (uint16) as a float32."""
    return types.float32(types.uint16), lambda c, b, s, a: f32_from_f16_ir(b, a[0])


# ---- functions -------------------------------------------------------------------------------------------------------------------------


def _horner_ir(b: ir.IRBuilder, x: ir.Value, coefficients: list[float]) -> ir.Value:
    """IR: the polynomial with these coefficients, the constant one first."""
    total = const_ir(x.type, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = fma_ir(b, total, x, const_ir(x.type, coefficient))
    return total


_EXP = [0.4999999403953552, 0.1666652113199234, 0.04166838899254799, 0.0083687175065279, 0.0013814596459269524]
_ROUND = 1.5 * 2.0**23  # added to a small float32, leaves its nearest integer in the low bits
_LN2_HIGH = float(np.float32(math.log(2.0)))


def exp_ir(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """IR: e^x = 2^n e^r with |r| <= ln(2)/2; 0 below -104, infinity from 88.73 on, NaN stays."""
    tf, ti = x.type, _like(x.type, I32)
    low, high = const_ir(tf, -104.0), const_ir(tf, 89.0)
    x = b.select(b.fcmp_ordered("<", x, low), low, x)
    x = b.select(b.fcmp_ordered(">", x, high), high, x)
    shifted = fma_ir(b, x, const_ir(tf, 1.0 / math.log(2.0)), const_ir(tf, _ROUND))
    n = b.fsub(shifted, const_ir(tf, _ROUND))
    r = fma_ir(b, n, const_ir(tf, -_LN2_HIGH), x)
    r = fma_ir(b, n, const_ir(tf, _LN2_HIGH - math.log(2.0)), r)
    p = fma_ir(b, b.fmul(r, r), _horner_ir(b, r, _EXP), r)
    p = b.fadd(p, const_ir(tf, 1.0))
    exponent = b.sub(b.bitcast(shifted, ti), const_ir(ti, int(np.float32(_ROUND).view(np.int32))))
    half = b.ashr(exponent, const_ir(ti, 1))  # in two steps: 2^n alone may be out of range
    for part in (half, b.sub(exponent, half)):
        p = b.fmul(p, b.bitcast(b.shl(b.add(part, const_ir(ti, 127)), const_ir(ti, 23)), tf))
    return p


_TANH = [-0.33333277702331543, 0.13331331312656403, -0.05373000726103783, 0.020606180652976036, -0.00566698145121336]


def tanh_ir(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """IR: tanh: a polynomial below 0.625, else 1 - 2 / (e^2|x| + 1)."""
    tf = x.type
    a, square = call_ir(b, "fabs", x), b.fmul(x, x)
    small = fma_ir(b, b.fmul(x, square), _horner_ir(b, square, _TANH), x)
    one = const_ir(tf, 1.0)
    e = exp_ir(b, b.fadd(a, a))
    large = b.fsub(one, b.fdiv(const_ir(tf, 2.0), b.fadd(e, one)))
    return b.select(b.fcmp_ordered("<", a, const_ir(tf, 0.625)), small, call_ir(b, "copysign", large, x))


_ERFCX = [
    0.5107913613319397, 0.34358033537864685, 0.13973599672317505, 0.01822100393474102, -0.010754595510661602, -0.0032386055681854486,
    0.0015406996244564652, 0.00041572473128326237, -0.00031784240854904056, -1.56735422933707e-05, 5.262178456177935e-05,
    -1.1031147550966125e-05,
]  # fmt: skip


def erfc_ir(b: ir.IRBuilder, z: ir.Value) -> ir.Value:
    """IR: erfc(z) for z >= 0 as e^(-z^2) t P(2t - 1) with t = 1 / (1 + z/2); the square's rounding is made good."""
    tf = z.type
    one = const_ir(tf, 1.0)
    t = b.fdiv(one, fma_ir(b, z, const_ir(tf, 0.5), one))
    p = _horner_ir(b, fma_ir(b, t, const_ir(tf, 2.0), const_ir(tf, -1.0)), _ERFCX)
    square = b.fmul(z, z)
    minus = b.fmul(square, const_ir(tf, -1.0))
    lost = fma_ir(b, z, z, minus)
    e = exp_ir(b, minus)
    e = fma_ir(b, b.fmul(e, const_ir(tf, -1.0)), lost, e)
    return b.fmul(b.fmul(e, t), p)


def _unary(build: Callable[[ir.IRBuilder, ir.Value], ir.Value], doc: str) -> Any:
    def unary(typingctx, x):  # type: ignore[no-untyped-def]
        return VF(VF), lambda c, b, s, a: build(b, a[0])

    unary.__doc__ = doc
    return intrinsic(unary)


vf_exp = _unary(exp_ir, "e^x, relative error below 2e-7.")
vf_tanh = _unary(tanh_ir, "tanh, relative error below 2e-7.")
vf_erfc = _unary(erfc_ir, "erfc of lanes >= 0, relative error below 1e-6.")
vf_negate = _unary(lambda b, x: b.fneg(x), "-x, sign of zero included.")


@intrinsic
def exp_f32(typingctx, x):  # type: ignore[no-untyped-def]
    """e^x of a float32, the same bits as a lane of `vf_exp`."""
    return types.float32(types.float32), lambda c, b, s, a: exp_ir(b, a[0])


@intrinsic
def vf_min(typingctx, x, y):  # type: ignore[no-untyped-def]
    """The smaller lane; a NaN in one of them gives the other."""
    return VF(VF, VF), lambda c, b, s, a: call_ir(b, "minnum", *a)


@intrinsic
def vf_select_less(typingctx, x, y, yes, no):  # type: ignore[no-untyped-def]
    """`yes` where x < y, else `no` (also where one is NaN)."""
    return VF(VF, VF, VF, VF), lambda c, b, s, a: b.select(b.fcmp_ordered("<", a[0], a[1]), a[2], a[3])


@intrinsic
def vi_select_less(typingctx, x, y, yes, no):  # type: ignore[no-untyped-def]
    """int32 lanes: `yes` where the float32 lanes x < y, else `no`."""
    return VI(VF, VF, VI, VI), lambda c, b, s, a: b.select(b.fcmp_ordered("<", a[0], a[1]), a[2], a[3])


@intrinsic
def vi_iota(typingctx):  # type: ignore[no-untyped-def]
    """0, 1, ... 15."""
    return VI(), lambda c, b, s, a: ir.Constant(VI.llvm, list(range(LANES)))


@intrinsic
def sqrt_f32(typingctx, x):  # type: ignore[no-untyped-def]
    """The square root of a float32, correctly rounded."""
    return types.float32(types.float32), lambda c, b, s, a: call_ir(b, "sqrt", a[0])


@intrinsic
def bytes_load(typingctx, address):  # type: ignore[no-untyped-def]
    """64 bytes at any address."""
    return VI(types.int64), lambda c, b, s, a: b.load(pointer_ir(b, a[0], VI.llvm), align=1)


@intrinsic
def bytes_store(typingctx, address, value):  # type: ignore[no-untyped-def]
    """64 bytes to any address."""

    def codegen(c, b, s, a):  # type: ignore[no-untyped-def]
        b.store(a[1], pointer_ir(b, a[0], VI.llvm), align=1)
        return c.get_dummy_value()

    return types.void(types.int64, VI), codegen


# ---- parts of vectors ------------------------------------------------------------------------------------------------------------------


def stack_buffer(n_bytes: int) -> Any:
    """An intrinsic that gives the address of `n_bytes` on the stack, the same in every iteration, aligned to 64."""

    def buffer(typingctx):  # type: ignore[no-untyped-def]
        def codegen(c, b, s, a):  # type: ignore[no-untyped-def]
            with b.goto_entry_block():  # once, and not filled: storing an array of bytes costs LLVM seconds
                memory = b.alloca(ir.ArrayType(I8, n_bytes))
            memory.align = 64
            return b.ptrtoint(memory, I64)

        return types.int64(), codegen

    return intrinsic(buffer)


_vector_buffer = stack_buffer(64)


@device_function
def vf_load_part(address, count):  # type: ignore[no-untyped-def]
    """`count` float32 (0 to 16), zeros behind them; reads nothing else."""
    buffer = _vector_buffer()
    vf_store(buffer, vf_zero())
    for i in range(count):
        store_i32(buffer + 4 * i, load_i32(address + 4 * i))
    return vf_load(buffer)


@device_function
def vf_store_part(address, value, count):  # type: ignore[no-untyped-def]
    """The first `count` lanes; writes nothing else."""
    buffer = _vector_buffer()
    vf_store(buffer, value)
    for i in range(count):
        store_i32(address + 4 * i, load_i32(buffer + 4 * i))


@device_function
def copy_halves(source, destination, count):  # type: ignore[no-untyped-def]
    """`count` 2-byte words."""
    for i in range(count):
        store_u16(destination + 2 * i, load_u16(source + 2 * i))


# ---- sharing work ----------------------------------------------------------------------------------------------------------------------


@device_function
def share(n_items, thread, n_threads):  # type: ignore[no-untyped-def]
    """Where a thread's contiguous run of items begins; it ends where that of `thread + 1` begins."""
    return n_items * thread // n_threads
