"""Every weight type, bit for bit against the `gguf` package, on random blocks and on extreme scales."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from numba_meta import dtypes
from numba_meta.errors import ShapeError
from numba_meta.quants import dequantize, split_blocks

ALL_TYPES = list(dtypes.WEIGHT_TYPES)
BLOCK_TYPES = [dtype for dtype in ALL_TYPES if dtype.is_quantized]
# float16 bit patterns: zeros, subnormals, largest, infinities, quiet and signalling not-a-numbers
EXTREME_HALVES = np.array([0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0xFE01, 0x7C01], np.uint16)
# byte offsets of the float16 fields of a block
HALF_FIELDS = {
    "q8_0": (0,), "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q2_k": (80, 82), "q3_k": (108,), "q4_k": (0, 2),
    "q5_k": (0, 2), "q6_k": (208,), "iq4_nl": (0,), "iq4_xs": (0,),
}  # fmt: skip


def reference(raw: np.ndarray, dtype: dtypes.DType) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(dtype.gguf_id))


def random_bytes(dtype: dtypes.DType, rows: int, blocks: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (rows, blocks * dtype.block_bytes), dtype=np.uint8)


@pytest.mark.parametrize("dtype", ALL_TYPES, ids=repr)
def test_random_blocks_equal_the_reference_bit_for_bit(dtype: dtypes.DType) -> None:
    raw = random_bytes(dtype, 37, 24, seed=dtype.gguf_id)
    ours, theirs = dequantize(raw, dtype), reference(raw, dtype)
    assert ours.dtype == np.float32 and ours.shape == theirs.shape
    np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))


@pytest.mark.parametrize("dtype", BLOCK_TYPES, ids=repr)
def test_extreme_scales_equal_the_reference_bit_for_bit(dtype: dtypes.DType) -> None:
    fields = HALF_FIELDS[dtype.name]
    n = len(EXTREME_HALVES)
    raw = random_bytes(dtype, n**2, 1, seed=7)
    for i, field in enumerate(fields):
        column = np.tile(EXTREME_HALVES, n) if i == 0 else np.repeat(EXTREME_HALVES, n)
        raw[:, field : field + 2] = column.view(np.uint8).reshape(-1, 2)
    ours, theirs = dequantize(raw, dtype), reference(raw, dtype)
    np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))


@pytest.mark.parametrize("dtype", BLOCK_TYPES, ids=repr)
@pytest.mark.parametrize("fill", [0x00, 0xFF])
def test_blocks_of_equal_bits(dtype: dtypes.DType, fill: int) -> None:
    raw = np.full((3, dtype.block_bytes), fill, np.uint8)
    for field in HALF_FIELDS[dtype.name]:
        raw[:, field : field + 2] = np.array([0.5], np.float16).view(np.uint8)
    np.testing.assert_array_equal(dequantize(raw, dtype).view(np.uint32), reference(raw, dtype).view(np.uint32))


@pytest.mark.parametrize("dtype", BLOCK_TYPES, ids=repr)
def test_result_does_not_depend_on_chunks_or_on_leading_axes(dtype: dtypes.DType) -> None:
    n_blocks = 3 * ((1 << 18) // dtype.block_size) + 5  # more than three chunks
    raw = random_bytes(dtype, 1, n_blocks, seed=3)
    whole = dequantize(raw[0], dtype)
    assert whole.shape == (n_blocks * dtype.block_size,)
    pick = slice(n_blocks // 2 * dtype.block_size, (n_blocks // 2 + 6) * dtype.block_size)
    some = raw[0, n_blocks // 2 * dtype.block_bytes : (n_blocks // 2 + 6) * dtype.block_bytes].reshape(2, 1, 3, -1)
    nested = dequantize(some, dtype)
    assert nested.shape == (2, 1, 3, dtype.block_size)
    np.testing.assert_array_equal(nested.reshape(-1).view(np.uint32), whole[pick].view(np.uint32))


@pytest.mark.parametrize("dtype", ALL_TYPES, ids=repr)
def test_no_rows_and_strided_rows(dtype: dtypes.DType) -> None:
    assert dequantize(np.empty((0, 2 * dtype.block_bytes), np.uint8), dtype).shape == (0, 2 * dtype.block_size)
    raw = random_bytes(dtype, 6, 4, seed=11)
    strided, packed = raw[::2, dtype.block_bytes : 3 * dtype.block_bytes], raw[::2, dtype.block_bytes : 3 * dtype.block_bytes].copy()
    np.testing.assert_array_equal(dequantize(strided, dtype).view(np.uint32), reference(packed, dtype).view(np.uint32))


@pytest.mark.parametrize("dtype", BLOCK_TYPES, ids=repr)
def test_fields_give_the_values_by_the_documented_formula(dtype: dtypes.DType) -> None:
    raw = random_bytes(dtype, 5, 2, seed=19).reshape(5, 1, -1)
    for field in HALF_FIELDS[dtype.name]:
        for block in range(2):
            at = block * dtype.block_bytes + field
            raw[..., at : at + 2] = np.array([0.37 + field + block], np.float16).view(np.uint8)
    blocks = split_blocks(raw, dtype)
    n_elements = 2 * dtype.block_size
    assert blocks.dtype == dtype and blocks.quants.shape == (5, 1, n_elements) and blocks.scale.shape == (5, 1, 2)
    assert blocks.quants.dtype in (np.int8, np.uint8) and blocks.scale.dtype == np.float16
    scale = np.repeat(blocks.scale.astype(np.float64), dtype.block_size, axis=-1)
    if blocks.sub_scales is not None:
        assert blocks.sub_scales.shape == (5, 1, n_elements // blocks.group_size)
        scale = scale * np.repeat(blocks.sub_scales.astype(np.float64), blocks.group_size, axis=-1)
    values = scale * blocks.quants
    if blocks.minimum is not None:
        minimum = np.repeat(blocks.minimum.astype(np.float64), dtype.block_size, axis=-1)
        if blocks.sub_minimums is None:
            values += minimum
        else:
            values -= minimum * np.repeat(blocks.sub_minimums.astype(np.float64), blocks.group_size, axis=-1)
    np.testing.assert_allclose(dequantize(raw, dtype), values, rtol=1e-6, atol=1e-3 * np.finfo(np.float32).eps * np.abs(values).max())


def test_wrong_bytes_end_in_one_line() -> None:
    with pytest.raises(ShapeError, match=r"\[2, 35\].*multiple of 34"):
        dequantize(np.zeros((2, 35), np.uint8), dtypes.Q8_0)
    with pytest.raises(ShapeError, match="int8"):
        split_blocks(np.zeros((2, 34), np.int8), dtypes.Q8_0)
    with pytest.raises(ShapeError, match="f32 has no quantized blocks"):
        split_blocks(np.zeros((2, 4), np.uint8), dtypes.F32)
    with pytest.raises(ShapeError, match="i32"):
        dequantize(np.zeros((2, 4), np.uint8), dtypes.I32)
