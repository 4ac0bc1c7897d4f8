"""LLVM code for the GPU's matrix products: loads, 8-bit dot products, arithmetic that is never fused or reordered, loops.

Functions take an llvmlite builder; they are called at compile time by the intrinsics of `matmul_*.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from numba_meta.kernels.cuda import api
from numba_meta.kernels.cuda.kernel import EARLY

I8, I16, I32, I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
VOID = ir.VoidType()
Value = Any  # ir.Value: llvmlite has no types for mypy


def asm(b: Any, result: Any, text: str, constraints: str, arguments: Sequence[Value], effects: bool = False) -> Value:
    """One call of inline PTX."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return b.call(ir.InlineAsm(kind, text, constraints, side_effect=effects), list(arguments))


def compiling_for() -> tuple[int, int]:
    """The compute capability that code is emitted for."""
    assert api._compiled_for is not None
    return api._compiled_for


def i32(value: int) -> Value:
    """A constant, given signed or unsigned."""
    return ir.Constant(I32, value - (1 << 32) if value >= 1 << 31 else value)


def i64(value: int) -> Value:
    """A constant."""
    return ir.Constant(I64, value)


def f32(value: float) -> Value:
    """A constant."""
    return ir.Constant(F32, value)


# ---- memory ----------------------------------------------------------------------------------------------------------------------------

STREAM = ".nc.L1::no_allocate"  # read once: weights
KEEP = ".nc"  # read again soon: scales of weights
WRITTEN = "written"  # by the kernel before: activations; `.nc` may miss what was written after this kernel began (early launches)


def load(b: Any, address: Value, n: int, offset: int = 0, hint: str = WRITTEN) -> list[Value]:
    """n (1, 2 or 4) words of 32 bits at a multiple of their size. In the order in which they are asked for: loads first, then sums."""
    if hint == WRITTEN:
        hint = "" if compiling_for() >= EARLY else KEEP
    names = ", ".join(f"${i}" for i in range(n))
    vector, names = (f".v{n}", f"{{{names}}}") if n > 1 else ("", names)
    kind = ir.LiteralStructType([I32] * n) if n > 1 else I32
    text = f"ld.global{hint}{vector}.b32 {names}, [${n}+{offset}];"
    value = asm(b, kind, text, ",".join(["=r"] * n + ["l"]), [address], True)
    return [b.extract_value(value, i) for i in range(n)] if n > 1 else [value]


def load_small(b: Any, address: Value, kind: str, offset: int = 0) -> Value:
    """`u8`, `s8` or `u16`, widened to 32 bits."""
    return asm(b, I32, f"ld.global.nc.{kind} $0, [$1+{offset}];", "=r,l", [address], True)


# ---- arithmetic ------------------------------------------------------------------------------------------------------------------------


def fma(b: Any, x: Value, y: Value, z: Value) -> Value:
    """x * y + z, rounded once."""
    return asm(b, F32, "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [x, y, z])


def mul(b: Any, x: Value, y: Value) -> Value:
    """x * y, never fused."""
    return asm(b, F32, "mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y])


def add(b: Any, x: Value, y: Value) -> Value:
    """x + y, never fused."""
    return asm(b, F32, "add.rn.f32 $0, $1, $2;", "=f,f,f", [x, y])


def dp4a(b: Any, x: Value, y: Value, z: Value) -> Value:
    """z + the sum of 4 products of int8."""
    return asm(b, I32, "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [x, y, z])


def permute(b: Any, x: Value, y: Value, selector: int) -> Value:
    """Bytes chosen from x (0..3) and y (4..7)."""
    return asm(b, I32, f"prmt.b32 $0, $1, $2, {selector:#x};", "=r,r,r", [x, y])


def bits(b: Any, x: Value, shift: int, mask: int) -> Value:
    """(x >> shift) & mask; a negative shift goes left."""
    if shift:
        x = b.lshr(x, i32(shift)) if shift > 0 else b.shl(x, i32(-shift))
    return b.and_(x, i32(mask))


def low_half(b: Any, x: Value) -> Value:
    """The float16 in the low half of 32 bits, as float32."""
    return b.fpext(b.bitcast(b.trunc(x, I16), F16), F32)


def high_half(b: Any, x: Value) -> Value:
    """The float16 in the high half of 32 bits, as float32."""
    return low_half(b, b.lshr(x, i32(16)))


def float_of(b: Any, x: Value) -> Value:
    """An int32 as float32."""
    return b.sitofp(x, F32)


def byte_float(b: Any, x: Value, i: int, signed: bool) -> Value:
    """Byte i of 32 bits as float32."""
    byte = b.trunc(b.lshr(x, i32(8 * i)) if i else x, I8)
    return float_of(b, b.sext(byte, I32) if signed else b.zext(byte, I32))


def bit_cast(b: Any, x: Value, kind: Any) -> Value:
    """The same 32 bits as another type."""
    return b.bitcast(x, kind)


# ---- the kernel before this one (sm_90 on; nothing, where a launch is not allowed to begin early) ----------------------------------------


def start_next(b: Any) -> None:
    """Lets the next kernel begin, up to its `wait_for_previous`, as soon as there is room."""
    if compiling_for() >= EARLY:
        asm(b, VOID, "griddepcontrol.launch_dependents;", "~{memory}", [], True)


def wait_for_previous(b: Any) -> None:
    """Waits until the kernel before this one is done and what it wrote is visible."""
    if compiling_for() >= EARLY:
        asm(b, VOID, "griddepcontrol.wait;", "~{memory}", [], True)


def _for_kernels(emitter: Callable[[Any], None]) -> Any:
    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        emitter(b)
        return context.get_dummy_value()

    def call(typingctx):  # type: ignore[no-untyped-def]
        return api.types.void(), codegen

    return api.intrinsic(call)


# For kernels written for Numba. Every block of a kernel that begins early must come to the second one, also if it has nothing to do.
start_next_kernel, wait_for_previous_kernel = _for_kernels(start_next), _for_kernels(wait_for_previous)


# ---- warps and loops -------------------------------------------------------------------------------------------------------------------


def sum_of_warp(b: Any, x: Value) -> Value:
    """The sum over all lanes, in every lane: lanes 16 apart first."""
    for distance in (16, 8, 4, 2, 1):
        x = add(b, x, asm(b, F32, f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, -1;", "=f,f", [x], True))
    return x


def keep_order(b: Any) -> None:
    """No load moves across: fewer of them are on their way at once, fewer registers hold what they bring."""
    asm(b, VOID, "bar.warp.sync -1;", "~{memory}", [], True)


def slot(b: Any, value: Value) -> Value:
    """A variable (a register, after optimization), set to a value."""
    with b.goto_entry_block():
        place = b.alloca(value.type)
    b.store(value, place)
    return place


@contextmanager
def loop_while(b: Any, condition: Callable[[], Value]) -> Iterator[None]:
    """A loop whose condition is computed before each round."""
    head, body, end = (b.append_basic_block(name) for name in ("head", "body", "end"))
    b.branch(head)
    b.position_at_end(head)
    b.cbranch(condition(), body, end)
    b.position_at_end(body)
    yield
    b.branch(head)
    b.position_at_end(end)
