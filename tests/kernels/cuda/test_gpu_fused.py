"""Fused kernels on a GPU: byte by byte what the kernels that they join leave."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernels.cuda.on_gpu import TestGpu, open_gpu
from kernels.cuda.placed import FILL, Placed

from numba_meta.dtypes import CACHE_TYPES, DType
from numba_meta.kernels.cuda import elementwise, norm, reduce, reduce_norm, rope
from numba_meta.kernels.cuda.norm_rope_store import norm_rope_store_kernel
from numba_meta.kernels.cuda.packed import activation_row_bytes
from numba_meta.kernels.cuda.quantize import quantize_kernel
from numba_meta.kernels.cuda.rope_store import rope_store_kernel
from numba_meta.kernels.cuda.rows import store_rows_kernel

pytestmark = pytest.mark.gpu
ROWS, LIVE = 4, 3
WIDTHS = [32, 96, 576, 4096, 12320]


@pytest.fixture(scope="module")
def gpu() -> TestGpu:
    return open_gpu()


class Case:
    """Rows of random values by name, and kernels over them. Kernels may write the float32 rows that are named in `places`."""

    def __init__(self, gpu: TestGpu, n: int, aligned: bool, *names: str) -> None:
        self.gpu, self.n, self.aligned = gpu, n, aligned
        self.live = gpu.upload(np.array([LIVE], np.int64))
        self.values = {name: np.random.default_rng().standard_normal((ROWS, n)).astype(np.float32) for name in names}
        self.weights = {name: self.row() for name in ("weight", "x_weight")}

    def row(self) -> Placed:
        return Placed(np.random.default_rng().standard_normal((1, self.n)).astype(np.float32), self.aligned, self.gpu)

    def given(self, name: str) -> Placed:
        return Placed(self.values[name], self.aligned, self.gpu)

    def empty(self) -> Placed:
        return Placed.poisoned((ROWS, self.n), self.aligned, self.gpu)

    def run(self, kernel: Any, places: dict[str, Placed], **others: Any) -> None:
        rows = {name: place.address for name, place in places.items()}
        rows |= {f"{name}_stride": place.stride for name, place in places.items()}
        rows |= {name: self.weights[name].address for name in self.weights if name in kernel.parameters}
        self.gpu.run(kernel, ROWS, **rows, n=self.n, n_rows=self.live, **others)

    def quantized(self) -> Placed:
        return Placed.poisoned((ROWS, activation_row_bytes("q8", self.n)), True, self.gpu, np.uint8)

    def quantize(self, x: Placed) -> np.ndarray:
        """What quantize_rows makes of rows."""
        aligned, out = Placed(x.result(), True, self.gpu), self.quantized()
        self.run(quantize_kernel("q8"), {"x": aligned, "y": out})
        return out.result()

    def check_last(self, plain: Any, quantizing: Any, make: Any, **others: Any) -> np.ndarray:
        """A kernel that writes float32 as y, and the one that writes `q8`: y of the former; both leave the same everywhere else."""
        first, second = make(), make()
        y = self.empty()
        self.run(plain, {**first, "y": y}, **others)
        bits = self.quantized()
        self.run(quantizing, {**second, "y": bits}, **others)
        assert bits.result().tobytes() == self.quantize(y).tobytes()
        assert (bits.result()[LIVE:] == FILL).all() and np.isnan(y.result()[LIVE:]).all()
        for name in first:
            assert first[name].result().tobytes() == second[name].result().tobytes()
        return y.result()


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("aligned", [True, False])
def test_norms(gpu: TestGpu, n: int, aligned: bool) -> None:
    case = Case(gpu, n, aligned, "x", "other")
    if aligned:  # rows of activations are
        case.check_last(norm.rms_norm, norm.rms_norm_quantize, lambda: {"x": case.given("x")}, rows_per_token=1, eps=1e-5)
    normed, total, y = case.empty(), case.empty(), case.empty()
    case.run(norm.rms_norm, {"x": case.given("x"), "y": normed}, rows_per_token=1, eps=1e-5)
    # add, rms_norm
    case.run(elementwise.add, {"x": case.given("x"), "y": case.given("other"), "out": total})
    case.run(norm.rms_norm, {"x": total, "y": y}, rows_per_token=1, eps=1e-5)
    places = {"x": case.given("x"), "other": case.given("other"), "total": case.empty()}
    got = case.check_last(norm.add_rms_norm, norm.add_rms_norm_quantize, lambda: {**places, "total": case.empty()}, eps=1e-5)
    assert got.tobytes() == y.result().tobytes()
    case.run(norm.add_rms_norm, {**places, "y": case.empty()}, eps=1e-5)
    assert places["total"].result().tobytes() == total.result().tobytes()
    # rms_norm, add, rms_norm
    case.weights["weight"], case.weights["x_weight"] = case.weights["x_weight"], case.weights["weight"]
    total, y = case.empty(), case.empty()
    case.run(elementwise.add, {"x": normed, "y": case.given("other"), "out": total})
    case.run(norm.rms_norm, {"x": total, "y": y}, rows_per_token=1, eps=1e-6)
    both = norm.norm_add_rms_norm, norm.norm_add_rms_norm_quantize
    got = case.check_last(*both, lambda: {**places, "total": case.empty()}, x_eps=1e-5, eps=1e-6)
    assert got.tobytes() == y.result().tobytes()
    in_place = case.given("x")
    case.run(norm.norm_add_rms_norm, {"x": in_place, "other": case.given("other"), "total": in_place, "y": y}, x_eps=1e-5, eps=1e-6)
    assert in_place.result()[:LIVE].tobytes() == total.result()[:LIVE].tobytes() and y.result().tobytes() == got.tobytes()


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("n_parts", [1, 2, 3])
def test_sum_of_parts_and_norm(gpu: TestGpu, n: int, n_parts: int) -> None:
    case = Case(gpu, n, n != 96, "other", *(f"part {i}" for i in range(n_parts)))
    parts = [case.given(f"part {i}") for i in range(n_parts)]
    given = {"parts": gpu.upload(np.array([part.address for part in parts])), "n_parts": n_parts, "part_stride": parts[0].stride}
    reduced, total, y = case.empty(), case.empty(), case.empty()
    case.run(reduce.all_reduce, {"out": reduced}, **given)
    case.run(norm.add_rms_norm, {"x": reduced, "other": case.given("other"), "total": total, "y": y}, eps=1e-5)
    both = reduce_norm.all_reduce_add_rms_norm, reduce_norm.all_reduce_add_rms_norm_quantize
    got = case.check_last(*both, lambda: {"other": case.given("other"), "total": case.empty()}, eps=1e-5, **given)
    assert got.tobytes() == y.result().tobytes()
    in_place = case.given("other")
    case.run(both[0], {"other": in_place, "total": in_place, "y": y}, eps=1e-5, **given)
    assert in_place.result()[:LIVE].tobytes() == total.result()[:LIVE].tobytes() and y.result().tobytes() == got.tobytes()


@pytest.mark.parametrize("kind", elementwise.GLU)
@pytest.mark.parametrize("n", WIDTHS)
def test_gated_activations(gpu: TestGpu, n: int, kind: str) -> None:
    case = Case(gpu, n, n != 96, "x", "y")
    out, bits, places = case.empty(), case.quantized(), {"x": case.given("x"), "y": case.given("y")}
    case.run(getattr(elementwise, kind), {**places, "out": out})
    case.run(getattr(elementwise, f"{kind}_quantize"), {**places, "out": bits})
    assert bits.result().tobytes() == case.quantize(out).tobytes()
    assert (bits.result()[LIVE:] == FILL).all() and not (bits.result()[:LIVE] == FILL).all()


@pytest.mark.parametrize("dtype", CACHE_TYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize(("interleaved", "normed"), [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize(("n_head", "n_head_kv", "head_dim", "half"), [(32, 8, 128, 64), (9, 3, 64, 32), (5, 2, 96, 16), (4, 1, 256, 128)])
def test_rope_and_store(
    gpu: TestGpu, dtype: DType, interleaved: bool, normed: bool, n_head: int, n_head_kv: int, head_dim: int, half: int
) -> None:
    """Also with a norm of each head before it."""

    def rows(n: int) -> Placed:
        return Placed(np.random.default_rng().standard_normal((ROWS, n)).astype(np.float32), True, gpu)

    live, cells = gpu.upload(np.array([LIVE], np.int64)), gpu.upload(np.array([4, -1, 0, 2], np.int32))
    q, k, v, table = rows(n_head * head_dim), rows(n_head_kv * head_dim), rows(n_head_kv * 96), rows(2 * half)

    def normalize(x: Placed, n: int, weight: Placed) -> Placed:
        heads = Placed(x.result().reshape(ROWS * n, head_dim), True, gpu)
        out = Placed.poisoned((ROWS * n, head_dim), True, gpu)
        gpu.run(
            norm.rms_norm, ROWS, x=heads.address, x_stride=heads.stride, weight=weight.address, y=out.address, y_stride=out.stride,
            n=head_dim, rows_per_token=n, n_rows=live, eps=1e-6,
        )  # fmt: skip
        return Placed(out.result().reshape(ROWS, n * head_dim), True, gpu)

    def cache(n: int) -> Placed:
        return Placed.poisoned((6, n // dtype.block_size * dtype.block_bytes), True, gpu, np.uint8)

    def rotate(x: Placed, n: int) -> Placed:
        out = Placed.poisoned((ROWS, n * head_dim), True, gpu)
        gpu.run(
            rope.rope_interleaved if interleaved else rope.rope_halves, ROWS, x=x.address, x_stride=x.stride, x_head_stride=4 * head_dim,
            y=out.address, y_stride=out.stride, y_head_stride=4 * head_dim, table=table.address, table_stride=table.stride, n_head=n,
            head_dim=head_dim, half=half, n_rows=live,
        )  # fmt: skip
        return out

    def store(x: Placed, n: int) -> bytes:
        stored = cache(n)
        gpu.run(
            store_rows_kernel(dtype), ROWS, x=x.address, x_stride=x.stride, cells=cells, cache=stored.address,
            cell_stride=stored.stride, n=n, n_rows=live,
        )  # fmt: skip
        return stored.result().tobytes()

    n_k, n_v = n_head_kv * head_dim, n_head_kv * 96
    kernel, extra, q_in, k_in = rope_store_kernel(dtype, interleaved), {}, q, k
    if normed:
        q_weight, k_weight = (Placed(np.random.default_rng().standard_normal((1, head_dim)).astype(np.float32), True, gpu) for _ in "qk")
        kernel = norm_rope_store_kernel(dtype, interleaved)
        extra = {"q_weight": q_weight.address, "k_weight": k_weight.address, "eps": 1e-6}
        q_in, k_in = normalize(q, n_head, q_weight), normalize(k, n_head_kv, k_weight)
    wanted_q, wanted_k, wanted_v = rotate(q_in, n_head), store(rotate(k_in, n_head_kv), n_k), store(v, n_v)
    for q_out in (Placed.poisoned((ROWS, n_head * head_dim), True, gpu), q):
        k_cache, v_cache = cache(n_k), cache(n_v)
        gpu.run(
            kernel, ROWS, q=q.address, q_stride=q.stride, q_head_stride=4 * head_dim,
            q_out=q_out.address, q_out_stride=q_out.stride, q_out_head_stride=4 * head_dim, n_head=n_head, k=k.address,
            k_stride=k.stride, k_head_stride=4 * head_dim, n_head_kv=n_head_kv, v=v.address, v_stride=v.stride, n_v=n_v,
            head_dim=head_dim, half=half, table=table.address, table_stride=table.stride, cells=cells, k_cache=k_cache.address,
            k_cell_stride=k_cache.stride, v_cache=v_cache.address, v_cell_stride=v_cache.stride, n_rows=live, **extra,
        )  # fmt: skip
        assert q_out.result()[:LIVE].tobytes() == wanted_q.result()[:LIVE].tobytes()
        assert k_cache.result().tobytes() == wanted_k and v_cache.result().tobytes() == wanted_v
        assert q_out is q or np.isnan(q_out.result()[LIVE:]).all()
