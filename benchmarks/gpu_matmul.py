"""Matrix products on a GPU: one row of activations in GB/s of packed weights, prompts in TFLOP/s.

    python benchmarks/gpu_matmul.py [--types q8_0,q4_0] [--rows 1,4,16,512] [--shapes 4096x4096,...] [--exact]

Launches are replays of a recorded graph over so many copies of the weights that they do not fit the L2 cache; medians.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

from command_line import count, listed, one_of, run_main, sizes
from kernels.cuda import on_gpu

from numba_meta.dtypes import BY_NAME, WEIGHT_TYPES, DType
from numba_meta.kernels.cuda import packed
from numba_meta.kernels.cuda.matmul import choose_columns, matmul_kernel
from numba_meta.kernels.cuda.quantize import quantize_kernel

SHAPES = "4096x4096,14336x4096,4096x14336,6144x4096,28672x4096,576x576,1536x576,49152x576"  # n_out x k
LIMIT = 4000.0  # GB/s: a device copy on an H200, bytes read and written
CACHE_BYTES = 200 << 20  # more than the L2 cache holds


def seconds(dtype: DType, exact: bool, n_out: int, k: int, rows: int) -> float:
    """Of one product."""
    gpu = on_gpu.open_gpu()
    n_bytes = packed.packed_bytes(dtype, n_out, k)
    n_columns = choose_columns(rows)
    form = packed.activation_format(dtype, exact, n_columns)
    n_copies = min(64, max(2, CACHE_BYTES // n_bytes + 1)) if rows <= 16 else 2
    # Random bytes hold huge scales: bytes up to 0x3B give positive halves below 1 and floats below 2e-3.
    noise = np.random.default_rng().integers(0, 0x3C, n_bytes, np.uint8)
    weights = [gpu.upload(noise) for _ in range(n_copies)]
    row_bytes = packed.activation_row_bytes(form, k)
    n_rows = gpu.upload(np.array([rows]))
    x = gpu.upload(np.random.default_rng().standard_normal((rows, k)).astype(np.float32))
    if form != "f32":
        source, x = x, gpu.empty(rows * row_bytes)
        gpu.run(quantize_kernel(form), rows, x=source, x_stride=4 * k, y=x, y_stride=row_bytes, n=k, n_rows=n_rows)
    y = gpu.empty(4 * rows * n_out)
    kernel = matmul_kernel(dtype, exact, n_columns)
    shared = {"x": x, "x_stride": row_bytes, "y": y, "y_stride": 4 * n_out, "n_out": n_out, "k": k, "n_rows": n_rows}
    return gpu.time([(kernel, rows, {"w": w, **shared}) for w in weights], repeats=7) / n_copies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    types = listed(one_of(dtype.name for dtype in WEIGHT_TYPES))
    parser.add_argument("--types", type=types, default="q8_0,q4_0,q4_1,q5_0,q4_k,q5_k,q6_k,f16,bf16")
    parser.add_argument("--rows", type=listed(count()), default="1")
    parser.add_argument("--shapes", type=listed(sizes("4096x4096")), default=SHAPES, help="n_out x k")
    parser.add_argument("--exact", action="store_true")
    options = parser.parse_args()
    for rows in options.rows:
        print(f"{'type':8} {'n_out x k':>14} {'rows':>5} {'us':>9} {'GB/s':>7} {'of limit':>8} {'TFLOP/s':>8}")
        for type_name in options.types:
            for shape in options.shapes:
                n_out, k = map(int, shape.split("x"))
                if k % BY_NAME[type_name].block_size:
                    continue
                taken = seconds(BY_NAME[type_name], options.exact, n_out, k, rows)
                rate = packed.packed_bytes(BY_NAME[type_name], n_out, k) / taken / 1e9
                flops = 2e-12 * n_out * k * rows / taken
                print(f"{type_name:8} {shape:>14} {rows:5} {taken * 1e6:9.2f} {rate:7.0f} {rate / LIMIT:8.0%} {flops:8.1f}", flush=True)


if __name__ == "__main__":
    run_main(main)
