"""Quantization to the float and 32-element types, byte for byte against the `gguf` package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from numba_meta import dtypes
from numba_meta.errors import ShapeError
from numba_meta.quants import QUANTIZABLE, dequantize, quantize


def reference(values: np.ndarray, dtype: dtypes.DType) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType(dtype.gguf_id)).view(np.uint8)


def test_types_of_the_cache_can_be_quantized() -> None:
    assert set(dtypes.CACHE_TYPES) <= set(QUANTIZABLE)


@pytest.mark.parametrize("dtype", QUANTIZABLE, ids=repr)
@pytest.mark.parametrize("scale", [1e-6, 0.02, 1.0, 3000.0])
def test_normal_values_equal_the_reference(dtype: dtypes.DType, scale: float) -> None:
    values = (np.random.default_rng(5).standard_normal((33, 160)) * scale).astype(np.float32)
    values[3, 32:64] = 0.0  # a block of zeros
    values[4, :32] = scale  # a block of one value
    ours = quantize(values, dtype)
    assert ours.dtype == np.uint8 and ours.shape == (33, dtype.row_bytes(160))
    np.testing.assert_array_equal(ours, reference(values, dtype))


@given(arrays(np.float32, (2, 64), elements=st.floats(-60000, 60000, width=32, allow_subnormal=False)))
def test_any_values_equal_the_reference(values: np.ndarray) -> None:
    for dtype in QUANTIZABLE:
        np.testing.assert_array_equal(quantize(values, dtype), reference(values, dtype), err_msg=dtype.name)


@pytest.mark.parametrize("dtype", [dtypes.Q8_0, dtypes.Q4_0, dtypes.Q4_1, dtypes.Q5_0, dtypes.Q5_1], ids=repr)
def test_error_stays_within_one_step(dtype: dtypes.DType) -> None:
    values = np.random.default_rng(8).standard_normal((20, 96)).astype(np.float32)
    spread = np.abs(values.reshape(-1, 32)).max(axis=-1) * 2
    n_levels = {"q8_0": 256, "q4_0": 16, "q4_1": 16, "q5_0": 32, "q5_1": 32}[dtype.name]
    error = np.abs(dequantize(quantize(values, dtype), dtype) - values).reshape(-1, 32).max(axis=-1)
    assert (error <= 1.01 * spread / (n_levels - 1)).all()


# not-a-numbers, infinities, two ties, the largest float, the smallest
SPECIAL_BITS = [0x7F800001, 0xFFFFFFFF, 0x7FC00000, 0x7F800000, 0xFF800000, 0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x00000001]


@pytest.mark.parametrize("bits", SPECIAL_BITS)
def test_bf16_of_special_bits(bits: int) -> None:
    values = np.full((1, 4), bits, np.uint32).view(np.float32)
    np.testing.assert_array_equal(quantize(values, dtypes.BF16), reference(values, dtypes.BF16))


def test_wrong_requests_end_in_one_line() -> None:
    with pytest.raises(ShapeError, match="cannot quantize to q4_k"):
        quantize(np.zeros((1, 256), np.float32), dtypes.Q4_K)
    with pytest.raises(ShapeError, match="33 elements"):
        quantize(np.zeros((1, 33), np.float32), dtypes.Q8_0)
