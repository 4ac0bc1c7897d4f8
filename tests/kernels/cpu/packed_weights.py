"""Random weights of every type, packed, and buffers whose surroundings are watched: shared by the tests of the CPU's matrix products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from numba_meta import dtypes
from numba_meta.dtypes import DType
from numba_meta.kernels.cpu import packed, packing
from numba_meta.kernels.cpu.kernel import CpuKernel
from numba_meta.kernels.cpu.quantize import quantize_kernel
from numba_meta.quants import dequantize

# byte offsets of the float16 fields of a block
HALF_FIELDS = {
    "q8_0": (0,), "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q2_k": (80, 82), "q3_k": (108,), "q4_k": (0, 2),
    "q5_k": (0, 2), "q6_k": (208,), "iq4_nl": (0,), "iq4_xs": (0,),
}  # fmt: skip
CANARY = 0xA5


def random_raw(dtype: DType, n_out: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """Rows as a file holds them, uint8 `[n_out, row_bytes]`: random bits with scales near 0.02, some zero or subnormal."""
    if dtype is dtypes.F32:
        return rng.standard_normal((n_out, k), np.float32).view(np.uint8)
    if dtype is dtypes.F16:
        return rng.standard_normal((n_out, k), np.float32).astype(np.float16).view(np.uint8)
    if dtype is dtypes.BF16:
        return np.ascontiguousarray(rng.standard_normal((n_out, k), np.float32).view(np.uint16)[:, 1::2]).view(np.uint8)
    raw = rng.integers(0, 256, (n_out * k // dtype.block_size, dtype.block_bytes), np.uint8)
    for field in HALF_FIELDS[dtype.name]:
        scales = (rng.standard_normal(len(raw)) * 0.02).astype(np.float16)
        kind = rng.integers(0, 16, len(raw))
        scales[kind == 0] = 0.0
        scales[kind == 1] = np.float16(3e-6)  # subnormal
        raw[:, field : field + 2] = scales.view(np.uint8).reshape(-1, 2)
    return raw.reshape(n_out, dtype.row_bytes(k))


class Guarded:
    """An array inside a larger one full of canaries: `rows` of `row_bytes`, `stride` bytes apart."""

    def __init__(self, rows: int, row_bytes: int, stride: int | None = None) -> None:
        self.stride = row_bytes if stride is None else stride
        self.row_bytes, self.rows, self._margin = row_bytes, rows, 256
        self.all = np.full(2 * self._margin + rows * self.stride, CANARY, np.uint8)
        self.address = self.all.ctypes.data + self._margin

    def read(self, dtype: Any = np.uint8) -> np.ndarray:
        """The rows; checks that nothing around them was written."""
        body = self.all[self._margin : self._margin + self.rows * self.stride].reshape(self.rows, self.stride)
        assert (self.all[: self._margin] == CANARY).all() and (self.all[self._margin + self.rows * self.stride :] == CANARY).all()
        assert (body[:, self.row_bytes :] == CANARY).all()
        return np.ascontiguousarray(body[:, : self.row_bytes]).view(dtype)


@dataclass
class Weights:
    """Random weights: `raw` as in a file, `values` as float32 `[n_out, k]`, `tiles` packed."""

    dtype: DType
    n_out: int
    k: int
    raw: np.ndarray
    values: np.ndarray
    tiles: np.ndarray


def make_weights(dtype: DType, n_out: int, k: int, rng: np.random.Generator) -> Weights:
    raw = random_raw(dtype, n_out, k, rng)
    return pack_weights(dtype, n_out, k, raw)


def pack_weights(dtype: DType, n_out: int, k: int, raw: np.ndarray) -> Weights:
    out = Guarded(1, packed.packed_bytes(dtype, n_out, k))
    packing.pack(raw, dtype, out.address)
    return Weights(dtype, n_out, k, raw, dequantize(raw, dtype), out.read()[0])


def quantize(x: np.ndarray) -> np.ndarray:
    """float32 `[rows, k]` as `q8` rows, uint8."""
    rows, k = x.shape
    out = np.zeros((rows, packed.activation_row_bytes("q8", k)), np.uint8)
    quantize_kernel()(x=x, x_stride=x.strides[0], y=out, y_stride=out.strides[0], n=k, n_rows=np.array([rows]))
    return out


def activations(weights: Weights, exact: bool, x: np.ndarray) -> np.ndarray:
    """x in the format that the product reads."""
    return x if packed.activation_format(weights.dtype, exact) == "f32" else quantize(x)


def multiply(kernel: CpuKernel, weights: Weights, x: np.ndarray, rows: int | None = None, threads: int = 1) -> np.ndarray:
    """A product for the first `rows` rows of x (in the kernel's format), float32 `[rows, n_out]`; checks that nothing else is written."""
    rows = len(x) if rows is None else rows
    out = Guarded(rows, 4 * weights.n_out, 4 * weights.n_out + 20)
    kernel(
        w=weights.tiles,
        x=x,
        x_stride=x.strides[0],
        y=out.address,
        y_stride=out.stride,
        n_out=weights.n_out,
        k=weights.k,
        n_rows=np.array([rows]),
        threads=threads,
    )
    return out.read(np.float32)
