"""Matrix products of packed weights: y[r][o] = sum over k of w[o][k] * x[r][k] (layouts: `packed.py`).

Bits of y[r][o] depend on activation row r and weight row o alone, in exact mode for any number of rows, else for up to
`MOST_VECTOR_COLUMNS`: those are computed by `matmul_vector.py`, more of them on tensor cores by `matmul_tiles.py`.
"""

from __future__ import annotations

from numba_meta.dtypes import DType
from numba_meta.errors import UsageError
from numba_meta.kernels.cuda.kernel import CudaKernel
from numba_meta.kernels.cuda.matmul_tiles import tile_kernel
from numba_meta.kernels.cuda.matmul_vector import Q8_COLUMNS, most_columns, vector_kernel
from numba_meta.kernels.cuda.packed import MOST_VECTOR_COLUMNS, activation_format, check_weight_type, same_layout

TILE_COLUMNS = 128
COLUMNS = (*Q8_COLUMNS, TILE_COLUMNS)


def choose_columns(capacity_rows: int) -> int:
    """How many activation rows to compute at once, for up to `capacity_rows` of them."""
    return next((n for n in COLUMNS if capacity_rows <= n <= MOST_VECTOR_COLUMNS), TILE_COLUMNS)


def matmul_kernel(dtype: DType, exact: bool, n_columns: int) -> CudaKernel:
    """The product with packed weights of a type, for activations in `activation_format(dtype, exact, n_columns)`.

    Parameters: `w` packed weights `[n_out, k]`; `x` activation rows, `x_stride` bytes apart, which begin at multiples of 16 bytes (float32
    ones for float types: of 4); `y` float32 rows `[n_out]`, `y_stride` bytes apart; `n_out`; `k` (whole blocks; 0 writes zeros); `n_rows`
    address of the live row count (int64). `n_columns`, one of `COLUMNS`: rows computed at once; any live row count is right with each.
    Raises `UsageError`, `ShapeError`.
    """
    if n_columns not in COLUMNS:
        raise UsageError(f"a matrix product computes {', '.join(map(str, COLUMNS))} rows at once, not {n_columns}")
    check_weight_type(dtype)
    form = activation_format(dtype, exact, n_columns)
    if form == "f16":
        return tile_kernel(same_layout(dtype))
    exact = form == "f32"
    return vector_kernel(same_layout(dtype), exact, min(n_columns, most_columns(dtype, exact)))
