"""Kernels that treat each element alone: sums, products, activations, gated activations; and the softmax of rows.

Rows are float32, strides in bytes; a stride of 0 repeats one row (a bias, a weight). Outputs may be inputs. A block takes a row's next 512
columns, a thread 4 of them. `swiglu_quantize` and the like write the `q8` activations of a matrix product instead of float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from numba_meta.kernels.cuda.device import add as add_f32
from numba_meta.kernels.cuda.device import cuda, device_function, fma, load_i64, maximum, start_next_kernel, types, wait_for_previous_kernel
from numba_meta.kernels.cuda.device import mul as mul_f32
from numba_meta.kernels.cuda.kernel import CudaKernel, Float, Gpu, Int, Launch, Ptr, cuda_kernel
from numba_meta.kernels.cuda.lanes import MAX_THREADS, block_max, block_sum, load_4, store_4, threads_for
from numba_meta.kernels.cuda.outputs import write_f32, write_q8

THREADS = 128


def blocks_of_columns(arguments: Mapping[str, Any], n_rows: int, gpu: Gpu) -> Launch:
    """A block for each row and 4 columns a thread."""
    threads = threads_for(arguments["n"], THREADS)
    return Launch((n_rows, -(-arguments["n"] // (4 * threads)), 1), (threads, 1, 1))


# ---- functions of one element ----------------------------------------------------------------------------------------------------------


@device_function
def sigmoid_of(x):  # type: ignore[no-untyped-def]
    """1 / (1 + e^-x)."""
    return np.float32(1.0) / (np.float32(1.0) + math.exp(-x))


@device_function
def silu_of(x):  # type: ignore[no-untyped-def]
    """x / (1 + e^-x)."""
    return x / (np.float32(1.0) + math.exp(-x))


_GELU_LINEAR = np.float32(-2.0 * math.sqrt(2.0 / math.pi))
_GELU_CUBIC = np.float32(-2.0 * math.sqrt(2.0 / math.pi) * 0.044715)
_SQRT_HALF = np.float32(math.sqrt(0.5))


@device_function
def gelu_tanh_of(x):  # type: ignore[no-untyped-def]
    """x (1 + tanh u) / 2 = x / (1 + e^-2u) with u = sqrt(2/pi) (x + 0.044715 x^3)."""
    return x / (np.float32(1.0) + math.exp(mul_f32(x, fma(_GELU_CUBIC, mul_f32(x, x), _GELU_LINEAR))))


@device_function
def gelu_erf_of(x):  # type: ignore[no-untyped-def]
    """x erfc(-x / sqrt 2) / 2."""
    return mul_f32(mul_f32(np.float32(0.5), x), math.erfc(mul_f32(-x, _SQRT_HALF)))


@device_function
def relu_of(x):  # type: ignore[no-untyped-def]
    """x, at least 0; NaN stays."""
    return np.float32(0.0) if x < np.float32(0.0) else x


# x is the gate, y what it lets through (up).
GLU = {
    "swiglu": device_function(lambda x, y: mul_f32(silu_of(x), y)),
    "geglu_tanh": device_function(lambda x, y: mul_f32(gelu_tanh_of(x), y)),
    "geglu_erf": device_function(lambda x, y: mul_f32(gelu_erf_of(x), y)),
    "reglu": device_function(lambda x, y: mul_f32(relu_of(x), y)),
    "sigmoid_gate": device_function(lambda x, y: mul_f32(sigmoid_of(x), y)),
}


# ---- the kernels -----------------------------------------------------------------------------------------------------------------------


def _binary(name: str, apply: Callable[..., Any], write: Callable[..., None] = write_f32) -> CudaKernel:
    """out = apply(x, y), element by element. Reads 8 n bytes a row and writes out."""

    @cuda_kernel(name=name, launch=blocks_of_columns, max_threads=THREADS)
    def kernel(x: Ptr, x_stride: Int, y: Ptr, y_stride: Int, out: Ptr, out_stride: Int, n: Int, n_rows: Ptr):  # type: ignore[no-untyped-def]
        start_next_kernel()
        wait_for_previous_kernel()
        live = load_i64(n_rows)
        row, i = np.int64(cuda.blockIdx.x), 4 * (np.int64(cuda.blockIdx.y) * cuda.blockDim.x + cuda.threadIdx.x)
        is_aligned = (x | x_stride | y | y_stride | out | out_stride) & 15 == 0
        # While the row count is on its way: rows up to the capacity can be read.
        a, b = load_4(x + row * x_stride + 4 * i, n - i, is_aligned), load_4(y + row * y_stride + 4 * i, n - i, is_aligned)
        if row < live:
            values = (apply(a[0], b[0]), apply(a[1], b[1]), apply(a[2], b[2]), apply(a[3], b[3]))
            write(out + row * out_stride, i, values, n, is_aligned)

    return kernel


def _unary(name: str, function: Callable[..., Any]) -> CudaKernel:
    """out = function(x, p, q), element by element; p and q are the kernel's numbers (0 where unused). Reads and writes 4 n bytes a row."""
    apply = device_function(function)

    @cuda_kernel(name=name, launch=blocks_of_columns, max_threads=THREADS)
    def kernel(x: Ptr, x_stride: Int, out: Ptr, out_stride: Int, n: Int, p: Float, q: Float, n_rows: Ptr):  # type: ignore[no-untyped-def]
        start_next_kernel()
        wait_for_previous_kernel()
        live = load_i64(n_rows)
        row, i = np.int64(cuda.blockIdx.x), 4 * (np.int64(cuda.blockIdx.y) * cuda.blockDim.x + cuda.threadIdx.x)
        is_aligned = (x | x_stride | out | out_stride) & 15 == 0
        a = load_4(x + row * x_stride + 4 * i, n - i, is_aligned)
        if row < live:
            values = (apply(a[0], p, q), apply(a[1], p, q), apply(a[2], p, q), apply(a[3], p, q))
            store_4(out + row * out_stride + 4 * i, values, n - i, is_aligned)

    return kernel


add = _binary("add", device_function(lambda x, y: add_f32(x, y)))
sub = _binary("sub", device_function(lambda x, y: x - y))
mul = _binary("mul", device_function(lambda x, y: mul_f32(x, y)))
div = _binary("div", device_function(lambda x, y: x / y))

swiglu, geglu_tanh, geglu_erf, reglu, sigmoid_gate = (_binary(name, apply) for name, apply in GLU.items())

# The same, then quantize_rows: out are `q8` rows, n whole blocks of 32.
swiglu_quantize, geglu_tanh_quantize, geglu_erf_quantize, reglu_quantize, sigmoid_gate_quantize = (
    _binary(f"{name}_quantize", apply, write_q8) for name, apply in GLU.items()
)

scale = _unary("scale", lambda x, p, q: mul_f32(x, p))  # x p
scale_add = _unary("scale_add", lambda x, p, q: fma(x, p, q))  # x p + q, one rounding
clamp = _unary("clamp", lambda x, p, q: p if x < p else (q if q < x else x))  # into p..q; NaN stays
softcap = _unary("softcap", lambda x, p, q: mul_f32(p, math.tanh(x / p)))  # p tanh(x / p)
silu = _unary("silu", lambda x, p, q: silu_of(x))
gelu_tanh = _unary("gelu_tanh", lambda x, p, q: gelu_tanh_of(x))
gelu_erf = _unary("gelu_erf", lambda x, p, q: gelu_erf_of(x))
relu = _unary("relu", lambda x, p, q: relu_of(x))
relu_squared = _unary("relu_squared", lambda x, p, q: mul_f32(relu_of(x), relu_of(x)))
sigmoid = _unary("sigmoid", lambda x, p, q: sigmoid_of(x))
tanh = _unary("tanh", lambda x, p, q: math.tanh(x))
exp = _unary("exp", lambda x, p, q: math.exp(x))


@device_function
def _exponential_4(values, left, factor, top):  # type: ignore[no-untyped-def]
    """e^(x factor - top) of 4 columns, 0 beyond the first `left`."""
    e0, e1, e2, e3 = np.float32(0.0), np.float32(0.0), np.float32(0.0), np.float32(0.0)
    if left > 0:
        e0 = math.exp(mul_f32(values[0], factor) - top)
    if left > 1:
        e1 = math.exp(mul_f32(values[1], factor) - top)
    if left > 2:
        e2 = math.exp(mul_f32(values[2], factor) - top)
    if left > 3:
        e3 = math.exp(mul_f32(values[3], factor) - top)
    return (e0, e1, e2, e3)


def _block_per_row(arguments: Mapping[str, Any], n_rows: int, gpu: Gpu) -> Launch:
    return Launch((n_rows, 1, 1), (threads_for(arguments["n"]), 1, 1))


@cuda_kernel(launch=_block_per_row, max_threads=MAX_THREADS)
def softmax_rows(x: Ptr, x_stride: Int, out: Ptr, out_stride: Int, n: Int, factor: Float, n_rows: Ptr):  # type: ignore[no-untyped-def]
    """out = softmax(x * factor) over the n columns of each row. A block computes a row: two reads, two writes."""
    start_next_kernel()
    wait_for_previous_kernel()
    live = load_i64(n_rows)
    scratch, scratch_of_sum = cuda.shared.array(32, types.float32), cuda.shared.array(32, types.float32)
    row, step, begin = np.int64(cuda.blockIdx.x), 4 * np.int64(cuda.blockDim.x), 4 * np.int64(cuda.threadIdx.x)
    if row >= live:
        return
    source, target = x + row * x_stride, out + row * out_stride
    is_aligned = (x | x_stride | out | out_stride) & 15 == 0
    largest = np.float32(-np.inf)
    i = begin
    while i < n:
        v = load_4(source + 4 * i, n - i, is_aligned)
        largest = maximum(largest, mul_f32(v[0], factor))
        if n - i > 1:
            largest = maximum(largest, mul_f32(v[1], factor))
        if n - i > 2:
            largest = maximum(largest, mul_f32(v[2], factor))
        if n - i > 3:
            largest = maximum(largest, mul_f32(v[3], factor))
        i += step
    largest = block_max(largest, scratch)
    total = np.float32(0.0)
    i = begin
    while i < n:
        e = _exponential_4(load_4(source + 4 * i, n - i, is_aligned), n - i, factor, largest)
        store_4(target + 4 * i, e, n - i, is_aligned)
        total = add_f32(add_f32(add_f32(add_f32(total, e[0]), e[1]), e[2]), e[3])
        i += step
    total = block_sum(total, scratch_of_sum)
    i = begin
    while i < n:
        e = load_4(target + 4 * i, n - i, is_aligned)  # this thread wrote it
        store_4(target + 4 * i, (e[0] / total, e[1] / total, e[2] / total, e[3] / total), n - i, is_aligned)
        i += step


def all_kernels() -> list[CudaKernel]:
    """Every kernel of this module."""
    binary = [add, sub, mul, div, swiglu, geglu_tanh, geglu_erf, reglu, sigmoid_gate]
    unary = [scale, scale_add, clamp, softcap, silu, gelu_tanh, gelu_erf, relu, relu_squared, sigmoid, tanh, exp]
    quantizing = [swiglu_quantize, geglu_tanh_quantize, geglu_erf_quantize, reglu_quantize, sigmoid_gate_quantize]
    return [*binary, *unary, softmax_rows, *quantizing]
