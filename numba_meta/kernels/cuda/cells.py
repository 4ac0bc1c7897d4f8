"""The cell table of each sequence: which cell of the cache holds the token at a position. int32 `[sequence][position]`, -1: none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numba_meta.kernels.cuda.device import cuda, load_i32, load_i64, store_i32, types
from numba_meta.kernels.cuda.kernel import CudaKernel, Gpu, Int, Launch, Ptr, cuda_kernel

THREADS = 128


def _thread_per_row(arguments: Mapping[str, Any], n_rows: int, gpu: Gpu) -> Launch:
    return Launch((-(-n_rows // THREADS), 1, 1), (THREADS, 1, 1))


@cuda_kernel(launch=_thread_per_row, max_threads=THREADS)
def store_cells(table: Ptr, table_stride: Int, sequences: Ptr, positions: Ptr, cells: Ptr, n_rows: Ptr):  # type: ignore[no-untyped-def]
    """table[sequences[r]][positions[r]] = cells[r] for every live row, a thread each."""
    row = types.int64(cuda.grid(1))
    if row < load_i64(n_rows):
        store_i32(table + load_i32(sequences + 4 * row) * table_stride + 4 * load_i32(positions + 4 * row), load_i32(cells + 4 * row))


def all_kernels() -> list[CudaKernel]:
    """Every kernel of this module."""
    return [store_cells]
