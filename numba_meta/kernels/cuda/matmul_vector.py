"""Matrix products of one or a few rows of activations: memory is the limit, weights are read once (arithmetic: `matmul_rows.py`).

grid (groups of weight rows, groups of `n_columns` activation rows), block of 4 warps. A warp computes a few weight rows, or, of long ones,
a part; then warps meet in shared memory. Reads the packed weights once per group of activation rows; writes 4 n_out n_rows bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from numba_meta import dtypes
from numba_meta.dtypes import DType
from numba_meta.kernels.cuda.device import cuda, device_function, load_i64, store_f32, types
from numba_meta.kernels.cuda.emit import start_next_kernel, wait_for_previous_kernel
from numba_meta.kernels.cuda.kernel import CudaKernel, Gpu, Int, Launch, Ptr, cuda_kernel
from numba_meta.kernels.cuda.matmul_rows import SPAN, rows_product, unit_elements
from numba_meta.kernels.cuda.packed import FLOAT_TYPES, QUANT_LAYOUTS, same_layout

Q8_COLUMNS, F32_COLUMNS = (1, 2, 4, 8, 16), (1, 8)  # activation rows at once, by their form
LOG_WARPS = 2
WARPS = 1 << LOG_WARPS  # of a block
_THREADS = 32 * WARPS


def log_row_warps(n_units: int) -> int:
    """How many warps share a row of weights (its logarithm to base 2): by its length alone, as the order of a sum depends on it."""
    if n_units <= SPAN:
        return 0
    if n_units <= 2 * SPAN:
        return 1
    return 2


_log_row_warps = device_function(log_row_warps)


LOG_ROWS_PER_WARP = 1
ROWS_PER_WARP = 1 << LOG_ROWS_PER_WARP  # weight rows that a warp computes at once: they share its activations, no bits depend on it


def log_block_rows(n_units: int) -> int:
    """Weight rows that a block computes (logarithm to base 2)."""
    return LOG_WARPS + LOG_ROWS_PER_WARP - log_row_warps(n_units)


@functools.cache
def vector_kernel(dtype: DType, exact: bool, n_columns: int, n_weights: int = 1) -> CudaKernel:
    """The product for `n_columns` activation rows at once; parameters as for `matmul.matmul_kernel` or `matmul.matmul_group_kernel`."""
    n_elements = unit_elements(dtype)
    log_elements, log_columns = n_elements.bit_length() - 1, n_columns.bit_length() - 1
    product = rows_product(dtype, exact, ROWS_PER_WARP, n_columns)
    n_own = ROWS_PER_WARP * n_columns

    def launch(arguments: Mapping[str, Any], n_rows: int, gpu: Gpu) -> Launch:
        names = ["n_out"] if n_weights == 1 else [f"n_out_{i}" for i in range(n_weights)]
        per_block = 1 << log_block_rows(-(-arguments["k"] // n_elements))
        n_blocks = sum(-(-arguments[name] // per_block) for name in names) if n_rows else 0
        return Launch((n_blocks, -(-n_rows // n_columns) or 1, 1), (_THREADS, 1, 1))

    @device_function
    def multiply(block, w, x, x_stride, y, y_stride, n_out, k, rows):  # type: ignore[no-untyped-def]
        column = types.int64(cuda.blockIdx.y) * n_columns
        if n_columns > 1 and column >= rows:
            wait_for_previous_kernel()
            return
        lane, warp = types.int64(cuda.threadIdx.x & 31), types.int64(cuda.threadIdx.x >> 5)
        log_parts = _log_row_warps((k + (n_elements - 1)) >> log_elements)
        n_parts = types.int64(1) << log_parts
        part = warp & (n_parts - 1)
        row = ((block * WARPS + warp) >> log_parts) * ROWS_PER_WARP
        total = product(w, n_out, k, row, x, x_stride, column, rows, lane, part, n_parts)
        if n_parts > 1:
            parts = cuda.shared.array(_THREADS, types.float32)
            parts[32 * warp + lane] = total
            cuda.syncthreads()
            if part > 0:
                return
            for i in range(1, n_parts):
                total = total + parts[32 * (warp + i) + lane]
        row, column = row + (lane >> log_columns), column + (lane & (n_columns - 1))
        if lane < n_own and row < n_out and column < rows:
            store_f32(y + column * y_stride + 4 * row, total)

    @device_function
    def n_blocks(n_out, k):  # type: ignore[no-untyped-def]
        log_rows = LOG_WARPS + LOG_ROWS_PER_WARP - _log_row_warps((k + (n_elements - 1)) >> log_elements)
        return (n_out + (types.int64(1) << log_rows) - 1) >> log_rows

    layout = dtype.name if dtype in FLOAT_TYPES else QUANT_LAYOUTS[dtype].name
    group = f"_of_{n_weights}" if n_weights > 1 else ""
    name = f"matmul{group}_{layout}_{'exact' if exact else 'fast'}_{n_columns}"
    function = {1: _of_one, 2: _of_two, 3: _of_three}[n_weights](multiply, n_blocks)
    return cuda_kernel(launch=launch, max_threads=_THREADS, name=name)(function)


def _of_one(multiply: Any, n_blocks: Any) -> Callable[..., None]:
    def matmul(w: Ptr, x: Ptr, x_stride: Int, y: Ptr, y_stride: Int, n_out: Int, k: Int, n_rows: Ptr) -> None:
        start_next_kernel()
        multiply(types.int64(cuda.blockIdx.x), w, x, x_stride, y, y_stride, n_out, k, load_i64(n_rows))

    return matmul


def _of_two(multiply: Any, n_blocks: Any) -> Callable[..., None]:
    def matmul(
        x: Ptr, x_stride: Int, k: Int, n_rows: Ptr, w_0: Ptr, y_0: Ptr, y_stride_0: Int, n_out_0: Int,
        w_1: Ptr, y_1: Ptr, y_stride_1: Int, n_out_1: Int,
    ) -> None:  # fmt: skip
        start_next_kernel()
        block, w, y, y_stride, n_out = types.int64(cuda.blockIdx.x), w_0, y_0, y_stride_0, n_out_0
        if block >= n_blocks(n_out_0, k):
            block -= n_blocks(n_out_0, k)
            w, y, y_stride, n_out = w_1, y_1, y_stride_1, n_out_1
        multiply(block, w, x, x_stride, y, y_stride, n_out, k, load_i64(n_rows))

    return matmul


def _of_three(multiply: Any, n_blocks: Any) -> Callable[..., None]:
    def matmul(
        x: Ptr, x_stride: Int, k: Int, n_rows: Ptr, w_0: Ptr, y_0: Ptr, y_stride_0: Int, n_out_0: Int,
        w_1: Ptr, y_1: Ptr, y_stride_1: Int, n_out_1: Int, w_2: Ptr, y_2: Ptr, y_stride_2: Int, n_out_2: Int,
    ) -> None:  # fmt: skip
        start_next_kernel()
        block, w, y, y_stride, n_out = types.int64(cuda.blockIdx.x), w_0, y_0, y_stride_0, n_out_0
        if block >= n_blocks(n_out_0, k):
            block -= n_blocks(n_out_0, k)
            w, y, y_stride, n_out = w_1, y_1, y_stride_1, n_out_1
            if block >= n_blocks(n_out_1, k):
                block -= n_blocks(n_out_1, k)
                w, y, y_stride, n_out = w_2, y_2, y_stride_2, n_out_2
        multiply(block, w, x, x_stride, y, y_stride, n_out, k, load_i64(n_rows))

    return matmul


def all_kernels() -> list[CudaKernel]:
    """Every kernel of this module that `matmul.matmul_kernel` gives."""
    layouts = dict.fromkeys(same_layout(dtype) for dtype in QUANT_LAYOUTS)
    floats = [(dtype, True, n) for dtype in (*FLOAT_TYPES, *layouts) for n in F32_COLUMNS]
    groups = [(dtypes.Q4_0, False, 1, 2), (dtypes.Q4_0, False, 1, 3)]  # those of other types differ from these as single ones do
    return [vector_kernel(*each) for each in floats + [(dtype, False, n) for dtype in layouts for n in Q8_COLUMNS] + groups]
