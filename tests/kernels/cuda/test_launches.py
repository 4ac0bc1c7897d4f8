"""How many blocks of how many threads the kernels over rows get: every column of every row has its thread, within a GPU's limits."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from numba_meta.dtypes import Q8_0
from numba_meta.kernels.cuda import copy, deliver, elementwise, norm, reduce, reduce_norm, rope, rope_store
from numba_meta.kernels.cuda.kernel import CudaKernel, Gpu, Launch

GPU = Gpu((7, 5), 68)
EXTENTS = st.integers(1, 300_000)
ROWS = st.integers(0, 100_000)


def launch(kernel: CudaKernel, n_rows: int, **arguments: Any) -> Launch:
    """A launch that any GPU can do: limits of CUDA, no more threads than the kernel was compiled for."""
    found = kernel.launch(arguments, n_rows, GPU)
    assert found.grid[0] < 1 << 31 and all(0 <= n <= 65535 for n in found.grid[1:])
    assert all(n >= 1 for n in found.block) and found.block[0] * found.block[1] * found.block[2] <= kernel.max_threads <= 1024
    return found


@given(EXTENTS, ROWS)
def test_a_thread_for_each_4_columns(n: int, n_rows: int) -> None:
    for kernel in (elementwise.add, elementwise.scale, elementwise.swiglu_quantize, reduce.all_reduce):
        found = launch(kernel, n_rows, n=n)
        assert found.grid[0] == n_rows and found.block[0] % 32 == 0
        assert n <= 4 * found.grid[1] * found.block[0] < n + 4 * found.block[0]


@given(EXTENTS, ROWS, st.integers(1, 64))
def test_a_block_of_whole_warps_for_each_row(n: int, n_rows: int, per_token: int) -> None:
    for kernel in (norm.add_rms_norm, reduce_norm.all_reduce_add_rms_norm, elementwise.softmax_rows, reduce.argmax_rows):
        found = launch(kernel, n_rows, n=n)
        assert found.grid == (n_rows, 1, 1) and found.block[0] % 32 == 0
    assert launch(norm.rms_norm, n_rows, n=n, rows_per_token=per_token).grid == (n_rows * per_token, 1, 1)


@given(st.integers(1, 256), st.integers(1, 256), ROWS)
def test_every_head_has_its_threads(half: int, n_head: int, n_rows: int) -> None:
    for kernel in (rope.rope_halves, rope.rope_interleaved):
        found = launch(kernel, n_rows, half=half, n_head=n_head)
        assert found.grid[0] == n_rows and found.grid[1] * found.block[1] >= n_head
    angles = launch(rope.rope_angles, n_rows, half=half)
    assert angles.grid[0] == n_rows and angles.grid[1] * angles.block[0] >= half


@given(st.integers(1, 128), st.integers(1, 16), st.integers(1, 512), st.data())
def test_blocks_of_q_k_and_v(n_head: int, n_head_kv: int, head_dim: int, data: st.DataObject) -> None:
    half, n_v = data.draw(st.integers(0, head_dim // 2)), data.draw(st.integers(1, 4096))
    arguments = {"n_head": n_head, "n_head_kv": n_head_kv, "head_dim": head_dim, "half": half, "n_v": n_v}
    found = launch(rope_store.rope_store_kernel(Q8_0, False), 3, **arguments)
    each = (n_head * (head_dim - half), n_head_kv * head_dim, n_v)
    assert found.grid == (3, sum((n + 127) // 128 for n in each), 1) and found.block == (128, 1, 1)


@given(st.integers(0, 1 << 24), st.integers(0, 1 << 24))
def test_copies(width: int, height: int) -> None:
    found = launch(copy.copy_2d, 1, width=width, height=height)
    assert found.grid[0] * found.block[1] >= height and (found.grid[1] > 0) == (width > 0)
    zeros = launch(copy.fill_zero, height % 1000, n_bytes=width)
    assert zeros.grid[0] == height % 1000 and zeros.grid[1] > 0
    assert launch(deliver.write_back, 5, width=width).grid == (5, 1, 1)
    assert launch(deliver.deliver_windows, 5).grid == (136, 1, 1)
    assert launch(reduce.gather_columns, 5, out_stride=width).grid[0] == 5
