"""Packed weights hold exactly what the file's rows hold, for every type, wherever the rows lie; rows are looked up bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels.cpu.packed_weights import Guarded, Weights, make_weights, pack_weights, random_raw

from numba_meta import dtypes
from numba_meta.dtypes import DType
from numba_meta.errors import ShapeError
from numba_meta.kernels.cpu import packed, packing
from numba_meta.kernels.cpu.get_rows import get_rows_kernel
from numba_meta.kernels.cpu.isa import Isa
from numba_meta.kernels.cpu.packing import pack_kernel
from numba_meta.quants import dequantize

ALL_TYPES = dtypes.WEIGHT_TYPES


def look_up(weights: Weights, ids: np.ndarray, first: int = 0, threads: int = 1, isa: Isa | None = None) -> np.ndarray:
    out = Guarded(len(ids), 4 * weights.k, 4 * weights.k + 12)
    get_rows_kernel(weights.dtype, isa)(
        w=weights.tiles,
        ids=ids.astype(np.int32),
        first=first,
        count=weights.n_out,
        k=weights.k,
        y=out.address,
        y_stride=out.stride,
        n_rows=np.array([len(ids)]),
        threads=threads,
    )
    return out.read(np.float32)


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("dtype", ALL_TYPES, ids=repr)
def test_packed_rows_are_the_dequantized_ones_bit_for_bit(dtype: DType) -> None:
    rng = np.random.default_rng()
    for n_out in (1, 16, 37):
        weights = make_weights(dtype, n_out, 512, rng)
        assert_same_bits(look_up(weights, np.arange(n_out), threads=3), weights.values)


@pytest.mark.parametrize("dtype", ALL_TYPES, ids=repr)
def test_packs_a_column_slice_of_wider_read_only_rows(dtype: DType) -> None:
    rng = np.random.default_rng()
    raw = random_raw(dtype, 19, 1024, rng)
    raw.flags.writeable = False
    begin, end = dtype.row_bytes(256), dtype.row_bytes(768)
    weights = pack_weights(dtype, 19, 512, raw[:, begin:end])
    ids = rng.permutation(19)
    assert_same_bits(look_up(weights, ids), dequantize(raw, dtype)[ids, 256:768])


@pytest.mark.parametrize("dtype", [dtypes.Q8_0, dtypes.F16], ids=repr)
def test_threads_pack_the_same_bytes(dtype: DType) -> None:
    weights = make_weights(dtype, 45, 64, np.random.default_rng())
    out = Guarded(1, weights.tiles.size)
    pack_kernel(dtype)(w=weights.raw, row_stride=weights.raw.strides[0], n_out=45, k=64, out=out.address, threads=4)
    np.testing.assert_array_equal(out.read()[0], weights.tiles)


def test_the_padding_of_a_last_tile_is_zero() -> None:
    rng = np.random.default_rng()
    blocks = make_weights(dtypes.Q4_0, 5, 64, rng).tiles.reshape(2, 32 + 256)
    assert not blocks[:, :32].reshape(2, 16, 2)[:, 5:].any()
    assert not blocks[:, 32:].reshape(2, 4, 16, 4)[:, :, 5:].any()
    assert not make_weights(dtypes.BF16, 5, 64, rng).tiles.reshape(64, 16, 2)[:, 5:].any()


def test_rows_outside_the_table_are_zero() -> None:
    weights = make_weights(dtypes.Q4_0, 20, 96, np.random.default_rng())
    rows = look_up(weights, np.array([99, 100, 119, 120, -1, 2**31 - 1, 107]), first=100, threads=2)
    assert_same_bits(rows[[1, 2, 6]], weights.values[[0, 19, 7]])
    assert not rows[[0, 3, 4, 5]].any()


def test_no_rows_are_looked_up_in_an_empty_table() -> None:
    weights = make_weights(dtypes.Q6_K, 0, 256, np.random.default_rng())
    assert weights.tiles.size == 0
    assert not look_up(weights, np.array([0, 1])).any()
    assert look_up(weights, np.array([], np.int32)).shape[0] == 0


@pytest.mark.parametrize("dtype", [dtypes.F32, dtypes.F16, dtypes.BF16], ids=repr)
def test_float_rows_of_any_length(dtype: DType) -> None:
    weights = make_weights(dtype, 18, 45, np.random.default_rng())
    assert_same_bits(look_up(weights, np.arange(18), threads=2), weights.values)


@pytest.mark.parametrize("isa", [Isa.PORTABLE, Isa.AVX2], ids=lambda isa: isa.name)
def test_every_float16_is_converted_exactly(isa: Isa) -> None:
    raw = np.arange(65536, dtype=np.uint16).reshape(64, 1024).view(np.uint8)
    weights = pack_weights(dtypes.F16, 64, 1024, raw)
    rows = look_up(weights, np.arange(64), isa=isa)
    numbers = ~np.isnan(weights.values)
    assert np.isnan(rows[~numbers]).all()
    assert_same_bits(rows[numbers], weights.values[numbers])


@pytest.mark.parametrize("dtype", [dtypes.Q5_1, dtypes.Q2_K, dtypes.Q6_K], ids=repr)
def test_the_portable_look_up_has_the_same_bits(dtype: DType) -> None:
    weights = make_weights(dtype, 5, 256, np.random.default_rng())
    assert_same_bits(look_up(weights, np.arange(5), isa=Isa.PORTABLE), weights.values)


@given(st.sampled_from(ALL_TYPES), st.integers(0, 10_000), st.integers(0, 40))
def test_packed_bytes_are_whole_tiles_and_near_the_file(dtype: DType, n_out: int, n_super_blocks: int) -> None:
    k = 256 * n_super_blocks
    n_bytes = packed.packed_bytes(dtype, n_out, k)
    file_bytes = -(-n_out // 16) * 16 * dtype.row_bytes(k)
    repacked = dtype in (dtypes.Q2_K, dtypes.Q3_K, dtypes.IQ4_NL, dtypes.IQ4_XS)
    assert file_bytes <= n_bytes <= file_bytes * (2 if repacked else 1.03)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: packed.packed_bytes(dtypes.Q4_K, 16, 288), "288 elements do not fill blocks of q4_k"),
        (lambda: packed.packed_bytes(dtypes.I32, 16, 32), "i32 is no type of weights"),
        (lambda: packed.activation_row_bytes("q8", 33), "33 activations cannot be quantized"),
        (lambda: packing.pack(np.zeros((2, 35), np.uint8), dtypes.Q8_0, np.zeros(9999, np.uint8)), "expected uint8"),
        (lambda: packing.pack(np.zeros((2, 34), np.uint8), dtypes.Q8_0, np.zeros(543, np.uint8)), "expected 544"),
        (lambda: packing.pack(np.zeros((2, 68), np.uint8)[:, ::2], dtypes.Q8_0, np.zeros(544, np.uint8)), "expected uint8"),
    ],
)
def test_wrong_shapes_are_one_clear_line(call, words: str) -> None:
    with pytest.raises(ShapeError) as caught:
        call()
    assert words in str(caught.value) and "\n" not in str(caught.value)
