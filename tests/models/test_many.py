"""Several sequences in one batch: each gets what it gets alone, whatever turns they take."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from synthetic import write_model

import numba_meta as nm
from numba_meta.errors import ContextFullError, UsageError


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "llama.gguf", types="q5_0", seed=21)


def prompts(n: int, longest: int = 40) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [[int(i) for i in rng.integers(0, 397, rng.integers(1, longest))] for _ in range(n)]


@pytest.mark.parametrize("unified", (True, False))
@pytest.mark.parametrize("parallel", (1, 2, 4, 20))
def test_each_prompt_gets_what_it_gets_alone(parallel: int, unified: bool, path: Path) -> None:
    """Also more prompts than sequences, and more sequences than a step of 16 rows."""
    with nm.load(path, ctx_size=60 * parallel, parallel=parallel, kv_unified=unified) as model:
        many = prompts(23)
        assert model.generate_many(many, 9, ignore_eos=True) == [model.generate_ids(ids, 9, ignore_eos=True) for ids in many]


def test_prompts_wait_for_cells(path: Path) -> None:
    """Room for two at a time, in a context of four sequences: nobody runs out of cells."""
    with nm.load(path, ctx_size=100, parallel=4) as model:
        many = prompts(9)
        assert model.generate_many(many, 10, ignore_eos=True) == [model.generate_ids(ids, 10, ignore_eos=True) for ids in many]


def test_a_prompt_that_cannot_end_in_its_room_is_an_error_and_the_model_goes_on(path: Path) -> None:
    with nm.load(path, ctx_size=40, parallel=2) as model:
        many = [prompts(1)[0][:10], [1] * 35]
        with pytest.raises(ContextFullError, match="^1 more token does not fit the context"):
            model.generate_many(many, 10, ignore_eos=True)
        assert model.generate_many(many, 5, ignore_eos=True) == [model.generate_ids(ids, 5, ignore_eos=True) for ids in many]


def test_sequences_end_at_different_times(path: Path) -> None:
    """An id that some generate soon is made the end."""
    with nm.load(path, ctx_size=400, parallel=4) as model:
        many = prompts(8)
        free = model.generate_many(many, 12, ignore_eos=True)
        end = free[0][3]
        model.tokenizer.__dict__["eog_ids"] = frozenset([end])
        assert model.tokenizer.eog_ids == {end}
        wanted = [ids[: ids.index(end)] if end in ids else ids for ids in free]
        assert len({len(ids) for ids in wanted}) > 1
        assert model.generate_many(many, 12) == wanted == [model.generate_ids(ids, 12) for ids in many]


def test_seeds(path: Path) -> None:
    """Prompt i samples with seed + i: equal prompts differ, and each can be made again alone."""
    with nm.load(path, ctx_size=200, parallel=3) as model:
        ids = prompts(1)[0]
        options = {"temperature": 2.0, "top_k": 50, "ignore_eos": True}
        first = model.generate_many([ids] * 3, 10, seed=7, **options)
        assert first == model.generate_many([ids] * 3, 10, seed=7, **options)
        assert first == [model.generate_ids(ids, 10, seed=7 + i, **options) for i in range(3)]
        assert len(set(map(tuple, first))) == 3
        assert first != model.generate_many([ids] * 3, 10, seed=70, **options)


def test_no_prompts_no_tokens_and_wrong_ones(path: Path) -> None:
    with nm.load(path, ctx_size=50, parallel=2) as model:
        assert model.generate_many([], 5) == []
        assert model.generate_many([[1], [2, 3]], 0) == [[], []]
        assert [len(ids) for ids in model.generate_many([[1], [2, 3]], 1, ignore_eos=True)] == [1, 1]
        for wrong in ([[1], []], [[1], [397]], [[-1]], [""]):
            with pytest.raises(UsageError):
                model.generate_many(wrong, 5)
        with pytest.raises(UsageError, match="max_tokens -1"):
            model.generate_many([[1]], -1)
        with pytest.raises(UsageError, match="unknown sampling options"):
            model.generate_many([[1]], 1, temprature=1.0)


def test_timings_count_tokens(path: Path) -> None:
    with nm.load(path, ctx_size=200, parallel=2) as model:
        model.generate_many([[1, 2, 3], [4, 5]], 6, ignore_eos=True)
        timings = model.timings
        assert timings.n_prompt == 5
        assert timings.n_generated == 2 * 5, "a prompt's first token comes with the prompt"
        assert timings.prompt_seconds > 0 and timings.generation_seconds > 0
