"""Weights on their devices: layouts that do not overlap, pieces that are the file's, nothing left behind on an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.rewriting import rewrite
from synthetic import write_model

import numba_meta as nm
from numba_meta.devices.cpu import ALIGNMENT
from numba_meta.models.running.weights import WeightPlan, is_vector
from numba_meta.tensor import Role


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "llama.gguf", types={"default": "q4_0", "ffn_down": "q6_k"}, tied=False)


def weights_of(model: Any) -> tuple[WeightPlan, list[Any]]:
    from numba_meta.models.running.recordings import Capacity

    graph = model.context.plan(Capacity(1, 1)).split.graph
    return model.context.weight_plan, [leaf for leaf in graph.leaves if leaf.role is Role.WEIGHT]


@pytest.mark.parametrize(("n", "tensor_split"), ((1, None), (2, "70,30"), (3, "1,0,2"), (6, None)))
def test_pieces_lie_apart_and_aligned(n: int, tensor_split: str | None, path: Path) -> None:
    from numba_meta.kernels.cpu.packed import packed_bytes

    with nm.load(path, devices=["cpu:0"] * n, tensor_split=tensor_split, ctx_size=64) as model:
        plan, leaves = weights_of(model)
        assert {leaf.name for leaf in leaves} == set(plan.offsets)
        for device in range(n):
            end = 0
            for leaf in sorted(leaves, key=lambda leaf: plan.offsets[leaf.name][device]):
                offset = plan.offsets[leaf.name][device]
                assert offset >= end and offset % ALIGNMENT == 0, leaf.name
                k, n_out, *_ = plan.states[leaf.name].piece_shape(leaf.shape, device)
                end = offset + (4 * k if is_vector(leaf) else packed_bytes(leaf.dtype, n_out, k))
            assert end <= plan.n_bytes[device] == model.plan.devices[device].weight_bytes


def test_a_device_without_a_part_holds_only_what_all_hold(path: Path) -> None:
    with nm.load(path, devices="cpu:0,cpu:0", tensor_split="1,0", ctx_size=64) as model:
        whole, rest = (device.weight_bytes for device in model.plan.devices)
        plan, leaves = weights_of(model)
        mirrored = [leaf for leaf in leaves if plan.states[leaf.name].piece_shape(leaf.shape, 1) == leaf.shape]
        assert {"output_norm.weight", "blk.0.attn_norm.weight"} <= {leaf.name for leaf in mirrored}
        assert not {"blk.0.ffn_up.weight", "blk.0.attn_q.weight", "output.weight"} & {leaf.name for leaf in mirrored}
        assert rest < 0.5 * whole


def test_vectors_of_half_precision_are_float32_in_memory(path: Path, tmp_path: Path) -> None:
    """Norms that a file holds as f16 give the logits of the same values in f32."""
    import gguf

    rng = np.random.default_rng(3)
    values = {f"blk.{i}.attn_norm.weight": rng.uniform(0.5, 2, 256).astype(np.float16) for i in range(2)}
    half = rewrite(path, tmp_path / "half.gguf", tensors=values)
    single = rewrite(path, tmp_path / "single.gguf", tensors={name: v.astype(np.float32) for name, v in values.items()})
    assert gguf.GGUFReader(half).tensors[-1].tensor_type == gguf.GGMLQuantizationType.F16
    results = []
    for file in (half, single):
        with nm.load(file, exact=True, ctx_size=64) as model:
            results.append(model.logits([1, 2, 3]))
    np.testing.assert_array_equal(*results)


def test_an_interrupted_load_leaves_nothing(path: Path) -> None:
    """A progress call that raises (as Ctrl-C does) ends the load; a second one works, and the file can be removed meanwhile."""
    import gc
    import threading

    before = threading.active_count()

    def interrupt(what: str, done: int, total: int) -> None:
        if done * 2 > total:
            raise KeyboardInterrupt

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            nm.load(path, ctx_size=64, progress=interrupt)
    gc.collect()
    assert threading.active_count() == before
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert str(path) not in maps.read_text()
    with nm.load(path, ctx_size=64) as model:
        assert len(model.generate_ids([1], 2, ignore_eos=True)) == 2
