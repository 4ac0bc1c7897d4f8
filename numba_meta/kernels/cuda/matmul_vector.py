"""Matrix products of one or a few rows of activations: memory is the limit, weights are read once (arithmetic: `matmul_rows.py`).

grid (groups of weight rows, groups of `n_columns` activation rows), block of 4 warps. A warp computes a few weight rows, or, of long ones,
a part; then warps meet in shared memory. Reads the packed weights once per group of activation rows; writes 4 n_out n_rows bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from numba_meta.dtypes import DType
from numba_meta.kernels.cuda.device import cuda, device_function, load_i64, store_f32, types
from numba_meta.kernels.cuda.emit import wait_for_previous_kernel
from numba_meta.kernels.cuda.kernel import CudaKernel, Gpu, Int, Launch, Ptr, cuda_kernel
from numba_meta.kernels.cuda.matmul_rows import SPAN, rows_product, unit_elements
from numba_meta.kernels.cuda.packed import FLOAT_TYPES, QUANT_LAYOUTS, same_layout

Q8_COLUMNS, F32_COLUMNS = (1, 2, 4, 8, 16), (1, 8)  # activation rows at once, by their form
WARPS = 4  # of a block
THREADS = 32 * WARPS


def most_columns(dtype: DType, exact: bool) -> int:
    """Activation rows that a kernel computes at once, at most: as many as registers hold."""
    if exact or dtype in FLOAT_TYPES:
        return F32_COLUMNS[-1]
    return 8 if QUANT_LAYOUTS[dtype].bits == 5 else Q8_COLUMNS[-1]


def log_row_warps(n_units: int) -> int:
    """How many warps share a row of weights (its logarithm to base 2): by its length alone, as the order of a sum depends on it."""
    if n_units <= SPAN:
        return 0
    if n_units <= 2 * SPAN:
        return 1
    return 2


_log_row_warps = device_function(log_row_warps)


ROWS_PER_WARP = 2  # weight rows that a warp computes at once, so that they share its activations; no output's bits depend on it


def blocks_of_rows(n_out: int, k: int, dtype: DType) -> int:
    """Blocks for all rows of a matrix."""
    per_block = ROWS_PER_WARP * WARPS >> log_row_warps(-(-k // unit_elements(dtype)))
    return -(-n_out // per_block)


@functools.cache
def log_parts_of(dtype: DType) -> Any:
    """The device function k -> `log_row_warps` of a row of k elements."""
    n_elements = unit_elements(dtype)
    log_elements = n_elements.bit_length() - 1

    @device_function
    def log_parts(k):  # type: ignore[no-untyped-def]
        return _log_row_warps((k + (n_elements - 1)) >> log_elements)

    return log_parts


@functools.cache
def block_product(dtype: DType, exact: bool, n_columns: int) -> Any:
    """The device function (w, y, y_stride, n_out, x, x_stride, k, block, column, rows): what the block'th block of a matrix does."""
    log_columns, log_parts_of_row = n_columns.bit_length() - 1, log_parts_of(dtype)
    product = rows_product(dtype, exact, ROWS_PER_WARP, n_columns)
    n_own = ROWS_PER_WARP * n_columns

    @device_function
    def compute(w, y, y_stride, n_out, x, x_stride, k, block, column, rows):  # type: ignore[no-untyped-def]
        lane, warp = types.int64(cuda.threadIdx.x & 31), types.int64(cuda.threadIdx.x >> 5)
        log_parts = log_parts_of_row(k)
        n_parts = types.int64(1) << log_parts
        part = warp & (n_parts - 1)
        row = ((block * WARPS + warp) >> log_parts) * ROWS_PER_WARP
        total = product(w, n_out, k, row, x, x_stride, column, rows, lane, part, n_parts)
        if n_parts > 1:
            parts = cuda.shared.array(THREADS, types.float32)
            parts[32 * warp + lane] = total
            cuda.syncthreads()
            if part > 0:
                return
            for i in range(1, n_parts):
                total = total + parts[32 * (warp + i) + lane]
        row, column = row + (lane >> log_columns), column + (lane & (n_columns - 1))
        if lane < n_own and row < n_out and column < rows:
            store_f32(y + column * y_stride + 4 * row, total)

    return compute


@functools.cache
def vector_kernel(dtype: DType, exact: bool, n_columns: int) -> CudaKernel:
    """The product for `n_columns` activation rows at once; parameters as for `matmul.matmul_kernel`."""
    compute = block_product(dtype, exact, n_columns)

    def launch(arguments: Mapping[str, Any], n_rows: int, gpu: Gpu) -> Launch:
        n_blocks = blocks_of_rows(arguments["n_out"], arguments["k"], dtype) if n_rows else 0
        return Launch((n_blocks, -(-n_rows // n_columns) or 1, 1), (THREADS, 1, 1))

    def matmul(w: Ptr, x: Ptr, x_stride: Int, y: Ptr, y_stride: Int, n_out: Int, k: Int, n_rows: Ptr) -> None:
        rows = load_i64(n_rows)
        column = types.int64(cuda.blockIdx.y) * n_columns
        if n_columns > 1 and column >= rows:
            wait_for_previous_kernel()  # whoever waits for this kernel waits for that one, too
            return
        compute(w, y, y_stride, n_out, x, x_stride, k, types.int64(cuda.blockIdx.x), column, rows)

    layout = dtype.name if dtype in FLOAT_TYPES else QUANT_LAYOUTS[dtype].name
    name = f"matmul_{layout}_{'exact' if exact else 'fast'}_{n_columns}"
    return cuda_kernel(launch=launch, max_threads=THREADS, name=name)(matmul)


def all_kernels() -> list[CudaKernel]:
    """Every kernel of this module that `matmul.matmul_kernel` gives."""
    layouts = dict.fromkeys(same_layout(dtype) for dtype in QUANT_LAYOUTS)
    floats = [(dtype, True, n) for dtype in (*FLOAT_TYPES, *layouts) for n in F32_COLUMNS]
    fast = [(dtype, False, n) for dtype in layouts for n in Q8_COLUMNS if n <= most_columns(dtype, False)]
    return [vector_kernel(*each) for each in floats + fast]
