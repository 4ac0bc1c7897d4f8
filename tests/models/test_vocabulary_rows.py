"""Embeddings with more rows than there are tokens, and files whose tokenizer cannot be built, through whole models."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from models.rewriting import REMOVED, rewrite
from models.test_vocabulary import bpe, spm
from synthetic import write_model

import numba_meta as nm
from numba_meta.errors import ModelFileError, NumbaMetaWarning, UsageError
from numba_meta.models.files.gguf import read_gguf
from numba_meta.models.text.tokenizer import Tokenizer
from numba_meta.models.text.tokenizer_check import n_choosable, tokenizer_problem

VALUE = gguf.GGUFValueType
N_ROWS, N_TOKENS = 397, 335
PROMPT = [11, 250, 7]


def shortened(source: Path, path: Path, n_tokens: int) -> Path:
    """`source` with a vocabulary of so many tokens, whose further rows win whatever is said."""
    with read_gguf(source) as file:
        metadata = {name: file.metadata.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type", "scores")}
    kinds = {"tokens": VALUE.STRING, "token_type": VALUE.INT32, "scores": VALUE.FLOAT32}
    changed = {f"tokenizer.ggml.{name}": (values[:n_tokens], kinds[name]) for name, values in metadata.items() if values is not None}
    reader = gguf.GGUFReader(source)
    embedding = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    rows = np.array(embedding.data, np.float32)
    loud = rows.copy()
    loud[n_tokens:] *= 40
    return rewrite_lists(source, path, changed, {"token_embd.weight": rows, "output.weight": loud})


def rewrite_lists(source: Path, path: Path, lists: dict[str, Any], tensors: dict[str, Any]) -> Path:
    """As `rewrite`, for arrays."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, reader.get_field("general.architecture").contents())
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        values, kind = lists.get(key, (field.contents(), field.types[1] if len(field.types) > 1 else None))
        writer.add_key_value(key, values, field.types[0], kind if field.types[0] == VALUE.ARRAY else None)
    for tensor in reader.tensors:
        if tensor.name not in tensors:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    for name, rows in tensors.items():
        writer.add_tensor(name, rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def padded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 397 rows and 335 tokens, whose output matrix is an own one that prefers the rows beyond."""
    folder = tmp_path_factory.mktemp("padded")
    return shortened(write_model(folder / "whole.gguf", request.param, types="f32", seed=5), folder / "padded.gguf", N_TOKENS)


@pytest.mark.parametrize("devices", ["cpu:0", "cpu:0,cpu:0"])
def test_rows_beyond_the_vocabulary_are_never_generated(padded: Path, devices: str) -> None:
    with nm.load(padded, devices=devices, ctx_size=256, parallel=3, exact=True) as model:
        assert model.tokenizer.n_vocab == N_TOKENS
        logits = model.logits(PROMPT)
        assert logits.shape == (3, N_ROWS) and (logits.argmax(axis=1) >= N_TOKENS).any(), "they would win"
        beyond = [N_ROWS - 1, 11, N_TOKENS]
        assert model.logits(beyond, last=True).shape == (N_ROWS,), "ids of a prompt may be any row"
        for prompt in (PROMPT, beyond):
            for options in ({}, {"temperature": 1.5, "seed": 1}, {"temperature": 1.0, "seed": 2, "top_k": 5}, {"repetition_penalty": 1.3}):
                ids = model.generate_ids(prompt, 12, ignore_eos=True, **options)
                assert len(ids) == 12 and max(ids) < N_TOKENS, options
                many = model.generate_many([prompt, PROMPT], 6, ignore_eos=True, **options)
                assert max(map(max, many)) < N_TOKENS
            assert isinstance("".join(model.generate(prompt, 12, ignore_eos=True)), str)
        first = int(model.logits(PROMPT, last=True)[:N_TOKENS].argmax())
        assert model.generate_ids(PROMPT, 1, ignore_eos=True) == [first], "the best of those that are tokens"
        assert model.perplexity("the sea and the rain and the sea", 4) > 1


def test_one_and_two_devices_choose_the_same(padded: Path) -> None:
    def run(devices: str) -> list[int]:
        with nm.load(padded, devices=devices, ctx_size=128, deterministic=True) as model:
            return model.generate_ids(PROMPT, 16, ignore_eos=True, temperature=1.0, seed=4)

    assert run("cpu:0") == run("cpu:0,cpu:0")


# ---- tokenizers that cannot be built ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("broken") / "llama.gguf")


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "pre": ({"tokenizer.ggml.pre": ("made-up", VALUE.STRING)}, "tokenizer.ggml.pre is 'made-up', a pre-tokenizer that is not known; known"),
    "model": ({"tokenizer.ggml.model": ("bert", VALUE.STRING)}, "tokenizer.ggml.model is 'bert', expected"),
    "none": ({"tokenizer.ggml.model": REMOVED, "tokenizer.ggml.tokens": REMOVED}, "tokenizer.ggml.model is missing"),
    "merges": ({"tokenizer.ggml.merges": REMOVED}, "tokenizer.ggml.merges is missing"),
    "bos": ({"tokenizer.ggml.bos_token_id": (4000, VALUE.UINT32)}, "tokenizer.ggml.bos_token_id is 4000, outside the vocabulary"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_model_whose_tokenizer_cannot_be_built_takes_ids(what: str, llama: Path, tmp_path: Path) -> None:
    changes, problem = BROKEN[what]
    path = rewrite(llama, tmp_path / "broken.gguf", changes)
    line = f"^broken.gguf: the tokenizer cannot be built: {problem}.*; ids alone can be given and come back$"
    with pytest.warns(NumbaMetaWarning, match=line) as told:
        model = nm.load(path, ctx_size=64)
    with model, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(told) == 1 and told[0].filename == __file__
        assert len(model.generate_ids(PROMPT, 4)) == 4 or what in ("pre", "bos"), "where the ids that end a text are known, they do"
        assert len(model.generate_ids(PROMPT, 4, ignore_eos=True, context_shift=True)) == 4
        assert len(model.generate_many([PROMPT], 4, ignore_eos=True)[0]) == 4
        assert model.logits(PROMPT).shape == (3, N_ROWS)
        uses: list[Callable[[], Any]] = [
            lambda: model.tokenize("a"),
            lambda: model.detokenize([1]),
            lambda: list(model.generate("a", 1)),
            lambda: model.generate_ids("a"),
            lambda: model.perplexity("a"), lambda: model.tokenizer, lambda: model.chat_template,
        ]  # fmt: skip
        for use in uses:
            with pytest.raises(ModelFileError, match=f"^broken.gguf: the tokenizer cannot be built: {problem}.*; only ids can be used$"):
                use()


@pytest.mark.parametrize("what", BROKEN)
def test_text_is_refused_before_weights_are_read(what: str, llama: Path, tmp_path: Path) -> None:
    changes, problem = BROKEN[what]
    path = rewrite(llama, tmp_path / "broken.gguf", changes)
    with pytest.raises(ModelFileError, match=f"^broken.gguf: the tokenizer cannot be built: {problem}.*; text needs one: use a file"):
        nm.load(path, devices="cpu:0?mem=1M", needs_text=True)


def test_merges_and_rows_that_do_not_fit_are_found_in_the_header(llama: Path) -> None:
    with read_gguf(llama) as file:
        metadata = dict(file.metadata)
    assert tokenizer_problem(metadata, N_ROWS) is None
    assert tokenizer_problem(metadata) is None
    key = "tokenizer.ggml."
    wrong = [
        ({f"{key}merges": [*metadata[f"{key}merges"], "qq xx"]}, "merges[18] is 'qq xx', and 'qq' is no token"),
        ({f"{key}merges": [*metadata[f"{key}merges"], "q x"]}, "merges[18] is 'q x', and 'qx' is no token"),
        ({f"{key}merges": ["qx"]}, "merges[0] is 'qx', expected two token texts"),
        ({f"{key}token_type": [1]}, "token_type holds 1 entries for 397 tokens"),
    ]
    for changes, line in wrong:
        problem = tokenizer_problem({**metadata, **changes}, N_ROWS)
        assert problem is not None and line in problem and problem.startswith("the tokenizer cannot be built: ")
    fewer = tokenizer_problem(metadata, N_ROWS - 1)
    assert fewer is not None and "tokens holds 397 tokens, the embedding 396 rows" in fewer
    assert [n_choosable(metadata, n) for n in (300, 397, 500)] == [300, 397, 397]
    assert n_choosable({}, 500) == n_choosable({f"{key}tokens": 3}, 500) == 500


ODD_VALUES: list[Any] = [
    None, -1, 0, 1, 3.5, float("nan"), True, "x", "", [], ["a"], [1], [[1]], {}, b"x", 1 << 70, [None], [float("inf")], ["a b", "c"],
]  # fmt: skip


@pytest.mark.parametrize("base", [spm({"a": -1.0, "▁": -2.0}), bpe(["a b", "b c"])], ids=["spm", "bpe"])
def test_the_header_tells_whether_a_tokenizer_can_be_built(base: dict[str, Any]) -> None:
    names = ("add_space_prefix", "add_eos_token", "eot_token_id", "padding_token_id", "seperator_token_id", "fim_pad_token_id")
    for key in {*base, *(f"tokenizer.ggml.{name}" for name in names)}:
        for value in ODD_VALUES:
            metadata = {**base, key: value}
            try:
                Tokenizer.from_metadata(metadata).encode("ab a")
                is_built = True
            except ModelFileError:
                is_built = False
            assert (tokenizer_problem(metadata, 1000) is None) == is_built, (key, value)


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_the_real_models_have_no_problem(name: str, request: pytest.FixtureRequest) -> None:
    with read_gguf(request.getfixturevalue(f"{name}_path")) as file:
        assert tokenizer_problem(file.metadata, file.tensors["token_embd.weight"].shape[1]) is None


# ---- what a call may be given ----------------------------------------------------------------------------------------------------------


def test_no_limit_goes_on_until_the_context_is_full(llama: Path) -> None:
    with nm.load(llama, ctx_size=32, parallel=2) as model:
        ids = model.generate_ids(PROMPT, None, ignore_eos=True)
        assert len(ids) == 32 - len(PROMPT) + 1, "the last one is not fed back"
        assert model.generate_ids(PROMPT, len(ids), ignore_eos=True) == ids
        pieces = list(model.generate(PROMPT, max_tokens=None, stop=None, ignore_eos=True, top_k=-1, seed=-1))
        assert pieces == list(model.generate(PROMPT, max_tokens=len(ids), ignore_eos=True))
        assert model.generate_many([PROMPT, PROMPT[:2]], None, stop=None, ignore_eos=True)[0] == ids
        shifting = model.generate(PROMPT, None, ignore_eos=True, context_shift=True)
        assert sum(1 for _, _ in zip(range(40), shifting, strict=False)) == 40
        with pytest.raises(UsageError, match="has no end"):
            model.generate_ids(PROMPT, None, ignore_eos=True, context_shift=True)


@pytest.mark.parametrize("ids", [[True, False], [1, True], np.array([True, False]), [np.bool_(True)]])
def test_booleans_are_no_ids(llama: Path, ids: Any) -> None:
    with nm.load(llama, ctx_size=32) as model:
        calls: list[Callable[[], Any]] = [
            lambda: model.generate_ids(ids, 1),
            lambda: model.logits(ids),
            lambda: model.detokenize(ids),
            lambda: model.generate_many([ids], 1),
        ]
        for call in calls:
            with pytest.raises(UsageError, match="expected text or a sequence of token ids"):
                call()
        with pytest.raises(UsageError, match="repetition_penalty is 1e-320, expected a number from 1e-06 to 1e"):
            model.generate_ids(PROMPT, 1, repetition_penalty=1e-320)
