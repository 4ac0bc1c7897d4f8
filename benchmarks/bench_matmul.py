"""Matrix products of packed weights on one thread: GB/s of weights (decode, in cache and from memory), GMAC/s (prompts of 512 rows).

python -m pytest benchmarks/bench_matmul.py --benchmark-enable --benchmark-columns=median,iqr
"""

from __future__ import annotations

import numpy as np
import pytest

from numba_meta import dtypes
from numba_meta.kernels.cpu.kernel import ENTRY_TYPE
from numba_meta.kernels.cpu.matmul import choose_columns, matmul_kernel
from numba_meta.kernels.cpu.packed import activation_format, activation_row_bytes, packed_bytes
from numba_meta.kernels.cpu.packing import pack_kernel
from numba_meta.kernels.cpu.quantize import quantize_kernel

CASES = {"decode in cache": (1024, 1024, 1), "decode from memory": (65536, 2048, 1), "prompt": (1536, 512, 512)}  # n_out, k, rows
TYPES = (dtypes.Q4_0, dtypes.Q4_1, dtypes.Q5_0, dtypes.Q8_0, dtypes.Q4_K, dtypes.Q5_K, dtypes.Q6_K, dtypes.F16)


@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
@pytest.mark.parametrize("dtype", TYPES, ids=repr)
@pytest.mark.parametrize("case", CASES)
def test_matmul(benchmark, case, dtype, exact):
    n_out, k, rows = CASES[case]
    rng = np.random.default_rng(0)
    weights = rng.integers(0, 32, packed_bytes(dtype, n_out, k), np.uint8)  # any bytes below 0x7c are finite scales
    x = rng.standard_normal((rows, k)).astype(np.float32)
    n_rows, fmt = np.array([rows]), activation_format(dtype, exact)
    stride = activation_row_bytes(fmt, k)
    if fmt == "q8":
        quantized = np.empty((rows, stride), np.uint8)
        quantize_kernel()(x=x, x_stride=4 * k, y=quantized, y_stride=stride, n=k, n_rows=n_rows)
        x = quantized
    y = np.empty((rows, n_out), np.float32)
    kernel = matmul_kernel(dtype, exact, choose_columns(rows))
    pointers = {"w": weights, "x": x, "y": y, "n_rows": n_rows}
    block = kernel.pack(x_stride=stride, y_stride=4 * n_out, n_out=n_out, k=k, **{name: a.ctypes.data for name, a in pointers.items()})
    run = ENTRY_TYPE(kernel.address)
    benchmark(run, block.ctypes.data, 0, 1)
    if benchmark.stats is not None:  # None where benchmarks are disabled
        seconds = benchmark.stats.stats.median
        benchmark.extra_info["GB/s"] = round(weights.nbytes / seconds / 1e9, 1)
        benchmark.extra_info["GMAC/s"] = round(n_out * k * rows / seconds / 1e9, 1)


@pytest.mark.parametrize("dtype", TYPES, ids=repr)
def test_pack(benchmark, dtype):
    n_out, k = 1024, 2048
    raw = np.random.default_rng(0).integers(0, 256, (n_out, dtype.row_bytes(k)), np.uint8)
    out = np.empty(packed_bytes(dtype, n_out, k), np.uint8)
    benchmark(lambda: pack_kernel(dtype)(w=raw, row_stride=raw.strides[0], n_out=n_out, k=k, out=out))
    if benchmark.stats is not None:
        benchmark.extra_info["GB/s of the file"] = round(raw.nbytes / benchmark.stats.stats.median / 1e9, 2)
