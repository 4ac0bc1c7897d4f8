"""The real models over several CPU devices: the tokens of one device, and its logits within rounding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.conftest import MODEL_NAMES, OpenModel
from models.feeding import continue_greedily

import numba_meta as nm

N_DEVICES = (1, 2, 3, 4, 6)
UNEVEN = {1: "5", 2: "70,30", 3: "1,0,2", 4: "10,60,5,25", 6: "0,3,1,0,5,1"}
ALL = [(n, text) for n in N_DEVICES for text in (None, UNEVEN[n])] + [(2, "1,0"), (2, "0,1")]
# SmolLM2 has 9 heads over 3 KV heads; Gemma 4 over 1: more devices than heads, uneven parts and empty ones.
SAMPLE = [("smollm2", 2, "70,30"), ("smollm2", 4, None), ("gemma3", 2, "1,0"), ("gemma3", 3, "10,30,5"), ("gemma3", 6, None)]


def generates_as_one_device(
    name: str, n: int, tensor_split: str | None, path: Path, open_model: OpenModel, references: Any, n_tokens: int
) -> None:
    prompts = [references(name)[prompt] for prompt in ("english", "chat", "code", "english")]
    wanted = [prompt["exact"]["greedy_ids"][:n_tokens] for prompt in prompts]
    whole = open_model(name, True).logits(prompts[0]["ids"], last=True)
    with nm.load(path, devices=["cpu:0"] * n, tensor_split=tensor_split, exact=True, ctx_size=512, parallel=4) as model:
        assert len(model.plan.devices) == n
        logits = model.logits(prompts[0]["ids"], last=True)
        assert np.abs(logits - whole).max() < 5e-4
        assert continue_greedily(model, logits, n_tokens) == wanted[0]
        assert model.generate_many([prompt["ids"] for prompt in prompts], n_tokens, ignore_eos=True) == wanted


@pytest.mark.parametrize(("name", "n", "tensor_split"), SAMPLE)
def test_a_split_generates_what_one_device_does(
    name: str, n: int, tensor_split: str | None, real_paths: Callable[[str], Path], open_model: OpenModel, references: Any
) -> None:
    generates_as_one_device(name, n, tensor_split, real_paths(name), open_model, references, 12)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "tensor_split"), ALL)
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_every_split_generates_what_one_device_does(
    name: str, n: int, tensor_split: str | None, real_paths: Callable[[str], Path], open_model: OpenModel, references: Any
) -> None:
    generates_as_one_device(name, n, tensor_split, real_paths(name), open_model, references, 48)


@pytest.mark.parametrize(("name", "n", "tensor_split"), [("smollm2", 2, "70,30"), ("gemma3", 3, None)])
def test_a_split_in_fast_mode_is_near_exact_mode(
    name: str, n: int, tensor_split: str | None, real_paths: Callable[[str], Path], references: Any
) -> None:
    reference = references(name)["code"]
    with nm.load(real_paths(name), devices=["cpu:0"] * n, tensor_split=tensor_split, ctx_size=256) as model:
        top = np.argsort(-model.logits(reference["ids"], last=True))[:20]
        assert len(set(top.tolist()) & set(reference["exact"]["top20_ids"])) >= 16


def test_each_device_holds_its_part_of_weights_and_cache(smollm2_path: Path) -> None:
    """Nobody holds the whole model: cut matrices and K/V follow the split; only the token embedding and norms are held by all."""
    with nm.load(smollm2_path, ctx_size=512) as model:
        whole = model.plan.devices[0]
    with nm.load(smollm2_path, devices="cpu:0,cpu:0,cpu:0", ctx_size=512) as model:
        parts = model.plan.devices
    for part in parts:  # the cache is placed by share, in 1/65536, and each of 60 tensors begins at a multiple of 64
        assert whole.cache_bytes / 3 <= part.cache_bytes <= whole.cache_bytes * (1 / 3 + 2 / 65536) + 60 * 64
        assert part.weight_bytes < 0.6 * whole.weight_bytes
    with nm.load(smollm2_path, devices="cpu:0,cpu:0", tensor_split="1,0", ctx_size=512) as model:
        first, rest = model.plan.devices
    assert first.cache_bytes == whole.cache_bytes and rest.cache_bytes < 60 * 128, "60 tensors of no elements, aligned"
    assert rest.weight_bytes < 0.01 * first.weight_bytes
