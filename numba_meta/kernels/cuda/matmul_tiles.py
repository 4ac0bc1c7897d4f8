"""Matrix products of many rows of activations on tensor cores: float16 in, float32 sums (a block's code: `tile_block.py`).

grid (tiles of activation rows, tiles of 128 weight rows, halves of those in small tiles), block of 8 warps; a tile is 128 by 128 rows, or
64 by 64. Reads packed weights n_rows / 128 times and activations n_out / 128 times, mostly from the L2 cache.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from numba_meta import dtypes
from numba_meta.dtypes import DType
from numba_meta.errors import ShapeError
from numba_meta.kernels.cuda.api import intrinsic
from numba_meta.kernels.cuda.device import cuda, load_i64, shared_address, types
from numba_meta.kernels.cuda.kernel import CudaKernel, Gpu, Int, Launch, Ptr, cuda_kernel
from numba_meta.kernels.cuda.packed import FLOAT_TYPES, QUANT_LAYOUTS, same_layout
from numba_meta.kernels.cuda.tile_block import LARGE, SMALL, THREADS, TILE, Block, Tiling, shared_bytes


def _tile_product(dtype: DType, tiling: Tiling) -> Any:
    """The intrinsic `tile(w, x, x_stride, y, y_stride, n_out, k, rows, first_x, first_w, thread, shared)`."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        w, x, x_stride, y, y_stride, n_out, k, rows, first_x, first_w, thread, shared = args
        block = Block(b, tiling, dtype, w, x, x_stride, n_out, k, rows, first_x, first_w, thread, shared)
        block.run()
        block.store(y, y_stride)
        return context.get_dummy_value()

    signature = types.void(*[types.int64] * 11, types.int32)

    def tile(typingctx, w, x, x_stride, y, y_stride, n_out, k, rows, first_x, first_w, thread, shared):  # type: ignore[no-untyped-def]
        return signature, codegen

    return intrinsic(tile)


def choose_tiling(n_out: int, n_rows: int, n_multiprocessors: int) -> Tiling:
    """Large tiles move less through shared memory; small ones where large ones are too few for the GPU, or mostly empty."""
    blocks = -(-n_rows // LARGE.x_rows) * -(-n_out // LARGE.w_rows)
    return SMALL if n_rows <= SMALL.x_rows or 2 * blocks <= n_multiprocessors else LARGE


@functools.cache
def tile_kernel(dtype: DType) -> CudaKernel:
    """The product for many activation rows in `f16`; parameters as for `matmul.matmul_kernel`."""
    if dtype == dtypes.F32:
        raise ShapeError("f32 weights have no product on tensor cores; float32 activations are computed by matmul_vector")
    large, small = _tile_product(dtype, LARGE), _tile_product(dtype, SMALL)
    large_rows, small_rows = LARGE.x_rows, SMALL.x_rows
    small_weights = SMALL.w_rows

    def launch(arguments: Mapping[str, Any], n_rows: int, gpu: Gpu) -> Launch:
        """Small tiles: two blocks along z for each large tile of weight rows, by which the kernel knows them."""
        tiling = choose_tiling(arguments["n_out"], n_rows, gpu.n_multiprocessors)
        grid = (-(-n_rows // tiling.x_rows), -(-arguments["n_out"] // TILE), TILE // tiling.w_rows)
        return Launch(grid, (THREADS, 1, 1), shared_bytes(dtype, gpu.capability))

    def matmul(w: Ptr, x: Ptr, x_stride: Int, y: Ptr, y_stride: Int, n_out: Int, k: Int, n_rows: Ptr) -> None:
        rows, thread = load_i64(n_rows), types.int64(cuda.threadIdx.x)
        shared = shared_address(cuda.shared.array(0, types.float32, alignment=128))
        first_w = types.int64(cuda.blockIdx.y) * TILE
        if cuda.gridDim.z == 1:
            first_x = types.int64(cuda.blockIdx.x) * large_rows
            if first_x < rows:
                large(w, x, x_stride, y, y_stride, n_out, k, rows, first_x, first_w, thread, shared)
        else:
            first_x = types.int64(cuda.blockIdx.x) * small_rows
            first_w += types.int64(cuda.blockIdx.z) * small_weights
            if first_x < rows and first_w < n_out:
                small(w, x, x_stride, y, y_stride, n_out, k, rows, first_x, first_w, thread, shared)

    layout = dtype.name if dtype in FLOAT_TYPES else QUANT_LAYOUTS[dtype].name
    return cuda_kernel(launch=launch, max_threads=THREADS, name=f"matmul_{layout}_tiles")(matmul)


def all_kernels() -> list[CudaKernel]:
    """Every kernel of this module."""
    return [tile_kernel(dtype) for dtype in (dtypes.F16, dtypes.BF16, *dict.fromkeys(same_layout(dtype) for dtype in QUANT_LAYOUTS))]
