"""Rotary positions against float64."""

from __future__ import annotations

import numpy as np
import pytest
from kernels.cpu.guarded import Guarded, live, same_for_threads

from numba_meta.kernels.cpu.rope import rope_angles, rope_halves, rope_interleaved


def angles(positions: np.ndarray, half: int, magnitude: float = 1.0) -> tuple[Guarded, np.ndarray]:
    """The kernel's table, and the angles in float64."""
    frequencies = 10000.0 ** (-np.arange(half) / half)
    positions = positions.astype(np.int32)

    def run(threads: int) -> np.ndarray:
        table = Guarded(positions.size, 2 * half)
        rope_angles(
            threads=threads, positions=positions, inverse_frequencies=frequencies, table=table.address, table_stride=table.stride,
            half=half, magnitude=magnitude, n_rows=live(positions.size),
        )  # fmt: skip
        return table.result()

    return Guarded.of(same_for_threads(run)), positions[:, None] * frequencies


def test_angles_are_exact_far_out() -> None:
    table, expected = angles(np.array([0, 1, 77, 131071, 1000003]), 24, magnitude=1.125)
    np.testing.assert_allclose(table.array[:, :24], 1.125 * np.cos(expected), atol=6e-8)
    np.testing.assert_allclose(table.array[:, 24:], 1.125 * np.sin(expected), atol=6e-8)


def rotate(x: np.ndarray, theta: np.ndarray, half: int, interleaved: bool) -> np.ndarray:
    """x: [row, head, dim] in float64."""
    out = x.copy()
    first, second = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    c, s = np.cos(theta)[:, None], np.sin(theta)[:, None]
    out[..., first] = x[..., first] * c - x[..., second] * s
    out[..., second] = x[..., first] * s + x[..., second] * c
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "half"), [(64, 32), (80, 16), (24, 12), (50, 21), (6, 1)])
@pytest.mark.parametrize("in_place", [False, True])
def test_rotation(interleaved: bool, head_dim: int, half: int, in_place: bool) -> None:
    rng = np.random.default_rng()
    rows, n_head = 5, 3
    x = rng.standard_normal((rows, n_head * head_dim)).astype(np.float32)
    table, theta = angles(rng.integers(0, 5000, rows), half)
    kernel = rope_interleaved if interleaved else rope_halves

    def run(threads: int) -> np.ndarray:
        source = Guarded.of(x)
        out = source if in_place else Guarded(rows, n_head * head_dim)
        kernel(
            threads=threads, x=source.address, x_stride=source.stride, x_head_stride=4 * head_dim, y=out.address, y_stride=out.stride,
            y_head_stride=4 * head_dim, table=table.address, table_stride=table.stride, n_head=n_head, head_dim=head_dim, half=half,
            n_rows=live(rows),
        )  # fmt: skip
        return out.result()

    expected = rotate(x.reshape(rows, n_head, head_dim).astype(np.float64), theta, half, interleaved)
    np.testing.assert_allclose(same_for_threads(run).reshape(expected.shape), expected, atol=6e-7)


def test_dead_rows_are_left_alone() -> None:
    table, _ = angles(np.arange(4), 16)
    source, out = Guarded.of(np.ones((4, 32), np.float32)), Guarded(4, 32)
    for kernel in (rope_halves, rope_interleaved):
        kernel(
            threads=2, x=source.address, x_stride=source.stride, x_head_stride=128, y=out.address, y_stride=out.stride, y_head_stride=128,
            table=table.address, table_stride=table.stride, n_head=1, head_dim=32, half=16, n_rows=live(0),
        )  # fmt: skip
        assert np.isnan(out.result()).all()
