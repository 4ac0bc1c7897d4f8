"""Perplexity counts as llama.cpp does: the second half of each whole chunk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from models.conftest import MODEL_NAMES, OpenModel
from models.numpy_reference import ReferenceModel
from synthetic import write_model

import numba_meta as nm
from numba_meta.errors import ContextFullError, UsageError

# llama.cpp with float32 weights and cache: 765 tokens of 3 chunks of 512
EXACT = {"smollm2": 24.539237, "gemma3": 24.038015}


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_exact_mode_has_the_reference_perplexity(name: str, open_model: OpenModel, data_folder: Path) -> None:
    text = (data_folder / "ppl_text.txt").read_text(encoding="utf-8")
    # Gemma: what the reference has beside exact arithmetic (see test_reference) shows here as 1e-5.
    assert open_model(name, True).perplexity(text) == pytest.approx(EXACT[name], rel=1e-4)


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_fast_mode_is_within_1_5_percent(name: str, open_model: OpenModel, data_folder: Path) -> None:
    text = (data_folder / "ppl_text.txt").read_text(encoding="utf-8")
    assert open_model(name, False).perplexity(text) == pytest.approx(EXACT[name], rel=0.015)


@pytest.mark.parametrize("architecture", ("llama", "gemma3"))
def test_perplexity_is_that_of_the_definition(architecture: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf", architecture, types="q8_0")
    reference = ReferenceModel.read(path)
    text = "the winds and the waters are always on the side of the ablest navigators, as it is said in the books here " * 3
    with nm.load(path, exact=True) as model:
        ids, n = model.tokenize(text), 40
        adds_bos = architecture == "gemma3"
        assert (ids[0] == model.tokenizer.bos_id) == adds_bos and len(ids) > 2 * n and len(ids) % n
        scores = []
        for at in range(0, len(ids) - n + 1, n):
            chunk = ids[at : at + n]
            fed = [model.tokenizer.bos_id, *chunk[1:]] if adds_bos else chunk
            rows = reference.logits(fed)
            log_sums = np.log(np.exp(rows).sum(axis=1))
            scores += [log_sums[i] - rows[i, chunk[i + 1]] for i in range(n // 2, n - 1)]
        assert model.perplexity(text, n) == pytest.approx(np.exp(np.mean(scores)), rel=1e-5)


def test_impossible_chunks_are_one_line(tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf")
    with nm.load(path, ctx_size=64) as model:
        with pytest.raises(UsageError, match="no whole chunk of 512"):
            model.perplexity("too short")
        for ctx_size in (-1, 0, 1, 2):
            with pytest.raises(UsageError, match="whole number of 3 or more"):
                model.perplexity("a text", ctx_size)
        with pytest.raises(ContextFullError, match="128 tokens.*room for 64"):
            model.perplexity("a long text, much longer than what the context has room for " * 20, 128)
        assert model.perplexity("a text that is just long enough", 4) > 1
