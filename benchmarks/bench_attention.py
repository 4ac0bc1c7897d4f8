"""Attention on one thread: GB/s of cache bytes (single steps), GFLOP/s (prompts; 4 * dim flops for a head and a position).

python -m pytest benchmarks/bench_attention.py --benchmark-enable --benchmark-columns=median,iqr
"""

from __future__ import annotations

import numpy as np
import pytest

from numba_meta import dtypes
from numba_meta.kernels.cpu.attention import (
    attention_chunks,
    attention_rows,
    attention_rows_scratch_bytes,
    attention_scratch_bytes,
    chunks_needed,
)
from numba_meta.kernels.cpu.kernel import ENTRY_TYPE
from numba_meta.kernels.cpu.rows import store_rows_kernel

SHAPES = {"9 heads of 64 over 3": (9, 3, 64), "4 heads of 256 over 1": (4, 1, 256), "32 heads of 128 over 8": (32, 8, 128)}
CASES = {"step, 256 cells": (256, 1), "step, 16384 cells": (16384, 1), "prompt of 512": (512, 512)}  # cells, rows


@pytest.mark.parametrize("dtype", [dtypes.F16, dtypes.Q8_0], ids=repr)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", CASES)
def test_attention(benchmark, case, shape, dtype):
    (n_cells, rows), (n_head, n_kv, dim) = CASES[case], SHAPES[shape]
    rng = np.random.default_rng(0)
    table = np.arange(n_cells, dtype=np.int32)
    head_bytes, cell_bytes = dtype.row_bytes(dim), n_kv * dtype.row_bytes(dim)
    caches = [np.zeros((n_cells, cell_bytes), np.uint8) for _ in "kv"]
    for cache in caches:
        x = rng.standard_normal((n_cells, n_kv * dim)).astype(np.float32)
        store_rows_kernel(dtype)(
            x=x, x_stride=x.strides[0], cells=table, cache=cache, cell_stride=cell_bytes, n=n_kv * dim, n_rows=np.array([n_cells])
        )
    q = rng.standard_normal((rows, n_head, dim)).astype(np.float32)
    positions, sequences, n_rows = np.arange(n_cells - rows, n_cells, dtype=np.int32), np.zeros(rows, np.int32), np.array([rows])
    pointers = {
        "q": q, "k": caches[0], "v": caches[1], "cell_table": table, "positions": positions, "sequences": sequences, "n_rows": n_rows,
    }  # fmt: skip
    values = {
        "q_stride": q.strides[0], "q_head_stride": q.strides[1], "k_stride": cell_bytes, "k_head_stride": head_bytes,
        "v_stride": cell_bytes, "v_head_stride": head_bytes, "table_stride": 0, "window": 0, "n_head": n_head, "first_head": 0,
        "group": n_head // n_kv, "first_kv": 0, "scale": dim**-0.5,
    }  # fmt: skip
    n_chunks = chunks_needed(n_cells)
    if rows == 1:
        kernel = attention_chunks(dtype, dtype, dim, dim)
        pointers["partial"] = np.empty(attention_scratch_bytes(rows, n_head, dim, n_chunks), np.uint8)
        values["n_chunks"] = n_chunks
    else:
        kernel = attention_rows(dtype, dtype, dim, dim)
        pointers |= {"y": np.empty_like(q), "scratch": np.empty(attention_rows_scratch_bytes(dim, dim), np.uint8)}
        values |= {"sinks": 0, "y_stride": q.strides[0], "y_head_stride": q.strides[1], "scratch_bytes": pointers["scratch"].nbytes}
    block = kernel.pack(**values, **{name: array.ctypes.data for name, array in pointers.items()})
    run = ENTRY_TYPE(kernel.address)
    benchmark(run, block.ctypes.data, 0, 1)
    if benchmark.stats is not None:  # None where benchmarks are disabled
        seconds = benchmark.stats.stats.median
        benchmark.extra_info["GB/s"] = 2 * n_cells * cell_bytes / seconds / 1e9
        benchmark.extra_info["GFLOP/s"] = 4 * dim * n_head * int((positions.astype(np.int64) + 1).sum()) / seconds / 1e9
        print(f" {benchmark.extra_info['GB/s']:.1f} GB/s, {benchmark.extra_info['GFLOP/s']:.1f} GFLOP/s")
