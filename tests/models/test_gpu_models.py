"""Models on GPUs: random small ones against float64 in exact mode, over one and two devices, and GPUs; fast mode against the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.numpy_reference import ReferenceModel
from synthetic import TYPE_NAMES, write_model

import numba_meta as nm

pytestmark = pytest.mark.gpu
MIXED = {"default": "q5_0", "attn_v": "q6_k", "ffn_down": "q4_1", "token_embd": "q8_0", "attn_output": "f16"}
ON_ONE = ("cuda:0", "cuda:0,cuda:0")
DEVICES = (*ON_ONE, pytest.param("cuda:0,cuda:1", marks=pytest.mark.gpu(2)))


def ids(seed: int, n: int = 40) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, 397, n)]


def logits(path: Path, tokens: list[int], **options: Any) -> np.ndarray:
    with nm.load(path, **options) as model:
        return model.logits(tokens)


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("type_name", TYPE_NAMES)
def test_every_weight_type_agrees_with_float64(type_name: str, devices: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf", types=type_name, tied=TYPE_NAMES.index(type_name) % 2 == 0, seed=1)
    wanted = ReferenceModel.read(path).logits(ids(1))
    assert wanted.std() > 1, "logits that say something"
    assert np.abs(logits(path, ids(1), exact=True, devices=devices) - wanted).max() < 2e-4


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("types", ("f32", "q4_k", MIXED), ids=("f32", "q4_k", "mixed"))
def test_gemma3_agrees_with_float64(types: Any, devices: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf", "gemma3", n_layer=6, types=types, seed=2)
    wanted = ReferenceModel.read(path).logits(ids(2))
    assert np.abs(logits(path, ids(2), exact=True, devices=devices) - wanted).max() < 2e-4


@pytest.mark.parametrize("architecture", ("llama", "gemma3"))
@pytest.mark.parametrize("cache", ("f32", "f16", "bf16", "q8_0", "q4_0"))
def test_fast_mode_is_near_the_exact_one(architecture: str, cache: str, tmp_path: Path) -> None:
    """A prompt of 40 tokens and steps of one: what activations of 8 bits and the cache's type lose, and no more."""
    path = write_model(tmp_path / "tiny.gguf", architecture, n_layer=3, types="q8_0", head_dim=64, n_head=6, n_head_kv=2, seed=5)
    wanted = ReferenceModel.read(path).logits(ids(5))
    allowed = 0.6 if cache == "q4_0" else 0.08
    for devices in ON_ONE:
        got = logits(path, ids(5), devices=devices, cache_type_k=cache, cache_type_v=cache)
        assert np.sqrt(np.mean((got - wanted) ** 2)) < allowed * wanted.std()


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("architecture", ("llama", "gemma3"))
def test_greedy_tokens_are_those_of_the_cpu(architecture: str, devices: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf", architecture, n_layer=4, types="q4_k", seed=6)
    options: dict[str, Any] = {"exact": True, "ctx_size": 256}
    with nm.load(path, **options) as model:
        wanted = model.generate_ids(ids(6), 64, ignore_eos=True)
    with nm.load(path, devices=devices, **options) as model:
        assert model.generate_ids(ids(6), 64, ignore_eos=True) == wanted


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("architecture", ("llama", "gemma3"))
def test_joined_calls_give_the_bits_of_separate_ones(
    architecture: str, devices: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "tiny.gguf", architecture, n_layer=3, types="q4_k", seed=7)

    def steps() -> list[bytes]:
        with nm.load(path, devices=devices, ctx_size=256) as model:
            prompt = model.context.decode(ids(7, 20), [0] * 20, [19]).tobytes()
            return [prompt, *(model.context.decode([i], [0], [0]).tobytes() for i in ids(8, 4))]

    joined = steps()
    monkeypatch.setattr("numba_meta.schedule.plan.fuse", lambda calls, *_: list(calls))
    assert steps() == joined


@pytest.mark.parametrize("kv", ("device", "host"))
@pytest.mark.parametrize("devices", ("cuda:0,cuda:0", "cuda:0,cuda:0,cuda:0", pytest.param("cuda:0,cuda:1", marks=pytest.mark.gpu(2))))
@pytest.mark.parametrize("architecture", ("llama", "gemma3"))
def test_sums_through_host_memory_give_the_same_bits(
    architecture: str, devices: str, kv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As between GPUs that cannot read each other's memory."""
    path = write_model(tmp_path / "tiny.gguf", architecture, n_layer=3, types="q8_0", n_head=6, n_head_kv=3, head_dim=64, seed=9)

    def steps() -> list[bytes]:
        with nm.load(path, devices=devices, ctx_size=256, kv=kv) as model:
            prompt = model.context.decode(ids(9, 40), [0] * 40, [39]).tobytes()
            return [prompt, *(model.context.decode([i], [0], [0]).tobytes() for i in ids(10, 12))]

    direct = steps()
    asked: list[bool] = []
    monkeypatch.setattr("numba_meta.devices.cuda_driver.GpuContext.can_read", lambda self, other: asked.append(True))
    assert steps() == direct and asked
