"""Exact mode answers what an independent float32 forward and llama.cpp answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from models.conftest import MODEL_NAMES, OpenModel
from models.feeding import continue_greedily

# llama.cpp's own distance from exact arithmetic in Gemma is 0.034: a half-precision table for GELU is part of it.
LLAMA_CPP_TOLERANCE = {"smollm2": 1e-3, "gemma3": 0.05}
PROMPTS = ("english", "code", "chat", "long")


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_logits_and_greedy_ids_are_the_reference_ones(name: str, prompt: str, open_model: OpenModel, references: Any) -> None:
    model, reference = open_model(name, True), references(name)[prompt]
    logits = model.logits(reference["ids"], last=True)
    exact, theirs = reference["exact"], reference["llama_cpp"]["f32weights_f32kv_faoff"]
    assert np.abs(logits[exact["top20_ids"]] - exact["top20_logits"]).max() < 1e-3
    assert np.abs(logits[theirs["top20_ids"]] - theirs["top20_logits"]).max() < LLAMA_CPP_TOLERANCE[name]
    assert np.sort(logits)[::-1][:20] == pytest.approx(exact["top20_logits"], abs=1e-3), "others are larger"
    assert continue_greedily(model, logits, 48) == exact["greedy_ids"] == theirs["greedy_ids"]


@pytest.mark.parametrize("prompt", PROMPTS[:3])
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_generate_ids_gives_the_reference_ids(name: str, prompt: str, open_model: OpenModel, references: Any) -> None:
    reference = references(name)[prompt]
    assert open_model(name, True).generate_ids(reference["ids"], 48, ignore_eos=True) == reference["exact"]["greedy_ids"]


def test_generation_ends_before_an_end_of_generation_id(open_model: OpenModel, references: Any) -> None:
    model, reference = open_model("smollm2", True), references("smollm2")["chat"]
    first_end = reference["llama_cpp"]["f32weights_f32kv_faoff"]["first_eog"]
    assert model.generate_ids(reference["ids"], 48) == reference["exact"]["greedy_ids"][:first_end]
    assert "".join(model.generate(reference["ids"], 48)) == "The capital of France is Paris."


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_four_sequences_generate_what_each_does_alone(name: str, open_model: OpenModel, references: Any) -> None:
    short = [references(name)[prompt] for prompt in PROMPTS[:3]]
    prompts = [short[0]["ids"], short[1]["ids"], short[2]["ids"], short[0]["ids"]]
    wanted = [short[i]["exact"]["greedy_ids"] for i in (0, 1, 2, 0)]
    assert open_model(name, True).generate_many(prompts, 48, ignore_eos=True) == wanted
