"""Norms of rows against float64."""

from __future__ import annotations

import numpy as np
import pytest
from kernels.cpu.guarded import Guarded, live, same_for_threads

from numba_meta.kernels.cpu.norm import center_rows, rms_norm


def normalize(x: np.ndarray, weight: np.ndarray, rows_per_token: int, threads: int, n_live: int | None = None) -> np.ndarray:
    tokens = x.shape[0] // rows_per_token if n_live is None else n_live
    source, out = Guarded.of(x), Guarded(*x.shape)
    rms_norm(
        threads=threads, x=source.address, x_stride=source.stride, weight=weight, y=out.address, y_stride=out.stride, n=x.shape[1],
        rows_per_token=rows_per_token, n_rows=live(tokens), eps=1e-5,
    )  # fmt: skip
    return out.result()


@pytest.mark.parametrize("n", [1, 15, 16, 64, 80, 100, 576, 2048])
@pytest.mark.parametrize("rows_per_token", [1, 3])
def test_against_float64(n: int, rows_per_token: int) -> None:
    rng = np.random.default_rng(n)
    x, weight = rng.standard_normal((6, n)).astype(np.float32), rng.standard_normal(n).astype(np.float32)
    y = same_for_threads(lambda threads: normalize(x, weight, rows_per_token, threads))
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(y, expected, rtol=1e-6)


def test_a_row_stands_alone() -> None:
    rng = np.random.default_rng()
    x, weight = rng.standard_normal((7, 100)).astype(np.float32), rng.standard_normal(100).astype(np.float32)
    together = normalize(x, weight, 1, 2)
    for row in range(7):
        assert normalize(x[row : row + 1], weight, 1, 1).tobytes() == together[row].tobytes()


def test_rows_beyond_the_live_ones_are_left_alone() -> None:
    x, weight = np.ones((4, 40), np.float32), np.ones(40, np.float32)
    y = normalize(x, weight, 2, 2, n_live=1)
    assert np.isfinite(y[:2]).all() and np.isnan(y[2:]).all()
    assert np.isnan(normalize(x, weight, 1, 2, n_live=0)).all()


def test_in_place() -> None:
    rng = np.random.default_rng()
    x, weight = rng.standard_normal((3, 90)).astype(np.float32), rng.standard_normal(90).astype(np.float32)
    rows = Guarded.of(x)
    rms_norm(
        threads=2, x=rows.address, x_stride=rows.stride, weight=weight, y=rows.address, y_stride=rows.stride, n=90, rows_per_token=1,
        n_rows=live(3), eps=1e-5,
    )  # fmt: skip
    assert rows.result().tobytes() == normalize(x, weight, 1, 1).tobytes()


@pytest.mark.parametrize("n", [1, 15, 16, 64, 80, 100, 576, 2048])
def test_centered_rows_against_float64(n: int) -> None:
    """In place too; the same for any threads, dead rows stay."""
    x = (np.random.default_rng(n).standard_normal((6, n)) + 3).astype(np.float32)
    wide = x.astype(np.float64)

    def center(threads: int) -> np.ndarray:
        rows = Guarded.of(x)
        center_rows(
            threads=threads, x=rows.address, x_stride=rows.stride, y=rows.address, y_stride=rows.stride, n=n, rows_per_token=2,
            n_rows=live(2),
        )  # fmt: skip
        return rows.result()

    got = same_for_threads(center)
    np.testing.assert_allclose(got[:4], (wide - wide.mean(1, keepdims=True))[:4], atol=2e-6)
    assert got[4:].tobytes() == x[4:].tobytes()
