"""Matrix products on a GPU against float64: right for every type and shape, and the same bits for a row whatever is computed beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernels.cuda import on_gpu
from kernels.cuda.weights import Weights, make_weights, pack_weights, q8_bytes, quantized_rows, relative_error

from numba_meta import dtypes
from numba_meta.dtypes import DType
from numba_meta.kernels.cuda import emit, packed
from numba_meta.kernels.cuda.get_rows import get_rows_kernel
from numba_meta.kernels.cuda.kernel import CudaKernel
from numba_meta.kernels.cuda.matmul import COLUMNS, TILE_COLUMNS, matmul_kernel
from numba_meta.kernels.cuda.matmul_several import several_kernel
from numba_meta.kernels.cuda.quantize import quantize_kernel

pytestmark = pytest.mark.gpu
BLOCK_TYPES = [dtype for dtype in dtypes.WEIGHT_TYPES if dtype.is_quantized]
FLOAT_TYPES = [dtype for dtype in dtypes.WEIGHT_TYPES if not dtype.is_quantized]
DIRECT_TYPES = [dtypes.Q4_1, dtypes.Q5_0, dtypes.Q6_K, dtypes.Q8_0, dtypes.Q4_K]  # all bit widths; offsets, minima, groups


def random_rows(rows: int, k: int) -> np.ndarray:
    return np.random.default_rng().standard_normal((rows, k)).astype(np.float32)


def quantize(x: np.ndarray, form: str = "q8") -> np.ndarray:
    """x in a form, uint8 `[rows, activation_row_bytes]`, by the GPU."""
    gpu, (rows, k) = on_gpu.open_gpu(), x.shape
    row_bytes = packed.activation_row_bytes(form, k)
    source, out = gpu.upload(x), gpu.empty((rows + 1) * row_bytes)
    n_rows = gpu.upload(np.array([rows]))
    gpu.run(quantize_kernel(form), rows + 1, x=source, x_stride=4 * k, y=out, y_stride=row_bytes, n=k, n_rows=n_rows)
    all_rows = out.download(np.uint8, (rows + 1, row_bytes))
    assert (all_rows[rows] == 0xFF).all()
    return all_rows[:rows]


def multiply(
    weights: Weights, exact: bool, n_columns: int, x: np.ndarray, rows: int | None = None, kernel: CudaKernel | None = None
) -> np.ndarray:
    """The first `rows` rows of x (in the form that is read, as bytes) times weights; checks that nothing else is written."""
    gpu, rows, n_out = on_gpu.open_gpu(), len(x) if rows is None else rows, weights.n_out
    kernel = kernel or matmul_kernel(weights.dtype, exact, n_columns)
    x = np.ascontiguousarray(x).view(np.uint8)
    out = gpu.empty((len(x) + 1) * (n_out + 5) * 4)
    planes = gpu.upload(np.append(weights.planes, np.zeros(16, np.uint8)))  # never nothing
    arguments: dict[str, Any] = {"w": planes, "x": gpu.upload(x), "x_stride": x.strides[0], "n_rows": gpu.upload(np.array([rows]))}
    gpu.run(kernel, len(x), y=out, y_stride=4 * (n_out + 5), n_out=n_out, k=weights.k, **arguments)
    y = out.download(np.float32, (len(x) + 1, n_out + 5))
    assert np.isnan(y[rows:]).all() and np.isnan(y[:, n_out:]).all()
    return y[:rows, :n_out]


def bits(y: np.ndarray) -> list[bytes]:
    return [row.tobytes() for row in y]


def values_read(weights: Weights, exact: bool, n_columns: int, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x as bytes in the form that is read, and the values in it."""
    form = packed.activation_format(weights.dtype, exact, n_columns)
    if form == "f32":
        return x, x
    if form == "q8":
        quants, scales = quantized_rows(x)
        return q8_bytes(x), quants * np.repeat(scales, 32, 1).astype(np.float64)
    halves = quantize(x, form)
    k = x.shape[1]
    scale = np.ascontiguousarray(halves[:, -16:-12]).view(np.float32).astype(np.float64)
    return halves, np.ascontiguousarray(halves[:, : 2 * k]).view(np.float16) * scale


@pytest.mark.parametrize("k", [32, 96, 576, 4096])
def test_rows_are_quantized_as_documented(k: int) -> None:
    x = random_rows(5, k) * np.logspace(-3, 3, 5, dtype=np.float32)[:, None]
    x[1, :32] = 0.0
    x[2, 3] = 1e-38
    used = k + k // 4  # what follows, to a multiple of 16 bytes, is not read
    np.testing.assert_array_equal(quantize(x)[:, :used], q8_bytes(x)[:, :used])


@pytest.mark.parametrize("k", [1, 2, 45, 576, 4096])
def test_rows_become_halves_within_their_rounding(k: int) -> None:
    x = random_rows(6, k) * np.array([1e-20, 1e-3, 1, 1e5, 1e20, 1], np.float32)[:, None]
    x[5] = 0.0
    halves = quantize(x, "f16")
    scale = np.ascontiguousarray(halves[:, -16:-12]).view(np.float32)
    mantissa, _ = np.frexp(scale)
    assert (mantissa == 0.5).all()  # powers of two
    stored = np.ascontiguousarray(halves[:, : 2 * k]).view(np.float16).astype(np.float64)
    largest = np.abs(x).max(1, keepdims=True)
    assert (np.abs(stored * scale - x) <= np.maximum(np.abs(x) * 2.0**-11, largest * 2.0**-38)).all()
    assert (np.abs(stored[:5]).max(1) >= 2.0**14).all() and (np.abs(stored) <= 2.0**15).all()


def test_values_that_are_not_finite_poison_their_block_or_row() -> None:
    for bad in (np.nan, np.inf, -np.inf):
        x = random_rows(3, 96)
        x[1, 40] = bad
        scales = np.ascontiguousarray(quantize(x)[:, 96:120]).view(np.float32).reshape(3, 3, 2)[:, :, 0]
        assert np.isnan(scales).tolist() == [[False] * 3, [False, True, False], [False] * 3]
        halves = quantize(x, "f16")
        assert np.isnan(np.ascontiguousarray(halves[:, -16:-12]).view(np.float32)[:, 0]).tolist() == [False, True, False]


@pytest.mark.parametrize("n_columns", [1, 4, 16])
@pytest.mark.parametrize("dtype", BLOCK_TYPES, ids=repr)
def test_fast_products_are_right(dtype: DType, n_columns: int) -> None:
    for n_out, k in ((37, 768), (16, 4096 + 512), (5, 12288)):
        weights = make_weights(dtype, n_out, k, np.random.default_rng())
        x, values = values_read(weights, False, n_columns, random_rows(n_columns, k))
        y = multiply(weights, False, n_columns, x)
        assert relative_error(y, weights.values, values) < 5e-7


@pytest.mark.parametrize("k", [32, 96, 544, 576, 1536])
@pytest.mark.parametrize("dtype", [dtypes.Q4_0, dtypes.Q5_1, dtypes.Q8_0], ids=repr)
def test_fast_products_of_any_number_of_blocks(dtype: DType, k: int) -> None:
    weights = make_weights(dtype, 33, k, np.random.default_rng())
    for n_columns in (1, 2, 8):
        x, values = values_read(weights, False, n_columns, random_rows(n_columns, k))
        assert relative_error(multiply(weights, False, n_columns, x), weights.values, values) < 5e-7


@pytest.mark.parametrize("dtype", dtypes.WEIGHT_TYPES, ids=repr)
def test_exact_products_are_right(dtype: DType) -> None:
    for n_out, k, rows in ((37, 512, 1), (21, 4096 + 768, 7), (5, 256, 20)):
        weights = make_weights(dtype, n_out, k, np.random.default_rng())
        x = random_rows(rows, k)
        for n_columns in (1, 4, TILE_COLUMNS):
            assert relative_error(multiply(weights, True, n_columns, x), weights.values, x) < 5e-7


@pytest.mark.parametrize("dtype", [*BLOCK_TYPES, dtypes.F16, dtypes.BF16], ids=repr)
def test_products_on_tensor_cores_are_right(dtype: DType) -> None:
    """Activations as read; weights, and their scales and minima, are rounded to float16 (half a unit: 2^-11). Small and large tiles."""
    for n_out, k, rows in ((37, 256, 20), (300, 1024, 129), (4400, 512, 256), (5, 4096, 17)):
        weights = make_weights(dtype, n_out, k, np.random.default_rng())
        x, values = values_read(weights, False, TILE_COLUMNS, random_rows(rows, k))
        y = multiply(weights, False, TILE_COLUMNS, x, rows - 3)
        assert relative_error(y, weights.values, values[: rows - 3]) < 2.0**-11, (n_out, k, rows)


@pytest.mark.parametrize("dtype", [dtypes.Q4_K, dtypes.Q8_0, dtypes.F16], ids=repr)
def test_products_on_older_tensor_cores_are_the_same(dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code for sm_75, compiled for this GPU: products of 8 elements at a time, no asynchronous copies."""
    kernel = matmul_kernel(dtype, False, TILE_COLUMNS)
    older = CudaKernel(kernel.function, f"{kernel.name}_older", kernel.launch, kernel.max_threads, kernel.capability)
    for n_out, rows in ((70, 40), (4400, 256)):
        weights = make_weights(dtype, n_out, 512, np.random.default_rng())
        x, values = values_read(weights, False, TILE_COLUMNS, random_rows(rows, 512))
        with monkeypatch.context() as patch:
            patch.setattr(emit, "compiling_for", lambda: (7, 5))
            y = multiply(weights, False, TILE_COLUMNS, x, None, older)
        assert relative_error(y, weights.values, values) < 2.0**-11


@pytest.mark.parametrize("dtype", [dtypes.Q4_0, dtypes.Q8_0, dtypes.F16, dtypes.BF16], ids=repr)
@pytest.mark.parametrize("k", [1, 9, 32, 96, 544, 576])
def test_products_on_tensor_cores_of_any_length(dtype: DType, k: int) -> None:
    if k % dtype.block_size:
        k = 32 * k
    weights = make_weights(dtype, 131, k, np.random.default_rng())
    x, values = values_read(weights, False, TILE_COLUMNS, random_rows(33, k))
    y = multiply(weights, False, TILE_COLUMNS, x)
    assert relative_error(y, weights.values, values) < 2.0**-11


@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=repr)
@pytest.mark.parametrize("k", [1, 31, 45, 2050])
def test_float_rows_of_any_length(dtype: DType, k: int) -> None:
    weights = make_weights(dtype, 17, k, np.random.default_rng())
    x = random_rows(6, k)
    assert relative_error(multiply(weights, False, 8, x), weights.values, x) < 5e-7


@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=repr)
def test_bits_do_not_depend_on_where_activations_lie(dtype: DType) -> None:
    weights = make_weights(dtype, 9, 1000, np.random.default_rng())
    x = random_rows(3, 1000)
    wide = np.zeros((3, 1001), np.float32)
    wide[:, :1000] = x
    assert bits(multiply(weights, True, 4, wide)) == bits(multiply(weights, True, 4, x))


@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
@pytest.mark.parametrize("dtype", [*DIRECT_TYPES, dtypes.F16, dtypes.F32], ids=repr)
@pytest.mark.parametrize(("n_out", "k"), [(17, 256), (131, 512), (6, 5632)])
def test_rows_stand_alone(dtype: DType, exact: bool, n_out: int, k: int) -> None:
    """A row's bits are those that it has alone, in any batch of up to 16 rows, at any place in it (in exact mode in any batch)."""
    weights = make_weights(dtype, n_out, k, np.random.default_rng())
    x, _ = values_read(weights, exact, 1, random_rows(17, k))
    alone = [bits(multiply(weights, exact, 1, row[None]))[0] for row in x]
    for n_columns in COLUMNS:
        if packed.activation_format(dtype, exact, n_columns) == "f16":
            continue
        for rows in (0, 1, 2, 3, 5, 16, 17):
            assert bits(multiply(weights, exact, n_columns, x, rows)) == alone[:rows], (n_columns, rows)
    assert bits(multiply(weights, exact, 16, x[:16][::-1])) == alone[:16][::-1]


@pytest.mark.parametrize("dtype", [dtypes.Q4_K, dtypes.Q8_0, dtypes.F16], ids=repr)
@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
def test_output_rows_stand_alone(dtype: DType, exact: bool) -> None:
    """Pieces of the weight rows, cut anywhere, give the columns that the whole gives."""
    whole = make_weights(dtype, 50, 512, np.random.default_rng())
    x, _ = values_read(whole, exact, 4, random_rows(4, 512))
    y = multiply(whole, exact, 4, x)
    for begin, end in ((0, 1), (3, 20), (16, 32), (33, 50), (7, 7)):
        piece = pack_weights(dtype, end - begin, 512, whole.raw[begin:end])
        for n_columns in (1, 4):
            assert bits(multiply(piece, exact, n_columns, x)) == bits(y[:, begin:end]), (begin, end, n_columns)


@pytest.mark.parametrize("n_columns", [1, 4])
@pytest.mark.parametrize("dtype", [dtypes.Q4_0, dtypes.Q6_K], ids=repr)
def test_several_weights_at_once_have_the_bits_of_single_ones(dtype: DType, n_columns: int) -> None:
    gpu, k = on_gpu.open_gpu(), 9216
    for sizes in ((70, 9, 0), (33, 0, 17), (8, 8, 8)):
        weights = [make_weights(dtype, n_out, k, np.random.default_rng()) for n_out in sizes]
        x, _ = values_read(weights[0], False, n_columns, random_rows(n_columns, k))
        arguments: dict[str, Any] = {"x": gpu.upload(x), "x_stride": x.strides[0], "k": k, "n_rows": gpu.upload(np.array([n_columns]))}
        outs = [gpu.empty((n_columns + 1) * 4 * (n + 3)) for n in sizes]
        for i, (weight, out) in enumerate(zip(weights, outs, strict=True)):
            arguments |= {f"w{i}": gpu.upload(weight.planes), f"y{i}": out, f"y{i}_stride": 4 * (weight.n_out + 3), f"n{i}": weight.n_out}
        gpu.run(several_kernel(packed.same_layout(dtype), False, n_columns), n_columns, **arguments)
        for weight, out in zip(weights, outs, strict=True):
            y = out.download(np.float32, (n_columns + 1, weight.n_out + 3))
            assert np.isnan(y[n_columns:]).all() and np.isnan(y[:, weight.n_out :]).all()
            assert bits(y[:n_columns, : weight.n_out]) == bits(multiply(weight, False, n_columns, x))


@pytest.mark.parametrize("dtype", [dtypes.Q8_0, dtypes.Q5_0, dtypes.Q6_K], ids=repr)
def test_largest_integers_do_not_overflow(dtype: DType) -> None:
    """Quants of all ones or all zeros against activations at +-127."""
    for fill in (0x00, 0x80, 0xFF, 0x7F):
        raw = np.full((16, dtype.row_bytes(256)), fill, np.uint8)
        field = 208 if dtype is dtypes.Q6_K else 0
        raw.reshape(-1, dtype.block_bytes)[:, field : field + 2] = np.float16([1.0]).view(np.uint8)
        weights = pack_weights(dtype, 16, 256, raw)
        for signs in (np.ones(256), -np.ones(256), np.tile([1, 1, -1, -1], 64), np.tile([1, -1], 128)):
            x, values = values_read(weights, False, 1, signs.astype(np.float32)[None])
            assert relative_error(multiply(weights, False, 1, x), weights.values, values) < 5e-7


@pytest.mark.parametrize("n_columns", COLUMNS)
@pytest.mark.parametrize("dtype", [dtypes.Q4_K, dtypes.Q8_0, dtypes.F16, dtypes.F32], ids=repr)
def test_nothing_to_add_gives_zeros_and_nothing_to_write_writes_nothing(dtype: DType, n_columns: int) -> None:
    no_k = make_weights(dtype, 21, 0, np.random.default_rng())
    row_bytes = max(4, packed.activation_row_bytes(packed.activation_format(dtype, False, n_columns), 0))
    unwritten = np.full((3, row_bytes // 4), np.nan, np.float32)  # `f16` rows have a scale even then, which nobody writes
    y = multiply(no_k, False, n_columns, unwritten)
    assert y.shape == (3, 21) and not y.any()
    no_rows = make_weights(dtype, 0, 256, np.random.default_rng())
    x, _ = values_read(no_rows, False, n_columns, random_rows(3, 256))
    assert multiply(no_rows, False, n_columns, x).size == 0


def test_not_a_number_stays_in_its_row() -> None:
    weights = make_weights(dtypes.Q4_1, 20, 64, np.random.default_rng())
    x = random_rows(5, 64)
    x[2, 40] = np.nan
    for exact, n_columns in ((False, 8), (True, 8), (False, TILE_COLUMNS)):
        form = packed.activation_format(dtypes.Q4_1, exact, n_columns)
        y = multiply(weights, exact, n_columns, x if form == "f32" else quantize(x, form))
        assert np.isnan(y).all(1).tolist() == [False, False, True, False, False]
        assert not np.isnan(y[[0, 1, 3, 4]]).any()


@pytest.mark.parametrize("dtype", dtypes.WEIGHT_TYPES, ids=repr)
def test_rows_are_looked_up_bit_for_bit(dtype: DType) -> None:
    gpu = on_gpu.open_gpu()
    k = 1024 if dtype.is_quantized else 1021
    weights = make_weights(dtype, 23, k, np.random.default_rng())
    ids = np.array([107, 99, 100, 122, 123, -1, 111, 5], np.int32)
    out = gpu.empty(8 * (k + 3) * 4)
    arguments: dict[str, Any] = {"w": gpu.upload(weights.planes), "ids": gpu.upload(ids), "n_rows": gpu.upload(np.array([7]))}
    gpu.run(get_rows_kernel(dtype), 8, first=100, count=23, k=k, y=out, y_stride=4 * (k + 3), **arguments)
    y = out.download(np.float32, (8, k + 3))
    assert np.isnan(y[7]).all() and np.isnan(y[:, k:]).all()
    np.testing.assert_array_equal(y[[0, 2, 3, 6], :k].view(np.uint32), weights.values[[7, 0, 22, 11]].view(np.uint32))
    assert not y[[1, 4, 5], :k].any()
