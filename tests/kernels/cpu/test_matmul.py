"""Matrix products of packed weights: right to the last bit, and the same bits for a row whatever is computed beside it, on every level."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import numpy as np
import pytest
from kernels.cpu.matmul_reference import dequantized_activations, exact_product, fast_product, relative_error
from kernels.cpu.packed_weights import activations, make_weights, multiply, pack_weights
from llvmlite.binding import get_host_cpu_features

from numba_meta import dtypes
from numba_meta.dtypes import DType
from numba_meta.errors import ShapeError, UsageError
from numba_meta.kernels.cpu.isa import Isa
from numba_meta.kernels.cpu.matmul import choose_columns, matmul_kernel
from numba_meta.kernels.cpu.packed import QUANT_LAYOUTS

BLOCK_TYPES = [dtype for dtype in dtypes.WEIGHT_TYPES if dtype.is_quantized]
FLOAT_TYPES = [dtype for dtype in dtypes.WEIGHT_TYPES if not dtype.is_quantized]
DIRECT_TYPES = [dtypes.Q4_1, dtypes.Q5_0, dtypes.Q6_K, dtypes.Q8_0]  # 4, 5, 6, 8 bits; with and without offsets, minima, scale groups


def bits(y: np.ndarray) -> list[bytes]:
    """Each row's bytes."""
    return [row.tobytes() for row in y]


def random_rows(rows: int, k: int) -> np.ndarray:
    return np.random.default_rng().standard_normal((rows, k)).astype(np.float32)


@pytest.mark.parametrize("dtype", BLOCK_TYPES, ids=repr)
def test_fast_products_are_the_documented_operations_bit_for_bit(dtype: DType) -> None:
    weights = make_weights(dtype, 37, 768, np.random.default_rng())
    x = activations(weights, False, random_rows(11, 768))
    y = multiply(matmul_kernel(dtype, False, 8), weights, x, threads=2)
    np.testing.assert_array_equal(y, fast_product(weights, x))
    quants, scales = dequantized_activations(x)
    assert relative_error(y, weights, quants * np.repeat(scales, 32, 1).astype(np.float64)) < 5e-7


@pytest.mark.parametrize("dtype", dtypes.WEIGHT_TYPES, ids=repr)
def test_exact_products_are_the_documented_operations_bit_for_bit(dtype: DType) -> None:
    weights = make_weights(dtype, 37, 512, np.random.default_rng())
    x = random_rows(7, 512)
    y = multiply(matmul_kernel(dtype, True, 4), weights, x, threads=2)
    np.testing.assert_array_equal(y, exact_product(weights, x))
    assert relative_error(y, weights, x) < 5e-7


@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=repr)
@pytest.mark.parametrize("k", [1, 31, 45])
def test_float_rows_of_any_length(dtype: DType, k: int) -> None:
    weights = make_weights(dtype, 17, k, np.random.default_rng())
    x = random_rows(6, k)
    np.testing.assert_array_equal(multiply(matmul_kernel(dtype, False, 8), weights, x), exact_product(weights, x))


@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
@pytest.mark.parametrize("dtype", DIRECT_TYPES, ids=repr)
@pytest.mark.parametrize(("n_out", "k"), [(17, 256), (397, 256), (16, 2048)])
def test_rows_stand_alone(dtype: DType, exact: bool, n_out: int, k: int) -> None:
    """A row's bits are those that it has alone, in any batch, at any place in it, in any blocking, on any number of threads."""
    weights = make_weights(dtype, n_out, k, np.random.default_rng())
    x = activations(weights, exact, random_rows(17, k))
    alone = [bits(multiply(matmul_kernel(dtype, exact, 1), weights, row[None]))[0] for row in x]
    for columns in (1, 4, 8):
        kernel = matmul_kernel(dtype, exact, columns)
        for rows in (0, 1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17):
            for threads in (1, 2, 3):
                assert bits(multiply(kernel, weights, x, rows, threads)) == alone[:rows], (columns, rows, threads)
        assert bits(multiply(kernel, weights, x[::-1].copy())) == alone[::-1]


@pytest.mark.parametrize("dtype", [dtypes.Q4_K, dtypes.Q8_0, dtypes.F16], ids=repr)
@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
def test_output_rows_stand_alone(dtype: DType, exact: bool) -> None:
    """Pieces of the weight rows, cut anywhere, give the columns that the whole gives."""
    whole = make_weights(dtype, 50, 512, np.random.default_rng())
    x = activations(whole, exact, random_rows(5, 512))
    y = multiply(matmul_kernel(dtype, exact, 4), whole, x)
    for begin, end in ((0, 1), (3, 20), (16, 32), (33, 50), (7, 7)):
        piece = pack_weights(dtype, end - begin, 512, whole.raw[begin:end])
        assert bits(multiply(matmul_kernel(dtype, exact, 8), piece, x, threads=2)) == bits(y[:, begin:end]), (begin, end)


@pytest.mark.parametrize("isa", [Isa.PORTABLE, Isa.AVX2], ids=lambda isa: isa.name)
@pytest.mark.parametrize(
    ("dtype", "exact", "columns"),
    [(dtype, False, 4) for dtype in DIRECT_TYPES]
    + [(dtypes.Q8_0, False, 1), (dtypes.Q2_K, False, 8), (dtypes.Q4_K, True, 4), (dtypes.F16, True, 1)],
)
def test_every_level_of_instructions_has_the_same_bits(dtype: DType, exact: bool, columns: int, isa: Isa) -> None:
    weights = make_weights(dtype, 37, 512, np.random.default_rng())
    x = activations(weights, exact, random_rows(6, 512))
    best, lower = matmul_kernel(dtype, exact, columns), matmul_kernel(dtype, exact, columns, isa)
    assert lower.name.endswith(isa.name.lower())
    assert bits(multiply(lower, weights, x, threads=2)) == bits(multiply(best, weights, x))


@pytest.mark.parametrize("dtype", [dtypes.Q8_0, dtypes.Q5_0, dtypes.Q6_K], ids=repr)
@pytest.mark.parametrize("isa", list(Isa), ids=lambda isa: isa.name)
def test_largest_integers_do_not_saturate(dtype: DType, isa: Isa) -> None:
    """Quants of all ones or all zeros against activations at +-127: the sums of 16 bits on the way hold them."""
    for fill in (0x00, 0x80, 0xFF, 0x7F):
        raw = np.full((16, dtype.row_bytes(256)), fill, np.uint8)
        field = 208 if dtype is dtypes.Q6_K else 0
        raw.reshape(-1, dtype.block_bytes)[:, field : field + 2] = np.float16([1.0]).view(np.uint8)
        weights = pack_weights(dtype, 16, 256, raw)
        for signs in (np.ones(256), -np.ones(256), np.tile([1, 1, -1, -1], 64), np.tile([1, -1], 128)):
            x = activations(weights, False, signs.astype(np.float32)[None])
            np.testing.assert_array_equal(multiply(matmul_kernel(dtype, False, 4, isa), weights, x), fast_product(weights, x))


@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
@pytest.mark.parametrize("dtype", [dtypes.Q4_K, dtypes.Q8_0, dtypes.F32], ids=repr)
def test_nothing_to_add_gives_zeros_and_nothing_to_write_writes_nothing(dtype: DType, exact: bool) -> None:
    rng = np.random.default_rng()
    kernel = matmul_kernel(dtype, exact, 4)
    no_k = make_weights(dtype, 21, 0, rng)
    y = multiply(kernel, no_k, np.zeros((3, 0), np.float32), threads=2)
    assert y.shape == (3, 21) and not y.any()
    no_rows = make_weights(dtype, 0, 256, rng)
    assert multiply(kernel, no_rows, activations(no_rows, exact, random_rows(3, 256)), threads=2).size == 0


def test_not_a_number_stays_in_its_row() -> None:
    weights = make_weights(dtypes.Q4_1, 20, 64, np.random.default_rng())
    x = random_rows(5, 64)
    x[2, 40] = np.nan
    for exact in (False, True):
        y = multiply(matmul_kernel(dtypes.Q4_1, exact, 4), weights, activations(weights, exact, x))
        assert np.isnan(y).all(1).tolist() == [False, False, True, False, False]
        assert not np.isnan(y[[0, 1, 3, 4]]).any()


def test_types_that_share_a_layout_share_kernels() -> None:
    assert matmul_kernel(dtypes.IQ4_NL, False, 4) is matmul_kernel(dtypes.Q8_0, False, 4)
    assert matmul_kernel(dtypes.F16, False, 4) is matmul_kernel(dtypes.F16, True, 8)
    names = {layout.name for layout in QUANT_LAYOUTS.values()}
    assert len({matmul_kernel(dtype, False, 1).name for dtype in BLOCK_TYPES}) == len(names)


def test_wrong_requests_are_one_clear_line() -> None:
    with pytest.raises(UsageError, match="not 3"):
        matmul_kernel(dtypes.Q8_0, False, 3)
    with pytest.raises(ShapeError, match="i64 is no type of weights"):
        matmul_kernel(dtypes.I64, False, 1)


def test_columns_grow_with_the_rows() -> None:
    assert [choose_columns(n) for n in (1, 2, 4, 5, 16, 512)] == [1, 4, 4, 8, 8, 8]


PROGRAM = """
import numpy as np
from kernels.cpu.matmul_reference import exact_product, fast_product
from kernels.cpu.packed_weights import activations, make_weights, multiply
from numba_meta import dtypes
from numba_meta.kernels.cpu.isa import detect
from numba_meta.kernels.cpu.matmul import matmul_kernel
for dtype, exact in ((dtypes.Q4_K, False), (dtypes.F16, True)):
    weights = make_weights(dtype, 19, 256, np.random.default_rng())
    x = activations(weights, exact, np.random.default_rng().standard_normal((5, 256)).astype(np.float32))
    y = multiply(matmul_kernel(dtype, exact, 4), weights, x)
    np.testing.assert_array_equal(y, exact_product(weights, x) if exact else fast_product(weights, x))
print(detect().name)
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="compiles for x86-64 processors")
@pytest.mark.parametrize(
    ("cpu", "features", "level"), [("x86-64", "", "PORTABLE"), ("haswell", "", "PORTABLE"), ("haswell", "+avx2,+fma,+f16c", "AVX2")]
)
def test_lesser_processors(cpu: str, features: str, level: str) -> None:
    """The whole path compiled for a lesser processor computes the same bits: it needs no instruction or function that is not there."""
    if cpu == "haswell" and not all(get_host_cpu_features().get(name) for name in ("avx2", "fma", "f16c", "bmi2")):
        pytest.skip("this processor cannot run the code: it has no AVX2, FMA, F16C or BMI2")
    environment = {**os.environ, "NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == level
