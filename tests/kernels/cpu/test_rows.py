"""Rows looked up, and rows stored in a cache: the bytes are those of the gguf package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from kernels.cpu.guarded import FILL, Guarded, live, same_for_threads

from numba_meta.dtypes import BF16, CACHE_TYPES, F16, F32, Q4_0, Q4_K, Q8_0, DType
from numba_meta.errors import ShapeError
from numba_meta.kernels.cpu.rows import get_rows_f32, store_rows_kernel

GGUF_TYPES = {F32: "F32", F16: "F16", BF16: "BF16", Q8_0: "Q8_0", Q4_0: "Q4_0"}


def quantized(x: np.ndarray, dtype: DType) -> np.ndarray:
    """The bytes of each row as the gguf package makes them."""
    kind = getattr(gguf.GGMLQuantizationType, GGUF_TYPES[dtype])
    with np.errstate(all="ignore"):
        return np.ascontiguousarray(gguf.quants.quantize(x, kind)).view(np.uint8).reshape(x.shape[0], -1)


def stored(x: np.ndarray, cells: np.ndarray, n_cells: int, dtype: DType, threads: int, n_live: int | None = None) -> np.ndarray:
    source, cache = Guarded.of(x), Guarded(n_cells, dtype.row_bytes(x.shape[1]), np.uint8, gap=2 * (dtype is not F32) + 4)
    store_rows_kernel(dtype)(
        threads=threads, x=source.address, x_stride=source.stride, cells=cells.astype(np.int32), cache=cache.address,
        cell_stride=cache.stride, n=x.shape[1], n_rows=live(x.shape[0] if n_live is None else n_live),
    )  # fmt: skip
    return cache.result()


def samples(rows: int, n: int) -> np.ndarray:
    """Rows of several magnitudes, with zero blocks, ties of magnitude and halves that must round."""
    rng = np.random.default_rng()
    x = rng.standard_normal((rows, n)) * 10.0 ** rng.integers(-6, 5, (rows, 1))
    x[0] = 0.0
    x[1, : min(n, 32)] = rng.choice([-1.0, 1.0], min(n, 32))
    x[2] = rng.integers(-254, 255, n) / 2.0
    x[2, 0] = 127.0
    return x.astype(np.float32)


@pytest.mark.parametrize("dtype", CACHE_TYPES, ids=repr)
@pytest.mark.parametrize("n", [32, 192, 320])
def test_bytes_are_those_of_gguf(dtype: DType, n: int) -> None:
    x = samples(40, n)
    cells = np.random.default_rng().permutation(50)[:40]
    cache = same_for_threads(lambda threads: stored(x, cells, 50, dtype, threads))
    np.testing.assert_array_equal(cache[cells], quantized(x, dtype))
    assert (np.delete(cache, cells, axis=0) == FILL).all()


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=repr)
@pytest.mark.parametrize("n", [1, 17, 130])
def test_tails(dtype: DType, n: int) -> None:
    x = samples(4, n)
    np.testing.assert_array_equal(stored(x, np.arange(4), 4, dtype, 2), quantized(x, dtype))


@pytest.mark.parametrize("dtype", CACHE_TYPES, ids=repr)
def test_skipped_and_dead_rows(dtype: DType) -> None:
    x = samples(5, 64)
    cache = stored(x, np.array([3, -1, 1, 0, 2]), 4, dtype, 2, n_live=3)
    np.testing.assert_array_equal(cache[[3, 1]], quantized(x, dtype)[[0, 2]])
    assert (cache[[0, 2]] == FILL).all()
    assert (stored(x, np.arange(5), 5, dtype, 2, n_live=0) == FILL).all()


def test_other_types_are_an_error() -> None:
    with pytest.raises(ShapeError, match="q4_k"):
        store_rows_kernel(Q4_K)


@pytest.mark.parametrize("n", [1, 16, 150, 576])
def test_get_rows(n: int) -> None:
    rng = np.random.default_rng()
    table = rng.standard_normal((6, n)).astype(np.float32)
    ids = np.array([10, 15, 9, 16, 10, 12, 0], np.int32)  # this device holds rows 10 to 15

    def run(threads: int) -> np.ndarray:
        source, out = Guarded.of(table), Guarded(7, n)
        get_rows_f32(
            threads=threads, table=source.address, table_stride=source.stride, first_row=10, n_table_rows=6, ids=ids, y=out.address,
            y_stride=out.stride, n=n, n_rows=live(6),
        )  # fmt: skip
        return out.result()

    out = same_for_threads(run)
    np.testing.assert_array_equal(out[[0, 1, 4, 5]], table[[0, 5, 0, 2]])
    assert (out[[2, 3]] == 0).all() and np.isnan(out[6]).all()
