"""Integer dot products, half-precision conversions and byte access for kernels over quantized values, per level of instructions.

The functions named `*_ir` emit LLVM code; the tiles of `matmul_tiles` are built of them. The intrinsics below serve kernels in Python.
"""

from __future__ import annotations

from collections.abc import Callable
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


class IntSum:
    """IR: a growing sum, exact on every level, of (w.byte[4 lane + j] - offset) * x.byte[4 lane + j] over j < 4 in each int32 lane.

    The bytes of w are unsigned and below 2**bits, those of x signed and within -127..127; `offset` is 0 or 2**(bits - 1).
    `minus_sum()` gives -(sum of all bytes of x that will be added), the same in each lane: the offset is taken off at the start.
    """

    def __init__(self, b: ir.IRBuilder, isa: Isa, bits: int, offset: int, minus_sum: Callable[[], ir.Value]) -> None:
        self.b, self.isa, self.bits = b, isa, bits
        self._words: list[ir.Value] = []  # AVX2: two halves of 16-bit sums
        self._room = self._capacity = max(1, 32767 // (2 * 127 * (2**bits - 1)))  # how many sums of pairs 16 bits hold
        self._signed = isa == Isa.AVX2 and bits == 8
        if offset and not self._signed:
            self._sum = b.shl(minus_sum(), constant_ir(_i32, offset.bit_length() - 1))
        else:
            self._sum = constant_ir(_i32, 0)

    def add(self, w: ir.Value, x: ir.Value) -> None:
        """Adds 4 products per lane."""
        b = self.b
        if self.isa >= Isa.AVX512_VNNI:
            dot = declare_ir(b, "llvm.x86.avx512.vpdpbusd.512", VI.llvm, [VI.llvm] * 3)
            self._sum = b.call(dot, [self._sum, w, x])
        elif self.isa >= Isa.AVX2:
            self._add_words(w, x)
        else:
            self._sum = b.add(self._sum, _dot_portable(b, w, x))

    def total(self) -> ir.Value:
        """The sum, 16 int32."""
        self._flush()
        return self._sum

    def _add_words(self, w: ir.Value, x: ir.Value) -> None:
        """vpmaddubsw makes 16-bit sums of pairs. With 8 bits the offset comes off first and the sign of w moves to x: |w| <= 128 fits."""
        b, v8, v16 = self.b, vector_of(_i8, 32), vector_of(_i16, 16)
        pairs = declare_ir(b, "llvm.x86.avx2.pmadd.ub.sw", v16, [v8] * 2)
        if self._signed:
            w = b.xor(w, constant_ir(_i32, -0x7F7F7F80))
        words = []
        for w_half, x_half in zip(_halves(b, w), _halves(b, x), strict=True):
            w_bytes, x_bytes = b.bitcast(w_half, v8), b.bitcast(x_half, v8)
            if self._signed:
                x_bytes = b.call(declare_ir(b, "llvm.x86.avx2.psign.b", v8, [v8] * 2), [x_bytes, w_bytes])
                negative = b.icmp_signed("<", w_bytes, constant_ir(_i8, 0, 32))
                w_bytes = b.select(negative, b.sub(constant_ir(_i8, 0, 32), w_bytes), w_bytes)
            words.append(b.call(pairs, [w_bytes, x_bytes]))
        if self._words and self._room == 0:
            self._flush()
        self._words = [b.add(old, new) for old, new in zip(self._words, words, strict=True)] if self._words else words
        self._room -= 1

    def _flush(self) -> None:
        """Widens the 16-bit sums and adds them."""
        if self._words:
            b = self.b
            widen = declare_ir(b, "llvm.x86.avx2.pmadd.wd", vector_of(_i32, 8), [vector_of(_i16, 16)] * 2)
            self._sum = b.add(self._sum, _join(b, [b.call(widen, [half, constant_ir(_i16, 1, 16)]) for half in self._words]))
            self._words, self._room = [], self._capacity


def _halves(b: ir.IRBuilder, v: ir.Value) -> list[ir.Value]:
    n = LANES // 2
    return [b.shuffle_vector(v, v, ir.Constant(vector_of(_i32, n), list(range(s, s + n)))) for s in (0, n)]


def _join(b: ir.IRBuilder, halves: list[ir.Value]) -> ir.Value:
    return b.shuffle_vector(*halves, ir.Constant(vector_of(_i32), list(range(LANES))))


def _dot_portable(b: ir.IRBuilder, w: ir.Value, x: ir.Value) -> ir.Value:
    """Products of even and of odd bytes fit 16 bits (255 * 127 < 2**15); pairs of them are added as 32 bits."""
    v16, eight, sixteen = vector_of(_i16, 2 * LANES), constant_ir(_i16, 8, 2 * LANES), constant_ir(_i32, 16)
    w, x = b.bitcast(w, v16), b.bitcast(x, v16)
    even = b.mul(b.and_(w, constant_ir(_i16, 255, 2 * LANES)), b.ashr(b.shl(x, eight), eight))
    odd = b.mul(b.lshr(w, eight), b.ashr(x, eight))
    pairs = [b.add(b.ashr(b.shl(v, sixteen), sixteen), b.ashr(v, sixteen)) for v in (b.bitcast(even, VI.llvm), b.bitcast(odd, VI.llvm))]
    return b.add(*pairs)


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
