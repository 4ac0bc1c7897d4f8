"""Kernels that treat each element alone: sums, products, activations, gated activations; and the softmax of rows.

Rows are float32, strides in bytes; a stride of 0 repeats one row (a bias, a weight). Outputs may be inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from numba_meta.kernels.cpu.kernel import CpuKernel, Float, Int, Ptr, cpu_kernel
from numba_meta.kernels.cpu.simd import (
    fma,
    load_i64,
    vf_abs,
    vf_broadcast,
    vf_load,
    vf_max,
    vf_reduce_max,
    vf_splat,
    vf_store,
    vf_sum,
    vf_zero,
)
from numba_meta.kernels.cpu.simd_math import (
    device_function,
    share,
    vf_erfc,
    vf_exp,
    vf_load_part,
    vf_negate,
    vf_select_less,
    vf_store_part,
    vf_tanh,
)

BLOCK = 128  # columns that stay with one thread


def _binary(name: str, operation: Callable[..., Any]) -> CpuKernel:
    """out = operation(x, y), element by element."""
    apply = device_function(operation)

    @cpu_kernel(name=name)
    def kernel(  # type: ignore[no-untyped-def]
        thread, n_threads, x: Ptr, x_stride: Int, y: Ptr, y_stride: Int, out: Ptr, out_stride: Int, n: Int, n_rows: Ptr
    ):
        blocks = (n + BLOCK - 1) // BLOCK
        total = load_i64(n_rows) * blocks
        item, end = share(total, thread, n_threads), share(total, thread + 1, n_threads)
        while item < end:
            row = item // blocks
            first = item - row * blocks
            last = min(blocks, first + end - item)
            i, stop = first * BLOCK, min(n, last * BLOCK)
            a, b, c = x + row * x_stride, y + row * y_stride, out + row * out_stride
            while i + 16 <= stop:
                vf_store(c + 4 * i, apply(vf_load(a + 4 * i), vf_load(b + 4 * i)))
                i += 16
            if i < stop:
                value = apply(vf_load_part(a + 4 * i, stop - i), vf_load_part(b + 4 * i, stop - i))
                vf_store_part(c + 4 * i, value, stop - i)
            item += last - first

    return kernel  # type: ignore[no-any-return]


def _unary(name: str, operation: Callable[..., Any]) -> CpuKernel:
    """out = operation(x, vector of p, vector of q), element by element; p and q are the kernel's numbers (0 where unused)."""
    apply = device_function(operation)

    @cpu_kernel(name=name)
    def kernel(  # type: ignore[no-untyped-def]
        thread, n_threads, x: Ptr, x_stride: Int, out: Ptr, out_stride: Int, n: Int, p: Float, q: Float, n_rows: Ptr
    ):
        blocks = (n + BLOCK - 1) // BLOCK
        total = load_i64(n_rows) * blocks
        item, end = share(total, thread, n_threads), share(total, thread + 1, n_threads)
        vp, vq = vf_splat(p), vf_splat(q)
        while item < end:
            row = item // blocks
            first = item - row * blocks
            last = min(blocks, first + end - item)
            i, stop = first * BLOCK, min(n, last * BLOCK)
            a, c = x + row * x_stride, out + row * out_stride
            while i + 16 <= stop:
                vf_store(c + 4 * i, apply(vf_load(a + 4 * i), vp, vq))
                i += 16
            if i < stop:
                vf_store_part(c + 4 * i, apply(vf_load_part(a + 4 * i, stop - i), vp, vq), stop - i)
            item += last - first

    return kernel  # type: ignore[no-any-return]


# ---- functions of one vector -----------------------------------------------------------------------------------------------------------


@device_function
def _sigmoid(x):  # type: ignore[no-untyped-def]
    one = vf_splat(np.float32(1.0))
    return one / (one + vf_exp(vf_negate(x)))


@device_function
def _silu(x):  # type: ignore[no-untyped-def]
    return x / (vf_splat(np.float32(1.0)) + vf_exp(vf_negate(x)))


_GELU_LINEAR = np.float32(-2.0 * math.sqrt(2.0 / math.pi))
_GELU_CUBIC = np.float32(-2.0 * math.sqrt(2.0 / math.pi) * 0.044715)


@device_function
def _gelu_tanh(x):  # type: ignore[no-untyped-def]
    """x (1 + tanh u) / 2 = x / (1 + e^-2u) with u = sqrt(2/pi) (x + 0.044715 x^3)."""
    minus_2u = x * fma(vf_splat(_GELU_CUBIC), x * x, vf_splat(_GELU_LINEAR))
    return x / (vf_splat(np.float32(1.0)) + vf_exp(minus_2u))


_SQRT_HALF = np.float32(math.sqrt(0.5))


@device_function
def _gelu_erf(x):  # type: ignore[no-untyped-def]
    """x erfc(-x / sqrt 2) / 2, where erfc(-z) = 2 - erfc(z)."""
    tail = vf_erfc(vf_abs(x) * vf_splat(_SQRT_HALF))
    return (vf_splat(np.float32(0.5)) * x) * vf_select_less(x, vf_zero(), tail, vf_splat(np.float32(2.0)) - tail)


@device_function
def _relu(x):  # type: ignore[no-untyped-def]
    return vf_select_less(x, vf_zero(), vf_zero(), x)


# ---- the kernels -----------------------------------------------------------------------------------------------------------------------

add = _binary("add", lambda x, y: x + y)
sub = _binary("sub", lambda x, y: x - y)
mul = _binary("mul", lambda x, y: x * y)
div = _binary("div", lambda x, y: x / y)

# x is the gate, y what it lets through (up).
swiglu = _binary("swiglu", lambda x, y: _silu(x) * y)
geglu_tanh = _binary("geglu_tanh", lambda x, y: _gelu_tanh(x) * y)
geglu_erf = _binary("geglu_erf", lambda x, y: _gelu_erf(x) * y)
reglu = _binary("reglu", lambda x, y: _relu(x) * y)
sigmoid_gate = _binary("sigmoid_gate", lambda x, y: _sigmoid(x) * y)

scale = _unary("scale", lambda x, p, q: x * p)  # x p
scale_add = _unary("scale_add", lambda x, p, q: fma(x, p, q))  # x p + q, one rounding
clamp = _unary("clamp", lambda x, p, q: vf_select_less(x, p, p, vf_select_less(q, x, q, x)))  # into p..q; NaN stays
softcap = _unary("softcap", lambda x, p, q: p * vf_tanh(x / p))  # p tanh(x / p)
silu = _unary("silu", lambda x, p, q: _silu(x))
gelu_tanh = _unary("gelu_tanh", lambda x, p, q: _gelu_tanh(x))
gelu_erf = _unary("gelu_erf", lambda x, p, q: _gelu_erf(x))
relu = _unary("relu", lambda x, p, q: _relu(x))
relu_squared = _unary("relu_squared", lambda x, p, q: _relu(x) * _relu(x))
sigmoid = _unary("sigmoid", lambda x, p, q: _sigmoid(x))
tanh = _unary("tanh", lambda x, p, q: vf_tanh(x))
exp = _unary("exp", lambda x, p, q: vf_exp(x))


@cpu_kernel
def softmax_rows(thread, n_threads, x: Ptr, x_stride: Int, out: Ptr, out_stride: Int, n: Int, factor: Float, n_rows: Ptr):  # type: ignore[no-untyped-def]
    """out = softmax(x * factor) over the n columns of each row. One thread computes a row."""
    total = load_i64(n_rows)
    low, by = vf_splat(np.float32(-np.inf)), vf_splat(factor)
    for row in range(share(total, thread, n_threads), share(total, thread + 1, n_threads)):
        source, target = x + row * x_stride, out + row * out_stride
        largest = low
        i = 0
        while i + 16 <= n:
            largest = vf_max(largest, vf_load(source + 4 * i) * by)
            i += 16
        for j in range(i, n):
            largest = vf_max(largest, vf_broadcast(source + 4 * j) * by)
        top = vf_splat(vf_reduce_max(largest))
        total_weight = vf_zero()
        i = 0
        while i + 16 <= n:
            weight = vf_exp(vf_load(source + 4 * i) * by - top)
            vf_store(target + 4 * i, weight)
            total_weight = total_weight + weight
            i += 16
        if i < n:
            vf_store_part(target + 4 * i, vf_exp(vf_load_part(source + 4 * i, n - i) * by - top), n - i)
            total_weight = total_weight + vf_load_part(target + 4 * i, n - i)
        divisor = vf_splat(vf_sum(total_weight))
        i = 0
        while i + 16 <= n:
            vf_store(target + 4 * i, vf_load(target + 4 * i) / divisor)
            i += 16
        if i < n:
            vf_store_part(target + 4 * i, vf_load_part(target + 4 * i, n - i) / divisor, n - i)
