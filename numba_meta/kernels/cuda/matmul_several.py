"""Up to three matrix products of the same activations in one launch: Q, K and V; gate and up. The bits are those of `matmul_vector.py`.

Small matrices do not fill a GPU one after the other. grid and block as there; each matrix takes whole blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from numba_meta.dtypes import DType
from numba_meta.kernels.cuda.device import cuda, load_i64, types, wait_for_previous_kernel
from numba_meta.kernels.cuda.kernel import CudaKernel, Gpu, Int, Launch, Ptr, cuda_kernel
from numba_meta.kernels.cuda.matmul_vector import (
    Q8_COLUMNS,
    ROWS_PER_WARP,
    THREADS,
    WARPS,
    block_product,
    blocks_of_rows,
    log_parts_of,
    most_columns,
)
from numba_meta.kernels.cuda.packed import FLOAT_TYPES, QUANT_LAYOUTS, same_layout

MOST_MATRICES = 3


@functools.cache
def several_kernel(dtype: DType, exact: bool, n_columns: int) -> CudaKernel:
    """Products of packed weights `w0`, `w1`, `w2` of one type with the same rows: `y0`, `y1`, `y2`, each a row every `y0_stride` .. bytes.

    `n0`, `n1`, `n2`: rows of each matrix, 0: none. All else as for `matmul.matmul_kernel`.
    """
    compute, log_parts_of_row = block_product(dtype, exact, n_columns), log_parts_of(dtype)
    log_block = (ROWS_PER_WARP * WARPS).bit_length() - 1

    def launch(arguments: Mapping[str, Any], n_rows: int, gpu: Gpu) -> Launch:
        n_blocks = sum(blocks_of_rows(arguments[f"n{i}"], arguments["k"], dtype) for i in range(MOST_MATRICES))
        return Launch((n_blocks, -(-n_rows // n_columns), 1), (THREADS, 1, 1))

    def kernel(
        w0: Ptr, y0: Ptr, y0_stride: Int, n0: Int, w1: Ptr, y1: Ptr, y1_stride: Int, n1: Int, w2: Ptr, y2: Ptr, y2_stride: Int, n2: Int,
        x: Ptr, x_stride: Int, k: Int, n_rows: Ptr,
    ) -> None:  # fmt: skip
        rows = load_i64(n_rows)
        column = types.int64(cuda.blockIdx.y) * n_columns
        if n_columns > 1 and column >= rows:
            wait_for_previous_kernel()  # whoever is launched early behind this one relies on it
            return
        log_rows = log_block - log_parts_of_row(k)  # of a block
        block, whole = types.int64(cuda.blockIdx.x), (types.int64(1) << log_rows) - 1
        end_0 = (n0 + whole) >> log_rows
        end_1 = end_0 + ((n1 + whole) >> log_rows)
        w, y, y_stride, n_out = w0, y0, y0_stride, n0
        if block >= end_1:
            w, y, y_stride, n_out, block = w2, y2, y2_stride, n2, block - end_1
        elif block >= end_0:
            w, y, y_stride, n_out, block = w1, y1, y1_stride, n1, block - end_0
        compute(w, y, y_stride, n_out, x, x_stride, k, block, column, rows)

    layout = dtype.name if dtype in FLOAT_TYPES else QUANT_LAYOUTS[dtype].name
    name = f"several_{layout}_{'exact' if exact else 'fast'}_{n_columns}"
    return cuda_kernel(launch=launch, max_threads=THREADS, name=name)(kernel)


def all_kernels() -> list[CudaKernel]:
    """Those that decode steps in fast mode use."""
    layouts = dict.fromkeys(same_layout(dtype) for dtype in QUANT_LAYOUTS)
    return [several_kernel(dtype, False, n) for dtype in layouts for n in Q8_COLUMNS if n <= most_columns(dtype, False)]
