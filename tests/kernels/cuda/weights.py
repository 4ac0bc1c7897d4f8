"""Random weights as the file holds them, packed for a GPU, with their values; activations in the forms that products read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from kernels.cpu.packed_weights import random_raw

from numba_meta.dtypes import DType
from numba_meta.kernels.cuda import packed, packing
from numba_meta.quants import dequantize


@dataclass
class Weights:
    """`raw` as in a file, `values` float32 `[n_out, k]`, `planes` packed (uint8)."""

    dtype: DType
    n_out: int
    k: int
    raw: np.ndarray
    values: np.ndarray
    planes: np.ndarray


def make_weights(dtype: DType, n_out: int, k: int, rng: np.random.Generator) -> Weights:
    return pack_weights(dtype, n_out, k, random_raw(dtype, n_out, k, rng))


def pack_weights(dtype: DType, n_out: int, k: int, raw: np.ndarray) -> Weights:
    """Packs into memory full of garbage; checks that nothing behind it is written."""
    n_bytes = packed.packed_bytes(dtype, n_out, k)
    out = np.full(n_bytes + 64, 0xA5, np.uint8)
    packing.pack(raw, dtype, out)
    assert (out[n_bytes:] == 0xA5).all()
    return Weights(dtype, n_out, k, raw, dequantize(raw, dtype), out[:n_bytes])


def quantized_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What `q8` rows hold of x `[rows, k]`: int8 quants `[rows, k]` and float32 scales `[rows, k / 32]`, as the kernel computes them."""
    blocks = x.reshape(len(x), -1, 32).astype(np.float32)
    largest = np.abs(blocks).max(2, keepdims=True)
    zero = largest <= np.float32(1e-30)
    inverse = np.where(zero, np.float32(0), np.float32(127) / np.where(zero, np.float32(1), largest))
    scales = np.where(zero, np.float32(0), largest / np.float32(127))
    return np.rint(blocks * inverse).astype(np.int8).reshape(x.shape), scales[:, :, 0]


def q8_bytes(x: np.ndarray) -> np.ndarray:
    """x as `q8` rows, uint8 `[rows, activation_row_bytes]`."""
    rows, k = x.shape
    quants, scales = quantized_rows(x)
    blocks = quants.reshape(rows, -1, 2, 16)
    out = np.zeros((rows, packed.activation_row_bytes("q8", k)), np.uint8)
    out[:, :k] = np.ascontiguousarray(blocks.transpose(0, 2, 1, 3)).view(np.uint8).reshape(rows, k)
    sums = blocks.astype(np.int16).sum(3)
    meta = np.zeros((rows, k // 32, 8), np.uint8)
    meta[:, :, :4] = np.ascontiguousarray(scales)[:, :, None].view(np.uint8)
    meta[:, :, 4:6] = sums.sum(2).astype(np.int16)[:, :, None].view(np.uint8)
    meta[:, :, 6:] = np.ascontiguousarray(sums[:, :, 0]).astype(np.int16)[:, :, None].view(np.uint8)
    out[:, k : k + k // 4] = meta.reshape(rows, -1)
    return out


def relative_error(y: np.ndarray, values: np.ndarray, x: np.ndarray) -> float:
    """Largest |y - float64 product| over the product of absolute values."""
    w, x = values.astype(np.float64), x.astype(np.float64)
    return float((np.abs(y - x @ w.T) / (np.abs(x) @ np.abs(w).T + 1e-30)).max(initial=0.0))
