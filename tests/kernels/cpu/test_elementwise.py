"""Element by element kernels against float64: tails, repeated rows, dead rows, threads, in place."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from kernels.cpu.guarded import Guarded, live, same_for_threads

from numba_meta.kernels.cpu import elementwise as e
from numba_meta.kernels.cpu.kernel import CpuKernel

erf = np.vectorize(math.erf)


def sigmoid64(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def gelu_tanh64(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu_erf64(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + erf(x / math.sqrt(2)))


BINARY: list[tuple[CpuKernel, Callable[[np.ndarray, np.ndarray], np.ndarray]]] = [
    (e.add, lambda x, y: x + y),
    (e.sub, lambda x, y: x - y),
    (e.mul, lambda x, y: x * y),
    (e.div, lambda x, y: x / y),
    (e.swiglu, lambda x, y: x * sigmoid64(x) * y),
    (e.geglu_tanh, lambda x, y: gelu_tanh64(x) * y),
    (e.geglu_erf, lambda x, y: gelu_erf64(x) * y),
    (e.reglu, lambda x, y: np.maximum(x, 0) * y),
    (e.sigmoid_gate, lambda x, y: sigmoid64(x) * y),
]
UNARY: list[tuple[CpuKernel, Callable[[np.ndarray], np.ndarray]]] = [
    (e.scale, lambda x: x * 1.5),
    (e.scale_add, lambda x: x * 1.5 + 2.5),
    (e.clamp, lambda x: np.clip(x, 1.5, 2.5)),
    (e.softcap, lambda x: 1.5 * np.tanh(x / 1.5)),
    (e.silu, lambda x: x * sigmoid64(x)),
    (e.gelu_tanh, gelu_tanh64),
    (e.gelu_erf, gelu_erf64),
    (e.relu, lambda x: np.maximum(x, 0)),
    (e.relu_squared, lambda x: np.maximum(x, 0) ** 2),
    (e.sigmoid, sigmoid64),
    (e.tanh, np.tanh),
    (e.exp, np.exp),
]


def run_binary(kernel: CpuKernel, x: np.ndarray, y: np.ndarray, threads: int, n_live: int | None = None) -> np.ndarray:
    a, b, out = Guarded.of(x), Guarded.of(y), Guarded(*x.shape)
    kernel(
        threads=threads, x=a.address, x_stride=a.stride, y=b.address, y_stride=b.stride if y.shape == x.shape else 0, out=out.address,
        out_stride=out.stride, n=x.shape[1], n_rows=live(x.shape[0] if n_live is None else n_live),
    )  # fmt: skip
    return out.result()


def run_unary(kernel: CpuKernel, x: np.ndarray, threads: int, n_live: int | None = None) -> np.ndarray:
    a, out = Guarded.of(x), Guarded(*x.shape)
    kernel(
        threads=threads, x=a.address, x_stride=a.stride, out=out.address, out_stride=out.stride, n=x.shape[1], p=1.5, q=2.5,
        n_rows=live(x.shape[0] if n_live is None else n_live),
    )  # fmt: skip
    return out.result()


@pytest.mark.parametrize(("kernel", "expected"), BINARY, ids=lambda v: getattr(v, "name", ""))
@pytest.mark.parametrize(("rows", "n"), [(1, 1), (3, 17), (2, 128), (5, 300)])
def test_binary(kernel: CpuKernel, expected: Callable[[np.ndarray, np.ndarray], np.ndarray], rows: int, n: int) -> None:
    rng = np.random.default_rng()
    x, y = (3 * rng.standard_normal((rows, n))).astype(np.float32), rng.uniform(0.5, 3.0, (rows, n)).astype(np.float32)
    out = same_for_threads(lambda threads: run_binary(kernel, x, y, threads))
    np.testing.assert_allclose(out, expected(x.astype(np.float64), y.astype(np.float64)), rtol=1e-6, atol=1e-6)
    for row in range(rows):  # a row stands alone
        assert run_binary(kernel, x[row : row + 1], y[row : row + 1], 1).tobytes() == out[row].tobytes()


@pytest.mark.parametrize(("kernel", "expected"), UNARY, ids=lambda v: getattr(v, "name", ""))
@pytest.mark.parametrize(("rows", "n"), [(1, 5), (4, 300)])
def test_unary(kernel: CpuKernel, expected: Callable[[np.ndarray], np.ndarray], rows: int, n: int) -> None:
    x = (3 * np.random.default_rng().standard_normal((rows, n))).astype(np.float32)
    out = same_for_threads(lambda threads: run_unary(kernel, x, threads))
    np.testing.assert_allclose(out, expected(x.astype(np.float64)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kernel", [kernel for kernel, _ in UNARY if kernel not in (e.relu, e.relu_squared)], ids=lambda k: k.name)
def test_nan_stays(kernel: CpuKernel) -> None:
    assert np.isnan(run_unary(kernel, np.full((1, 20), np.nan, np.float32), 1)).all()


def test_a_stride_of_zero_repeats_a_bias() -> None:
    rng = np.random.default_rng()
    x, bias = rng.standard_normal((4, 70)).astype(np.float32), rng.standard_normal((1, 70)).astype(np.float32)
    np.testing.assert_array_equal(run_binary(e.add, x, bias, 2), x + bias)


@pytest.mark.parametrize("n_live", [0, 2])
def test_dead_rows_are_left_alone(n_live: int) -> None:
    x = np.ones((4, 70), np.float32)
    for out in (run_binary(e.add, x, x, 2, n_live), run_unary(e.scale, x, 2, n_live)):
        assert np.isfinite(out[:n_live]).all() and np.isnan(out[n_live:]).all()


def test_in_place() -> None:
    x = np.random.default_rng().standard_normal((3, 200)).astype(np.float32)
    rows = Guarded.of(x)
    e.add(
        threads=2, x=rows.address, x_stride=rows.stride, y=rows.address, y_stride=rows.stride, out=rows.address, out_stride=rows.stride,
        n=200, n_rows=live(3),
    )  # fmt: skip
    np.testing.assert_array_equal(rows.result(), x + x)


@pytest.mark.parametrize("n", [1, 16, 33, 500])
def test_softmax(n: int) -> None:
    x = (20 * np.random.default_rng().standard_normal((3, n))).astype(np.float32)
    x[0, 0] = -np.inf if n > 1 else 0.0

    def run(threads: int) -> np.ndarray:
        a, out = Guarded.of(x), Guarded(3, n)
        e.softmax_rows(
            threads=threads, x=a.address, x_stride=a.stride, out=out.address, out_stride=out.stride, n=n, factor=0.5, n_rows=live(3)
        )
        return out.result()

    wide = x.astype(np.float64) * 0.5
    weights = np.exp(wide - wide.max(1, keepdims=True))
    np.testing.assert_allclose(same_for_threads(run), weights / weights.sum(1, keepdims=True), rtol=4e-6, atol=1e-30)
