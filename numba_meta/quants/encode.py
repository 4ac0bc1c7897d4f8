"""From values to stored bytes, for the float types and the 32-element block types (round to nearest, no search for better scales)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from numba_meta import dtypes
from numba_meta.dtypes import DType
from numba_meta.errors import ShapeError
from numba_meta.quants.blocks import ByteArray, FloatArray


def _reciprocal(scale: FloatArray) -> FloatArray:
    """1 / scale, and 0 where a block is all zeros."""
    return np.where(scale == 0, np.float32(0), np.float32(1) / scale)


def _half_bytes(column: FloatArray) -> ByteArray:
    return column.astype(np.float16).view(np.uint8)


def _nibbles(stored: ByteArray) -> ByteArray:
    """Byte `i` takes the low four bits of element `i` and, above them, those of element `i + 16`."""
    return (stored[:, :16] & np.uint8(0x0F)) | (stored[:, 16:] << np.uint8(4))


def _fifth_bits(stored: ByteArray) -> ByteArray:
    return np.packbits(stored >> np.uint8(4), axis=-1, bitorder="little")


def _encode_q8_0(values: FloatArray) -> ByteArray:
    scale = np.abs(values).max(axis=-1, keepdims=True) / np.float32(127)
    scaled = values * _reciprocal(scale)
    magnitude = np.abs(scaled)
    whole = np.floor(magnitude)
    rounded = np.sign(scaled) * (whole + np.floor(2 * (magnitude - whole)))  # halves go away from zero, as roundf does
    return np.hstack([_half_bytes(scale), rounded.astype(np.int8).view(np.uint8)])


def _signed_quants(values: FloatArray, half_range: int) -> tuple[FloatArray, ByteArray]:
    """Scale and offset quants of a `_0` type: the value of largest magnitude, sign and all, becomes `-half_range`."""
    at = np.abs(values).argmax(axis=-1, keepdims=True)
    scale = np.take_along_axis(values, at, axis=-1) / np.float32(-half_range)
    stored = np.trunc(values * _reciprocal(scale) + np.float32(half_range + 0.5)).astype(np.uint8)
    return scale, stored.clip(0, 2 * half_range - 1)


def _unsigned_quants(values: FloatArray, n_levels: int) -> tuple[FloatArray, FloatArray, ByteArray]:
    """Scale, minimum and quants of a `_1` type, which spans the block from its minimum to its maximum."""
    minimum = values.min(axis=-1, keepdims=True)
    scale = (values.max(axis=-1, keepdims=True) - minimum) / np.float32(n_levels - 1)
    stored = np.trunc((values - minimum) * _reciprocal(scale) + np.float32(0.5)).astype(np.uint8)
    return scale, minimum, stored.clip(0, n_levels - 1)


def _encode_q4_0(values: FloatArray) -> ByteArray:
    scale, stored = _signed_quants(values, 8)
    return np.hstack([_half_bytes(scale), _nibbles(stored)])


def _encode_q4_1(values: FloatArray) -> ByteArray:
    scale, minimum, stored = _unsigned_quants(values, 16)
    return np.hstack([_half_bytes(scale), _half_bytes(minimum), _nibbles(stored)])


def _encode_q5_0(values: FloatArray) -> ByteArray:
    scale, stored = _signed_quants(values, 16)
    return np.hstack([_half_bytes(scale), _fifth_bits(stored), _nibbles(stored)])


def _encode_q5_1(values: FloatArray) -> ByteArray:
    scale, minimum, stored = _unsigned_quants(values, 32)
    return np.hstack([_half_bytes(scale), _half_bytes(minimum), _fifth_bits(stored), _nibbles(stored)])


def _encode_f32(values: FloatArray) -> ByteArray:
    return values.view(np.uint8)


def _encode_f16(values: FloatArray) -> ByteArray:
    return values.astype(np.float16).view(np.uint8)


def _encode_bf16(values: FloatArray) -> ByteArray:
    bits = values.view(np.uint32).astype(np.uint64)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to nearest, ties to even
    quiet = (bits >> 16) | 0x40  # keeps a not-a-number one, whatever its low bits were
    return np.where(is_nan, quiet, rounded).astype(np.uint16).view(np.uint8)


_ENCODERS: dict[DType, Callable[[FloatArray], ByteArray]] = {
    dtypes.F32: _encode_f32,
    dtypes.F16: _encode_f16,
    dtypes.BF16: _encode_bf16,
    dtypes.Q8_0: _encode_q8_0,
    dtypes.Q4_0: _encode_q4_0,
    dtypes.Q4_1: _encode_q4_1,
    dtypes.Q5_0: _encode_q5_0,
    dtypes.Q5_1: _encode_q5_1,
}
QUANTIZABLE = tuple(_ENCODERS)


def quantize(values: npt.NDArray[Any], dtype: DType) -> ByteArray:
    """Values as stored rows: float [..., n_elements] -> uint8 [..., n_bytes], byte for byte what `gguf.quants.quantize` gives.

    Raises `ShapeError` where rows do not fill whole blocks, or for a type outside `QUANTIZABLE`.
    """
    if dtype not in _ENCODERS:
        raise ShapeError(f"cannot quantize to {dtype}; expected one of {', '.join(known.name for known in QUANTIZABLE)}")
    rows = np.ascontiguousarray(values, np.float32)
    row_bytes = dtype.row_bytes(rows.shape[-1])
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        encoded = _ENCODERS[dtype](rows.reshape(-1, dtype.block_size))
    return encoded.reshape(*rows.shape[:-1], row_bytes)
