"""What follows a matrix product that was cut by its inputs, in one launch: the devices' sum, the residual, the next norm.

The bits are those of `all_reduce`, `add`, `rms_norm` (and `quantize_rows`). Grid and block as in `norm.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from numba_meta.kernels.cuda.device import cuda, load_i64, start_next_kernel, types, wait_for_previous_kernel
from numba_meta.kernels.cuda.kernel import CudaKernel, Float, Int, Ptr, cuda_kernel
from numba_meta.kernels.cuda.lanes import MAX_THREADS, block_sum, load_4, squares_4
from numba_meta.kernels.cuda.norm import block_per_row, factor_of, load_two, normalized_4, squares_two, sum_4
from numba_meta.kernels.cuda.outputs import WARP_COLUMNS, write_f32, write_q8
from numba_meta.kernels.cuda.reduce import first_parts, sum_of_parts_4


def _all_reduce_add_rms_norm(name: str, write: Callable[..., None]) -> CudaKernel:
    @cuda_kernel(name=name, launch=block_per_row, max_threads=MAX_THREADS)
    def kernel(  # type: ignore[no-untyped-def]
        parts: Ptr, n_parts: Int, part_stride: Int, other: Ptr, other_stride: Int, total: Ptr, total_stride: Int, weight: Ptr, y: Ptr,
        y_stride: Int, n: Int, n_rows: Ptr, eps: Float,
    ):  # fmt: skip
        """total = sum of the parts + other, y = rms_norm(total). total may be other or a part that no other device reads.

        `parts`: n_parts addresses (int64) of float32 rows, in device order. Reads 4 n (n_parts + 2) bytes a row.
        """
        start_next_kernel()
        scratch = cuda.shared.array(32, types.float32)
        row, step, column = np.int64(cuda.blockIdx.x), 4 * np.int64(cuda.blockDim.x), 4 * np.int64(cuda.threadIdx.x)
        is_aligned = (other | other_stride | total | total_stride | weight | y | y_stride) & 15 == 0
        b, c, target = other + row * other_stride, total + row * total_stride, y + row * y_stride
        second, offset = column + step, row * part_stride
        w = load_two(weight, column, second, n, is_aligned)
        wait_for_previous_kernel()
        live = load_i64(n_rows)
        part_0, part_1 = first_parts(parts, n_parts)
        u = load_two(b, column, second, n, is_aligned)
        if row >= live:
            return
        v0 = sum_4(sum_of_parts_4(parts, n_parts, part_0, part_1, offset + 4 * column, n - column, part_stride), u[0])
        v1 = sum_4(sum_of_parts_4(parts, n_parts, part_0, part_1, offset + 4 * second, n - second, part_stride), u[1])
        write_f32(c, column, v0, n, is_aligned)
        write_f32(c, second, v1, n, is_aligned)
        squares = squares_two((v0, v1))
        i = second + step
        while i < n:
            value = sum_of_parts_4(parts, n_parts, part_0, part_1, offset + 4 * i, n - i, part_stride)
            value = sum_4(value, load_4(b + 4 * i, n - i, is_aligned))
            write_f32(c, i, value, n, is_aligned)
            squares = squares_4(value, squares)
            i += step
        factor = factor_of(block_sum(squares, scratch), n, eps)
        write(target, column, normalized_4(v0, factor, w[0]), n, is_aligned)
        if second & WARP_COLUMNS < n:
            write(target, second, normalized_4(v1, factor, w[1]), n, is_aligned)
        i = second + step
        while i & WARP_COLUMNS < n:
            value, weights = load_4(c + 4 * i, n - i, is_aligned), load_4(weight + 4 * i, n - i, is_aligned)  # this thread wrote c
            write(target, i, normalized_4(value, factor, weights), n, is_aligned)
            i += step

    return kernel


all_reduce_add_rms_norm = _all_reduce_add_rms_norm("all_reduce_add_rms_norm", write_f32)
all_reduce_add_rms_norm_quantize = _all_reduce_add_rms_norm("all_reduce_add_rms_norm_quantize", write_q8)  # y: `q8` rows


def all_kernels() -> list[CudaKernel]:
    """Every kernel of this module."""
    return [all_reduce_add_rms_norm, all_reduce_add_rms_norm_quantize]
