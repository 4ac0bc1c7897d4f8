"""Rows stand alone: a row's logits are the same bits whatever is computed beside it and wherever its cells lie."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.conftest import MODEL_NAMES, OpenModel
from synthetic import write_model

import numba_meta as nm
from numba_meta.models.model import Model

MODES = (True, False)


def feed(model: Model, ids: Sequence[int], sequence: int, step: int) -> np.ndarray:
    """Appends ids in chunks of `step` rows; the logits of the last one."""
    for at in range(0, len(ids), step):
        chunk = list(ids[at : at + step])
        logits = model.context.decode(chunk, [sequence] * len(chunk), [len(chunk) - 1])
    return logits[0].copy()


def neighbours(prompts: Sequence[Sequence[int]], n: int) -> list[tuple[int, int]]:
    """`n` further rows (token, sequence) of sequences 1 to 3, each sequence's together."""
    rows = [(prompts[i % 3][i % 7], 1 + i % 3) for i in range(n)]
    return sorted(rows, key=lambda row: row[1])


def target_row(model: Model, prompts: Sequence[Sequence[int]], n_rows: int, sequence: int, n_others: int, scattered: bool) -> np.ndarray:
    """The logits of one more token after prompt 0, decoded in a batch of `n_rows` rows.

    `n_others` sequences hold prompts too. `scattered`: their prompts alternate with it, three tokens each, so that cells interleave.
    """
    model.context.cells.clear()
    held = {sequence: prompts[0]} | {(sequence + i) % 4: prompts[i] for i in range(1, n_others + 1)}
    step = 3 if scattered else 512
    for at in range(0, max(map(len, held.values())), step):
        for which, ids in held.items():
            if ids[at : at + step]:
                feed(model, ids[at : at + step], which, step)
    rows = [(token, (sequence + which) % 4) for token, which in neighbours(prompts[1:], n_rows - 1)]
    at = n_rows // 2
    rows.insert(at, (prompts[0][0], sequence))
    tokens, sequences = zip(*rows, strict=True)
    return model.context.decode(tokens, sequences, range(n_rows))[at].copy()


@pytest.fixture(scope="module")
def prompts(references: Any) -> Any:
    """Four prompts of a model: sequences of 17 to 84 tokens."""
    return lambda name: [references(name)[prompt]["ids"] for prompt in ("code", "english", "chat", "english")]


@pytest.mark.parametrize("exact", MODES, ids=("exact", "fast"))
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_bits_do_not_depend_on_the_batch(name: str, exact: bool, open_model: OpenModel, prompts: Any) -> None:
    model = open_model(name, exact)
    alone = target_row(model, prompts(name), 1, 0, 0, False)
    assert np.isfinite(alone).all() and alone.std() > 0.5
    for n_rows in (1, 2, 7, 16):
        for n_others in (0, 3):
            got = target_row(model, prompts(name), n_rows, 0, n_others, False)
            np.testing.assert_array_equal(got, alone, err_msg=f"{n_rows} rows, {n_others} other sequences")


@pytest.mark.parametrize("exact", MODES, ids=("exact", "fast"))
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_bits_do_not_depend_on_where_cells_lie(name: str, exact: bool, open_model: OpenModel, prompts: Any) -> None:
    model = open_model(name, exact)
    alone = target_row(model, prompts(name), 1, 0, 0, False)
    for sequence in (0, 3):
        for n_rows in (1, 16):
            got = target_row(model, prompts(name), n_rows, sequence, 3, True)
            np.testing.assert_array_equal(got, alone, err_msg=f"sequence {sequence}, {n_rows} rows")


@pytest.mark.parametrize("exact", MODES, ids=("exact", "fast"))
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_bits_do_not_depend_on_the_chunks_of_a_prompt(name: str, exact: bool, open_model: OpenModel, references: Any) -> None:
    """Also past 256 positions, where attention combines chunks, and for chunks of more rows than a batch promises."""
    model, ids = open_model(name, exact), references(name)["long"]["ids"][:300]
    wanted = None
    for step in (512, 16, 17, 100):
        model.context.cells.clear()
        got = feed(model, ids, 1, step)
        wanted = got if wanted is None else wanted
        np.testing.assert_array_equal(got, wanted, err_msg=f"chunks of {step}")
    model.context.cells.clear()
    feed(model, ids[:200], 1, 512)
    feed(model, ids[200:280], 1, 7)
    np.testing.assert_array_equal(feed(model, ids[280:], 1, 1), wanted)


@pytest.mark.parametrize("exact", MODES, ids=("exact", "fast"))
def test_bits_of_the_rows_that_give_logits_do_not_depend_on_which_do(exact: bool, open_model: OpenModel, references: Any) -> None:
    model, ids = open_model("smollm2", exact), references("smollm2")["english"]["ids"][:16]

    def rows(outputs: Sequence[int]) -> np.ndarray:
        model.context.cells.clear()
        return model.context.decode(ids, [0] * 16, outputs).copy()

    every = rows(range(16))
    for outputs in ([15], [0, 15], [9, 3, 3], list(range(15, -1, -1))):
        np.testing.assert_array_equal(rows(outputs), every[outputs])
    np.testing.assert_array_equal(model.logits(ids), every)


def test_four_sequences_generate_the_same_ids_in_fast_mode(open_model: OpenModel, references: Any) -> None:
    for name in MODEL_NAMES:
        ids = [references(name)[prompt]["ids"] for prompt in ("english", "code", "chat", "english", "code")]
        model = open_model(name, False)
        together = model.generate_many(ids, 16, ignore_eos=True)
        assert together == [model.generate_ids(prompt, 16, ignore_eos=True) for prompt in ids]


def cache_cases() -> list[Any]:
    """(cache type, exact): every type and either mode in the quick part, all pairs in the slow one."""
    quick = (("f32", True), ("f16", False), ("bf16", False), ("q8_0", True), ("q4_0", False))
    cases = itertools.product(("f32", "f16", "bf16", "q8_0", "q4_0"), MODES)
    return [pytest.param(*case, marks=() if case in quick else pytest.mark.slow) for case in cases]


@pytest.mark.parametrize(("cache_type", "exact"), cache_cases())
@pytest.mark.parametrize("architecture", ("llama", "gemma3"))
def test_bits_on_two_devices_and_in_every_cache_type(architecture: str, cache_type: str, exact: bool, tmp_path: Path) -> None:
    """Small models of six layers, windows of 16 tokens, over uneven devices: batches, cells and chunks at once."""
    path = write_model(tmp_path / "tiny.gguf", architecture, n_layer=6, n_head=4, n_head_kv=2, types="q4_k")
    rng = np.random.default_rng(7)
    texts = [[int(i) for i in rng.integers(0, 397, n)] for n in (300, 20, 41, 9)]
    options = {"cache_type_k": cache_type, "cache_type_v": cache_type, "exact": exact, "ctx_size": 512, "parallel": 4}
    with nm.load(path, devices="cpu:0,cpu:0", tensor_split="70,30", **options) as model:
        alone = target_row(model, texts, 1, 0, 0, False)
        for n_rows, sequence, n_others, scattered in ((2, 0, 0, False), (7, 1, 3, True), (16, 2, 2, False), (1, 3, 3, True)):
            got = target_row(model, texts, n_rows, sequence, n_others, scattered)
            np.testing.assert_array_equal(got, alone, err_msg=f"{n_rows} rows, sequence {sequence}, {n_others} others, {scattered}")
