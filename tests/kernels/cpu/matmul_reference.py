"""The CPU's matrix products in numpy: the documented order of operations, one rounding to float32 at a time, and plain float64."""

from __future__ import annotations

import numpy as np
from kernels.cpu.packed_weights import Weights

from numba_meta.kernels.cpu import packed
from numba_meta.quants import split_blocks


def _fma(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """x * y + z rounded once (the product is exact in 53 bits; the long sum is wide enough that rounding it again changes nothing)."""
    return ((x.astype(np.float64) * y.astype(np.float64)).astype(np.longdouble) + z).astype(np.float32)


def dequantized_activations(q8: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quants `[rows, k]` (int64) and scales `[rows, k / 32]` of `q8` rows."""
    blocks = q8.reshape(len(q8), -1, packed.ACTIVATION_BLOCK_BYTES)
    quants = np.ascontiguousarray(blocks[:, :, :32]).view(np.int8).astype(np.int64)
    scales = np.ascontiguousarray(blocks[:, :, packed.ACTIVATION_SCALE : packed.ACTIVATION_SCALE + 4]).view(np.float32)
    return quants.reshape(len(q8), -1), scales.reshape(len(q8), -1)


def fast_product(weights: Weights, q8: np.ndarray) -> np.ndarray:
    """Per scale group: an exact integer sum, times the weight's scale, times the activation's; then the minimum times the scaled sum."""
    blocks = split_blocks(weights.raw, weights.dtype)
    xq, xd = dequantized_activations(q8)
    group, per_block = blocks.group_size, weights.dtype.block_size // blocks.group_size
    fields = (blocks.scale, blocks.scale if blocks.minimum is None else blocks.minimum)
    scale, minimum = (np.repeat(field.astype(np.float32), per_block, -1) for field in fields)
    if blocks.sub_scales is not None:
        scale = scale * blocks.sub_scales.astype(np.float32)
    if blocks.sub_minimums is not None:
        minimum = -(minimum * blocks.sub_minimums.astype(np.float32))
    acc = np.zeros((len(q8), weights.n_out), np.float32)
    for g in range(weights.k // group):
        part = slice(g * group, (g + 1) * group)
        d = xd[:, g * group // 32, None]
        exact = xq[:, part] @ blocks.quants[:, part].astype(np.int64).T
        acc = _fma(exact.astype(np.float32) * scale[:, g], d, acc)
        if blocks.minimum is not None:
            scaled_sum = xq[:, part].sum(1, keepdims=True).astype(np.float32) * d
            acc = _fma(minimum[:, g], scaled_sum, acc)
    return acc


def exact_product(weights: Weights, x: np.ndarray) -> np.ndarray:
    """Blocks of 32: even and odd elements apart, then added; what remains of k after them is one more sum."""
    w = weights.values
    acc = np.zeros((len(x), weights.n_out), np.float32)
    whole = weights.k // 32 * 32
    for start in range(0, whole, 32):
        even, odd = np.zeros_like(acc), np.zeros_like(acc)
        for e in range(start, start + 32, 2):
            even = _fma(w[:, e], x[:, e, None], even)
            odd = _fma(w[:, e + 1], x[:, e + 1, None], odd)
        acc = acc + (even + odd)
    rest = np.zeros_like(acc)
    for e in range(whole, weights.k):
        rest = _fma(w[:, e], x[:, e, None], rest)
    return acc + rest


def relative_error(y: np.ndarray, weights: Weights, x: np.ndarray) -> float:
    """Largest |y - float64 product| over the product of absolute values."""
    w, x = weights.values.astype(np.float64), x.astype(np.float64)
    return float((np.abs(y - x @ w.T) / (np.abs(x) @ np.abs(w).T + 1e-30)).max())
