"""Rows looked up, stored and noted on a GPU: the bytes are those of the CPU's kernels."""

from __future__ import annotations

import numpy as np
import pytest

from numba_meta.dtypes import BF16, CACHE_TYPES, F16, F32, DType
from numba_meta.kernels.cpu import cells as cpu_cells
from numba_meta.kernels.cpu import rows as cpu_rows

pytestmark = pytest.mark.gpu

on_gpu = pytest.importorskip("kernels.cuda.on_gpu", reason="numba-cuda is not installed")
cuda_cells = pytest.importorskip("numba_meta.kernels.cuda.cells", reason="numba-cuda is not installed")
cuda_rows = pytest.importorskip("numba_meta.kernels.cuda.rows", reason="numba-cuda is not installed")
FILL = 0xFF


def samples(rows: int, n: int) -> np.ndarray:
    """Rows of several magnitudes, with zero blocks of both signs, ties of magnitude and halves that must round."""
    rng = np.random.default_rng()
    x = rng.standard_normal((rows, n)) * 10.0 ** rng.integers(-9, 5, (rows, 1))
    x[0] = rng.choice([0.0, -0.0], n)
    x[1, : min(n, 32)] = rng.choice([-1.0, 1.0], min(n, 32))
    x[2] = rng.integers(-254, 255, n) / 2.0
    x[2, 0] = 127.0
    return x.astype(np.float32)


def stored(x: np.ndarray, cells: np.ndarray, n_cells: int, dtype: DType, n_live: int) -> tuple[np.ndarray, np.ndarray]:
    """[cell, byte] as the GPU and the CPU leave it in memory that was filled with FILL."""
    gpu, n, stride = on_gpu.open_gpu(), x.shape[1], dtype.row_bytes(x.shape[1]) + 4
    theirs = np.full((n_cells, stride), FILL, np.uint8)
    live, ids = np.array([n_live], np.int64), cells.astype(np.int32)
    extents = {"x_stride": 4 * n, "cell_stride": stride, "n": n}
    cpu_rows.store_rows_kernel(dtype)(x=x, cells=ids, cache=theirs, n_rows=live, **extents)
    cache, given = gpu.empty(n_cells * stride, FILL), {"x": gpu.upload(x), "cells": gpu.upload(ids), "n_rows": gpu.upload(live)}
    gpu.run(cuda_rows.store_rows_kernel(dtype), len(x), cache=cache, **given, **extents)
    return cache.download(np.uint8, theirs.shape), theirs


@pytest.mark.parametrize("dtype", CACHE_TYPES, ids=repr)
@pytest.mark.parametrize("n", [32, 192, 1024])
def test_stored_bytes_are_those_of_the_cpu(dtype: DType, n: int) -> None:
    cells = np.random.default_rng().permutation(400)[:300]
    cells[7] = -1
    ours, theirs = stored(samples(300, n), cells, 400, dtype, 290)
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=repr)
@pytest.mark.parametrize("n", [1, 17, 130, 259])
def test_tails(dtype: DType, n: int) -> None:
    ours, theirs = stored(samples(4, n), np.arange(4), 5, dtype, 4)
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("dtype", CACHE_TYPES, ids=repr)
def test_no_live_row_stores_nothing(dtype: DType) -> None:
    ours, _ = stored(samples(5, 64), np.arange(5), 5, dtype, 0)
    assert (ours == FILL).all()


@pytest.mark.parametrize("n", [1, 16, 150, 576])
def test_get_rows(n: int) -> None:
    gpu, rng = on_gpu.open_gpu(), np.random.default_rng()
    table = rng.standard_normal((6, n)).astype(np.float32)
    ids = np.array([10, 15, 9, 16, 10, 12, 0], np.int32)  # this device holds rows 10 to 15
    out = gpu.empty(7 * 4 * n)
    gpu.run(
        cuda_rows.get_rows_f32, 7, table=gpu.upload(table), table_stride=4 * n, first_row=10, n_table_rows=6, ids=gpu.upload(ids), y=out,
        y_stride=4 * n, n=n, n_rows=gpu.upload(np.array([6], np.int64)),
    )  # fmt: skip
    y = out.download(np.float32, (7, n))
    np.testing.assert_array_equal(y[[0, 1, 4, 5]], table[[0, 5, 0, 2]])
    assert (y[[2, 3]] == 0).all() and np.isnan(y[6]).all()


def test_store_cells() -> None:
    gpu, rng = on_gpu.open_gpu(), np.random.default_rng()
    n, shape = 200, (3, 500)
    places = rng.permutation(shape[0] * shape[1])[:n]
    sequences, positions = (x.astype(np.int32) for x in np.divmod(places, shape[1]))
    cells = rng.integers(-1, 10_000, n).astype(np.int32)
    expected, live = np.full(shape, -1, np.int32), np.array([n - 3], np.int64)
    cpu_cells.store_cells(
        table=expected, table_stride=4 * shape[1], sequences=sequences, positions=positions, cells=cells, n_rows=live
    )
    table = gpu.empty(expected.nbytes, FILL)
    given = {"sequences": sequences, "positions": positions, "cells": cells, "n_rows": live}
    gpu.run(cuda_cells.store_cells, n, table=table, table_stride=4 * shape[1], **{name: gpu.upload(a) for name, a in given.items()})
    np.testing.assert_array_equal(table.download(np.int32, shape), expected)
