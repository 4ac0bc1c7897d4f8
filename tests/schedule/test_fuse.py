"""Joined calls: the same data flow in fewer launches. That bits are the same, a GPU shows (`tests/models/test_gpu_models.py`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from synthetic import write_model

import numba_meta as nm
from numba_meta.dtypes import F16, F32, I32, I64, Q8_0
from numba_meta.graph import Graph
from numba_meta.kernels import kernel_set
from numba_meta.lowering import Constant
from numba_meta.models.running.recordings import Capacity
from numba_meta.ops import attention, layout, matmul
from numba_meta.schedule.calls import Call, Peer, storage_of
from numba_meta.schedule.fuse import fuse
from numba_meta.schedule.infer import infer_splits
from numba_meta.schedule.plan import StepPlan, plan_step, read_elsewhere
from numba_meta.split.state import MIRRORED, split
from numba_meta.tensor import Role, Rows, Tensor

BLOCK = {
    "llama": [
        "several_8_fast_1", "rope_interleaved_store_f16", "attention_chunks_f16_f16_64_64", "attention_combine_quantize_64",
        "matmul_8_fast_1", "add_rms_norm_quantize", "several_8_fast_1", "swiglu_quantize", "matmul_8_fast_1", "add_rms_norm_quantize",
    ],
    "gemma3": [
        "several_8_fast_1", "norm_rope_halves_store_f16", "attention_chunks_f16_f16_64_64", "attention_combine_quantize_64",
        "matmul_8_fast_1", "norm_add_rms_norm_quantize", "several_8_fast_1", "geglu_tanh_quantize", "matmul_8_fast_1",
        "norm_add_rms_norm_quantize",
    ],
}  # fmt: skip


def plan(path: Path, devices: int, n_rows: int, exact: bool = False) -> StepPlan:
    """The plan of a step on CUDA devices, made without one."""
    with nm.load(path, devices=["cpu:0"] * devices, ctx_size=256) as model:
        split = model.context._split(Capacity(n_rows, 1), {})
        return plan_step(split, [1] * devices, exact, 256, kernels=kernel_set("cuda"))


def names(calls: tuple[Call, ...]) -> list[str]:
    return [call.kernel.name if call.kernel else "meet" for call in calls]


@pytest.mark.parametrize("architecture", BLOCK)
def test_a_block_in_few_launches(architecture: str, tmp_path: Path) -> None:
    made = names(plan(write_model(tmp_path / "m.gguf", architecture, n_layer=3, types="q8_0"), 1, 1).devices[0].calls)
    first = [i for i, name in enumerate(made) if name == "several_8_fast_1"][2]  # of the second layer
    assert made[first : first + len(BLOCK[architecture])] == BLOCK[architecture]


def test_what_devices_add_up_goes_on_to_the_residual_and_the_norm(tmp_path: Path) -> None:
    made = names(plan(write_model(tmp_path / "m.gguf", types="q8_0"), 2, 1).devices[1].calls)
    assert made.count("all_reduce") == 1 and "add" not in made  # the embedding's
    assert list(zip(made, made[1:], strict=False)).count(("meet", "all_reduce_add_rms_norm_quantize")) >= 3


@pytest.mark.parametrize("exact", (False, True))
@pytest.mark.parametrize("n_rows", (1, 16, 64))
@pytest.mark.parametrize("devices", (1, 2))
@pytest.mark.parametrize("architecture", BLOCK)
def test_what_is_read_was_written(architecture: str, devices: int, n_rows: int, exact: bool, tmp_path: Path) -> None:
    """Every call finds what it reads, the host and other devices find what they read; no call is there twice."""
    for device in plan(write_model(tmp_path / "m.gguf", architecture, types="q4_0"), devices, n_rows, exact).devices:
        written: set[object] = set()
        for call in device.calls:
            for place in call.reads:
                storage = storage_of(place)
                if not isinstance(place, Peer) and isinstance(storage, Tensor) and storage.role is Role.NODE:
                    assert storage in written, (call.node, storage.name)
            written |= {storage_of(place) for place in call.writes}
        assert {place for place in read_elsewhere(device.graph) if place.n_elements} <= written
        assert len(device.calls) == len({id(call) for call in device.calls})


def test_a_result_that_others_read_stays(tmp_path: Path) -> None:
    """Nothing is joined away that is kept."""
    with nm.load(write_model(tmp_path / "m.gguf", types="q8_0"), ctx_size=256) as model:
        split = model.context._split(Capacity(1, 1), {})
        step = plan_step(split, [1], False, 256)  # of CPU devices: nothing joined
    calls = step.devices[0].calls
    everything = {storage_of(place) for call in calls for place in call.writes}
    kept = fuse(calls, kernel_set("cuda"), False, everything)
    still = {storage_of(place) for call in kept for place in call.writes}
    assert everything <= still


@pytest.mark.parametrize("has_sinks", (False, True))
@pytest.mark.parametrize(("n_rows", "exact"), ((1, False), (16, True), (40, False), (40, True)))
@pytest.mark.parametrize("cut", ((6,), (4, 2)), ids=str)
def test_sinks_come_to_the_end_of_attention(cut: tuple[int, ...], n_rows: int, exact: bool, has_sinks: bool) -> None:
    """Joined with the quantization or not: a device's own sinks are an argument and read, or there are none."""
    graph = Graph("g")
    count = graph.leaf("n", I64, [1], Role.INPUT)
    q = graph.leaf("q", F32, [64, n_rows, 6], Role.INPUT, Rows(count, 1))
    k, v = (graph.leaf(name, F16, [64, 256, 3], Role.CACHE) for name in "kv")
    table = graph.leaf("table", I32, [256, 2], Role.CACHE)
    sequences, positions = (graph.leaf(name, I32, [n_rows], Role.INPUT) for name in ("sequences", "positions"))
    sinks = graph.leaf("sinks", F32, [6], Role.WEIGHT)
    given = sinks if has_sinks else None
    heads = attention.attention(graph, q, k, v, table, sequences, positions, scale=0.125, sinks=given, name="heads")
    weight = graph.leaf("weight", Q8_0, [384, 32], Role.WEIGHT)
    graph.output(matmul.matmul(graph, weight, layout.reshape(graph, heads, [384, n_rows]), "out"))
    kv = split(2, [n // 2 for n in cut])
    states = {q: split(2, cut), k: kv, v: kv, sinks: split(0, cut), weight: split(0, [64 * n for n in cut])}
    result = infer_splits(graph, lambda leaf: states.get(leaf, MIRRORED), len(cut))
    for device in plan_step(result, [1] * len(cut), exact, 256, kernels=kernel_set("cuda")).devices:
        (end,) = (call for call in device.calls if "sinks" in call.arguments)
        assert end.kernel is not None and end.arguments.keys() == end.kernel.parameters.keys()  # type: ignore[attr-defined]
        kind = "attention_rows_f16_f16_64_64" if n_rows > 16 else "attention_in_order_64" if exact else "attention_combine_quantize_64"
        assert end.kernel.name == kind
        own = device.graph.simple[sinks]
        assert end.arguments["sinks"] is own if has_sinks else end.arguments["sinks"] == 0
        assert (own in end.reads) == has_sinks and own.shape[0] == end.arguments["n_head"] == cut[device.graph.device]


def test_what_is_doubled_is_not_joined_with_the_norm_before_it() -> None:
    """x + x reads the first norm's result twice; joined, its second operand would never be written."""
    kernels, count = kernel_set("cuda"), Constant("count", np.array([1], np.int64))
    x, y, total, z = (Tensor(name, F32, (64, 1, 1, 1), (4, 256, 256, 256), "op", (), {}, Role.NODE) for name in "xyzt")
    weight = Constant("weight", np.ones(64, np.float32))

    def norm(source: Tensor, to: Tensor) -> Call:
        own = {"x": source, "y": to, "weight": weight, "n_rows": count}
        sizes = {"x_stride": 256, "y_stride": 256, "n": 64, "rows_per_token": 1, "eps": 1e-5}
        return Call(kernels.norm.rms_norm, own | sizes, (source, weight, count), (to,))

    for other in (y, x):
        operands = {"x": y, "y": other, "out": total, "n_rows": count}
        sizes = {"x_stride": 256, "y_stride": 256, "out_stride": 256, "n": 64}
        add = Call(kernels.elementwise.add, operands | sizes, (y, other, count), (total,))
        made = names(tuple(fuse([norm(x, y), add, norm(total, z)], kernels, False, ())))
        assert made == (["rms_norm", "add_rms_norm"] if other is y else ["norm_add_rms_norm"])
