"""Joined calls: the same data flow in fewer launches. That bits are the same, a GPU shows (`tests/models/test_gpu_models.py`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from synthetic import write_model

import numba_meta as nm
from numba_meta.dtypes import F32
from numba_meta.kernels import kernel_set
from numba_meta.models.recordings import Capacity
from numba_meta.ops.lowering import Constant
from numba_meta.schedule.fuse import fuse
from numba_meta.schedule.lower import Call, Peer, storage_of
from numba_meta.schedule.plan import StepPlan, plan_step, read_elsewhere
from numba_meta.tensor import Role, Tensor

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
