"""From stored bytes to values or fields, for every weight type."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from numba_meta import dtypes
from numba_meta.dtypes import DType
from numba_meta.errors import ShapeError
from numba_meta.quants import iq4, k_quants, legacy
from numba_meta.quants.blocks import Blocks, ByteArray, FloatArray

_SPLITTERS: dict[DType, Callable[[ByteArray], Blocks]] = {**legacy.SPLITTERS, **k_quants.SPLITTERS, **iq4.SPLITTERS}
_CHUNK_ELEMENTS = 1 << 18  # about 3 MB of intermediate arrays, so that a whole embedding costs only its result


def _n_blocks(raw: ByteArray, dtype: DType) -> int:
    """Blocks in all of `raw`, after checking that its rows hold whole ones."""
    if raw.dtype != np.uint8 or raw.ndim == 0 or raw.shape[-1] % dtype.block_bytes:
        raise ShapeError(
            f"bytes of {raw.dtype} {list(raw.shape)} cannot be read as {dtype}; expected uint8 rows of a multiple of {dtype.block_bytes}"
        )
    return raw.size // dtype.block_bytes


def _decode_floats(raw: ByteArray, dtype: DType) -> FloatArray:
    packed = np.ascontiguousarray(raw)
    if dtype == dtypes.F32:
        return packed.view(np.float32).copy()
    if dtype == dtypes.F16:
        return packed.view(np.float16).astype(np.float32)
    return (packed.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def _values(blocks: Blocks) -> FloatArray:
    """The formula of `Blocks`, in its order of operations: [n_blocks, block_size]."""
    n_blocks = blocks.scale.shape[0]
    quants = blocks.quants.reshape(n_blocks, -1, blocks.group_size).astype(np.float32)
    scale = blocks.scale.astype(np.float32)[:, None]
    if blocks.sub_scales is not None:
        scale = scale * blocks.sub_scales.reshape(n_blocks, -1).astype(np.float32)
    values = scale[:, :, None] * quants
    if blocks.minimum is not None:
        minimum = blocks.minimum.astype(np.float32)[:, None]
        if blocks.sub_minimums is None:
            values += minimum[:, :, None]
        else:
            values -= (minimum * blocks.sub_minimums.reshape(n_blocks, -1).astype(np.float32))[:, :, None]
    return np.asarray(values.reshape(n_blocks, -1), np.float32)


def dequantize(raw: ByteArray, dtype: DType) -> FloatArray:
    """The values of stored rows: uint8 [..., n_bytes] -> float32 [..., n_elements], a new array.

    Bit for bit what `gguf.quants.dequantize` gives, infinities and not-a-numbers in the scales included. Raises `ShapeError`
    where the rows do not hold whole blocks or `dtype` is no weight type.
    """
    n_blocks = _n_blocks(raw, dtype)
    if dtype in (dtypes.F32, dtypes.F16, dtypes.BF16):
        return _decode_floats(raw, dtype)
    split = _splitter(dtype)
    flat = raw.reshape(n_blocks, dtype.block_bytes)
    values = np.empty((n_blocks, dtype.block_size), np.float32)
    step = _CHUNK_ELEMENTS // dtype.block_size
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, n_blocks, step):
            values[start : start + step] = _values(split(flat[start : start + step]))
    return values.reshape(*raw.shape[:-1], raw.shape[-1] // dtype.block_bytes * dtype.block_size)


def split_blocks(raw: ByteArray, dtype: DType) -> Blocks:
    """The fields of stored rows: uint8 [..., n_bytes] -> `Blocks` with the same leading axes.

    Raises `ShapeError` where the rows do not hold whole blocks or `dtype` has no blocks.
    """
    flat = raw.reshape(_n_blocks(raw, dtype), dtype.block_bytes)
    return _splitter(dtype)(flat).reshape(raw.shape[:-1])


def _splitter(dtype: DType) -> Callable[[ByteArray], Blocks]:
    try:
        return _SPLITTERS[dtype]
    except KeyError:
        known = ", ".join(known.name for known in _SPLITTERS)
        raise ShapeError(f"{dtype} has no quantized blocks to take apart; expected one of {known}") from None
