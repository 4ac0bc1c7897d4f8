"""Strided copies and zeros, byte by byte."""

from __future__ import annotations

import numpy as np
import pytest
from kernels.cpu.guarded import FILL, Guarded, live, same_for_threads

from numba_meta.kernels.cpu.copy import copy_2d, fill_zero


@pytest.mark.parametrize(("height", "width"), [(1, 1), (3, 63), (2, 64), (5, 136), (2, 10001), (0, 64), (3, 0)])
def test_copy_2d(height: int, width: int) -> None:
    values = np.random.default_rng().integers(0, 256, (height, width), dtype=np.uint8)

    def run(threads: int) -> np.ndarray:
        source, out = Guarded.of(values, gap=5), Guarded(height, width, np.uint8, gap=3)
        copy_2d(
            threads=threads, source=source.address, source_pitch=source.stride, destination=out.address, destination_pitch=out.stride,
            width=width, height=height,
        )  # fmt: skip
        return out.result()

    np.testing.assert_array_equal(same_for_threads(run), values)


@pytest.mark.parametrize("n_bytes", [1, 64, 75, 300])
@pytest.mark.parametrize("n_live", [0, 2])
def test_fill_zero(n_bytes: int, n_live: int) -> None:
    def run(threads: int) -> np.ndarray:
        rows = Guarded(3, n_bytes, np.uint8, gap=3)
        fill_zero(threads=threads, x=rows.address, x_stride=rows.stride, n_bytes=n_bytes, n_rows=live(n_live))
        return rows.result()

    out = same_for_threads(run)
    assert (out[:n_live] == 0).all() and (out[n_live:] == FILL).all()
