"""Small CUDA kernels, timed inside a recorded graph: norms, activations, rotations, reductions, copies.

    python benchmarks/gpu_others.py

Each line: the kernel, its rows and columns, microseconds a launch, GB/s (bytes that must move), part of 4,000 GB/s. A decode step has one
row, where the time of a launch is everything: the first line is a launch that finds no live row. Launches take turns over copies of their
operands that do not fit into the L2 cache where the operands are large.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

from command_line import run_main
from kernels.cuda.on_gpu import TestGpu, open_gpu

from numba_meta.dtypes import F16, Q8_0
from numba_meta.kernels.cuda import copy, elementwise, norm, reduce, reduce_norm, rope
from numba_meta.kernels.cuda.kernel import CudaKernel
from numba_meta.kernels.cuda.packed import activation_row_bytes
from numba_meta.kernels.cuda.quantize import quantize_kernel
from numba_meta.kernels.cuda.rope_store import rope_store_kernel
from numba_meta.kernels.cuda.rows import store_rows_kernel

L2_BYTES = 64 << 20
LIMIT = 4000e9  # bytes a second
LAUNCHES = 200


class Bench:
    """Operands on the GPU, and what their launches take."""

    def __init__(self, gpu: TestGpu) -> None:
        self.gpu = gpu
        self.counts: dict[int, Any] = {}
        self.kept: list[Any] = []

    def floats(self, *shape: int) -> Any:
        """A buffer of random float32."""
        self.kept.append(self.gpu.upload(np.random.default_rng(1).standard_normal(shape, np.float32)))
        return self.kept[-1]

    def count(self, n: int) -> Any:
        """A row count in device memory."""
        if n not in self.counts:
            self.counts[n] = self.gpu.upload(np.array([n], np.int64))
        return self.counts[n]

    def line(self, kernel: CudaKernel, what: str, capacity: int, n_bytes: int, operands: Any, /, **others: Any) -> None:
        """One line of the table. `operands()` makes one set of the buffers that take turns."""
        n_sets = min(LAUNCHES, max(1, L2_BYTES // max(1, n_bytes))) if n_bytes > 1 << 20 else 4
        sets = [operands() for _ in range(n_sets)]
        launches = max(20, LAUNCHES if n_bytes < 8 << 20 else 20)
        work = [(kernel, capacity, {**sets[i % n_sets], **others}) for i in range(launches)]
        seconds = self.gpu.time(work) / launches
        rate = n_bytes / seconds
        print(f"{kernel.name:>32} {what:>14} {seconds * 1e6:9.2f} us {rate / 1e9:8.0f} GB/s {rate / LIMIT:6.1%}", flush=True)
        self.kept.clear()


def norms(bench: Bench) -> None:
    weight = bench.gpu.upload(np.ones(8192, np.float32))
    for rows, n in ((1, 576), (1, 2048), (1, 4096), (1, 8192), (4, 4096), (512, 4096)):
        size = rows * n
        bench.line(
            norm.rms_norm, f"{rows} x {n}", rows, 4 * (2 * size + n), lambda s=size: {"x": bench.floats(s), "y": bench.floats(s)},
            weight=weight, x_stride=4 * n, y_stride=4 * n, n=n, rows_per_token=1, n_rows=bench.count(rows), eps=1e-5,
        )  # fmt: skip
        bench.line(
            norm.add_rms_norm, f"{rows} x {n}", rows, 4 * (4 * size + n),
            lambda s=size: {name: bench.floats(s) for name in ("x", "other", "total", "y")}, weight=weight, x_stride=4 * n,
            other_stride=4 * n, total_stride=4 * n, y_stride=4 * n, n=n, n_rows=bench.count(rows), eps=1e-5,
        )  # fmt: skip
    bench.line(
        norm.rms_norm, "1 x 40 x 128", 1, 4 * 81 * 128, lambda: {"x": bench.floats(40 * 128), "y": bench.floats(40 * 128)}, weight=weight,
        x_stride=512, y_stride=512, n=128, rows_per_token=40, n_rows=bench.count(1), eps=1e-5,
    )  # fmt: skip


def element_by_element(bench: Bench) -> None:
    for kernel, rows, n, live in (
        (elementwise.add, 1, 4096, 0),
        (elementwise.add, 1, 4096, 1),
        (elementwise.swiglu, 1, 14336, 1),
        (elementwise.geglu_tanh, 1, 14336, 1),
        (elementwise.add, 512, 4096, 512),
        (elementwise.swiglu, 512, 14336, 512),
    ):
        size, stride = rows * n, 4 * n
        bench.line(
            kernel, f"{live} x {n}", rows, 12 * n * live, lambda s=size: {name: bench.floats(s) for name in ("x", "y", "out")},
            x_stride=stride, y_stride=stride, out_stride=stride, n=n, n_rows=bench.count(live),
        )  # fmt: skip
    bench.line(
        elementwise.softmax_rows, "1 x 32000", 1, 8 * 32000, lambda: {"x": bench.floats(32000), "out": bench.floats(32000)}, x_stride=0,
        out_stride=0, n=32000, factor=1.0, n_rows=bench.count(1),
    )  # fmt: skip


def rotations(bench: Bench) -> None:
    positions = bench.gpu.upload(np.arange(70000, 70512, dtype=np.int32))
    frequencies = bench.gpu.upload(10000.0 ** (-np.arange(64) / 64))
    for rows in (1, 512):
        bench.line(
            rope.rope_angles, f"{rows} x 64", rows, rows * 64 * 8, lambda r=rows: {"table": bench.floats(r * 128)}, positions=positions,
            inverse_frequencies=frequencies, table_stride=512, half=64, magnitude=1.0, n_rows=bench.count(rows),
        )  # fmt: skip
        size = rows * 32 * 128
        bench.line(
            rope.rope_halves, f"{rows} x 32 x 128", rows, 8 * size,
            lambda s=size, r=rows: {"x": bench.floats(s), "y": bench.floats(s), "table": bench.floats(r * 128)}, x_stride=4 * 4096,
            x_head_stride=512, y_stride=4 * 4096, y_head_stride=512, table_stride=512, n_head=32, head_dim=128, half=64,
            n_rows=bench.count(rows),
        )  # fmt: skip


def pieces(bench: Bench) -> None:
    for rows, n_parts in ((1, 2), (1, 4), (512, 2)):

        def operands(rows: int = rows, n_parts: int = n_parts) -> dict[str, Any]:
            parts = [bench.floats(rows * 4096) for _ in range(n_parts)]
            bench.kept.append(bench.gpu.upload(np.array([part.address for part in parts])))
            return {"parts": bench.kept[-1], "out": bench.floats(rows * 4096)}

        bench.line(
            reduce.all_reduce, f"{rows} x 4096 of {n_parts}", rows, 4 * 4096 * rows * (n_parts + 1), operands, n_parts=n_parts,
            part_stride=4 * 4096, out_stride=4 * 4096, n=4096, n_rows=bench.count(rows),
        )  # fmt: skip
    ids = bench.gpu.empty(4)
    for n in (32000, 128256, 262144):
        bench.line(
            reduce.argmax_rows, f"1 x {n}", 1, 4 * n, lambda n=n: {"x": bench.floats(n)}, x_stride=0, n=n, ids=ids, n_rows=bench.count(1)
        )
    for height, width in ((4096, 272), (4096, 1088), (256, 65536)):
        bench.line(
            copy.copy_2d, f"{height} x {width} B", 1, 2 * height * width,
            lambda h=height, w=width: {"source": bench.floats(h * w // 2), "destination": bench.floats(h * w // 4)},
            source_pitch=2 * width, destination_pitch=width, width=width, height=height,
        )  # fmt: skip


def fused(bench: Bench) -> None:
    """Each after the kernels that it joins and that are not in the table yet."""
    weight = bench.gpu.upload(np.ones(4096, np.float32))
    n, ff = 4096, 14336
    q8, ff_q8 = activation_row_bytes("q8", n), activation_row_bytes("q8", ff)
    for rows in (1, 512):
        norm_arguments = {"weight": weight, "y_stride": q8, "n": n, "n_rows": bench.count(rows), "eps": 1e-5}
        summands = {"other_stride": 4 * n, "total_stride": 4 * n, **norm_arguments}

        def place(*names: str, rows: int = rows, y_bytes: int = q8) -> dict[str, Any]:
            return {name: bench.floats(rows * n) for name in names} | {"y": bench.floats(rows * y_bytes // 4)}

        def parts(rows: int = rows) -> dict[str, Any]:
            two = [bench.floats(rows * n) for _ in range(2)]
            bench.kept.append(bench.gpu.upload(np.array([part.address for part in two])))
            return {"parts": bench.kept[-1]}

        bench.line(
            quantize_kernel("q8"), f"{rows} x {n}", rows, rows * (4 * n + q8), lambda place=place: place("x"), x_stride=4 * n, y_stride=q8,
            n=n, n_rows=bench.count(rows),
        )  # fmt: skip
        bench.line(
            norm.rms_norm_quantize, f"{rows} x {n}", rows, rows * (4 * n + q8), lambda place=place: place("x"), x_stride=4 * n,
            rows_per_token=1, **norm_arguments,
        )  # fmt: skip
        bench.line(
            norm.add_rms_norm_quantize, f"{rows} x {n}", rows, rows * (12 * n + q8), lambda place=place: place("x", "other", "total"),
            x_stride=4 * n, **summands,
        )  # fmt: skip
        bench.line(
            norm.norm_add_rms_norm_quantize, f"{rows} x {n}", rows, rows * (12 * n + q8), lambda place=place: place("x", "other", "total"),
            x_stride=4 * n, x_weight=weight, x_eps=1e-5, **summands,
        )  # fmt: skip
        bench.line(
            reduce_norm.all_reduce_add_rms_norm_quantize, f"{rows} x {n} of 2", rows, rows * (16 * n + q8),
            lambda place=place, parts=parts: place("other", "total") | parts(), n_parts=2, part_stride=4 * n, **summands,
        )  # fmt: skip
        bench.line(
            elementwise.swiglu_quantize, f"{rows} x {ff}", rows, rows * (8 * ff + ff_q8),
            lambda rows=rows: {"x": bench.floats(rows * ff), "y": bench.floats(rows * ff), "out": bench.floats(rows * ff_q8 // 4)},
            x_stride=4 * ff, y_stride=4 * ff, out_stride=ff_q8, n=ff, n_rows=bench.count(rows),
        )  # fmt: skip


def stores(bench: Bench) -> None:
    """32 heads over 8 of 128: K or V alone; then Q, K and V at once, with their rotation."""
    for rows in (1, 512):
        cells = bench.gpu.upload(np.random.default_rng(1).permutation(4096)[:rows].astype(np.int32))
        for dtype in (F16, Q8_0):
            cell = 1024 // dtype.block_size * dtype.block_bytes
            cached = {"cells": cells, "n_rows": bench.count(rows)}
            bench.line(
                store_rows_kernel(dtype), f"{rows} x 1024", rows, rows * (4096 + cell),
                lambda rows=rows, cell=cell: {"x": bench.floats(rows * 1024), "cache": bench.floats(1024 * cell)}, x_stride=4096,
                cell_stride=cell, n=1024, **cached,
            )  # fmt: skip

            def operands(rows: int = rows, cell: int = cell) -> dict[str, Any]:
                sizes = {"q": rows * 4096, "q_out": rows * 4096, "k": rows * 1024, "v": rows * 1024, "table": rows * 128}
                return {name: bench.floats(n) for name, n in (sizes | {"k_cache": 1024 * cell, "v_cache": 1024 * cell}).items()}

            strides = {"q_stride": 4 * 4096, "q_head_stride": 512, "q_out_stride": 4 * 4096, "q_out_head_stride": 512}
            strides |= {"k_stride": 4096, "k_head_stride": 512, "v_stride": 4096, "table_stride": 512}
            bench.line(
                rope_store_kernel(dtype, False), f"{rows} x 32 + 8 + 8", rows, rows * (32768 + 8192 + 512 + 2 * cell), operands, n_head=32,
                n_head_kv=8, n_v=1024, head_dim=128, half=64, k_cell_stride=cell, v_cell_stride=cell, **strides, **cached,
            )  # fmt: skip


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    bench = Bench(open_gpu())
    fused(bench)
    stores(bench)
    element_by_element(bench)
    norms(bench)
    rotations(bench)
    pieces(bench)


if __name__ == "__main__":
    run_main(main)
