"""SIMD in Numba: LLVM vectors of 16 lanes as values of kernels, and loads and stores at raw addresses.

16 lanes serve every CPU: one AVX-512 register, two of AVX2, four of SSE or NEON; LLVM splits them. Operators + - * work on equal vector
types and never contract to a fused multiply-add; `fma` is explicit, so that a sum has one order and one rounding everywhere.
Addresses are int64 in bytes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

LANES = 16
_i8, _i16, _i32, _i64, _f16, _f32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.HalfType(), ir.FloatType()


class VectorType(types.Type):
    """A Numba type that is one LLVM vector."""

    def __init__(self, name: str, element: ir.Type, n_lanes: int) -> None:
        self.llvm = ir.VectorType(element, n_lanes)
        super().__init__(name=name)


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, fe_type: VectorType) -> None:
        super().__init__(manager, fe_type, fe_type.llvm)


VF = VectorType("vf16", _f32, LANES)  # 16 float32
VI = VectorType("vi16", _i32, LANES)  # 16 int32


def splat_ir(builder: ir.IRBuilder, value: ir.Value, n_lanes: int = LANES) -> ir.Value:
    """IR: a vector with `value` in all lanes."""
    one = builder.insert_element(ir.Constant(ir.VectorType(value.type, n_lanes), ir.Undefined), value, ir.Constant(_i32, 0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_i32, n_lanes), [0] * n_lanes))


def pointer_ir(builder: ir.IRBuilder, address: ir.Value, element: ir.Type) -> ir.Value:
    """IR: an address as a typed pointer."""
    return builder.inttoptr(address, element.as_pointer())


def declare_ir(builder: ir.IRBuilder, name: str, result: ir.Type, arguments: list[ir.Type]) -> ir.Value:
    """IR: an external function or LLVM intrinsic of the module being built."""
    module = builder.module
    known = module.globals.get(name)
    return known if known is not None else ir.Function(module, ir.FunctionType(result, arguments), name)


def _binary(op: Any, build: dict[VectorType, str]) -> None:
    class Template(ConcreteTemplate):  # type: ignore[misc]
        cases = [signature(vector, vector, vector) for vector in build]

    infer_global(op)(Template)
    for vector, method in build.items():

        def lower(context: Any, builder: Any, sig: Any, args: Any, method: str = method) -> Any:
            return getattr(builder, method)(*args)

        lower_builtin(op, vector, vector)(lower)


_binary(operator.add, {VF: "fadd", VI: "add"})
_binary(operator.sub, {VF: "fsub", VI: "sub"})
_binary(operator.mul, {VF: "fmul", VI: "mul"})
_binary(operator.truediv, {VF: "fdiv"})
_binary(operator.and_, {VI: "and_"})
_binary(operator.or_, {VI: "or_"})


# ---- scalars at addresses --------------------------------------------------------------------------------------------------------------


def _loader(element: ir.Type, result: Any, align: int) -> Callable[..., Any]:
    def load(typingctx, address):  # type: ignore[no-untyped-def]
        return result(types.int64), lambda c, b, s, a: b.load(pointer_ir(b, a[0], element), align=align)

    return load


def _storer(element: ir.Type, source: Any, align: int) -> Callable[..., Any]:
    def store(typingctx, address, value):  # type: ignore[no-untyped-def]
        def codegen(c, b, s, a):  # type: ignore[no-untyped-def]
            b.store(a[1], pointer_ir(b, a[0], element), align=align)
            return c.get_dummy_value()

        return types.void(types.int64, source), codegen

    return store


load_i64 = intrinsic(_loader(_i64, types.int64, 8))
load_i32 = intrinsic(_loader(_i32, types.int32, 4))
load_i8 = intrinsic(_loader(_i8, types.int8, 1))
load_u8 = intrinsic(_loader(_i8, types.uint8, 1))
load_u16 = intrinsic(_loader(_i16, types.uint16, 2))
load_f32 = intrinsic(_loader(_f32, types.float32, 4))
store_i64 = intrinsic(_storer(_i64, types.int64, 8))
store_i32 = intrinsic(_storer(_i32, types.int32, 4))
store_i8 = intrinsic(_storer(_i8, types.int8, 1))
store_u8 = intrinsic(_storer(_i8, types.uint8, 1))
store_u16 = intrinsic(_storer(_i16, types.uint16, 2))
store_f32 = intrinsic(_storer(_f32, types.float32, 4))

# ---- vectors at addresses --------------------------------------------------------------------------------------------------------------

vf_load = intrinsic(_loader(VF.llvm, VF, 4))
vf_store = intrinsic(_storer(VF.llvm, VF, 4))
vi_load = intrinsic(_loader(VI.llvm, VI, 4))
vi_store = intrinsic(_storer(VI.llvm, VI, 4))


@intrinsic
def vf_splat(typingctx, value):  # type: ignore[no-untyped-def]
    """One float32 in all lanes."""
    return VF(types.float32), lambda c, b, s, a: splat_ir(b, a[0])


@intrinsic
def vi_splat(typingctx, value):  # type: ignore[no-untyped-def]
    """One int32 in all lanes."""
    return VI(types.int32), lambda c, b, s, a: splat_ir(b, a[0])


@intrinsic
def vf_broadcast(typingctx, address):  # type: ignore[no-untyped-def]
    """The float32 at an address in all lanes."""
    return VF(types.int64), lambda c, b, s, a: splat_ir(b, b.load(pointer_ir(b, a[0], _f32), align=4))


@intrinsic
def vf_zero(typingctx):  # type: ignore[no-untyped-def]
    return VF(), lambda c, b, s, a: ir.Constant(VF.llvm, [0.0] * LANES)


@intrinsic
def vi_zero(typingctx):  # type: ignore[no-untyped-def]
    return VI(), lambda c, b, s, a: ir.Constant(VI.llvm, [0] * LANES)


@intrinsic
def fma(typingctx, x, y, z):  # type: ignore[no-untyped-def]
    """x * y + z with one rounding, lane by lane or for float32 scalars."""
    kind = VF if x == VF else types.float32

    def codegen(c, b, s, a):  # type: ignore[no-untyped-def]
        name, ll = ("llvm.fma.v16f32", VF.llvm) if kind == VF else ("llvm.fma.f32", _f32)
        return b.call(declare_ir(b, name, ll, [ll] * 3), a)

    return kind(kind, kind, kind), codegen


@intrinsic
def vf_max(typingctx, x, y):  # type: ignore[no-untyped-def]
    """The larger lane; a NaN in one of them gives the other (IEEE maxNum)."""
    return VF(VF, VF), lambda c, b, s, a: b.call(declare_ir(b, "llvm.maxnum.v16f32", VF.llvm, [VF.llvm] * 2), a)


@intrinsic
def vf_abs(typingctx, x):  # type: ignore[no-untyped-def]
    return VF(VF), lambda c, b, s, a: b.call(declare_ir(b, "llvm.fabs.v16f32", VF.llvm, [VF.llvm]), a)


@intrinsic
def vf_from_vi(typingctx, x):  # type: ignore[no-untyped-def]
    """int32 lanes as float32."""
    return VF(VI), lambda c, b, s, a: b.sitofp(a[0], VF.llvm)


def _halves(builder: ir.IRBuilder, vector: ir.Value, combine: Callable[[Any, Any], Any]) -> ir.Value:
    """IR: lanes combined in halves (8, 4, 2, 1): one fixed order for every CPU."""
    n = LANES
    while n > 1:
        n //= 2
        mask = [ir.Constant(ir.VectorType(_i32, n), list(range(start, start + n))) for start in (0, n)]
        low, high = (builder.shuffle_vector(vector, vector, m) for m in mask)
        vector = combine(low, high)
    return builder.extract_element(vector, ir.Constant(_i32, 0))


@intrinsic
def vf_sum(typingctx, x):  # type: ignore[no-untyped-def]
    """The sum of the lanes, added in halves."""
    return types.float32(VF), lambda c, b, s, a: _halves(b, a[0], b.fadd)


@intrinsic
def vf_reduce_max(typingctx, x):  # type: ignore[no-untyped-def]
    """The largest lane."""

    def codegen(c, b, s, a):  # type: ignore[no-untyped-def]
        def larger(low, high):  # type: ignore[no-untyped-def]
            name = f"llvm.maxnum.v{low.type.count}f32"
            return b.call(declare_ir(b, name, low.type, [low.type] * 2), [low, high])

        return _halves(b, a[0], larger)

    return types.float32(VF), codegen


@intrinsic
def vi_sum(typingctx, x):  # type: ignore[no-untyped-def]
    """The sum of the lanes (int32)."""
    return types.int32(VI), lambda c, b, s, a: _halves(b, a[0], b.add)


# ---- bits ------------------------------------------------------------------------------------------------------------------------------


@intrinsic
def f32_bits(typingctx, x):  # type: ignore[no-untyped-def]
    """The bits of a float32 as int32."""
    return types.int32(types.float32), lambda c, b, s, a: b.bitcast(a[0], _i32)


@intrinsic
def bits_f32(typingctx, x):  # type: ignore[no-untyped-def]
    """int32 bits as a float32."""
    return types.float32(types.int32), lambda c, b, s, a: b.bitcast(a[0], _f32)
