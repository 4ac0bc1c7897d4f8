"""What Numba-CUDA lacks: memory by address, packed integers and halves, words of other processes; inline PTX where LLVM has none.

Addresses are int64, in bytes. Global memory is read and written through address space 1, shared memory by its 32-bit address
(`shared_address`). Tensor cores: `tensor_cores.py`. `simulated.py` has what of this the simulator can do; a kernel takes its names from
`device.py`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from numba_meta.kernels.cuda.api import cgutils, intrinsic, types
from numba_meta.kernels.cuda.emit import start_next_kernel, wait_for_previous_kernel  # noqa: F401

_i8, _i16, _i32, _i64 = (ir.IntType(n) for n in (8, 16, 32, 64))
_f16, _f32, _f64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
_void = ir.VoidType()
_GLOBAL, _SHARED = 1, 3


def _asm(b: Any, result: Any, kinds: list[Any], text: str, constraints: str, arguments: Any, effects: bool = False) -> Any:
    return b.call(ir.InlineAsm(ir.FunctionType(result, kinds), text, constraints, side_effect=effects), arguments)


def _tuple(b: Any, value: Any, n: int) -> Any:
    return cgutils.pack_array(b, [b.extract_value(value, i) for i in range(n)])


def _loader(kind: Any, result: Any, convert: Any, space: int) -> Any:
    """An intrinsic that reads one value of an LLVM type and widens it."""

    def codegen(c: Any, b: Any, s: Any, a: Any) -> Any:
        value = b.load(b.inttoptr(a[0], kind.as_pointer(space)), align=kind.width // 8 if hasattr(kind, "width") else _SIZES[kind])
        return convert(b, value)

    def load(typingctx, address):  # type: ignore[no-untyped-def]
        return result(types.int64 if space == _GLOBAL else types.int32), codegen

    return intrinsic(load)


def _storer(kind: Any, given: Any, convert: Any, space: int) -> Any:
    """An intrinsic that narrows one value and writes it."""

    def codegen(c: Any, b: Any, s: Any, a: Any) -> Any:
        size = kind.width // 8 if hasattr(kind, "width") else _SIZES[kind]
        b.store(convert(b, a[1]), b.inttoptr(a[0], kind.as_pointer(space)), align=size)
        return c.get_dummy_value()

    def store(typingctx, address, value):  # type: ignore[no-untyped-def]
        return types.void(types.int64 if space == _GLOBAL else types.int32, given), codegen

    return intrinsic(store)


_SIZES = {_f16: 2, _f32: 4, _f64: 8}


def _same(b: Any, value: Any) -> Any:
    return value


def _from_bf16(b: Any, bits: Any) -> Any:
    return b.bitcast(b.shl(b.zext(bits, _i32), ir.Constant(_i32, 16)), _f32)


def _to_f16(b: Any, value: Any) -> Any:
    return _asm(b, _i16, [_f32], "cvt.rn.f16.f32 $0, $1;", "=h,f", [value])


def _to_bf16(b: Any, value: Any) -> Any:
    """Round to nearest even on the bits, NaN kept: sm_75 has no instruction for it."""
    bits = b.bitcast(value, _i32)
    odd = b.and_(b.lshr(bits, ir.Constant(_i32, 16)), ir.Constant(_i32, 1))
    rounded = b.lshr(b.add(b.add(bits, ir.Constant(_i32, 0x7FFF)), odd), ir.Constant(_i32, 16))
    quiet = b.or_(b.lshr(bits, ir.Constant(_i32, 16)), ir.Constant(_i32, 0x40))
    return b.trunc(b.select(b.fcmp_unordered("uno", value, value), quiet, rounded), _i16)


# ---- one value -------------------------------------------------------------------------------------------------------------------------

load_u8 = _loader(_i8, types.int32, lambda b, v: b.zext(v, _i32), _GLOBAL)
load_i8 = _loader(_i8, types.int32, lambda b, v: b.sext(v, _i32), _GLOBAL)
load_u16 = _loader(_i16, types.int32, lambda b, v: b.zext(v, _i32), _GLOBAL)
load_i32 = _loader(_i32, types.int32, _same, _GLOBAL)
load_i64 = _loader(_i64, types.int64, _same, _GLOBAL)
load_f32 = _loader(_f32, types.float32, _same, _GLOBAL)
load_f64 = _loader(_f64, types.float64, _same, _GLOBAL)
load_f16 = _loader(_f16, types.float32, lambda b, v: b.fpext(v, _f32), _GLOBAL)
load_bf16 = _loader(_i16, types.float32, _from_bf16, _GLOBAL)
store_u8 = _storer(_i8, types.int32, lambda b, v: b.trunc(v, _i8), _GLOBAL)
store_u16 = _storer(_i16, types.int32, lambda b, v: b.trunc(v, _i16), _GLOBAL)
store_i32 = _storer(_i32, types.int32, _same, _GLOBAL)
store_i64 = _storer(_i64, types.int64, _same, _GLOBAL)
store_f32 = _storer(_f32, types.float32, _same, _GLOBAL)
store_f16 = _storer(_i16, types.float32, _to_f16, _GLOBAL)
store_bf16 = _storer(_i16, types.float32, _to_bf16, _GLOBAL)

shared_load_u8 = _loader(_i8, types.int32, lambda b, v: b.zext(v, _i32), _SHARED)
shared_load_i32 = _loader(_i32, types.int32, _same, _SHARED)
shared_load_f32 = _loader(_f32, types.float32, _same, _SHARED)
shared_store_u8 = _storer(_i8, types.int32, lambda b, v: b.trunc(v, _i8), _SHARED)
shared_store_u16 = _storer(_i16, types.int32, lambda b, v: b.trunc(v, _i16), _SHARED)
shared_store_i32 = _storer(_i32, types.int32, _same, _SHARED)
shared_store_f32 = _storer(_f32, types.float32, _same, _SHARED)


# ---- several values at once ------------------------------------------------------------------------------------------------------------


def _vector_loader(instruction: str, n: int, float_values: bool = False) -> Any:
    letter, kind, element = ("f", types.float32, _f32) if float_values else ("r", types.int32, _i32)
    outs = ", ".join(f"${i}" for i in range(n))
    text, constraints = f"{instruction} {{{outs}}}, [${n}];", ",".join([f"={letter}"] * n + ["l"])

    def codegen(c: Any, b: Any, s: Any, a: Any) -> Any:
        # A side effect, unless the memory never changes: it must not move across barriers.
        effects = ".nc." not in instruction
        return _tuple(b, _asm(b, ir.LiteralStructType([element] * n), [_i64], text, constraints, [a[0]], effects), n)

    def load(typingctx, address):  # type: ignore[no-untyped-def]
        return types.UniTuple(kind, n)(types.int64), codegen

    return intrinsic(load)


# `_nc`: memory that never changes while steps run (weights), not kept in L1. What a kernel of this step wrote, cells of a cache included,
# `_nc` may miss where this kernel began early: `_once` reads it, and does not keep it in L1 either.
load_v4_nc = _vector_loader("ld.global.nc.L1::no_allocate.v4.b32", 4)
load_v2_nc = _vector_loader("ld.global.nc.L1::no_allocate.v2.b32", 2)
load_v4_once = _vector_loader("ld.global.L1::no_allocate.v4.b32", 4)
load_v2_once = _vector_loader("ld.global.L1::no_allocate.v2.b32", 2)
load_v4 = _vector_loader("ld.global.v4.b32", 4)
load_v2 = _vector_loader("ld.global.v2.b32", 2)
load_v4_f32 = _vector_loader("ld.global.v4.f32", 4, True)
load_v2_f32 = _vector_loader("ld.global.v2.f32", 2, True)


@intrinsic
def load_i32_nc(typingctx, address):  # type: ignore[no-untyped-def]
    """32 bits of memory that never changes, not kept in L1."""
    return types.int32(types.int64), lambda c, b, s, a: _asm(
        b, _i32, [_i64], "ld.global.nc.L1::no_allocate.b32 $0, [$1];", "=r,l", a
    )


@intrinsic
def store_v4(typingctx, address, x0, x1, x2, x3):  # type: ignore[no-untyped-def]
    """16 bytes to an address that is a multiple of 16."""

    def codegen(c, b, s, a):  # type: ignore[no-untyped-def]
        _asm(b, _void, [_i64] + [_i32] * 4, "st.global.v4.b32 [$0], {$1,$2,$3,$4};", "l,r,r,r,r,~{memory}", a, True)
        return c.get_dummy_value()

    return types.void(types.int64, *[types.int32] * 4), codegen


@intrinsic
def store_v4_f32(typingctx, address, x0, x1, x2, x3):  # type: ignore[no-untyped-def]
    """4 float32 to an address that is a multiple of 16."""

    def codegen(c, b, s, a):  # type: ignore[no-untyped-def]
        _asm(b, _void, [_i64] + [_f32] * 4, "st.global.v4.f32 [$0], {$1,$2,$3,$4};", "l,f,f,f,f,~{memory}", a, True)
        return c.get_dummy_value()

    return types.void(types.int64, *[types.float32] * 4), codegen


@intrinsic
def shared_load_v4(typingctx, address):  # type: ignore[no-untyped-def]
    """16 bytes of shared memory."""

    def codegen(c, b, s, a):  # type: ignore[no-untyped-def]
        value = _asm(
            b, ir.LiteralStructType([_i32] * 4), [_i32], "ld.shared.v4.b32 {$0,$1,$2,$3}, [$4];", "=r,=r,=r,=r,r,~{memory}", a, True
        )
        return _tuple(b, value, 4)

    return types.UniTuple(types.int32, 4)(types.int32), codegen


@intrinsic
def shared_store_v4(typingctx, address, x0, x1, x2, x3):  # type: ignore[no-untyped-def]
    """16 bytes to shared memory."""

    def codegen(c, b, s, a):  # type: ignore[no-untyped-def]
        _asm(b, _void, [_i32] * 5, "st.shared.v4.b32 [$0], {$1,$2,$3,$4};", "r,r,r,r,r,~{memory}", a, True)
        return c.get_dummy_value()

    return types.void(types.int32, *[types.int32] * 4), codegen


@intrinsic
def shared_address(typingctx, array):  # type: ignore[no-untyped-def]
    """The 32-bit address of a `cuda.shared.array`."""

    def codegen(c, b, s, a):  # type: ignore[no-untyped-def]
        data = c.make_array(s.args[0])(c, b, value=a[0]).data
        return b.ptrtoint(b.addrspacecast(data, data.type.pointee.as_pointer(_SHARED)), _i32)

    return types.int32(array), codegen


# ---- arithmetic ------------------------------------------------------------------------------------------------------------------------


def _operation(text: str, constraints: str, result: Any, *given: Any) -> Any:
    """An intrinsic of one PTX instruction without side effects."""
    llvm = {types.int32: _i32, types.float32: _f32, types.int64: _i64}
    kinds = [llvm[kind] for kind in given]
    out = llvm[result]

    def codegen(c: Any, b: Any, s: Any, a: Any) -> Any:
        return _asm(b, out, kinds, text, constraints, a)

    if len(given) == 1:

        def call1(typingctx, x):  # type: ignore[no-untyped-def]
            return result(*given), codegen

        return intrinsic(call1)
    if len(given) == 2:

        def call2(typingctx, x, y):  # type: ignore[no-untyped-def]
            return result(*given), codegen

        return intrinsic(call2)

    def call3(typingctx, x, y, z):  # type: ignore[no-untyped-def]
        return result(*given), codegen

    return intrinsic(call3)


_I, _F = types.int32, types.float32
dp4a = _operation("dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", _I, _I, _I, _I)  # c + sum of 4 products of int8
dp4a_us = _operation("dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r", _I, _I, _I, _I)  # the same, the first ones uint8
permute_bytes = _operation("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", _I, _I, _I, _I)
fma = _operation("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", _F, _F, _F, _F)
mul = _operation("mul.rn.f32 $0, $1, $2;", "=f,f,f", _F, _F, _F)  # never fused with an addition
add = _operation("add.rn.f32 $0, $1, $2;", "=f,f,f", _F, _F, _F)
maximum = _operation("max.f32 $0, $1, $2;", "=f,f,f", _F, _F, _F)
exp2 = _operation("ex2.approx.ftz.f32 $0, $1;", "=f,f", _F, _F)
reciprocal = _operation("rcp.approx.ftz.f32 $0, $1;", "=f,f", _F, _F)
pack_f16 = _operation("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", _I, _F, _F)  # the first one in the low half
round_to_int = _operation("cvt.rni.s32.f32 $0, $1;", "=r,f", _I, _F)  # to the nearest, ties to even


@intrinsic
def low_f16(typingctx, pair):  # type: ignore[no-untyped-def]
    """The float16 in the low half of 32 bits, as float32."""
    return _F(_I), lambda c, b, s, a: b.fpext(b.bitcast(b.trunc(a[0], _i16), _f16), _f32)


@intrinsic
def high_f16(typingctx, pair):  # type: ignore[no-untyped-def]
    """The float16 in the high half of 32 bits, as float32."""
    return _F(_I), lambda c, b, s, a: b.fpext(b.bitcast(b.trunc(b.lshr(a[0], ir.Constant(_i32, 16)), _i16), _f16), _f32)


@intrinsic
def low_bf16(typingctx, pair):  # type: ignore[no-untyped-def]
    """The bfloat16 in the low half of 32 bits, as float32."""
    return _F(_I), lambda c, b, s, a: b.bitcast(b.shl(a[0], ir.Constant(_i32, 16)), _f32)


@intrinsic
def high_bf16(typingctx, pair):  # type: ignore[no-untyped-def]
    """The bfloat16 in the high half of 32 bits, as float32."""
    return _F(_I), lambda c, b, s, a: b.bitcast(b.and_(a[0], ir.Constant(_i32, 0xFFFF0000)), _f32)


@intrinsic
def float_bits(typingctx, x):  # type: ignore[no-untyped-def]
    """The 32 bits of a float32."""
    return _I(_F), lambda c, b, s, a: b.bitcast(a[0], _i32)


@intrinsic
def bits_float(typingctx, x):  # type: ignore[no-untyped-def]
    """32 bits as a float32."""
    return _F(_I), lambda c, b, s, a: b.bitcast(a[0], _f32)


@intrinsic
def pack_bf16(typingctx, low, high):  # type: ignore[no-untyped-def]
    """Two float32 as bfloat16, the first one in the low half; on every capability."""

    def codegen(c, b, s, a):  # type: ignore[no-untyped-def]
        low, high = (b.zext(_to_bf16(b, x), _i32) for x in a)
        return b.or_(low, b.shl(high, ir.Constant(_i32, 16)))

    return _I(_F, _F), codegen


@intrinsic
def f16_bits(typingctx, x):  # type: ignore[no-untyped-def]
    """A float32 as the 16 bits of a float16."""
    return _I(_F), lambda c, b, s, a: b.zext(_to_f16(b, a[0]), _i32)


# ---- words that other processes and GPUs read and write ----------------------------------------------------------------------------------


@intrinsic
def load_acquire_system(typingctx, address):  # type: ignore[no-untyped-def]
    """An int64 that another GPU or the host wrote; what they wrote before it is visible to this thread afterwards."""

    def codegen(c, b, s, a):  # type: ignore[no-untyped-def]
        return _asm(b, _i64, [_i64], "ld.acquire.sys.global.b64 $0, [$1];", "=l,l,~{memory}", a, True)

    return types.int64(types.int64), codegen


@intrinsic
def store_release_system(typingctx, address, value):  # type: ignore[no-untyped-def]
    """An int64 for another GPU or the host: who reads it sees all that this thread, and its block before a barrier, wrote before."""

    def codegen(c, b, s, a):  # type: ignore[no-untyped-def]
        _asm(b, _void, [_i64, _i64], "st.release.sys.global.b64 [$0], $1;", "l,l,~{memory}", a, True)
        return c.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def nanoseconds(typingctx):  # type: ignore[no-untyped-def]
    """The GPU's clock, in steps of about a microsecond."""
    return types.int64(), lambda c, b, s, a: _asm(b, _i64, [], "mov.u64 $0, %globaltimer;", "=l,~{memory}", [], True)
