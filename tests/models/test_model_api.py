"""The calls of a `Model`: text and ids, sampling, stops, prefixes that are kept, and what a user may get wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.feeding import append
from synthetic import write_model

import numba_meta as nm
from numba_meta.errors import ContextFullError, UsageError
from numba_meta.models.model import Model
from numba_meta.models.running.recordings import Capacity


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "llama.gguf", types="q4_1", seed=31)


@pytest.fixture(scope="module")
def model(path: Path) -> Any:
    with nm.load(path, ctx_size=256, parallel=2) as loaded:
        yield loaded


PROMPT = [11, 250, 7, 99, 42]


def test_text_and_ids_are_two_views_of_a_prompt(model: Model) -> None:
    text = "the sea and the rain"
    ids = model.tokenize(text)
    assert model.detokenize(ids) == text
    assert model.generate_ids(text, 8, ignore_eos=True) == model.generate_ids(ids, 8, ignore_eos=True)
    pieces = list(model.generate(text, 8, ignore_eos=True))
    assert "".join(pieces) == model.detokenize(model.generate_ids(ids, 8, ignore_eos=True))


def test_special_tokens_of_a_text_are_text_unless_parsed(model: Model) -> None:
    assert model.tokenize("<|im_end|>", parse_special=True) == [2]
    assert 2 not in model.tokenize("<|im_end|>")
    assert len(model.generate_ids("<|im_end|>", 2, ignore_eos=True)) == 2


def test_logits_are_one_row_per_id_and_the_last_is_the_last(model: Model) -> None:
    ids = [int(i) for i in np.random.default_rng(1).integers(0, 397, 100)]
    rows = model.logits(ids)
    assert rows.shape == (100, 397) and rows.dtype == np.float32
    last = model.logits(ids, last=True)
    assert last.shape == (397,)
    np.testing.assert_array_equal(last, rows[-1])
    kept = last.copy()
    model.logits(PROMPT)
    np.testing.assert_array_equal(last, kept, err_msg="what was given is the caller's own")
    np.testing.assert_array_equal(model.logits(ids[:30]), rows[:30])


def test_greedy_generation_is_the_largest_logit_each_time(model: Model) -> None:
    ids = model.generate_ids(PROMPT, 20, ignore_eos=True)
    rows = model.logits(PROMPT + ids)
    assert ids == rows[len(PROMPT) - 1 : -1].argmax(axis=1).tolist()
    assert ids == model.generate_ids(PROMPT, 20, ignore_eos=True, temperature=0.0, seed=5)


def test_the_same_seed_gives_the_same_text(model: Model) -> None:
    def text(seed: int | None) -> str:
        return "".join(model.generate(PROMPT, 24, ignore_eos=True, temperature=1.5, top_k=200, top_p=0.95, min_p=0.01, seed=seed))

    assert text(1) == text(1)
    assert len({text(seed) for seed in range(6)}) == 6
    assert len({text(None) for _ in range(4)}) > 1, "no seed: a random one"


def test_a_repetition_penalty_counts_the_prompt_and_what_was_generated(model: Model) -> None:
    ids = model.generate_ids(PROMPT, 40, ignore_eos=True, repetition_penalty=1e6, repetition_last_n=-1)
    rows = model.logits(PROMPT + ids)
    seen = set(PROMPT)
    for row, token in zip(rows[len(PROMPT) - 1 :], ids, strict=False):
        fresh = max((i for i in range(397) if i not in seen), key=lambda i: row[i])
        assert token == fresh
        seen.add(token)


def test_an_end_of_generation_id_ends_it(path: Path) -> None:
    with nm.load(path, ctx_size=64) as model:
        free = model.generate_ids(PROMPT, 12, ignore_eos=True)
        model.tokenizer.__dict__["eog_ids"] = frozenset([free[5]])
        n = free.index(free[5])
        assert model.generate_ids(PROMPT, 12) == free[:n]
        assert "".join(model.generate(PROMPT, 12)) == model.detokenize(free[:n])
        assert model.generate_ids(PROMPT, 12, ignore_eos=True) == free


def test_stop_texts_end_it_before_them(model: Model) -> None:
    whole = "".join(model.generate(PROMPT, 30, ignore_eos=True))
    for start, length in ((3, 2), (8, 5), (0, 1), (len(whole) - 3, 3)):
        stop = whole[start : start + length]
        wanted = whole[: whole.index(stop)]
        assert "".join(model.generate(PROMPT, 30, ignore_eos=True, stop=stop)) == wanted
        assert "".join(model.generate(PROMPT, 30, ignore_eos=True, stop=("not there", stop))) == wanted
    assert "".join(model.generate(PROMPT, 30, ignore_eos=True, stop="not there")) == whole


def test_a_kept_prefix_changes_nothing_but_the_work(model: Model) -> None:
    texts = [PROMPT, [*PROMPT, 8, 9, 10], [*PROMPT, 8, 1], PROMPT, PROMPT[:2], [300, *PROMPT]]
    for ids in texts:
        plain = "".join(model.generate(ids, 6, ignore_eos=True))
        assert model.timings.n_prompt == len(ids)
        assert "".join(model.generate(ids, 6, ignore_eos=True, reuse_prefix=True)) == plain
        assert model.timings.n_prompt == 1, "all but the last token were there"
    first = list(model.generate(PROMPT, 6, ignore_eos=True))
    grown = PROMPT + model.generate_ids(PROMPT, 6, ignore_eos=True)
    assert first
    plain = "".join(model.generate([*grown, 3, 4], 6, ignore_eos=True))
    list(model.generate(PROMPT, 6, ignore_eos=True))
    assert "".join(model.generate([*grown, 3, 4], 6, ignore_eos=True, reuse_prefix=True)) == plain
    assert model.timings.n_prompt == 3, "the last id that was generated had not been fed"


def test_a_kept_prefix_after_the_context_was_full(path: Path) -> None:
    with nm.load(path, ctx_size=12) as model:
        wanted = model.generate_ids(PROMPT, 8, ignore_eos=True)
        with pytest.raises(ContextFullError):
            model.generate_ids(PROMPT, 9, ignore_eos=True)
        for ids in (PROMPT, PROMPT + wanted[:7]):
            plain = "".join(model.generate(ids, 1, ignore_eos=True))
            with pytest.raises(ContextFullError):
                list(model.generate(PROMPT, 20, ignore_eos=True))
            assert "".join(model.generate(ids, 1, ignore_eos=True, reuse_prefix=True)) == plain


def test_a_kept_prefix_that_a_sliding_window_has_lost(tmp_path: Path) -> None:
    """600 tokens in a ring of 256 cells: going back to the first 100 is not possible, so all is computed again."""
    path = write_model(tmp_path / "gemma3.gguf", "gemma3", n_layer=6, context_length=700)
    ids = [int(i) for i in np.random.default_rng(2).integers(0, 397, 600)]
    with nm.load(path, ubatch_size=64) as model:
        for length, kept in ((599, 598), (590, 589), (100, 0)):
            plain = "".join(model.generate(ids[:length], 4, ignore_eos=True))
            list(model.generate(ids, 1, ignore_eos=True))
            assert "".join(model.generate(ids[:length], 4, ignore_eos=True, reuse_prefix=True)) == plain
            assert model.timings.n_prompt == length - kept


def test_one_generation_at_a_time(model: Model) -> None:
    """A generation whose cache another call has taken ends with one line instead of wrong text."""
    others: list[Any] = [
        lambda: model.generate_ids(PROMPT, 2),
        lambda: model.logits(PROMPT),
        lambda: next(model.generate([1, 2], 2, ignore_eos=True)),
        lambda: next(model.generate([1, 2], 2, ignore_eos=True, reuse_prefix=True)),
        lambda: model.generate_many([[1], [2]], 2),
        lambda: model.perplexity("the sea and the rain", 4),
    ]
    for other in others:
        begun = model._generated(PROMPT, 10, True, False, {})
        next(begun)
        other()
        with pytest.raises(UsageError, match="^another call has used the model since .*$"):
            next(begun)


def test_an_unfinished_generation_does_no_harm(model: Model) -> None:
    wanted = model.generate_ids(PROMPT, 10, ignore_eos=True)
    begun = model.generate(PROMPT, 10, ignore_eos=True)
    next(begun)
    assert model.generate_ids(PROMPT, 10, ignore_eos=True) == wanted


@pytest.mark.parametrize(
    ("call", "pattern"),
    [
        (lambda m: m.generate_ids([], 3), "the prompt is empty"),
        (lambda m: m.generate(""), "the prompt is empty"),
        (lambda m: m.generate_ids([397], 3), "token id 397 is not in the vocabulary; expected 0 to 396"),
        (lambda m: m.generate_ids([-1], 3), "token id -1"),
        (lambda m: m.logits([5, 1 << 40]), "token id 1099511627776"),
        (lambda m: m.generate_ids([1], -1), "max_tokens -1"),
        (lambda m: m.generate_ids([1], 3, temperature=-1.0), "temperature is -1.0"),
        (lambda m: m.generate_ids([1], 3, temperature="hot"), "temperature is 'hot'"),
        (lambda m: m.generate_ids([1], 3, heat=1.0), "unknown sampling options"),
        (lambda m: m.generate([1], stop=""), "a stop text is .*; expected a text of at least one character"),
        (lambda m: m.generate([1], stop=("a", "")), "a stop text is .*; expected a text of at least one character"),
    ],
)
def test_what_a_user_may_get_wrong(model: Model, call: Any, pattern: str) -> None:
    with pytest.raises(UsageError, match=pattern) as caught:
        call(model)
    assert len(str(caught.value).splitlines()) == 1
    assert len(model.generate_ids(PROMPT, 2, ignore_eos=True)) == 2


def test_zero_tokens(model: Model) -> None:
    assert model.generate_ids(PROMPT, 0) == []
    assert list(model.generate(PROMPT, 0)) == []


@pytest.mark.parametrize(
    ("batch", "pattern"),
    [
        (([], [], []), "a step of 0 tokens"),
        (([1, 2], [0], [0]), "2 tokens with 1 sequences"),
        (([1], [0], []), "0 outputs"),
        (([397], [0], [0]), "token id 397 is impossible; expected 0 to 396"),
        (([-1], [0], [0]), "token id -1"),
        (([1], [2], [0]), "sequence 2 is impossible; expected 0 to 1"),
        (([1], [-1], [0]), "sequence -1"),
        (([1], [0], [1]), "output row 1 is impossible; expected 0 to 0"),
        (([1] * 17, [0] * 8 + [1] * 9, [0]), "17 tokens holds several sequences"),
        (([1] * 257, [0] * 257, [0]), "do not fit the context"),
    ],
)
def test_a_context_takes_no_wrong_batch(model: Model, batch: Any, pattern: str) -> None:
    model.context.cells.clear()
    with pytest.raises(nm.NumbaMetaError, match=pattern):
        model.context.decode(*batch)
    assert [model.context.cells.length(sequence) for sequence in (0, 1)] == [0, 0], "nothing was appended"
    with pytest.raises(UsageError, match="1 to 2 tokens and 1 to 1 outputs"):
        model.context.decode([1, 2, 3], [0] * 3, [2], Capacity(2, 1))
    assert np.isfinite(append(model, [1, 2, 3])).all()


def test_what_was_decided_can_be_read(model: Model, path: Path) -> None:
    plan = model.plan
    assert (plan.architecture, plan.n_cells, plan.n_sequences, plan.exact) == ("llama", 256, 2, False)
    assert path.name in str(plan) and path.name in plan._repr_html_()
    assert path.name in repr(model) and "cpu:0" in repr(model)
    assert set(model.memory()) == {"cpu:0"}


def test_progress_is_told_while_loading(path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    nm.load(path, ctx_size=64, progress=lambda what, done, total: told.append((what, done, total))).close()
    loading = [(done, total) for what, done, total in told if what == "loading"]
    assert loading and loading[-1][0] == loading[-1][1] > 0
    assert [done for done, _ in loading] == sorted(done for done, _ in loading)
