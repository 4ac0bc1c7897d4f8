"""What attention on tensor cores needs beside `intrinsics.py`: pairs of halves, transposed fragments, copies that fill with zeros."""

from __future__ import annotations

from typing import Any

from numba_meta.kernels.cuda.api import intrinsic, types
from numba_meta.kernels.cuda.intrinsics import _asm, _i32, _i64, _operation, _void

_I, _F = types.int32, types.float32


def _shared_word(text: str) -> Any:
    """An intrinsic that reads a word of shared memory. Inline, so that addresses stay 32 bits wide."""

    def codegen(c: Any, b: Any, s: Any, a: Any) -> Any:
        return _asm(b, _i32, [_i32], text, "=r,r,~{memory}", a, True)

    def load(typingctx, address):  # type: ignore[no-untyped-def]
        return _I(_I), codegen

    return intrinsic(load)


shared_word = _shared_word("ld.shared.b32 $0, [$1];")
shared_half = _shared_word("ld.shared.u16 $0, [$1];")
mul_f16x2 = _operation("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", _I, _I, _I)
sub_f16x2 = _operation("sub.rn.f16x2 $0, $1, $2;", "=r,r,r", _I, _I, _I)
pack_bf16x2 = _operation("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", _I, _F, _F)  # sm_80 on; the first one in the low half



@intrinsic
def cell_address(typingctx, base, cell, stride):  # type: ignore[no-untyped-def]
    """base + cell * stride, of an int64, an int32 and an int64 that fits 31 bits: one instruction."""

    def codegen(c, b, s, a):  # type: ignore[no-untyped-def]
        return _asm(b, _i64, [_i32, _i32, _i64], "mad.wide.s32 $0, $1, $2, $3;", "=l,r,r,l", [a[1], b.trunc(a[2], _i32), a[0]])

    return types.int64(types.int64, _I, types.int64), codegen


@intrinsic
def quotient_u32(typingctx, x, y):  # type: ignore[no-untyped-def]
    """x // y of two int32 that are not negative, in 32 bits."""
    return _I(_I, _I), lambda c, b, s, a: b.udiv(a[0], a[1])


@intrinsic
def transposed(typingctx, pairs):  # type: ignore[no-untyped-def]
    """An 8 by 8 matrix of 16-bit elements in a warp (lane 4 r + c holds row r, columns 2 c and 2 c + 1), transposed. sm_75 on."""

    def codegen(c, b, s, a):  # type: ignore[no-untyped-def]
        return _asm(b, _i32, [_i32], "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", a, True)

    return _I(_I), codegen


def _filled_copy(n_bytes: int, cached: str) -> Any:
    text = f"cp.async.{cached}.shared.global [$0], [$1], {n_bytes}, $2;"

    def codegen(c: Any, b: Any, s: Any, a: Any) -> Any:
        _asm(b, _void, [_i32, _i64, _i32], text, "r,l,r,~{memory}", a, True)
        return c.get_dummy_value()

    def copy(typingctx, shared, source, n_source):  # type: ignore[no-untyped-def]
        return types.void(_I, types.int64, _I), codegen

    return intrinsic(copy)


# (shared, source, n): n bytes from global to shared memory in the background (sm_80 on), zeros behind them up to the size of the copy.
filled_copy = {4: _filled_copy(4, "ca"), 8: _filled_copy(8, "ca"), 16: _filled_copy(16, "cg")}
