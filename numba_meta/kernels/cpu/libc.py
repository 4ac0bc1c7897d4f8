"""Functions of the C library that compiled threads use to give their core away and to sleep."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from numba_meta.kernels.cpu.simd import declare_ir

_i32 = ir.IntType(32)


def _libc(symbol: str, n_pointers: int) -> Any:
    """A function of the C library that takes addresses and gives an int."""

    def codegen(c, b, s, a):  # type: ignore[no-untyped-def]
        byte = ir.IntType(8).as_pointer()
        function = declare_ir(b, symbol, _i32, [byte] * n_pointers)
        return b.call(function, [b.inttoptr(x, byte) for x in a])

    if n_pointers == 0:

        def call0(typingctx):  # type: ignore[no-untyped-def]
            return types.int32(), codegen

        return intrinsic(call0)
    if n_pointers == 1:

        def call1(typingctx, x):  # type: ignore[no-untyped-def]
            return types.int32(types.int64), codegen

        return intrinsic(call1)

    def call2(typingctx, x, y):  # type: ignore[no-untyped-def]
        return types.int32(types.int64, types.int64), codegen

    return intrinsic(call2)


yield_core = _libc("sched_yield", 0)
mutex_lock = _libc("pthread_mutex_lock", 1)
mutex_unlock = _libc("pthread_mutex_unlock", 1)
condition_wait = _libc("pthread_cond_wait", 2)
condition_broadcast = _libc("pthread_cond_broadcast", 1)
