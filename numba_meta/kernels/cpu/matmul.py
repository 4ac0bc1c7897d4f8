"""Matrix products of packed weights: y[r][o] = sum over k of w[o][k] * x[r][k] (layouts: `packed.py`, arithmetic: `matmul_tiles.py`).

Bits of y[r][o] depend on activation row r and weight row o alone: not on the other rows, `n_out`, `columns` or the threads.
"""

from __future__ import annotations

import functools

from numba_meta.dtypes import DType
from numba_meta.errors import UsageError
from numba_meta.kernels.cpu.isa import Isa, detect
from numba_meta.kernels.cpu.kernel import CpuKernel, Int, Ptr
from numba_meta.kernels.cpu.matmul_tiles import tile_product
from numba_meta.kernels.cpu.packed import FLOAT_TYPES, QUANT_LAYOUTS, activation_format, same_layout, tile_bytes
from numba_meta.kernels.cpu.simd import LANES, load_i64

COLUMNS = (1, 4, 8)
_MOST_F32_COLUMNS = 4  # with float32 activations more columns are no faster and take twice the time to compile


def choose_columns(capacity_rows: int) -> int:
    """How many activation rows to compute at once, for up to `capacity_rows` of them."""
    return 1 if capacity_rows <= 1 else 4 if capacity_rows <= 4 else 8


def matmul_kernel(dtype: DType, exact: bool, columns: int, isa: Isa | None = None) -> CpuKernel:
    """The product with packed weights of a type, for activations in `activation_format(dtype, exact)`.

    Parameters: `w` packed weights `[n_out, k]`; `x` activation rows, `x_stride` bytes apart; `y` float32 rows `[n_out]`, `y_stride` bytes
    apart; `n_out`; `k` (whole blocks; 0 writes zeros); `n_rows` address of the live row count (int64). Up to `columns` rows (1, 4 or 8)
    are computed at once; any live row count is right with each. `isa` asks for less than the machine has.

    Reads the packed weights once per call and the activations once per 16 weight rows; 2 n_out k n_rows operations.
    """
    if columns not in COLUMNS:
        raise UsageError(f"a matrix product computes {', '.join(map(str, COLUMNS))} rows at once, not {columns}")
    tile_bytes(dtype, 0)  # refuses a type that is none of weights
    exact = activation_format(dtype, exact) == "f32"
    level = detect() if isa is None else min(detect(), isa)
    return _matmul_kernel(same_layout(dtype), exact, min(columns, _MOST_F32_COLUMNS) if exact else columns, level)


@functools.cache
def _matmul_kernel(dtype: DType, exact: bool, columns: int, isa: Isa) -> CpuKernel:
    single = tile_product(dtype, exact, 1, isa)
    product = single if columns == 1 else tile_product(dtype, exact, columns, isa)
    unit_elements, unit_bytes = dtype.block_size, tile_bytes(dtype, dtype.block_size)

    def matmul(thread: int, n_threads: int, w: Ptr, x: Ptr, x_stride: Int, y: Ptr, y_stride: Int, n_out: Int, k: Int, n_rows: Ptr) -> None:
        """Threads share (tile, group of rows) pairs, tile by tile: weights are read once, `columns` activation rows at a time."""
        rows = load_i64(n_rows)
        groups = (rows + columns - 1) // columns
        total = (n_out + LANES - 1) // LANES * groups
        begin, end = total * thread // n_threads, total * (thread + 1) // n_threads
        tile, group = 0, 0
        if begin < end:
            tile, group = begin // groups, begin % groups
        stride = k // unit_elements * unit_bytes
        for _ in range(begin, end):
            row = group * columns
            to, lanes = y + row * y_stride + tile * (4 * LANES), min(LANES, n_out - tile * LANES)
            if columns == 1 or rows - row == 1:
                single(w + tile * stride, k, x + row * x_stride, x_stride, 1, to, y_stride, lanes)
            else:
                product(w + tile * stride, k, x + row * x_stride, x_stride, min(columns, rows - row), to, y_stride, lanes)
            group += 1
            if group == groups:
                tile, group = tile + 1, 0

    layout = dtype.name if dtype in FLOAT_TYPES else QUANT_LAYOUTS[dtype].name
    mode = "exact" if exact else "fast"
    return CpuKernel(matmul, f"matmul_{layout}_{mode}_{columns}_{isa.name.lower()}")
