"""The cell table of each sequence: which cell of the cache holds the token at a position. int32 `[sequence][position]`, -1: none."""

from __future__ import annotations

from numba_meta.kernels.cpu.kernel import Int, Ptr, cpu_kernel
from numba_meta.kernels.cpu.simd import load_i32, load_i64, store_i32


@cpu_kernel
def store_cells(thread, n_threads, table: Ptr, table_stride: Int, sequences: Ptr, positions: Ptr, cells: Ptr, n_rows: Ptr):  # type: ignore[no-untyped-def]
    """table[sequences[r]][positions[r]] = cells[r] for every live row; the first thread does it all (a few bytes a row)."""
    if thread == 0:
        for r in range(load_i64(n_rows)):
            store_i32(table + load_i32(sequences + 4 * r) * table_stride + 4 * load_i32(positions + 4 * r), load_i32(cells + 4 * r))
