"""Up to three matrix products of the same activations in one launch: Q, K and V; gate and up. The bits are those of `matmul_vector.py`.

Small matrices do not fill a GPU one after the other. grid and block as there; each matrix takes whole blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from numba_meta.dtypes import DType
from numba_meta.kernels.cuda.device import cuda, device_function, load_i64, store_f32, types, wait_for_previous_kernel
from numba_meta.kernels.cuda.kernel import CudaKernel, Gpu, Int, Launch, Ptr, cuda_kernel
from numba_meta.kernels.cuda.matmul_rows import rows_product, unit_elements
from numba_meta.kernels.cuda.matmul_vector import Q8_COLUMNS, ROWS_PER_WARP, WARPS, log_row_warps, most_columns
from numba_meta.kernels.cuda.packed import FLOAT_TYPES, QUANT_LAYOUTS, same_layout

MOST_MATRICES = 3
_THREADS = 32 * WARPS
_log_row_warps = device_function(log_row_warps)


@functools.cache
def several_kernel(dtype: DType, exact: bool, n_columns: int) -> CudaKernel:
    """Products of packed weights `w0`, `w1`, `w2` of one type with the same rows: `y0`, `y1`, `y2`, each a row every `y0_stride` .. bytes.

    `n0`, `n1`, `n2`: rows of each matrix, 0: none. All else as for `matmul.matmul_kernel`.
    """
    n_elements = unit_elements(dtype)
    log_elements, log_columns = n_elements.bit_length() - 1, n_columns.bit_length() - 1
    product = rows_product(dtype, exact, ROWS_PER_WARP, n_columns)
    n_own, log_block = ROWS_PER_WARP * n_columns, (ROWS_PER_WARP * WARPS).bit_length() - 1

    def launch(arguments: Mapping[str, Any], n_rows: int, gpu: Gpu) -> Launch:
        per_block = ROWS_PER_WARP * WARPS >> log_row_warps(-(-arguments["k"] // n_elements))
        n_blocks = sum(-(-arguments[f"n{i}"] // per_block) for i in range(MOST_MATRICES))
        return Launch((n_blocks, -(-n_rows // n_columns), 1), (_THREADS, 1, 1))

    def kernel(
        w0: Ptr, y0: Ptr, y0_stride: Int, n0: Int, w1: Ptr, y1: Ptr, y1_stride: Int, n1: Int, w2: Ptr, y2: Ptr, y2_stride: Int, n2: Int,
        x: Ptr, x_stride: Int, k: Int, n_rows: Ptr,
    ) -> None:  # fmt: skip
        rows = load_i64(n_rows)
        column = types.int64(cuda.blockIdx.y) * n_columns
        if n_columns > 1 and column >= rows:
            wait_for_previous_kernel()  # whoever is launched early behind this one relies on it
            return
        lane, warp = types.int64(cuda.threadIdx.x & 31), types.int64(cuda.threadIdx.x >> 5)
        log_parts = _log_row_warps((k + (n_elements - 1)) >> log_elements)
        n_parts = types.int64(1) << log_parts
        part = warp & (n_parts - 1)
        log_rows = log_block - log_parts  # of a block
        block, whole = types.int64(cuda.blockIdx.x), (types.int64(1) << log_rows) - 1
        end_0 = (n0 + whole) >> log_rows
        end_1 = end_0 + ((n1 + whole) >> log_rows)
        w, y, y_stride, n_out = w0, y0, y0_stride, n0
        if block >= end_1:
            w, y, y_stride, n_out, block = w2, y2, y2_stride, n2, block - end_1
        elif block >= end_0:
            w, y, y_stride, n_out, block = w1, y1, y1_stride, n1, block - end_0
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

    layout = dtype.name if dtype in FLOAT_TYPES else QUANT_LAYOUTS[dtype].name
    name = f"several_{layout}_{'exact' if exact else 'fast'}_{n_columns}"
    return cuda_kernel(launch=launch, max_threads=_THREADS, name=name)(kernel)


def all_kernels() -> list[CudaKernel]:
    """Those that decode steps in fast mode use."""
    layouts = dict.fromkeys(same_layout(dtype) for dtype in QUANT_LAYOUTS)
    return [several_kernel(dtype, False, n) for dtype in layouts for n in Q8_COLUMNS if n <= most_columns(dtype, False)]
