"""Generation past the end of the context: it shifts where asked, and only there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from models.cache_places import N_VOCAB, PLACES, ids
from models.feeding import append

import numba_meta as nm
from numba_meta.errors import ContextFullError, UsageError
from numba_meta.models.cache.operations import choose_shift
from numba_meta.models.model import Model


@pytest.fixture(scope="module")
def llama(paths: dict[str, Path]) -> Iterator[Model]:
    with nm.load(paths["llama"], ctx_size=64, parallel=2) as model:
        yield model


FRESH: dict[str, Any] = {"ignore_eos": True, "repetition_penalty": 1e6, "repetition_last_n": -1}  # the best token that has not come yet


def generated_by_hand(model: Model, prompt: list[int], n: int, keep: int, n_positions: int) -> list[int]:
    model.cache.clear()
    logits = append(model, prompt)[-1]
    out: list[int] = []
    while True:
        out.append(max(set(range(N_VOCAB)).difference(prompt, out), key=lambda i: logits[i]))
        if len(out) == n:
            return out
        if model.cache.length() == n_positions:
            model.cache.shift(0, keep, max(1, (n_positions - keep) // 2))
        logits = append(model, out[-1:])[-1]


def test_generation_past_the_end_shifts_where_asked(llama: Model) -> None:
    prompt = ids(13, 20)
    for keep in (0, 5, 20, 62):
        got = llama.generate_ids(prompt, 120, context_shift=True, keep=keep, **FRESH)
        assert got == generated_by_hand(llama, prompt, 120, keep, 64)
    whole = llama.generate_ids(prompt, 120, context_shift=True, keep=-1, **FRESH)
    assert whole == llama.generate_ids(prompt, 120, context_shift=True, keep=20, **FRESH)
    text = "".join(llama.generate(prompt, 120, context_shift=True, keep=-1, **FRESH))
    assert text == llama.detokenize(whole)
    assert llama.cache.tokens()[:20] == prompt
    assert llama.cache.tokens()[20:] == whole[-1 - (llama.cache.length() - 20) : -1]
    assert llama.timings.n_generated == 119


def test_generation_does_not_shift_unless_asked(llama: Model) -> None:
    for options in ({}, {"keep": 3}):
        with pytest.raises(ContextFullError, match=r"^1 more token does not fit the context: 64 are in sequence 0"):
            llama.generate_ids(ids(13, 20), 60, ignore_eos=True, **options)
    with pytest.raises(ContextFullError, match=r"^the context is full with 64 tokens and all of them are kept; keep fewer"):
        llama.generate_ids(ids(13, 64), 3, ignore_eos=True, context_shift=True, keep=-1)
    with pytest.raises(ContextFullError, match="^the prompt has 65 tokens, the context has room for 64"):
        llama.generate_ids(ids(13, 65), 3, context_shift=True)
    with pytest.raises(UsageError, match="^keep -2 is impossible; expected a whole number of -1 or more$"):
        llama.generate_ids(ids(13, 5), 3, keep=-2)


def test_a_shifting_generation_is_the_same_everywhere(paths: dict[str, Path]) -> None:
    for name in paths:
        results = []
        for options in PLACES.values():
            with nm.load(paths[name], exact=True, ctx_size=80, parallel=2, **options) as model:
                results.append(model.generate_ids(ids(14, 30), 120, context_shift=True, keep=4, **FRESH))
        unified, own = [results[i] for i in (0, 2, 4, 5)], [results[i] for i in (1, 3)]  # 80 positions, 40 positions
        assert all(other == unified[0] for other in unified) and all(other == own[0] for other in own)
        assert len(set(unified[0])) == len(set(own[0])) == 120


def test_a_bos_is_kept(paths: dict[str, Path]) -> None:
    with nm.load(paths["gemma3"], ctx_size=40) as model:
        assert model.tokenizer.vocabulary.add_bos
        list(model.generate("the sea", 100, ignore_eos=True, context_shift=True))
        tokens = model.cache.tokens()
        assert tokens[0] == model.tokenizer.bos_id and tokens[1:3] != model.tokenize("the sea")[1:3]


@given(st.integers(1, 10_000), st.integers(0, 12_000))
def test_a_shift_makes_room_and_keeps_what_it_should(length: int, keep: int) -> None:
    if keep >= length:
        with pytest.raises(ContextFullError):
            choose_shift(length, keep)
        return
    kept, drop = choose_shift(length, keep)
    assert kept == keep and 1 <= drop <= length - keep
    assert abs(2 * drop - (length - keep)) <= 1
