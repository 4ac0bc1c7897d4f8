"""Which kernel computes a product, how it is launched, and what it needs of a multiprocessor. What it computes: test_gpu_matmul.py."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels.cuda.assembly import CAPABILITIES, ptxas, resources

from numba_meta import dtypes
from numba_meta.dtypes import DType
from numba_meta.errors import ShapeError, UsageError
from numba_meta.kernels.cuda.kernel import Gpu
from numba_meta.kernels.cuda.matmul import COLUMNS, TILE_COLUMNS, choose_columns, matmul_kernel
from numba_meta.kernels.cuda.matmul_rows import unit_elements
from numba_meta.kernels.cuda.matmul_tiles import choose_tiling
from numba_meta.kernels.cuda.matmul_vector import ROWS_PER_WARP, WARPS, log_row_warps, most_columns
from numba_meta.kernels.cuda.packed import MOST_VECTOR_COLUMNS
from numba_meta.kernels.cuda.tile_block import LARGE, SMALL, shared_bytes

H200 = Gpu((9, 0), 132, 227 << 10)
WEIGHT_TYPES = st.sampled_from(dtypes.WEIGHT_TYPES)


@given(st.integers(0, 5000))
def test_few_rows_are_computed_at_once(rows: int) -> None:
    n = choose_columns(rows)
    assert n in COLUMNS
    assert n >= rows or rows > MOST_VECTOR_COLUMNS
    assert (n == TILE_COLUMNS) == (rows > MOST_VECTOR_COLUMNS)
    assert all(other < rows or other >= n for other in COLUMNS)


@given(WEIGHT_TYPES, st.booleans(), st.sampled_from(COLUMNS), st.integers(0, 5000), st.integers(0, 100), st.integers(1, 600))
def test_a_launch_covers_every_output_once(dtype: DType, exact: bool, n_columns: int, n_out: int, n_blocks: int, rows: int) -> None:
    k = n_blocks * max(32, dtype.block_size)
    kernel = matmul_kernel(dtype, exact, n_columns)
    launch = kernel.launch({"n_out": n_out, "k": k}, rows, H200)
    if n_columns == TILE_COLUMNS and not exact and dtype != dtypes.F32:
        tiling = choose_tiling(n_out, rows, H200.n_multiprocessors)
        of_weights, of_rows, per_block, at_once = launch.grid[1], launch.grid[0], tiling.w_rows * launch.grid[2], tiling.x_rows
    else:
        at_once = min(n_columns, most_columns(dtype, exact))
        of_weights, of_rows = launch.grid[0], launch.grid[1]
        per_block = WARPS * ROWS_PER_WARP >> log_row_warps(-(-k // unit_elements(dtype)))
    assert of_weights * per_block >= n_out > (of_weights - 1) * per_block or n_out == of_weights == 0
    assert n_out == 0 or of_rows * at_once >= rows > (of_rows - 1) * at_once
    assert launch.block[0] <= kernel.max_threads


@given(st.integers(0, 100_000))
def test_long_rows_are_shared_by_warps_that_have_something_to_do(n_units: int) -> None:
    warps = 1 << log_row_warps(n_units)
    assert warps <= WARPS
    assert warps == 1 or n_units > 128 * warps // 2


@given(WEIGHT_TYPES, st.booleans(), st.sampled_from(COLUMNS))
def test_types_of_one_layout_share_a_kernel(dtype: DType, exact: bool, n_columns: int) -> None:
    kernel = matmul_kernel(dtype, exact, n_columns)
    if dtype == dtypes.Q3_K:
        assert kernel is matmul_kernel(dtypes.Q6_K, exact, n_columns)
    if not dtype.is_quantized and n_columns <= MOST_VECTOR_COLUMNS:
        assert kernel is matmul_kernel(dtype, not exact, n_columns)


def test_code_is_what_the_capability_allows() -> None:
    kernel = matmul_kernel(dtypes.Q4_0, False, TILE_COLUMNS)
    new, old = kernel.ptx((9, 0)), kernel.ptx((7, 5))
    assert "m16n8k16" in new and "cp.async" in new
    assert "m16n8k16" not in old and "cp.async" not in old and "m16n8k8" in old
    early = "griddepcontrol.wait"
    assert [early in matmul_kernel(dtypes.Q4_0, False, 1).ptx(capability) for capability in ((8, 0), (9, 0))] == [False, True]


@pytest.mark.parametrize(("capability", "most"), [((7, 5), 64 << 10), ((8, 0), 163 << 10), ((8, 6), 99 << 10), ((9, 0), 227 << 10)])
def test_tiles_fit_the_shared_memory_of_a_block(capability: tuple[int, int], most: int) -> None:
    assert all(0 < shared_bytes(dtype, capability) <= most for dtype in (dtypes.Q4_0, dtypes.F16))


@given(st.integers(1, 200), st.integers(1, 5000), st.integers(1, 600))
def test_small_tiles_where_large_ones_leave_the_gpu_idle(n_multiprocessors: int, n_out: int, rows: int) -> None:
    tiling = choose_tiling(n_out, rows, n_multiprocessors)
    n_large = -(-n_out // LARGE.w_rows) * -(-rows // LARGE.x_rows)
    assert tiling is (SMALL if rows <= SMALL.x_rows or n_large * 2 <= n_multiprocessors else LARGE)


@pytest.mark.skipif(ptxas() is None, reason="needs ptxas (package nvidia-cuda-nvcc)")
@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: f"sm_{c[0]}{c[1]}")
@pytest.mark.parametrize("dtype", [dtypes.Q4_0, dtypes.Q8_0, dtypes.Q4_K, dtypes.Q6_K, dtypes.F16], ids=repr)
def test_decode_keeps_enough_warps_in_flight(dtype: DType, capability: tuple[int, int]) -> None:
    """128 registers: 16 warps of a multiprocessor, each with 4 KiB of weights or more on their way."""
    need = resources(matmul_kernel(dtype, False, 1), capability)
    assert need.registers <= 128 and need.spill_bytes == 0


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: matmul_kernel(dtypes.Q8_0, False, 3), UsageError, "not 3"),
        (lambda: matmul_kernel(dtypes.I32, False, 1), ShapeError, "i32 is no type of weights"),
    ],
)
def test_wrong_calls_are_one_clear_line(call, error, words: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert words in str(caught.value) and "\n" not in str(caught.value)
