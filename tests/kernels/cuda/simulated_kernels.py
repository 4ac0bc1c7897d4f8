"""Run by test_simulated.py with NUMBA_ENABLE_CUDASIM=1: kernels without warp functions, on host memory, thread by thread.

Prints a JSON object: the name of each check, and why it failed ("" where it did not). A simulated thread takes about a millisecond.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

assert os.environ.get("NUMBA_ENABLE_CUDASIM") == "1", "start this with NUMBA_ENABLE_CUDASIM=1"
sys.path[:0] = [str(Path(__file__).parents[3]), str(Path(__file__).parents[2])]

from kernels.cpu.guarded import FILL, Guarded, live  # noqa: E402
from kernels.cuda.placed import Placed  # noqa: E402
from kernels.cuda.references import BINARY, UNARY, rotate  # noqa: E402
from numba import cuda  # noqa: E402

from numba_meta.dtypes import BF16, F16, F32, DType  # noqa: E402
from numba_meta.kernels.code_cache import Float  # noqa: E402
from numba_meta.kernels.cuda import cells, copy, deliver, elementwise, reduce, rope, rope_store, rows  # noqa: E402
from numba_meta.kernels.cuda.kernel import CudaKernel, Gpu  # noqa: E402

GPU = Gpu((9, 0), 1)
CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def simulate(kernel: CudaKernel, capacity: int, /, **arguments: Any) -> None:
    """Runs a kernel as it would be launched for at most `capacity` live rows. Arrays stand for their addresses."""
    plain = {name: value.ctypes.data if isinstance(value, np.ndarray) else value for name, value in arguments.items()}
    kernel.pack(**plain)  # that they fit
    launch = kernel.launch(plain, capacity, GPU)
    values = [np.float32(plain[name]) if kind is Float else plain[name] for name, kind in kernel.parameters.items()]
    if all(launch.grid):
        cuda.jit(kernel.function)[launch.grid, launch.block](*values)


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng().standard_normal(shape).astype(np.float32)


@check
def binary() -> None:
    """3 rows of which 2 live, a tail that is no multiple of 4, 16-byte accesses and single ones, a repeated row."""
    for name, expected in BINARY.items():
        for aligned in (True, False) if name == "add" else (True,):
            x, y = random(3, 38), np.random.default_rng().uniform(0.5, 3, (3, 38)).astype(np.float32)
            a, b, out = Placed(x, aligned), Placed(y, aligned), Placed.poisoned((3, 38), aligned)
            y_stride = 0 if name == "mul" else b.stride
            simulate(
                getattr(elementwise, name), 3, x=a.address, x_stride=a.stride, y=b.address, y_stride=y_stride, out=out.address,
                out_stride=out.stride, n=38, n_rows=live(2),
            )  # fmt: skip
            got, y = out.result(), y[:1].repeat(3, 0) if name == "mul" else y
            np.testing.assert_allclose(got[:2], expected(x[:2].astype(float), y[:2].astype(float)), rtol=1e-6, atol=1e-6, err_msg=name)
            assert np.isnan(got[2]).all(), name


@check
def unary() -> None:
    for name, expected in UNARY.items():
        x = random(2, 13)
        a, out = Placed(x, True), Placed.poisoned((2, 13), True)
        simulate(
            getattr(elementwise, name), 2, x=a.address, x_stride=a.stride, out=out.address, out_stride=out.stride, n=13, p=1.5, q=2.5,
            n_rows=live(1),
        )  # fmt: skip
        got = out.result()
        np.testing.assert_allclose(got[0], expected(x[0].astype(float)), rtol=1e-6, atol=1e-6, err_msg=name)
        assert np.isnan(got[1]).all(), name


@check
def columns_beyond_a_block() -> None:
    x = random(1, 1030)
    out = np.full(1032, np.nan, np.float32)
    simulate(elementwise.add, 1, x=x, x_stride=0, y=x, y_stride=0, out=out, out_stride=0, n=1030, n_rows=live(1))
    np.testing.assert_array_equal(out[:1030], x[0] + x[0])
    assert np.isnan(out[1030:]).all()


@check
def rotations() -> None:
    """The table of angles, then both kinds of rotation by it, out of place and in place; a part of a head that is not rotated."""
    positions, half, head_dim, n_head = np.array([3, 131071, 9], np.int32), 5, 14, 3
    frequencies = 10000.0 ** (-np.arange(half) / half)
    table = Placed.poisoned((3, 2 * half), False)
    simulate(
        rope.rope_angles, 3, positions=positions, inverse_frequencies=frequencies, table=table.address, table_stride=table.stride,
        half=half, magnitude=1.125, n_rows=live(2),
    )  # fmt: skip
    theta = positions[:2, None] * frequencies
    got = table.result()
    np.testing.assert_allclose(got[:2], 1.125 * np.concatenate([np.cos(theta), np.sin(theta)], 1), atol=7e-8)
    assert np.isnan(got[2]).all()
    for kernel in (rope.rope_halves, rope.rope_interleaved):
        for in_place in (False, True):
            x = random(3, n_head * head_dim)
            source = Placed(x, False)
            out = source if in_place else Placed.poisoned(x.shape, False)
            simulate(
                kernel, 3, x=source.address, x_stride=source.stride, x_head_stride=4 * head_dim, y=out.address, y_stride=out.stride,
                y_head_stride=4 * head_dim, table=table.address, table_stride=table.stride, n_head=n_head, head_dim=head_dim, half=half,
                n_rows=live(2),
            )  # fmt: skip
            expected = rotate(x[:2].reshape(2, n_head, head_dim), theta, kernel is rope.rope_interleaved)
            expected[..., : 2 * half] *= 1.125
            np.testing.assert_allclose(out.result()[:2].reshape(expected.shape), expected, atol=7e-7)
            if not in_place:
                assert np.isnan(out.result()[2]).all()


@check
def strided_copies() -> None:
    for height, width, gaps in ((3, 70, (10, 26)), (2, 21, (3, 7)), (5, 8, (4, 8)), (0, 5, (1, 1)), (3, 0, (1, 1))):
        values = np.random.default_rng().integers(0, 256, (height, width), dtype=np.uint8)
        source, out = Guarded.of(values, gap=gaps[0]), Guarded(height, width, np.uint8, gap=gaps[1])
        simulate(
            copy.copy_2d, 1, source=source.address, source_pitch=source.stride, destination=out.address, destination_pitch=out.stride,
            width=width, height=height,
        )  # fmt: skip
        np.testing.assert_array_equal(out.result(), values)
    values = np.random.default_rng().integers(0, 256, (2, 75), dtype=np.uint8)
    source, out = Placed(values, True), Placed.poisoned((2, 75), True, dtype=np.uint8)
    simulate(
        copy.copy_2d, 1, source=source.address, source_pitch=source.stride, destination=out.address, destination_pitch=out.stride,
        width=75, height=2,
    )  # fmt: skip
    np.testing.assert_array_equal(out.result(), values)


@check
def zeros() -> None:
    for aligned in (True, False):
        filled = Placed(np.full((2, 75), 7, np.uint8), aligned)
        simulate(copy.fill_zero, 2, x=filled.address, x_stride=filled.stride, n_bytes=75, n_rows=live(1))
        got = filled.result()
        assert (got[0] == 0).all() and (got[1] == 7).all()


@check
def sums_of_parts() -> None:
    for n_parts in (1, 2, 3):
        values = [random(3, 38) for _ in range(n_parts)]
        parts = [Placed(value, True) for value in values]
        out = parts[0] if n_parts == 3 else Placed.poisoned((3, 38), False)
        simulate(
            reduce.all_reduce, 3, parts=np.array([part.address for part in parts]), n_parts=n_parts, part_stride=parts[0].stride,
            out=out.address, out_stride=out.stride, n=38, n_rows=live(2),
        )  # fmt: skip
        expected = values[0].copy()
        for value in values[1:]:
            expected += value
        np.testing.assert_array_equal(out.result()[:2], expected[:2])


@check
def pieces_side_by_side() -> None:
    for widths in ((5,), (20, 0, 3, 8)):
        values = [random(2, width) for width in widths]
        parts, out = [Placed(value, True) for value in values], Placed(np.full((2, sum(widths)), np.nan, np.float32), True)
        simulate(
            reduce.gather_columns, 2, parts=np.array([part.address if width else 0 for part, width in zip(parts, widths, strict=True)]),
            widths=np.array(widths), strides=np.array([part.stride for part in parts]), n_parts=len(widths), out=out.address,
            out_stride=out.stride, n_rows=live(1),
        )  # fmt: skip
        got = out.result()
        np.testing.assert_array_equal(got[0], np.concatenate(values, 1)[0])
        assert np.isnan(got[1]).all()


@check
def windows_and_rows_back() -> None:
    """Cells of the streams named, packed; and rows to their cells in the host, without those that have none."""
    for start, width, cell in ((16, 16, 48), (8, 24, 40), (4, 12, 20), (1, 3, 7)):
        host = np.random.default_rng().integers(0, 255, (3, 4, cell), dtype=np.uint8)
        slot = np.full((12, width), FILL, np.uint8)
        simulate(
            deliver.deliver_windows, 1, source=host.ctypes.data + start, stream_bytes=4 * cell, cell_bytes=cell, destination=slot,
            width=width, streams=np.array([2, 0, -1], np.int32), n_streams=live(2), n_cells=live(3),
        )  # fmt: skip
        np.testing.assert_array_equal(slot[:6], host[[2, 0], :3, start : start + width].reshape(6, width))
        assert (slot[6:] == FILL).all()
        back, wanted = np.full((12, cell), FILL, np.uint8), np.full((12, cell), FILL, np.uint8)
        wanted[7, start : start + width], wanted[0, start : start + width] = slot[3], slot[1]
        simulate(
            deliver.write_back, 4, slot=slot, width=width, slot_cells=np.array([3, 0, 1, 2], np.int32), host=back.ctypes.data + start,
            cell_bytes=cell, cells=np.array([7, -1, 0, 5], np.int32), n_rows=live(3),
        )  # fmt: skip
        np.testing.assert_array_equal(back, wanted)


@check
def rows_looked_up() -> None:
    table, y = random(4, 9), np.full((3, 9), np.nan, np.float32)
    simulate(
        rows.get_rows_f32, 3, table=table, table_stride=36, first_row=10, n_table_rows=4, ids=np.array([12, 9, 10], np.int32), y=y,
        y_stride=36, n=9, n_rows=live(2),
    )  # fmt: skip
    np.testing.assert_array_equal(y[0], table[2])
    assert (y[1] == 0).all() and np.isnan(y[2]).all()


@check
def rows_stored() -> None:
    x = random(3, 9)
    bits = x.view(np.uint32).astype(np.uint64)
    bf16 = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    for dtype, expected in ((F32, x), (F16, x.astype(np.float16)), (BF16, bf16)):
        cache = np.full((5, 9 * expected.itemsize), FILL, np.uint8)
        simulate(
            rows.store_rows_kernel(dtype), 3, x=x, x_stride=36, cells=np.array([3, -1, 0], np.int32), cache=cache,
            cell_stride=cache.shape[1], n=9, n_rows=live(2),
        )  # fmt: skip
        assert cache[3].tobytes() == expected[0].tobytes(), dtype
        assert (cache[[0, 1, 2, 4]] == FILL).all(), dtype


@check
def rotated_and_stored() -> None:
    """Q, K and V of one launch: what the kernels that it joins leave."""
    n_head, n_head_kv, head_dim, half, n_v = 3, 2, 12, 4, 10
    table, cell_of = random(3, 2 * half), np.array([3, -1, 0], np.int32)
    for dtype, interleaved in ((F32, False), (F16, True), (BF16, False)):
        q, k, v = random(3, n_head * head_dim), random(3, n_head_kv * head_dim), random(3, n_v)
        kernel = rope.rope_interleaved if interleaved else rope.rope_halves
        turned = {"table": table, "table_stride": 8 * half, "head_dim": head_dim, "half": half, "n_rows": live(2)}

        def rotate_by_itself(x: np.ndarray, n: int, kernel: CudaKernel = kernel, turned: dict[str, Any] = turned) -> np.ndarray:
            strides = {"x_stride": 4 * x.shape[1], "x_head_stride": 4 * head_dim, "y_stride": 4 * x.shape[1], "y_head_stride": 4 * head_dim}
            out = np.full_like(x, np.nan)
            simulate(kernel, 3, x=x, y=out, n_head=n, **strides, **turned)
            return out

        def store_by_itself(x: np.ndarray, dtype: DType = dtype) -> np.ndarray:
            cache = np.full((5, x.shape[1] * dtype.block_bytes), FILL, np.uint8)
            strides = {"x_stride": 4 * x.shape[1], "cell_stride": cache.shape[1]}
            simulate(rows.store_rows_kernel(dtype), 3, x=x, cells=cell_of, cache=cache, n=x.shape[1], n_rows=live(2), **strides)
            return cache

        wanted = rotate_by_itself(q, n_head), store_by_itself(rotate_by_itself(k, n_head_kv)), store_by_itself(v)
        got = np.full_like(q, np.nan), np.full_like(wanted[1], FILL), np.full_like(wanted[2], FILL)
        simulate(
            rope_store.rope_store_kernel(dtype, interleaved), 3, q=q, q_stride=4 * q.shape[1], q_head_stride=4 * head_dim, q_out=got[0],
            q_out_stride=4 * q.shape[1], q_out_head_stride=4 * head_dim, n_head=n_head, k=k, k_stride=4 * k.shape[1],
            k_head_stride=4 * head_dim, n_head_kv=n_head_kv, v=v, v_stride=4 * n_v, n_v=n_v, cells=cell_of, k_cache=got[1],
            k_cell_stride=got[1].shape[1], v_cache=got[2], v_cell_stride=got[2].shape[1], **turned,
        )  # fmt: skip
        assert all(a.tobytes() == b.tobytes() for a, b in zip(got, wanted, strict=True)), dtype
        assert (got[1][[0, 1, 2, 4]] == FILL).all() and not (got[1][3] == FILL).all() and np.isnan(got[0][2]).all(), dtype


@check
def cells_noted() -> None:
    table = np.full((2, 6), -1, np.int32)
    arguments = {"sequences": np.array([1, 0, 1], np.int32), "positions": np.array([4, 2, 0], np.int32)}
    simulate(cells.store_cells, 3, table=table, table_stride=24, cells=np.array([7, 8, 9], np.int32), n_rows=live(2), **arguments)
    assert table.tolist() == [[-1, -1, 8, -1, -1, -1], [-1, -1, -1, -1, 7, -1]]


def main() -> None:
    told = {}
    for name, function in CHECKS.items():
        try:
            function()
            told[name] = ""
        except Exception:
            told[name] = traceback.format_exc()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
