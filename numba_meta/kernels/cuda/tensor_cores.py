"""Tensor cores, and what feeds them: matrices from shared memory, asynchronous copies into it. Inline PTX."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from numba_meta.kernels.cuda.api import intrinsic, types
from numba_meta.kernels.cuda.intrinsics import _F, _I, _asm, _f32, _i32, _i64, _tuple, _void

# ---- tensor cores (sm_75: f16 with k 8 alone, s8 with k 16; sm_80 on: all of these) ------------------------------------------------------


def _mma(shape: str, kinds: str, n_a: int, n_b: int, float_values: bool) -> Any:
    """D = A B + C of one warp; D and C have 4 registers."""
    letter, element, value = ("f", _f32, _F) if float_values else ("r", _i32, _I)
    names = [f"${i}" for i in range(8 + n_a + n_b)]
    d, a_names, b_names, c_names = names[:4], names[4 : 4 + n_a], names[4 + n_a : 4 + n_a + n_b], names[4 + n_a + n_b :]
    groups = ", ".join("{" + ", ".join(group) + "}" for group in (d, a_names, b_names, c_names))
    text = f"mma.sync.aligned.{shape}.row.col.{kinds} {groups};"
    constraints = ",".join([f"={letter}"] * 4 + ["r"] * (n_a + n_b) + [letter] * 4)
    given = [_I] * (n_a + n_b) + [value] * 4

    def codegen(c: Any, b: Any, s: Any, a: Any) -> Any:
        kinds_ = [_i32] * (n_a + n_b) + [element] * 4
        return _tuple(b, _asm(b, ir.LiteralStructType([element] * 4), kinds_, text, constraints, a), 4)

    parameters = ", ".join(f"x{i}" for i in range(len(given)))
    scope: dict[str, Any] = {"signature": types.UniTuple(value, 4)(*given), "codegen": codegen}
    exec(f"def mma(typingctx, {parameters}):\n    return signature, codegen\n", scope)
    return intrinsic(scope["mma"])


mma_f16 = _mma("m16n8k16", "f32.f16.f16.f32", 4, 2, True)
mma_bf16 = _mma("m16n8k16", "f32.bf16.bf16.f32", 4, 2, True)
mma_s8 = _mma("m16n8k32", "s32.s8.s8.s32", 4, 2, False)
mma_f16_k8 = _mma("m16n8k8", "f32.f16.f16.f32", 2, 1, True)


@intrinsic
def load_matrix_x4(typingctx, address):  # type: ignore[no-untyped-def]
    """`ldmatrix`: four 8 by 8 matrices of 16-bit elements from shared memory; each lane gives the address of one row."""

    def codegen(c, b, s, a):  # type: ignore[no-untyped-def]
        text = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0,$1,$2,$3}, [$4];"
        return _tuple(b, _asm(b, ir.LiteralStructType([_i32] * 4), [_i32], text, "=r,=r,=r,=r,r,~{memory}", a, True), 4)

    return types.UniTuple(_I, 4)(_I), codegen


@intrinsic
def load_matrix_x4_transposed(typingctx, address):  # type: ignore[no-untyped-def]
    """As `load_matrix_x4`, each matrix transposed."""

    def codegen(c, b, s, a):  # type: ignore[no-untyped-def]
        text = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0,$1,$2,$3}, [$4];"
        return _tuple(b, _asm(b, ir.LiteralStructType([_i32] * 4), [_i32], text, "=r,=r,=r,=r,r,~{memory}", a, True), 4)

    return types.UniTuple(_I, 4)(_I), codegen


# ---- asynchronous copies to shared memory (sm_80 on) -------------------------------------------------------------------------------------


@intrinsic
def async_copy_16(typingctx, shared, source):  # type: ignore[no-untyped-def]
    """16 bytes from global to shared memory, in the background."""

    def codegen(c, b, s, a):  # type: ignore[no-untyped-def]
        _asm(b, _void, [_i32, _i64], "cp.async.cg.shared.global [$0], [$1], 16;", "r,l,~{memory}", a, True)
        return c.get_dummy_value()

    return types.void(_I, types.int64), codegen


@intrinsic
def async_commit(typingctx):  # type: ignore[no-untyped-def]
    """Ends a group of asynchronous copies."""

    def codegen(c, b, s, a):  # type: ignore[no-untyped-def]
        _asm(b, _void, [], "cp.async.commit_group;", "~{memory}", [], True)
        return c.get_dummy_value()

    return types.void(), codegen


def _async_wait(n: int) -> Any:
    def codegen(c: Any, b: Any, s: Any, a: Any) -> Any:
        _asm(b, _void, [], f"cp.async.wait_group {n};", "~{memory}", [], True)
        return c.get_dummy_value()

    def wait(typingctx):  # type: ignore[no-untyped-def]
        return types.void(), codegen

    return intrinsic(wait)


async_wait_all, async_wait_1, async_wait_2, async_wait_3 = (_async_wait(n) for n in range(4))
