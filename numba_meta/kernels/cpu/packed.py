"""How weights and activations lie in memory for the CPU's matrix products.

Weights: tiles of 16 rows, each one contiguous stream over k. A quantized tile is, per super-block (256 elements; 32 where the type has
no super-blocks, then `d` and `m` are those of the block):

    d    16 float16            scale of each row
    m    16 float16            minimum of each row, where the type has one
    per block of 32 elements:
        scales   16 bytes per group (u8, or i8 where signed), where the type has scales below `d`; then minima, 16 u8 per group
        quants   16 rows interleaved: one 64-byte load gives 4 consecutive elements (bytes) of each row
                 4 bits: 4 loads; the load g holds elements 4g.. in the low and 16+4g.. in the high nibbles
                 8 bits: 8 loads
        high     5 bits: one load, bit g of byte j is the high bit of element 4g+j
                 6 bits: two loads (elements 0..15 and 16..31), bits 2g, 2g+1 of byte j belong to element 4g+j

value = scale * (quant - offset)  or  scale * quant + minimum, where scale = d * s and minimum = m or -(m * s') are exact in float32.
F32, F16 and BF16 tiles hold 16 rows per element of k. Rows beyond `n_out` are zero bytes.

Activations `f32` are plain rows. Activations `q8`: 52 bytes per block of 32 elements (`ACTIVATION_*` below).
"""

from __future__ import annotations

from dataclasses import dataclass

from numba_meta import dtypes
from numba_meta.dtypes import DType
from numba_meta.errors import ShapeError
from numba_meta.kernels.cpu.simd import LANES
from numba_meta.kernels.quant_fields import BLOCK, FLOAT_TYPES, QuantFields, first_of_layout

# One block of quantized activations: value = quant * scale.
ACTIVATION_SCALE = 32  # float32, after 32 int8 quants
ACTIVATION_SCALED_SUM = 36  # float32: scale * (sum of quants)
ACTIVATION_MINUS_SUM = 40  # int32: -(sum of quants)
ACTIVATION_MINUS_HALF_SUMS = 44  # 2 int32: the same for elements 0..15 and 16..31
ACTIVATION_BLOCK_BYTES = 52


@dataclass(frozen=True)
class QuantLayout(QuantFields):
    """A packed quantized type on CPUs: tiles of 16 rows, unsigned quants; scales below `d` are signed where there is an offset."""

    @property
    def head_bytes(self) -> int:
        """Bytes of `d` and `m` in front of a super-block."""
        return 2 * LANES * (2 if self.has_minimum else 1)

    @property
    def scale_bytes(self) -> int:
        """Bytes of scales and minima in a block."""
        return (BLOCK // self.group) * LANES * (2 if self.has_minimum else 1) if self.has_scales else 0

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of 16 rows by 32 elements, without `d` and `m`."""
        return self.scale_bytes + LANES * BLOCK * self.bits // 8

    @property
    def high_offset(self) -> int:
        """Where the high bits begin in a block (5 and 6 bits)."""
        return self.scale_bytes + LANES * BLOCK // 2

    def tile_bytes(self, k: int) -> int:
        """Bytes of a tile of 16 rows by k elements."""
        n_blocks = k // BLOCK
        return n_blocks // self.super_blocks * self.head_bytes + n_blocks * self.block_bytes


_4_BIT_OFFSET = QuantLayout("4o", 4, 8)
_8_BIT_OFFSET = QuantLayout("8o", 8, 128)
_6_BIT_SUPER = QuantLayout("6s", 6, 32, super_blocks=8, group=16)

# Types that share a layout without loss: IQ4_NL's codebook are 8-bit integers; Q3_K's quants -4..3 fit Q6_K's -32..31.
QUANT_LAYOUTS: dict[DType, QuantLayout] = {
    dtypes.Q4_0: _4_BIT_OFFSET,
    dtypes.Q4_1: QuantLayout("4m", 4, 0, has_minimum=True),
    dtypes.Q5_0: QuantLayout("5o", 5, 16),
    dtypes.Q5_1: QuantLayout("5m", 5, 0, has_minimum=True),
    dtypes.Q8_0: _8_BIT_OFFSET,
    dtypes.IQ4_NL: _8_BIT_OFFSET,
    dtypes.Q4_K: QuantLayout("4sm", 4, 0, has_minimum=True, super_blocks=8),
    dtypes.Q5_K: QuantLayout("5sm", 5, 0, has_minimum=True, super_blocks=8),
    dtypes.Q6_K: _6_BIT_SUPER,
    dtypes.Q3_K: _6_BIT_SUPER,
    dtypes.Q2_K: QuantLayout("4sm16", 4, 0, has_minimum=True, super_blocks=8, group=16),
    dtypes.IQ4_XS: QuantLayout("8s", 8, 128, super_blocks=8),
}


def same_layout(dtype: DType) -> DType:
    """The first type that is packed as this one is: types of one layout share their kernels."""
    return first_of_layout(dtype, QUANT_LAYOUTS)


def tile_bytes(dtype: DType, k: int) -> int:
    """Bytes of one packed tile: 16 rows of k elements."""
    if k < 0 or k % dtype.block_size:
        raise ShapeError(f"{k} elements do not fill blocks of {dtype} ({dtype.block_size} elements each); cut at whole blocks")
    if dtype in FLOAT_TYPES:
        return LANES * k * dtype.block_bytes
    if dtype not in QUANT_LAYOUTS:
        raise ShapeError(f"{dtype} is no type of weights; expected one of {', '.join(map(repr, (*FLOAT_TYPES, *QUANT_LAYOUTS)))}")
    return QUANT_LAYOUTS[dtype].tile_bytes(k)


def packed_bytes(dtype: DType, n_out: int, k: int) -> int:
    """Bytes that `pack` writes for `[n_out, k]` weights: whole tiles of 16 rows."""
    return -(-n_out // LANES) * tile_bytes(dtype, k)


def activation_format(dtype: DType, exact: bool, columns: int = 1) -> str:
    """What the product with weights of this type reads: `f32`, or `q8` (quantized to 8 bits) where that is faster and allowed.

    The same for any number of columns at once.
    """
    return "f32" if exact or dtype in FLOAT_TYPES else "q8"


def activation_row_bytes(fmt: str, k: int) -> int:
    """Bytes of one row of k activations; `q8` rows must be whole blocks of 32."""
    if fmt == "f32":
        return 4 * k
    if k % BLOCK:
        raise ShapeError(f"a row of {k} activations cannot be quantized; expected a multiple of {BLOCK}")
    return k // BLOCK * ACTIVATION_BLOCK_BYTES
