"""What the CUDA simulator can do of `intrinsics.py`: memory by address (the host's), arithmetic of one value; no warps, no tensor cores."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import numpy as np

_f32 = np.float32


def _loader(kind: Any, result: Callable[[Any], Any]) -> Callable[[int], Any]:
    return lambda address: result(kind.from_address(int(address)).value)


def _storer(kind: Any, convert: Callable[[Any], Any]) -> Callable[[int, Any], None]:
    def store(address: int, value: Any) -> None:
        kind.from_address(int(address)).value = convert(value)

    return store


def _from_bf16(bits: int) -> Any:
    return np.array([bits << 16], np.uint32).view(_f32)[0]


def _bf16_bits(value: Any) -> int:
    if np.isnan(value):
        return float_bits(value) >> 16 & 0xFFFF | 0x40
    bits = float_bits(value) & 0xFFFFFFFF
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 & 0xFFFF


def float_bits(value: Any) -> int:
    """The 32 bits of a float32, signed."""
    return int(np.array([value], _f32).view(np.int32)[0])


def bits_float(bits: int) -> Any:
    """32 bits as a float32."""
    return np.array([int(bits) & 0xFFFFFFFF], np.uint32).view(_f32)[0]


def f16_bits(value: Any) -> int:
    """A float32 as the 16 bits of a float16."""
    return int(np.array([value], _f32).astype(np.float16).view(np.uint16)[0])


load_u8 = _loader(ctypes.c_uint8, int)
load_i8 = _loader(ctypes.c_int8, int)
load_u16 = _loader(ctypes.c_uint16, int)
load_i32 = load_i32_nc = _loader(ctypes.c_int32, int)
load_i64 = _loader(ctypes.c_int64, int)
load_f32 = _loader(ctypes.c_float, _f32)
load_f64 = _loader(ctypes.c_double, np.float64)
load_f16 = _loader(ctypes.c_uint16, lambda bits: np.array([bits], np.uint16).view(np.float16)[0].astype(_f32))
load_bf16 = _loader(ctypes.c_uint16, _from_bf16)
store_u8 = _storer(ctypes.c_uint8, lambda value: int(value) & 0xFF)
store_u16 = _storer(ctypes.c_uint16, lambda value: int(value) & 0xFFFF)
store_i32 = _storer(ctypes.c_int32, int)
store_i64 = _storer(ctypes.c_int64, int)
store_f32 = _storer(ctypes.c_float, float)
store_f16 = _storer(ctypes.c_uint16, f16_bits)
store_bf16 = _storer(ctypes.c_uint16, _bf16_bits)

# x86 keeps the order of loads and that of stores: plain ones acquire and release.
load_acquire_system, store_release_system = load_i64, store_i64


def nanoseconds() -> int:
    """The host's clock."""
    return time.monotonic_ns()


def load_v4(address: int) -> tuple[int, ...]:
    """16 bytes as 4 int32."""
    return tuple(load_i32(address + 4 * i) for i in range(4))


def load_v2(address: int) -> tuple[int, ...]:
    """8 bytes as 2 int32."""
    return tuple(load_i32(address + 4 * i) for i in range(2))


load_v4_nc, load_v2_nc = load_v4_once, load_v2_once = load_v4, load_v2


def load_v4_f32(address: int) -> tuple[Any, ...]:
    """4 float32."""
    return tuple(load_f32(address + 4 * i) for i in range(4))


def load_v2_f32(address: int) -> tuple[Any, ...]:
    """2 float32."""
    return tuple(load_f32(address + 4 * i) for i in range(2))


def store_v4(address: int, *values: int) -> None:
    """4 int32."""
    for i, value in enumerate(values):
        store_i32(address + 4 * i, value)


def store_v4_f32(address: int, *values: Any) -> None:
    """4 float32."""
    for i, value in enumerate(values):
        store_f32(address + 4 * i, value)


def fma(x: Any, y: Any, z: Any) -> Any:
    """x * y + z with one rounding (float64 holds the product of two float32 exactly)."""
    return _f32(np.float64(x) * np.float64(y) + np.float64(z))


def mul(x: Any, y: Any) -> Any:
    """x * y in float32."""
    return _f32(x) * _f32(y)


def add(x: Any, y: Any) -> Any:
    """x + y in float32."""
    return _f32(x) + _f32(y)


def maximum(x: Any, y: Any) -> Any:
    """The larger one; the other one where one is NaN."""
    return np.fmax(_f32(x), _f32(y))


def exp2(x: Any) -> Any:
    """2 to the x."""
    return np.exp2(_f32(x))


def reciprocal(x: Any) -> Any:
    """1 / x."""
    return _f32(1) / _f32(x)


def round_to_int(x: Any) -> int:
    """To the nearest integer, ties to even."""
    return int(np.rint(_f32(x)))


def dp4a(a: int, b: int, c: int) -> int:
    """c + the sum of 4 products of int8."""
    left, right = (np.array([int(x) & 0xFFFFFFFF], np.uint32).view(np.int8).astype(np.int64) for x in (a, b))
    return int(c) + int((left * right).sum())


def low_f16(pair: int) -> Any:
    """The float16 in the low half, as float32."""
    return np.array([int(pair) & 0xFFFF], np.uint16).view(np.float16)[0].astype(_f32)


def high_f16(pair: int) -> Any:
    """The float16 in the high half, as float32."""
    return low_f16(int(pair) >> 16)


def low_bf16(pair: int) -> Any:
    """The bfloat16 in the low half, as float32."""
    return _from_bf16(int(pair) & 0xFFFF)


def high_bf16(pair: int) -> Any:
    """The bfloat16 in the high half, as float32."""
    return _from_bf16(int(pair) >> 16 & 0xFFFF)


def start_next_kernel() -> None:
    """Kernels run one after the other."""


def wait_for_previous_kernel() -> None:
    """Kernels run one after the other."""
