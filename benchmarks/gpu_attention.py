"""Attention on a GPU: microseconds with the combine kernel, bytes of K and V that must move, part of 4,000 GB/s.

    python benchmarks/gpu_attention.py [--cells 4096 16384 65536] [--shapes 8x128x4 3x64x3 1x256x4] [--types f16 bf16 q8_0 q4_0] [--prompt]

A shape is KV heads x elements of a head x query heads of each. Random caches, several of them in turns so that none stays in the L2.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

from command_line import count, one_of, run_main, sizes
from kernels.cuda import on_gpu
from kernels.cuda.attention_on_gpu import encode

from numba_meta.dtypes import BY_NAME, CACHE_TYPES, DType
from numba_meta.kernels.cuda import attention

LIMIT = 4000.0  # GB/s
ROTATED_BYTES = 400e6  # of caches in turns: well above any L2
PROMPT_ROWS = 512


def inputs(dtype: DType, n_cells: int, n_kv: int, dim: int, group: int, first_position: int, rows: int) -> tuple[list[dict[str, Any]], int]:
    """Arguments over caches of their own, and the bytes of K and V of one."""
    gpu, rng = on_gpu.open_gpu(), np.random.default_rng(0)
    row_bytes = dtype.row_bytes(dim)
    n_bytes = 2 * n_cells * n_kv * row_bytes
    few = encode(rng.standard_normal((1024, n_kv, dim), dtype=np.float32), dtype)
    cache = few[rng.integers(0, len(few), n_cells)]
    q = gpu.upload(rng.standard_normal((rows, n_kv * group, dim), dtype=np.float32))
    shared = {
        "q": q, "q_stride": 4 * n_kv * group * dim, "q_head_stride": 4 * dim, "k_stride": n_kv * row_bytes, "k_head_stride": row_bytes,
        "v_stride": n_kv * row_bytes, "v_head_stride": row_bytes, "cell_table": gpu.upload(np.arange(n_cells, dtype=np.int32)),
        "table_stride": 4 * n_cells, "positions": gpu.upload(np.arange(first_position, first_position + rows, dtype=np.int32)),
        "sequences": gpu.upload(np.zeros(rows, np.int32)), "window": 0, "n_head": n_kv * group, "first_head": 0, "group": group,
        "first_kv": 0, "scale": dim**-0.5, "n_rows": gpu.upload(np.array([rows], np.int64)),
    }  # fmt: skip
    copies = max(2, round(ROTATED_BYTES / n_bytes))
    return [{**shared, "k": gpu.upload(cache), "v": gpu.upload(cache)} for _ in range(min(copies, 64))], n_bytes


def step_seconds(
    dtype: DType, n_cells: int, n_kv: int, dim: int, group: int, rows: int = 1, kernel: Any = None
) -> tuple[float, float, int]:
    """(with the combine kernel, without it, bytes) of a single step at the last of so many cells."""
    gpu = on_gpu.open_gpu()
    given, n_bytes = inputs(dtype, n_cells, n_kv, dim, group, n_cells - rows, rows)
    n_chunks, n_head = attention.chunks_needed(n_cells), n_kv * group
    partial = gpu.empty(attention.attention_scratch_bytes(rows, n_head, dim, n_chunks))
    out = gpu.empty(4 * rows * n_head * dim)
    chunks, combine = kernel or attention.attention_chunks(dtype, dtype, dim, dim), attention.attention_combine(dim)
    first = [(chunks, rows, {**each, "partial": partial, "n_chunks": n_chunks}) for each in given]
    names = ("positions", "window", "n_head", "n_rows")
    last = {**{name: given[0][name] for name in names}, "partial": partial, "n_chunks": n_chunks, "sinks": 0, "y": out}
    last |= {"y_stride": 4 * n_head * dim, "y_head_stride": 4 * dim}
    both = [work for each in first for work in (each, (combine, rows, last))]
    return gpu.time(both) / len(first), gpu.time(first) / len(first), n_bytes


def prompt_seconds(dtype: DType, n_cells: int, rows: int, n_kv: int, dim: int, group: int) -> float:
    """The last `rows` of a prompt of so many cells."""
    gpu = on_gpu.open_gpu()
    given, _ = inputs(dtype, n_cells, n_kv, dim, group, n_cells - rows, rows)
    out = gpu.empty(4 * rows * n_kv * group * dim)
    strides = {"sinks": 0, "y": out, "y_stride": 4 * n_kv * group * dim, "y_head_stride": 4 * dim, "scratch": 0, "scratch_bytes": 0}
    kernel = attention.attention_rows(dtype, dtype, dim, dim)
    return gpu.time([(kernel, rows, {**each, **strides}) for each in given[:4]], repeats=5) / len(given[:4])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=count(), nargs="+", default=[1024, 4096, 16384, 65536])
    parser.add_argument("--shapes", type=sizes("8x128x4"), nargs="+", default=["8x128x4", "3x64x3", "1x256x4"])
    parser.add_argument("--types", type=one_of(dtype.name for dtype in CACHE_TYPES), nargs="+", default=["f16", "bf16", "q8_0", "q4_0"])
    parser.add_argument("--prompt", action="store_true", help="512 rows of a prompt instead of single steps")
    args = parser.parse_args()
    if args.prompt and min(args.cells) < PROMPT_ROWS:
        parser.error(f"--prompt needs --cells of {PROMPT_ROWS} or more, for as many rows")
    print("shape      type   cells   " + ("us of 512 rows   TFLOP/s" if args.prompt else "us      us without combine   GB/s   of limit"))
    for shape in args.shapes:
        n_kv, dim, group = map(int, shape.split("x"))
        for type_name in args.types:
            for n_cells in args.cells:
                if args.prompt:
                    seconds = prompt_seconds(BY_NAME[type_name], n_cells, PROMPT_ROWS, n_kv, dim, group)
                    flop = 4 * dim * n_kv * group * sum(range(n_cells - PROMPT_ROWS + 1, n_cells + 1))
                    print(f"{shape:10s} {type_name:6s} {n_cells:6d} {seconds * 1e6:10.1f} {flop / seconds / 1e12:12.1f}", flush=True)
                else:
                    both, alone, n_bytes = step_seconds(BY_NAME[type_name], n_cells, n_kv, dim, group)
                    rate = n_bytes / both / 1e9
                    times = f"{both * 1e6:9.1f} {alone * 1e6:9.1f}"
                    print(f"{shape:10s} {type_name:6s} {n_cells:6d} {times} {rate:16.0f} {rate / LIMIT:9.0%}", flush=True)


if __name__ == "__main__":
    run_main(main)
