"""Integer dot products, half-precision conversions and byte access for kernels over quantized values, per level of instructions.

The functions named `*_ir` emit LLVM code; the tiles of `matmul_tiles` are built of them. The intrinsics below serve kernels in Python.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from numba_meta.kernels.cpu.isa import Isa
from numba_meta.kernels.cpu.simd import LANES, VF, VI, _loader, declare_ir, pointer_ir, splat_ir

_i8, _i16, _i32, _i64, _half, _f32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.HalfType(), ir.FloatType()
_ROUNDER = 12582912.0  # 1.5 * 2**23: adding it rounds |x| < 2**22 to the nearest integer, ties to even


def vector_of(element: ir.Type, n: int = LANES) -> ir.VectorType:
    """IR: the type of `n` lanes of `element`."""
    return ir.VectorType(element, n)


def constant_ir(element: ir.Type, value: float, n: int = LANES) -> ir.Constant:
    """IR: `value` in all lanes."""
    return ir.Constant(ir.VectorType(element, n), [value] * n)


def load_ir(b: ir.IRBuilder, address: ir.Value, kind: ir.Type, offset: int = 0, align: int = 1) -> ir.Value:
    """IR: a value of `kind` at `address + offset` bytes."""
    place = b.add(address, ir.Constant(_i64, offset)) if offset else address
    return b.load(pointer_ir(b, place, kind), align=align)


def fma_ir(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    """IR: x * y + z with one rounding."""
    return b.call(declare_ir(b, f"llvm.fma.v{LANES}f32", VF.llvm, [VF.llvm] * 3), [x, y, z])


def half_to_f32_ir(b: ir.IRBuilder, bits: ir.Value, isa: Isa) -> ir.Value:
    """IR: float16 bits (i16, or lanes of it) as float32.

    `PORTABLE` has no such instruction, and LLVM would call a function that is not there: exponent and mantissa move to their float32
    places, which is the value times 2**-112 for subnormals too, and infinities and NaN get the exponent of all ones.
    """
    n = bits.type.count if isinstance(bits.type, ir.VectorType) else 0

    def of(element: ir.Type) -> ir.Type:
        return ir.VectorType(element, n) if n else element

    def const(element: ir.Type, value: float) -> ir.Constant:
        return constant_ir(element, value, n) if n else ir.Constant(element, value)

    if isa >= Isa.AVX2:
        return b.fpext(b.bitcast(bits, of(_half)), of(_f32))
    wide = b.zext(bits, of(_i32))
    moved = b.shl(b.and_(wide, const(_i32, 0x7FFF)), const(_i32, 13))
    scaled = b.bitcast(b.fmul(b.bitcast(moved, of(_f32)), const(_f32, 2.0**112)), of(_i32))
    special = b.icmp_unsigned(">=", moved, const(_i32, 0x7C00 << 13))
    magnitude = b.select(special, b.or_(moved, const(_i32, 0x7F800000)), scaled)
    sign = b.shl(b.and_(wide, const(_i32, 0x8000)), const(_i32, 16))
    return b.bitcast(b.or_(magnitude, sign), of(_f32))


def bf16_to_f32_ir(b: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """IR: lanes of bfloat16 bits as float32."""
    return b.bitcast(b.shl(b.zext(bits, vector_of(_i32)), constant_ir(_i32, 16)), VF.llvm)


def dot_ir(b: ir.IRBuilder, isa: Isa, acc: ir.Value, w: ir.Value, x: ir.Value, wide: bool) -> ir.Value:
    """IR: acc[lane] += sum over j < 4 of u8(w.byte[4 lane + j]) * i8(x.byte[4 lane + j]), exact on every level.

    `wide` tells that w may exceed 127 / 2: then pairs of products may not fit 16 bits. x must be within -127..127.
    """
    if isa >= Isa.AVX512_VNNI:
        return b.call(declare_ir(b, "llvm.x86.avx512.vpdpbusd.512", VI.llvm, [VI.llvm] * 3), [acc, w, x])
    if isa >= Isa.AVX2:
        return b.add(acc, _join(b, [_dot_avx2(b, *parts, wide) for parts in zip(_halves(b, w), _halves(b, x), strict=True)]))
    return b.add(acc, _dot_portable(b, w, x))


def _halves(b: ir.IRBuilder, v: ir.Value) -> list[ir.Value]:
    n = LANES // 2
    return [b.shuffle_vector(v, v, ir.Constant(vector_of(_i32, n), list(range(s, s + n)))) for s in (0, n)]


def _join(b: ir.IRBuilder, halves: list[ir.Value]) -> ir.Value:
    return b.shuffle_vector(*halves, ir.Constant(vector_of(_i32), list(range(LANES))))


def _dot_avx2(b: ir.IRBuilder, w: ir.Value, x: ir.Value, wide: bool) -> ir.Value:
    """8 lanes. Narrow: vpmaddubsw cannot saturate (2 * 63 * 127 < 2**15). Wide: even and odd bytes widened to 16 bits."""
    v8, v16, v32 = vector_of(_i8, 32), vector_of(_i16, 16), vector_of(_i32, 8)
    madd = declare_ir(b, "llvm.x86.avx2.pmadd.wd", v32, [v16] * 2)
    if not wide:
        pairs = b.call(declare_ir(b, "llvm.x86.avx2.pmadd.ub.sw", v16, [v8] * 2), [b.bitcast(w, v8), b.bitcast(x, v8)])
        return b.call(madd, [pairs, constant_ir(_i16, 1, 16)])
    w, x, eight = b.bitcast(w, v16), b.bitcast(x, v16), constant_ir(_i16, 8, 16)
    even = b.call(madd, [b.and_(w, constant_ir(_i16, 255, 16)), b.ashr(b.shl(x, eight), eight)])
    return b.add(even, b.call(madd, [b.lshr(w, eight), b.ashr(x, eight)]))


def _dot_portable(b: ir.IRBuilder, w: ir.Value, x: ir.Value) -> ir.Value:
    """Products of even and of odd bytes fit 16 bits (255 * 127 < 2**15); pairs of them are added as 32 bits."""
    v16, eight = vector_of(_i16, 2 * LANES), constant_ir(_i16, 8, 2 * LANES)
    w, x, total = b.bitcast(w, v16), b.bitcast(x, v16), None
    even = b.mul(b.and_(w, constant_ir(_i16, 255, 2 * LANES)), b.ashr(b.shl(x, eight), eight))
    odd = b.mul(b.lshr(w, eight), b.ashr(x, eight))
    for product in (b.bitcast(even, VI.llvm), b.bitcast(odd, VI.llvm)):
        sixteen = constant_ir(_i32, 16)
        pair = b.add(b.ashr(b.shl(product, sixteen), sixteen), b.ashr(product, sixteen))
        total = pair if total is None else b.add(total, pair)
    return total


# ---- intrinsics ------------------------------------------------------------------------------------------------------------------------

load_quad = intrinsic(_loader(_i32, types.uint32, 1))  # 4 bytes at any address
load_half_bits = intrinsic(_loader(_i16, types.uint16, 1))


@intrinsic
def half_f32(typingctx, bits):  # type: ignore[no-untyped-def]
    """float16 bits (uint16) as float32."""
    return types.float32(types.uint16), lambda c, b, s, a: half_to_f32_ir(b, a[0], Isa.AVX2)


@intrinsic
def half_f32_portable(typingctx, bits):  # type: ignore[no-untyped-def]
    """float16 bits (uint16) as float32, without the instruction for it."""
    return types.float32(types.uint16), lambda c, b, s, a: half_to_f32_ir(b, a[0], Isa.PORTABLE)


@intrinsic
def round_to_int(typingctx, x):  # type: ignore[no-untyped-def]
    """Lanes of float32 (|x| < 2**22) to the nearest int32, ties to even; a NaN gives some integer."""

    def codegen(c: Any, b: Any, s: Any, a: Any) -> Any:
        shifted = b.bitcast(b.fadd(a[0], constant_ir(_f32, _ROUNDER)), VI.llvm)
        return b.sub(shifted, b.bitcast(constant_ir(_f32, _ROUNDER), VI.llvm))

    return VI(VF), codegen


@intrinsic
def store_bytes(typingctx, address, v):  # type: ignore[no-untyped-def]
    """The low bytes of 16 int32 lanes."""

    def codegen(c: Any, b: Any, s: Any, a: Any) -> Any:
        kind = vector_of(_i8)
        b.store(b.trunc(a[1], kind), pointer_ir(b, a[0], kind), align=1)
        return c.get_dummy_value()

    return types.void(types.int64, VI), codegen


def broadcast_ir(b: ir.IRBuilder, address: ir.Value, offset: int, kind: ir.Type) -> ir.Value:
    """IR: the i32 or f32 at `address + offset` in all lanes (an embedded broadcast on AVX-512)."""
    return splat_ir(b, load_ir(b, address, kind, offset, align=4))
