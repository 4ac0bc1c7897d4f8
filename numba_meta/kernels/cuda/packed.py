"""How weights and activations lie in device memory for the GPU's matrix products.

Weights are planes, each row by row, each beginning at a multiple of 16 bytes. Per block of 32 elements of a row (nb blocks a row):

    quants   4 to 6 bits: 16 bytes, element e in the low and 16 + e in the high nibble of byte e
             8 bits: the row's first half holds elements 0..15 of each block, the second half elements 16..31; int8
    high     5 bits: 4 bytes, bit g of byte j is the high bit of element 4g+j
             6 bits: 8 bytes, bits 2g, 2g+1 of byte j belong to element 4g+j, those of byte 4+j to element 16+4g+j
    scales   without super-blocks: float16 d, then float16 m where the type has minima
             with super-blocks: 8-bit scales of the block's groups (signed where there is an offset or 8 bits), then their minima
    heads    per super-block of 8 blocks: float16 d, then float16 m where the type has minima

value = scale * (quant - offset)  or  scale * quant + minimum, where scale = d * s and minimum = m or -(m * s') are exact in float32.
F32, F16 and BF16 rows are as in the file, padded with zeros to a multiple of 16 bytes.

Activations `f32` are plain rows. `q8` rows: elements 0..15 of each block of 32, then elements 16..31 of each (int8), then 8 bytes per
block: float32 scale, int16 sum of the quants, int16 sum of the first 16. `f16` rows: k float16, then, at a multiple of 16 bytes, the
float32 scale of the row.
"""

from __future__ import annotations

from dataclasses import dataclass

from numba_meta import dtypes
from numba_meta.dtypes import DType
from numba_meta.errors import ShapeError
from numba_meta.kernels.quant_fields import BLOCK, FLOAT_TYPES, QuantFields, first_of_layout

ACTIVATION_META_BYTES = 8  # per block of `q8`
MOST_VECTOR_COLUMNS = 16  # rows of activations up to which a row has the same bits as alone, in fast mode


@dataclass(frozen=True)
class QuantLayout(QuantFields):
    """A packed quantized type on GPUs: planes."""

    @property
    def has_signed_scales(self) -> bool:
        """Whether those are signed."""
        return not self.has_minimum

    @property
    def quant_bytes(self) -> int:
        """Bytes of a block in the plane of quants."""
        return 32 if self.bits == 8 else 16

    @property
    def high_bytes(self) -> int:
        """Bytes of a block in the plane of high bits."""
        return {4: 0, 5: 4, 6: 8, 8: 0}[self.bits]

    @property
    def groups(self) -> int:
        """Groups of a block."""
        return BLOCK // self.group

    @property
    def scale_bytes(self) -> int:
        """Bytes of a block in the plane of scales."""
        both = 2 if self.has_minimum else 1
        return both * self.groups if self.has_scales else 2 * both

    @property
    def head_bytes(self) -> int:
        """Bytes of a super-block in the plane of heads."""
        return (4 if self.has_minimum else 2) if self.has_scales else 0


_8_BITS = QuantLayout("8", 8, 0)
_6_BITS_SUPER = QuantLayout("6s", 6, 32, super_blocks=8, group=16)

# Types that share a layout without loss: IQ4_NL's codebook are 8-bit integers; Q3_K's quants -4..3 fit Q6_K's -32..31.
QUANT_LAYOUTS: dict[DType, QuantLayout] = {
    dtypes.Q4_0: QuantLayout("4o", 4, 8),
    dtypes.Q4_1: QuantLayout("4m", 4, 0, has_minimum=True),
    dtypes.Q5_0: QuantLayout("5o", 5, 16),
    dtypes.Q5_1: QuantLayout("5m", 5, 0, has_minimum=True),
    dtypes.Q8_0: _8_BITS,
    dtypes.IQ4_NL: _8_BITS,
    dtypes.Q4_K: QuantLayout("4sm", 4, 0, has_minimum=True, super_blocks=8),
    dtypes.Q5_K: QuantLayout("5sm", 5, 0, has_minimum=True, super_blocks=8),
    dtypes.Q6_K: _6_BITS_SUPER,
    dtypes.Q3_K: _6_BITS_SUPER,
    dtypes.Q2_K: QuantLayout("4sm16", 4, 0, has_minimum=True, super_blocks=8, group=16),
    dtypes.IQ4_XS: QuantLayout("8s", 8, 0, super_blocks=8),
}


@dataclass(frozen=True)
class Planes:
    """Where the planes of packed weights begin, in bytes, and where the last one ends."""

    high: int
    scales: int
    heads: int
    end: int


def round_up_16(n_bytes: int) -> int:
    """The next multiple of 16."""
    return (n_bytes + 15) & -16


def planes(layout: QuantLayout, n_out: int, k: int) -> Planes:
    """The planes of `[n_out, k]` weights; that of the quants begins at 0. Kernels compute the same."""
    n_blocks = n_out * (k // BLOCK)
    high = n_blocks * layout.quant_bytes
    scales = round_up_16(high + n_blocks * layout.high_bytes)
    heads = round_up_16(scales + n_blocks * layout.scale_bytes)
    return Planes(high, scales, heads, round_up_16(heads + n_blocks // layout.super_blocks * layout.head_bytes))


def same_layout(dtype: DType) -> DType:
    """The first type that is packed as this one is: types of one layout share their kernels."""
    return first_of_layout(dtype, QUANT_LAYOUTS)


def check_weight_type(dtype: DType, k: int = 0) -> None:
    """Raises `ShapeError` for a type that is none of weights, or for k elements that do not fill its blocks."""
    if dtype not in FLOAT_TYPES and dtype not in QUANT_LAYOUTS:
        raise ShapeError(f"{dtype} is no type of weights; expected one of {', '.join(map(repr, (*FLOAT_TYPES, *QUANT_LAYOUTS)))}")
    if k < 0 or k % dtype.block_size:
        raise ShapeError(f"{k} elements do not fill blocks of {dtype} ({dtype.block_size} elements each); cut at whole blocks")


def packed_bytes(dtype: DType, n_out: int, k: int) -> int:
    """Bytes that `pack` writes for `[n_out, k]` weights. Raises `ShapeError`."""
    check_weight_type(dtype, k)
    if dtype in FLOAT_TYPES:
        return n_out * round_up_16(k * dtype.block_bytes)
    return planes(QUANT_LAYOUTS[dtype], n_out, k).end


def activation_format(dtype: DType, exact: bool, n_columns: int = 1) -> str:
    """What the product of `n_columns` rows of activations with weights of this type reads: `f32`, `q8`, or `f16` for the tensor cores."""
    if exact or dtype == dtypes.F32:
        return "f32"
    if n_columns > MOST_VECTOR_COLUMNS:
        return "f16"
    return "f32" if dtype in FLOAT_TYPES else "q8"


def activation_row_bytes(fmt: str, k: int) -> int:
    """Bytes of one row of k activations; `q8` rows must be whole blocks of 32. Rows begin at multiples of 16 bytes but for `f32`."""
    if fmt == "f32":
        return 4 * k
    if fmt == "f16":
        return round_up_16(2 * k) + 16
    if k % BLOCK:
        raise ShapeError(f"a row of {k} activations cannot be quantized; expected a multiple of {BLOCK}")
    return round_up_16(k + k // BLOCK * ACTIVATION_META_BYTES)
