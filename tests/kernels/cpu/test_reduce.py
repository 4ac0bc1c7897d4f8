"""Sums and concatenations of pieces, and the largest column."""

from __future__ import annotations

import numpy as np
import pytest
from kernels.cpu.guarded import Guarded, live, same_for_threads

from numba_meta.kernels.cpu.reduce import all_reduce, argmax_rows, gather_columns


@pytest.mark.parametrize("n_parts", [1, 2, 3, 5])
@pytest.mark.parametrize("n", [7, 128, 300])
def test_all_reduce_adds_in_order(n_parts: int, n: int) -> None:
    rng = np.random.default_rng()
    values = [rng.standard_normal((4, n)).astype(np.float32) for _ in range(n_parts)]

    def run(threads: int, into_first: bool = False) -> np.ndarray:
        parts = [Guarded.of(v) for v in values]
        out = parts[0] if into_first else Guarded(4, n)
        all_reduce(
            threads=threads, parts=np.array([p.address for p in parts]), n_parts=n_parts, part_stride=parts[0].stride, out=out.address,
            out_stride=out.stride, n=n, n_rows=live(3),
        )  # fmt: skip
        return out.result()

    expected = values[0].copy()
    for value in values[1:]:
        expected += value
    out = same_for_threads(run)
    np.testing.assert_array_equal(out[:3], expected[:3])
    assert np.isnan(out[3]).all()
    np.testing.assert_array_equal(run(2, into_first=True)[:3], expected[:3])


@pytest.mark.parametrize("widths", [(5,), (100, 0, 28), (1500, 1, 900, 3000), (0, 16)])
def test_gather_columns(widths: tuple[int, ...]) -> None:
    rng = np.random.default_rng()
    values = [rng.standard_normal((3, width)).astype(np.float32) for width in widths]

    def run(threads: int) -> np.ndarray:
        parts = [Guarded.of(v) for v in values]
        out = Guarded(3, sum(widths))
        addresses = np.array([p.address if width else 0 for p, width in zip(parts, widths, strict=True)])
        gather_columns(
            threads=threads, parts=addresses, widths=np.array(widths), strides=np.array([p.stride for p in parts]), n_parts=len(widths),
            out=out.address, out_stride=out.stride, n_rows=live(2),
        )  # fmt: skip
        return out.result()

    out = same_for_threads(run)
    np.testing.assert_array_equal(out[:2], np.concatenate(values, axis=1)[:2])
    assert np.isnan(out[2]).all()


@pytest.mark.parametrize("n", [1, 15, 16, 40, 1000])
def test_argmax(n: int) -> None:
    rng = np.random.default_rng()
    x = rng.integers(-3, 4, (40, n)).astype(np.float32)  # many ties: the lowest index wins
    x[1] = -np.inf
    x[2, n // 2] = np.inf
    source = Guarded.of(x)

    def run(threads: int) -> np.ndarray:
        ids = Guarded(1, 41, np.int32)
        argmax_rows(threads=threads, x=source.address, x_stride=source.stride, n=n, ids=ids.address, n_rows=live(40))
        return ids.result()[0]

    ids = same_for_threads(run)
    np.testing.assert_array_equal(ids[:40], x.argmax(1))
    assert ids[40] == -1


def test_argmax_passes_over_nan() -> None:
    x = np.full((1, 50), np.nan, np.float32)
    x[0, [20, 49]] = [-5.0, -6.0]
    ids = np.zeros(1, np.int32)
    argmax_rows(x=x, x_stride=0, n=50, ids=ids, n_rows=live(1))
    assert ids[0] == 20
