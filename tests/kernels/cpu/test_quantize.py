"""Activations are quantized exactly as the formula says, alone, and whatever the threads."""

from __future__ import annotations

import numpy as np
import pytest
from kernels.cpu.packed_weights import Guarded, quantize

from numba_meta.kernels.cpu import packed
from numba_meta.kernels.cpu.quantize import quantize_kernel


def fields(rows: np.ndarray) -> tuple[np.ndarray, ...]:
    """quants `[rows, block, 32]`, scale, scaled sum, minus sum `[rows, block]`, minus half sums `[rows, block, 2]`."""
    blocks = rows.reshape(len(rows), -1, packed.ACTIVATION_BLOCK_BYTES)

    def field(begin: int, end: int, dtype: type) -> np.ndarray:
        return np.ascontiguousarray(blocks[:, :, begin:end]).view(dtype)

    return (
        field(0, 32, np.int8),
        field(packed.ACTIVATION_SCALE, packed.ACTIVATION_SCALE + 4, np.float32)[:, :, 0],
        field(packed.ACTIVATION_SCALED_SUM, packed.ACTIVATION_SCALED_SUM + 4, np.float32)[:, :, 0],
        field(packed.ACTIVATION_MINUS_SUM, packed.ACTIVATION_MINUS_SUM + 4, np.int32)[:, :, 0],
        field(packed.ACTIVATION_MINUS_HALF_SUMS, packed.ACTIVATION_MINUS_HALF_SUMS + 8, np.int32),
    )


@pytest.mark.parametrize("k", [32, 96, 576, 2048])
def test_the_formula(k: int) -> None:
    rng = np.random.default_rng()
    x = (rng.standard_normal((5, k)) * rng.lognormal(0, 3, (5, k))).astype(np.float32)
    x[1, :32] = 0
    x[2, :32] = np.arange(32) - 16.5  # ties once scaled: the largest is 16.5
    quants, scale, scaled_sum, minus_sum, minus_halves = fields(quantize(x))
    blocks = x.reshape(5, -1, 32)
    largest = np.abs(blocks).max(2)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    np.testing.assert_array_equal(quants, np.rint(blocks * inverse[:, :, None]).astype(np.int64))
    np.testing.assert_array_equal(scale, largest / np.float32(127))
    halves = quants.astype(np.int32).reshape(5, -1, 2, 16).sum(3)
    np.testing.assert_array_equal(minus_halves, -halves)
    np.testing.assert_array_equal(minus_sum, -halves.sum(2))
    np.testing.assert_array_equal(scaled_sum, scale * halves.sum(2).astype(np.float32))
    assert (np.abs(quants.astype(np.float64) * scale[:, :, None] - blocks) <= 0.5001 * scale[:, :, None]).all()


def test_ties_go_to_even() -> None:
    x = np.zeros((1, 32), np.float32)
    x[0, :6] = [127, 0.5, 1.5, 2.5, -0.5, -3.5]
    assert fields(quantize(x))[0][0, 0, :6].tolist() == [127, 0, 2, 2, 0, -4]


def test_what_is_not_finite_stays_visible_and_alone() -> None:
    x = np.ones((3, 96), np.float32)
    x[0, 3], x[1, 40], x[2, 95] = np.nan, np.inf, -np.inf
    _, scale, scaled_sum, *_ = fields(quantize(x))
    assert np.isnan(scale).tolist() == [[True, False, False], [False, True, False], [False, False, True]]
    assert (np.isnan(scaled_sum) == np.isnan(scale)).all()


def test_vanishing_values_are_zero() -> None:
    quants, scale, scaled_sum, *_ = fields(quantize(np.full((1, 32), 1e-38, np.float32)))
    assert not quants.any() and not scale.any() and not scaled_sum.any()


def test_rows_alone_threads_and_strides_change_nothing() -> None:
    x = np.random.default_rng().standard_normal((7, 200)).astype(np.float32)[:, :160]
    row_bytes = packed.activation_row_bytes("q8", 160)
    expected = np.concatenate([quantize(np.ascontiguousarray(row[None])) for row in x])
    for live in (0, 1, 6, 7):
        for threads in (1, 2, 3, 50):
            out = Guarded(live, row_bytes, row_bytes + 12)
            quantize_kernel()(
                x=x, x_stride=x.strides[0], y=out.address, y_stride=out.stride, n=160, n_rows=np.array([live]), threads=threads
            )
            np.testing.assert_array_equal(out.read(), expected[:live])


def test_an_empty_row_writes_nothing() -> None:
    out = Guarded(0, 0, 0)
    quantize_kernel()(x=0, x_stride=0, y=out.address, y_stride=0, n=0, n_rows=np.array([4]), threads=2)
    assert out.read().size == 0
