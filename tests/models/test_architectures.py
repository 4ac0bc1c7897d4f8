"""Tiny files of every architecture, with logits and greedy ids of other programs: the same on any devices and with the cache anywhere."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from models.rewriting import REMOVED, rewrite

import numba_meta as nm
from numba_meta.models.model import Model

VALUE = gguf.GGUFValueType
FOLDER = Path(__file__).parent.parent / "data" / "archs"
NAMES = sorted(path.stem for path in FOLDER.glob("*.gguf"))
CTX_SIZE = 256  # as the references: some rope factors are chosen by it
TOLERANCE = 1e-3
OF_LLAMA_CPP_GELU = 2e-2  # its table of half precision
SPLITS: dict[str, dict[str, Any]] = {
    "one": {},
    "two": {"devices": "cpu:0,cpu:0"},
    "three-uneven-host": {"devices": "cpu:0,cpu:0,cpu:0", "tensor_split": "3,0.5,2", "kv": "host"},
}
MORE_SPLITS: dict[str, dict[str, Any]] = {
    "one-host": {"kv": "host", "ubatch_size": 16},
    "two-uneven": {"devices": "cpu:0,cpu:0", "tensor_split": "1,4", "ubatch_size": 16},
    "three": {"devices": "cpu:0,cpu:0,cpu:0"},
    "four": {"devices": "cpu:0,cpu:0,cpu:0,cpu:0"},
    "four-empty-host": {"devices": "cpu:0,cpu:0,cpu:0,cpu:0", "tensor_split": "0,5,1,2", "kv": "host", "kv_pipeline_depth": 0},
    "two-deterministic": {"devices": "cpu:0,cpu:0", "deterministic": True},
}


@dataclass(frozen=True)
class Prompt:
    """A prompt, what others answer, and the tolerance that goes with whom we compare with."""

    ids: list[int]
    positions: list[int]
    logits: np.ndarray
    tolerance: float
    greedy: list[int]  # up to where two right programs may part


@cache
def prompts_of(name: str) -> tuple[Prompt, ...]:
    facts = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    arrays = np.load(FOLDER / f"{name}.npz")
    is_float = facts["weights"] == "F32"
    found = []
    for i, prompt in enumerate(facts["prompts"]):
        kind = next(kind for kind in ("logits_float64", "logits_dequantised", "logits") if f"{kind}_{i}" in arrays)
        tolerance = OF_LLAMA_CPP_GELU if kind != "logits_float64" and facts["arch"].startswith("gemma") else TOLERANCE
        # llama.cpp's own greedy ids come from activations that it rounds where weights are quantized: no measure there.
        margin = 2 * max(tolerance, prompt.get("float64_max_abs") or 0)
        sure = next((n for n, gap in enumerate(prompt["greedy_top2_margins"]) if gap < margin), len(prompt["greedy"]))
        greedy = prompt["greedy"][:sure] if is_float else []
        found.append(Prompt(prompt["ids"], prompt["positions"], arrays[f"{kind}_{i}"], tolerance, greedy))
    return tuple(found)


def head_dim_of(name: str) -> int:
    """Elements of a head of Q and K."""
    facts = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    keys = {key.partition(".")[2]: value for key, value in facts["metadata"].items()}
    return int(keys.get("attention.key_length", keys["embedding_length"] // keys["attention.head_count"]))


def check_model(model: Model, name: str) -> None:
    """Logits of all prompts within their tolerance, and the greedy ids that are sure."""
    n_sure = 0
    for prompt in prompts_of(name):
        got = model.logits(prompt.ids)[prompt.positions]
        assert got.std() > 0.5, "logits that say something"
        assert np.abs(got - prompt.logits).max() < prompt.tolerance
        assert model.generate_ids(prompt.ids, max_tokens=len(prompt.greedy), ignore_eos=True) == prompt.greedy
        n_sure += len(prompt.greedy)
    assert n_sure > 0 or not any(prompt.greedy for prompt in prompts_of(name))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_ids_are_those_of_others(name: str, split: str) -> None:
    with nm.load(FOLDER / f"{name}.gguf", exact=True, ctx_size=CTX_SIZE, **SPLITS[split]) as model:
        check_model(model, name)


@pytest.mark.parametrize(
    "keys",
    [
        {"llama.rope.scaling.type": REMOVED},
        {"llama.rope.scaling.type": REMOVED, "llama.rope.scaling.factor": REMOVED, "llama.rope.scale_linear": (4.0, VALUE.FLOAT32)},
    ],
    ids=["factor-alone", "old-key"],
)
def test_scaling_without_a_type_is_linear(keys: dict[str, Any], tmp_path: Path) -> None:
    path = rewrite(FOLDER / "llama-linear-f32.gguf", tmp_path / "bare.gguf", keys)
    with nm.load(path, exact=True, ctx_size=CTX_SIZE, devices="cpu:0,cpu:0") as model:
        check_model(model, "llama-linear-f32")


@pytest.mark.slow
@pytest.mark.parametrize("split", MORE_SPLITS)
@pytest.mark.parametrize("name", NAMES)
def test_on_any_devices(name: str, split: str) -> None:
    with nm.load(FOLDER / f"{name}.gguf", exact=True, ctx_size=CTX_SIZE, **MORE_SPLITS[split]) as model:
        check_model(model, name)


@pytest.mark.parametrize("name", NAMES)
def test_sequences_together_say_what_each_says_alone(name: str) -> None:
    prompts = [prompt.ids for prompt in prompts_of(name)] + [prompts_of(name)[1].ids[:9]]
    with nm.load(FOLDER / f"{name}.gguf", exact=True, ctx_size=1024, parallel=4, devices="cpu:0,cpu:0") as model:
        together = model.generate_many(prompts, max_tokens=12, ignore_eos=True)
        alone = [model.generate_ids(ids, max_tokens=12, ignore_eos=True) for ids in prompts]
    assert together == alone


GPU_SPLITS: dict[str, dict[str, Any]] = {
    "one": {"devices": "cuda:0"},
    "two-host": {"devices": "cuda:0,cuda:0", "kv": "host"},
    "three-uneven": {"devices": "cuda:0,cuda:0,cuda:0", "tensor_split": "3,0.5,2", "ubatch_size": 16},
}


ON_GPU = [name for name in NAMES if head_dim_of(name) % 32 == 0]  # CUDA attention has no kernel for other widths


@pytest.mark.gpu
@pytest.mark.parametrize("split", GPU_SPLITS)
@pytest.mark.parametrize("name", ON_GPU)
def test_on_a_gpu(name: str, split: str) -> None:
    with nm.load(FOLDER / f"{name}.gguf", exact=True, ctx_size=CTX_SIZE, **GPU_SPLITS[split]) as model:
        check_model(model, name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_fast_steps_on_a_gpu_say_nearly_the_same(name: str) -> None:
    """Tensor cores, 8-bit activations where weights are quantized, a cache of f16: near the exact logits, many rows and few."""
    prompt = prompts_of(name)[1]
    with nm.load(FOLDER / f"{name}.gguf", ctx_size=CTX_SIZE, devices="cuda:0") as model:
        whole = model.logits(prompt.ids)
        few = model.logits(prompt.ids[:12])[-1]
    most = 0.35 * prompt.logits.std()
    assert np.abs(whole[prompt.positions] - prompt.logits).max() < most and np.abs(few - whole[11]).max() < most
