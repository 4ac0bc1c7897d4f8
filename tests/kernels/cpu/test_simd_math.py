"""Vector functions against float64 and numpy, over all of their range."""

from __future__ import annotations

import math

import numpy as np
import pytest

from numba_meta.kernels.cpu.elementwise import exp, gelu_erf, tanh
from numba_meta.kernels.cpu.kernel import CpuKernel, Int, Ptr, cpu_kernel
from numba_meta.kernels.cpu.simd import vf_load, vf_store
from numba_meta.kernels.cpu.simd_math import vf_load_bf16, vf_load_f16, vf_store_bf16, vf_store_f16

N = 1 << 16


def apply(kernel: CpuKernel, x: np.ndarray) -> np.ndarray:
    out = np.full(x.size, np.nan, np.float32)
    kernel(x=x, x_stride=0, out=out, out_stride=0, n=x.size, p=0.0, q=0.0, n_rows=np.array([1], np.int64))
    return out


def relative_error(y: np.ndarray, expected: np.ndarray) -> float:
    return float(np.max(np.abs(y - expected) / np.abs(expected)))


@pytest.mark.parametrize("reach", [1e-3, 1.0, 87.0])
def test_exp(reach: float) -> None:
    x = np.random.default_rng().uniform(-reach, reach, N).astype(np.float32)
    assert relative_error(apply(exp, x), np.exp(x.astype(np.float64))) < 1.3e-7


def test_exp_at_the_ends() -> None:
    x = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 88.72, 88.73, 1000.0, -87.4, -100.0, -103.0, -104.5, -1e30], np.float32)
    with np.errstate(over="ignore", under="ignore"):
        expected = np.exp(x.astype(np.float64)).astype(np.float32)
    y = apply(exp, x)
    smallest = float(np.float32(2.0**-149))
    np.testing.assert_allclose(y, expected, rtol=2e-7, atol=smallest)
    assert y[0] == 1.0 and y[1] == 1.0 and y[2] == np.inf and y[3] == 0.0 and y[7] == np.inf and y[12] == 0.0


@pytest.mark.parametrize("reach", [1e-6, 0.3, 0.7, 12.0])
def test_tanh(reach: float) -> None:
    x = np.random.default_rng().uniform(-reach, reach, N).astype(np.float32)
    assert relative_error(apply(tanh, x), np.tanh(x.astype(np.float64))) < 2e-7
    edge = apply(tanh, np.array([0.0, np.inf, -np.inf, np.nan, 30.0], np.float32))
    np.testing.assert_array_equal(edge, np.array([0.0, 1.0, -1.0, np.nan, 1.0], np.float32))


def test_gelu_erf_has_small_relative_errors_in_both_tails() -> None:
    x = np.random.default_rng().uniform(-11.0, 11.0, N).astype(np.float32)
    expected = np.array([0.5 * v * math.erfc(-v * math.sqrt(0.5)) for v in x.astype(np.float64)])
    near = np.abs(x) < 2
    y = apply(gelu_erf, x)
    assert relative_error(y[near], expected[near]) < 1e-6
    assert np.max(np.abs(y - expected) / np.abs(expected)) < 1.2e-5  # rounding of x / sqrt(2), times its square


@cpu_kernel
def _halves_to_floats(thread, n_threads, f16: Ptr, bf16: Ptr, from_f16: Ptr, from_bf16: Ptr, n: Int):  # type: ignore[no-untyped-def]
    for i in range(0, n, 16):
        vf_store(from_f16 + 4 * i, vf_load_f16(f16 + 2 * i))
        vf_store(from_bf16 + 4 * i, vf_load_bf16(bf16 + 2 * i))


@cpu_kernel
def _floats_to_halves(thread, n_threads, x: Ptr, f16: Ptr, bf16: Ptr, n: Int):  # type: ignore[no-untyped-def]
    for i in range(0, n, 16):
        vf_store_f16(f16 + 2 * i, vf_load(x + 4 * i))
        vf_store_bf16(bf16 + 2 * i, vf_load(x + 4 * i))


def test_every_half_becomes_its_float() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    from_f16, from_bf16 = np.empty(bits.size, np.float32), np.empty(bits.size, np.float32)
    _halves_to_floats(f16=bits, bf16=bits, from_f16=from_f16, from_bf16=from_bf16, n=bits.size)
    np.testing.assert_array_equal(from_f16, bits.view(np.float16).astype(np.float32))
    np.testing.assert_array_equal(from_bf16, (bits.astype(np.uint32) << 16).view(np.float32))


def test_floats_round_to_the_nearest_half() -> None:
    """Random bits, every float16, and the values halfway between neighbours (which go to the even one)."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    finite = np.sort(halves[np.isfinite(halves)])
    middle = (finite[1:] + finite[:-1]) / 2
    around = np.concatenate([np.nextafter(middle, np.float32(side)) for side in (-np.inf, np.inf)])
    edge = np.array([65519.99, 65520.0, 65536.0, -65520.0, 1e38, np.inf, -np.inf, np.nan, 2.0**-25, 2.0**-25 * 1.01, 1e-45], np.float32)
    random = np.random.default_rng().integers(0, 1 << 32, 1 << 17, dtype=np.uint32).view(np.float32)
    x = np.concatenate([halves, middle, around, edge, random, -middle])
    x = np.concatenate([x, np.zeros(-x.size % 16, np.float32)])
    f16, bf16 = np.empty(x.size, np.uint16), np.empty(x.size, np.uint16)
    _floats_to_halves(x=x, f16=f16, bf16=bf16, n=x.size)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(f16.view(np.float16), x.astype(np.float16))
    import gguf

    expected = gguf.quants.quantize(x, gguf.GGMLQuantizationType.BF16).view(np.uint16)
    np.testing.assert_array_equal(bf16, expected)
