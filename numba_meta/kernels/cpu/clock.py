"""Time in compiled code: the monotonic clock, and waiting until a moment without holding a core."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from numba_meta.kernels.cpu.libc import yield_core
from numba_meta.kernels.cpu.simd import declare_ir
from numba_meta.kernels.cpu.simd_math import device_function

_MONOTONIC = 1
_i32, _i64 = ir.IntType(32), ir.IntType(64)
_SLEEP_MARGIN = 100_000  # ns: what the system may oversleep
_SPIN = 5_000  # ns: on a busy machine a core that was given away does not come back sooner


@intrinsic
def clock_ns(typingctx):  # type: ignore[no-untyped-def]
    """Nanoseconds of the monotonic clock (that of `time.monotonic_ns`)."""

    def codegen(c, b, s, a):  # type: ignore[no-untyped-def]
        with b.goto_entry_block():
            spot = b.alloca(ir.ArrayType(_i64, 2))
        function = declare_ir(b, "clock_gettime", _i32, [_i32, ir.ArrayType(_i64, 2).as_pointer()])
        b.call(function, [ir.Constant(_i32, _MONOTONIC), spot])
        seconds, nanoseconds = (b.load(b.gep(spot, [ir.Constant(_i32, 0), ir.Constant(_i32, i)])) for i in (0, 1))
        return b.add(b.mul(seconds, ir.Constant(_i64, 1_000_000_000)), nanoseconds)

    return types.int64(), codegen


@intrinsic
def sleep_us(typingctx, microseconds):  # type: ignore[no-untyped-def]
    """Sleeps for about so many microseconds."""

    def codegen(c, b, s, a):  # type: ignore[no-untyped-def]
        return b.call(declare_ir(b, "usleep", _i32, [_i32]), [b.trunc(a[0], _i32)])

    return types.int32(types.int64), codegen


@device_function
def wait_for_time(deadline):  # type: ignore[no-untyped-def]
    """Returns at `deadline` (ns of `clock_ns`): sleeps the most of a long wait, yields the rest, spins at its end."""
    remaining = deadline - clock_ns()
    while remaining > 0:
        if remaining > 2 * _SLEEP_MARGIN:
            sleep_us((remaining - _SLEEP_MARGIN) // 1000)
        elif remaining > _SPIN:
            yield_core()
        remaining = deadline - clock_ns()
