"""Norms, rotations, element by element kernels, reductions and copies on a GPU: against float64 or byte by byte; a row stands alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernels.cuda import references
from kernels.cuda.on_gpu import TestGpu, open_gpu
from kernels.cuda.placed import FILL, Placed

from numba_meta.kernels.cuda import copy, deliver, elementwise, norm, reduce, rope
from numba_meta.kernels.cuda.kernel import CudaKernel

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpu() -> TestGpu:
    return open_gpu()


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng().standard_normal(shape).astype(np.float32)


def count(gpu: TestGpu, n: int) -> Any:
    return gpu.upload(np.array([n], np.int64))


# ---- norms -----------------------------------------------------------------------------------------------------------------------------


def normalize(
    gpu: TestGpu, x: np.ndarray, weight: np.ndarray, aligned: bool = True, per_token: int = 1, live: int | None = None
) -> np.ndarray:
    source, out = Placed(x, aligned, gpu), Placed.poisoned(x.shape, aligned, gpu)
    tokens = len(x) // per_token
    gpu.run(
        norm.rms_norm, tokens, x=source.address, x_stride=source.stride, weight=Placed(weight[None], aligned, gpu).address,
        y=out.address, y_stride=out.stride, n=x.shape[1], rows_per_token=per_token, n_rows=count(gpu, tokens if live is None else live),
        eps=1e-5,
    )  # fmt: skip
    return out.result()


@pytest.mark.parametrize("n", [1, 15, 64, 100, 576, 2048, 4096, 5000, 8192, 12290])
def test_rms_norm(gpu: TestGpu, n: int) -> None:
    """Against float64; the same bits alone, and wherever the rows lie; dead rows stay."""
    x, weight = random(6, n), random(n)
    y = normalize(gpu, x, weight, per_token=3, live=1)
    np.testing.assert_allclose(y[:3], references.rms_norm(x[:3], weight, 1e-5), rtol=2e-6)
    assert np.isnan(y[3:]).all()
    assert normalize(gpu, x, weight, aligned=False)[:3].tobytes() == y[:3].tobytes()
    assert normalize(gpu, x[2:3], weight).tobytes() == y[2].tobytes()
    assert np.isnan(normalize(gpu, x, weight, live=0)).all()


@pytest.mark.parametrize("n", [1, 15, 64, 100, 576, 4096, 12290])
def test_centered_rows(gpu: TestGpu, n: int) -> None:
    x = random(6, n) + np.float32(3)
    for aligned in (True, False):
        source, out = Placed(x, aligned, gpu), Placed.poisoned(x.shape, aligned, gpu)
        gpu.run(
            norm.center_rows, 3, x=source.address, x_stride=source.stride, y=out.address, y_stride=out.stride, n=n, rows_per_token=2,
            n_rows=count(gpu, 2),
        )  # fmt: skip
        wide = x[:4].astype(np.float64)
        np.testing.assert_allclose(out.result()[:4], wide - wide.mean(1, keepdims=True), atol=2e-6)
        assert np.isnan(out.result()[4:]).all()


@pytest.mark.parametrize("n", [33, 576, 4096, 12290])
@pytest.mark.parametrize("aligned", [True, False])
def test_add_rms_norm(gpu: TestGpu, n: int, aligned: bool) -> None:
    """The bits of `add`, then `rms_norm`; the sum may take the place of a summand."""
    x, other, weight = random(3, n), random(3, n), random(n)
    a, b, total, y = Placed(x, aligned, gpu), Placed(other, aligned, gpu), Placed.poisoned(x.shape, aligned, gpu), None
    for into in (total, a):
        y = Placed.poisoned(x.shape, aligned, gpu)
        gpu.run(
            norm.add_rms_norm, 3, x=a.address, x_stride=a.stride, other=b.address, other_stride=b.stride, total=into.address,
            total_stride=into.stride, weight=Placed(weight[None], aligned, gpu).address, y=y.address, y_stride=y.stride, n=n,
            n_rows=count(gpu, 2), eps=1e-5,
        )  # fmt: skip
        assert into.result()[:2].tobytes() == (x + other)[:2].tobytes()
        assert y.result()[:2].tobytes() == normalize(gpu, x + other, weight)[:2].tobytes()
        assert np.isnan(y.result()[2]).all()
    assert np.isnan(total.result()[2]).all()


# ---- element by element ----------------------------------------------------------------------------------------------------------------


def run_binary(gpu: TestGpu, kernel: CudaKernel, x: np.ndarray, y: np.ndarray, aligned: bool = True, live: int | None = None) -> np.ndarray:
    a, b, out = Placed(x, aligned, gpu), Placed(y, aligned, gpu), Placed.poisoned(x.shape, aligned, gpu)
    gpu.run(
        kernel, len(x), x=a.address, x_stride=a.stride, y=b.address, y_stride=b.stride if y.shape == x.shape else 0, out=out.address,
        out_stride=out.stride, n=x.shape[1], n_rows=count(gpu, len(x) if live is None else live),
    )  # fmt: skip
    return out.result()


def run_unary(gpu: TestGpu, kernel: CudaKernel, x: np.ndarray, aligned: bool = True, live: int | None = None) -> np.ndarray:
    a, out = Placed(x, aligned, gpu), Placed.poisoned(x.shape, aligned, gpu)
    gpu.run(
        kernel, len(x), x=a.address, x_stride=a.stride, out=out.address, out_stride=out.stride, n=x.shape[1], p=1.5, q=2.5,
        n_rows=count(gpu, len(x) if live is None else live),
    )  # fmt: skip
    return out.result()


@pytest.mark.parametrize("name", references.BINARY)
def test_binary(gpu: TestGpu, name: str) -> None:
    kernel = getattr(elementwise, name)
    for n in (1, 130, 1100):
        x, y = 3 * random(4, n), np.random.default_rng().uniform(0.5, 3, (4, n)).astype(np.float32)
        out = run_binary(gpu, kernel, x, y, live=3)
        np.testing.assert_allclose(out[:3], references.BINARY[name](x[:3].astype(float), y[:3].astype(float)), rtol=1e-6, atol=1e-6)
        assert np.isnan(out[3]).all()
        assert run_binary(gpu, kernel, x, y, aligned=False)[:3].tobytes() == out[:3].tobytes()
        assert run_binary(gpu, kernel, x[1:2], y[1:2]).tobytes() == out[1].tobytes()


@pytest.mark.parametrize("name", references.UNARY)
def test_unary(gpu: TestGpu, name: str) -> None:
    kernel = getattr(elementwise, name)
    x = 3 * random(4, 1101)
    out = run_unary(gpu, kernel, x, live=3)
    np.testing.assert_allclose(out[:3], references.UNARY[name](x[:3].astype(float)), rtol=1e-6, atol=1e-6)
    assert np.isnan(out[3]).all()
    assert run_unary(gpu, kernel, x, aligned=False)[:3].tobytes() == out[:3].tobytes()
    if not name.startswith("relu"):
        assert np.isnan(run_unary(gpu, kernel, np.full((1, 20), np.nan, np.float32))).all()


def test_large_arguments_saturate(gpu: TestGpu) -> None:
    x = np.array([[-1000, -100, -80, 80, 100, 1000]], np.float32)
    for name in ("silu", "gelu_tanh", "gelu_erf", "sigmoid", "tanh"):
        got = run_unary(gpu, getattr(elementwise, name), x)
        expected = [0, 0, 0, 1, 1, 1] * (x[0] if name not in ("sigmoid", "tanh") else np.ones(6))
        np.testing.assert_allclose(got[0], expected - (name == "tanh") * (x[0] < 0), atol=1e-30, err_msg=name)


def test_a_stride_of_zero_repeats_a_bias(gpu: TestGpu) -> None:
    x, bias = random(4, 70), random(1, 70)
    np.testing.assert_array_equal(run_binary(gpu, elementwise.add, x, bias), x + bias)


@pytest.mark.parametrize("n", [1, 16, 33, 500, 5001])
@pytest.mark.parametrize("aligned", [True, False])
def test_softmax_rows(gpu: TestGpu, n: int, aligned: bool) -> None:
    x = 20 * random(3, n)
    x[0, 0] = -np.inf if n > 1 else 0.0
    a, out = Placed(x, aligned, gpu), Placed.poisoned(x.shape, aligned, gpu)
    gpu.run(
        elementwise.softmax_rows, 3, x=a.address, x_stride=a.stride, out=out.address, out_stride=out.stride, n=n, factor=0.5,
        n_rows=count(gpu, 2),
    )  # fmt: skip
    wide = x[:2].astype(np.float64) * 0.5
    weights = np.exp(wide - wide.max(1, keepdims=True))
    np.testing.assert_allclose(out.result()[:2], weights / weights.sum(1, keepdims=True), rtol=4e-6, atol=1e-30)
    assert np.isnan(out.result()[2]).all()


# ---- rotations -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("head_dim", "half"), [(64, 32), (128, 64), (256, 128), (80, 16), (24, 12), (50, 21), (6, 1), (512, 200)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotations(gpu: TestGpu, head_dim: int, half: int, interleaved: bool) -> None:
    positions, n_head = np.array([3, 131071, 77, 5], np.int32), 5
    frequencies = 10000.0 ** (-np.arange(half) / half)
    table = Placed.poisoned((4, 2 * half), False, gpu)
    gpu.run(
        rope.rope_angles, 4, positions=gpu.upload(positions), inverse_frequencies=gpu.upload(frequencies), table=table.address,
        table_stride=table.stride, half=half, magnitude=1.125, n_rows=count(gpu, 3),
    )  # fmt: skip
    theta = positions[:3, None] * frequencies
    np.testing.assert_allclose(table.result()[:3], 1.125 * np.concatenate([np.cos(theta), np.sin(theta)], 1), atol=7e-8)
    assert np.isnan(table.result()[3]).all()
    x = random(4, n_head * head_dim)
    kernel = rope.rope_interleaved if interleaved else rope.rope_halves
    results = []
    for in_place in (False, True):
        source = Placed(x, not in_place, gpu)
        out = source if in_place else Placed.poisoned(x.shape, True, gpu)
        gpu.run(
            kernel, 4, x=source.address, x_stride=source.stride, x_head_stride=4 * head_dim, y=out.address, y_stride=out.stride,
            y_head_stride=4 * head_dim, table=table.address, table_stride=table.stride, n_head=n_head, head_dim=head_dim, half=half,
            n_rows=count(gpu, 3),
        )  # fmt: skip
        results.append(out.result())
    expected = references.rotate(x[:3].reshape(3, n_head, head_dim), theta, interleaved)
    expected[..., : 2 * half] *= 1.125
    np.testing.assert_allclose(results[0][:3].reshape(expected.shape), expected, atol=7e-7)
    assert np.isnan(results[0][3]).all()
    assert results[1][:3].tobytes() == results[0][:3].tobytes() and results[1][3].tobytes() == x[3].tobytes()


# ---- pieces, the largest column --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_parts", [1, 2, 3, 5])
@pytest.mark.parametrize(("n", "aligned"), [(7, True), (4096, True), (1001, False)])
def test_all_reduce_adds_in_order(gpu: TestGpu, n_parts: int, n: int, aligned: bool) -> None:
    values = [random(4, n) for _ in range(n_parts)]
    parts = [Placed(value, aligned, gpu) for value in values]
    addresses = gpu.upload(np.array([part.address for part in parts]))
    expected = values[0].copy()
    for value in values[1:]:
        expected += value
    for out in (Placed.poisoned((4, n), aligned, gpu), parts[0]):
        gpu.run(
            reduce.all_reduce, 4, parts=addresses, n_parts=n_parts, part_stride=parts[0].stride, out=out.address, out_stride=out.stride,
            n=n, n_rows=count(gpu, 3),
        )  # fmt: skip
        np.testing.assert_array_equal(out.result()[:3], expected[:3])
        assert np.isnan(out.result()[3]).all() or out is parts[0]


@pytest.mark.parametrize("widths", [(5,), (100, 0, 28), (1500, 1, 900, 3000), (0, 16), (64000, 64000)])
def test_gather_columns(gpu: TestGpu, widths: tuple[int, ...]) -> None:
    values = [random(3, width) for width in widths]
    parts, out = [Placed(value, True, gpu) for value in values], Placed.poisoned((3, sum(widths)), True, gpu)
    addresses = [part.address if width else 0 for part, width in zip(parts, widths, strict=True)]
    gpu.run(
        reduce.gather_columns, 3, parts=gpu.upload(np.array(addresses)), widths=gpu.upload(np.array(widths)),
        strides=gpu.upload(np.array([part.stride for part in parts])), n_parts=len(widths), out=out.address, out_stride=out.stride,
        n_rows=count(gpu, 2),
    )  # fmt: skip
    np.testing.assert_array_equal(out.result()[:2], np.concatenate(values, axis=1)[:2])
    assert np.isnan(out.result()[2]).all()


@pytest.mark.parametrize("n", [1, 15, 40, 1000, 32001])
@pytest.mark.parametrize("aligned", [True, False])
def test_argmax_rows(gpu: TestGpu, n: int, aligned: bool) -> None:
    """Many ties: the lowest index wins; infinities; NaN never wins."""
    rng = np.random.default_rng()
    x = rng.integers(-3, 4, (40, n)).astype(np.float32)
    x[1], x[2, n // 2] = -np.inf, np.inf
    source, ids = Placed(x, aligned, gpu), gpu.empty(41 * 4)
    gpu.run(reduce.argmax_rows, 41, x=source.address, x_stride=source.stride, n=n, ids=ids, n_rows=count(gpu, 40))
    got = ids.download(np.int32, 41)
    np.testing.assert_array_equal(got[:40], x.argmax(1))
    assert got[40] == -1
    x = np.full((1, n), np.nan, np.float32)
    x[0, [n // 2, n - 1]] = [-5.0, -6.0] if n > 1 else [-5.0, -5.0]
    gpu.run(reduce.argmax_rows, 1, x=gpu.upload(x), x_stride=0, n=n, ids=ids, n_rows=count(gpu, 1))
    assert ids.download(np.int32, 1)[0] == n // 2


# ---- bytes -----------------------------------------------------------------------------------------------------------------------------


def random_bytes(*shape: int) -> np.ndarray:
    return np.random.default_rng().integers(0, 255, shape, dtype=np.uint8)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (3, 63), (2, 64), (700, 136), (2, 100001), (5, 40000), (0, 64), (3, 0)])
@pytest.mark.parametrize("aligned", [True, False])
def test_copy_2d(gpu: TestGpu, height: int, width: int, aligned: bool) -> None:
    values = random_bytes(height, width)
    source, out = Placed(values, aligned, gpu), Placed.poisoned((height, width), True, gpu, np.uint8)
    gpu.run(
        copy.copy_2d, 1, source=source.address, source_pitch=source.stride, destination=out.address, destination_pitch=out.stride,
        width=width, height=height,
    )  # fmt: skip
    np.testing.assert_array_equal(out.result(), values)


@pytest.mark.parametrize("n_bytes", [1, 64, 75, 50000])
@pytest.mark.parametrize("aligned", [True, False])
def test_fill_zero(gpu: TestGpu, n_bytes: int, aligned: bool) -> None:
    filled = Placed(np.full((3, n_bytes), 7, np.uint8), aligned, gpu)
    gpu.run(copy.fill_zero, 3, x=filled.address, x_stride=filled.stride, n_bytes=n_bytes, n_rows=count(gpu, 2))
    assert (filled.result()[:2] == 0).all() and (filled.result()[2] == 7).all()


@pytest.mark.parametrize("streams", [[0], [2, 0], [1, 3, 2, 0], []])
@pytest.mark.parametrize("n_cells", [0, 1, 300])
@pytest.mark.parametrize(("start", "width", "cell"), [(0, 1088, 1088), (544, 544, 1088), (136, 136, 272), (68, 68, 136), (3, 5, 9)])
def test_windows_and_rows_back(gpu: TestGpu, start: int, width: int, cell: int, n_cells: int, streams: list[int]) -> None:
    """From mapped host memory to a slot, packed; from the slot back to the host."""
    from numba_meta.devices.cuda_driver import PinnedMemory

    pinned = PinnedMemory(gpu.context, 4 * 300 * cell)
    host = pinned.data.reshape(4, 300, cell)
    host[:] = random_bytes(4, 300, cell)
    slot = gpu.empty(4 * 300 * width)
    gpu.run(
        deliver.deliver_windows, 1, source=pinned.address + start, stream_bytes=300 * cell, cell_bytes=cell, destination=slot,
        width=width, streams=gpu.upload(np.array([*streams, -1], np.int32)), n_streams=count(gpu, len(streams)),
        n_cells=count(gpu, n_cells),
    )  # fmt: skip
    n, got = len(streams) * n_cells, slot.download(np.uint8, (1200, width))
    np.testing.assert_array_equal(got[:n], host[streams, :n_cells, start : start + width].reshape(n, width))
    assert (got[n:] == FILL).all()
    slot_cells, cells, wanted = np.array([3, 0, 299, 4], np.int32), np.array([7, -1, 2, 0], np.int32), host.copy()
    for row in (0, 2):
        wanted.reshape(-1, cell)[cells[row], start : start + width] = got[slot_cells[row]]
    gpu.run(
        deliver.write_back, 4, slot=slot, width=width, slot_cells=gpu.upload(slot_cells), host=pinned.address + start, cell_bytes=cell,
        cells=gpu.upload(cells), n_rows=count(gpu, 3),
    )  # fmt: skip
    np.testing.assert_array_equal(host, wanted)
    pinned.free()
