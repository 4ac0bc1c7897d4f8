"""Tokenizers of the real models against llama.cpp's ids, and their properties on random text."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from numba_meta.errors import UsageError
from numba_meta.models.files.gguf import read_gguf
from numba_meta.models.text.tokenizer import StreamDetokenizer, Tokenizer
from numba_meta.models.text.vocabulary import TokenKind

DATA = Path(__file__).parents[1] / "data"
CASES = json.loads((DATA / "tokenizer_cases.json").read_text(encoding="utf-8"))
MODELS = ("smollm2", "gemma3")
# SmolLM2's vocabulary has no token for these bytes (control characters, planes 4 to 11 of Unicode); llama.cpp leaves them out, so do we.
SMOLLM2_LACKS = bytes([0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2])

unicode_text = st.text(max_size=60)
# Words, runs of white space, signs and emoji meet more often here than in arbitrary text.
words = [" ", "  ", "\n", "\n\n", "\t", "The", "ing", "don't", "42", "3.14", "naïve", "世界", "😀", "…", "<", "|>", "▁", "</s>"]
prose = st.lists(st.sampled_from(words)).map("".join)


@pytest.fixture(scope="session")
def tokenizers(smollm2_path: Path, gemma3_path: Path) -> dict[str, Tokenizer]:
    made = {}
    for name, path in (("smollm2", smollm2_path), ("gemma3", gemma3_path)):
        with read_gguf(path) as file:
            made[name] = Tokenizer.from_metadata(file.metadata)
    return made


@functools.cache
def user_defined_texts(tokenizer: Tokenizer) -> list[str]:
    """The tokens that are cut out of plain text before any merging."""
    v = tokenizer.vocabulary
    return [v.tokens[i] for i, kind in enumerate(v.kinds) if kind == TokenKind.USER_DEFINED and i not in v.eog_ids]


def reference(model: str) -> dict[str, Any]:
    outputs: dict[str, Any] = json.loads((DATA / f"{model}.json").read_text(encoding="utf-8"))
    return outputs


@pytest.mark.parametrize("how", ["plain", "special"])
@pytest.mark.parametrize("model", MODELS)
def test_every_case_has_the_ids_of_llama_cpp(tokenizers: dict[str, Tokenizer], model: str, how: str) -> None:
    expected = CASES["models"][model][how]
    got = [tokenizers[model].encode(text, add_special=False, parse_special=how == "special") for text in CASES["strings"]]
    assert len(expected) == len(CASES["strings"]) > 60
    assert {i: ids for i, ids in enumerate(got) if ids != expected[i]} == {}


@pytest.mark.parametrize("model", MODELS)
def test_prompts_have_the_ids_of_llama_cpp(tokenizers: dict[str, Tokenizer], model: str) -> None:
    long_text = (DATA / "ppl_text.txt").read_text(encoding="utf-8")
    prompts = reference(model)["prompts"]
    assert any("text" not in prompt for prompt in prompts)
    for prompt in prompts:
        text = prompt["text"] if "text" in prompt else long_text[: prompt["prefix_chars"]]
        assert tokenizers[model].encode(text, parse_special=prompt["parse_special"]) == prompt["ids"], prompt["name"]


@pytest.mark.parametrize("model", MODELS)
def test_special_ids_are_those_of_llama_cpp(tokenizers: dict[str, Tokenizer], model: str) -> None:
    tokenizer, expected = tokenizers[model], reference(model)
    assert tokenizer.n_vocab == expected["n_vocab"]
    assert (tokenizer.bos_id, tokenizer.eos_id) == (expected["bos"], expected["eos"])
    assert sorted(tokenizer.eog_ids) == expected["eog_ids"]
    begins = [expected["bos"]] if expected["add_bos"] else []
    assert tokenizer.encode("") == begins and tokenizer.encode("", add_special=False) == []
    assert tokenizer.encode("x", add_special=True) == begins + tokenizer.encode("x", add_special=False)


@given(text=unicode_text | prose)
def test_smollm2_gives_back_the_text(tokenizers: dict[str, Tokenizer], text: str) -> None:
    tokenizer = tokenizers["smollm2"]
    kept = text.encode("utf-8").translate(None, SMOLLM2_LACKS)
    assert tokenizer.decode(tokenizer.encode(text)) == kept.decode("utf-8", "replace")


@given(text=unicode_text | prose)
def test_gemma3_gives_back_the_text(tokenizers: dict[str, Tokenizer], text: str) -> None:
    tokenizer = tokenizers["gemma3"]
    # SentencePiece writes a space as U+2581, so the two become one.
    assert tokenizer.decode(tokenizer.encode(text)) == text.replace("▁", " ")


@given(text=st.text(alphabet="abdehinrstT ▁></.ñ世\x7f😀", max_size=40).map(lambda text: re.sub("  +", " ", text)))
def test_gemma3_merges_as_a_search_for_the_best_pair_does(tokenizers: dict[str, Tokenizer], text: str) -> None:
    """Against a slow and plain statement of the rule; runs of spaces are tokens that are cut out before, so there are none."""
    tokenizer = tokenizers["gemma3"]
    v = tokenizer.vocabulary
    assert v.scores is not None
    assume(not any(token in text for token in user_defined_texts(tokenizer)))  # HTML tags are such tokens too; rare here
    pieces = list(text.replace(" ", "▁"))
    while True:
        unions = [(-v.scores[v.id_of[a + b]], i) for i, (a, b) in enumerate(zip(pieces, pieces[1:], strict=False)) if a + b in v.id_of]
        if not unions:
            break
        i = min(unions)[1]
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    expected = []
    for piece in pieces:
        expected += [v.id_of[piece]] if piece in v.id_of else [v.id_of[f"<0x{byte:02X}>"] for byte in piece.encode()]
    assert tokenizer.encode(text, add_special=False) == expected


@pytest.mark.parametrize("model", MODELS)
@given(data=st.data())
def test_streamed_text_is_the_decoded_text(tokenizers: dict[str, Tokenizer], model: str, data: st.DataObject) -> None:
    """Any ids, so half characters and special tokens too."""
    tokenizer = tokenizers[model]
    few = st.sampled_from(tokenizer.encode("😀é世 \n", add_special=False) + sorted(tokenizer.eog_ids))
    ids = data.draw(st.lists(st.integers(0, tokenizer.n_vocab - 1) | few, max_size=30))
    for skip_special in (True, False):
        kept = [i for i in ids if not (skip_special and tokenizer.is_hidden(i))]
        raw = b"".join(tokenizer.piece_bytes(i) for i in kept)
        stream = StreamDetokenizer(tokenizer, skip_special=skip_special)
        pieces = [stream.push(i) for i in ids]
        assert "".join(pieces) + stream.flush() == tokenizer.decode(ids, skip_special=skip_special) == raw.decode("utf-8", "replace")
        assert stream.flush() == ""


@pytest.mark.parametrize("model", MODELS)
def test_only_whole_characters_are_streamed(tokenizers: dict[str, Tokenizer], model: str) -> None:
    tokenizer = tokenizers[model]
    text = "𝔘 👩‍👩‍👧‍👦 Ångström"
    ids = tokenizer.encode(text, add_special=False)
    stream = StreamDetokenizer(tokenizer)
    pieces = [stream.push(i) for i in ids]
    assert "".join(pieces) == text and "" in pieces  # some token ends within a character
    unfinished = tokenizer.encode("𝔘", add_special=False)[:-1]
    assert [stream.push(i) for i in unfinished] == [""] * len(unfinished)
    assert stream.flush() == "\ufffd"


def test_control_tokens_are_left_out_of_text_unless_asked_for(tokenizers: dict[str, Tokenizer]) -> None:
    ids = tokenizers["smollm2"].encode("<|im_start|>user\nHi<|im_end|>", parse_special=True)
    assert tokenizers["smollm2"].decode(ids) == "user\nHi"
    assert tokenizers["smollm2"].decode(ids, skip_special=False) == "<|im_start|>user\nHi<|im_end|>"
    assert tokenizers["gemma3"].decode([2, 9259], skip_special=False) == "<bos>Hello"
    assert tokenizers["gemma3"].piece_bytes(251) == b"\r" and tokenizers["gemma3"].piece_bytes(26352) == b" Hello"


@pytest.mark.parametrize("model", MODELS)
def test_misuse_is_one_clear_line(tokenizers: dict[str, Tokenizer], model: str) -> None:
    tokenizer = tokenizers[model]
    for wrong in (b"bytes", None, 7, ["a"]):
        with pytest.raises(UsageError, match="expected a string"):
            tokenizer.encode(wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"U\+D800 at character 1"):
        tokenizer.encode("a\ud800")
    for wrong_id in (-1, tokenizer.n_vocab, 1 << 70):
        with pytest.raises(UsageError, match=f"expected 0 to {tokenizer.n_vocab - 1}"):
            tokenizer.decode([wrong_id])
        with pytest.raises(UsageError, match="outside the vocabulary"):
            tokenizer.piece_bytes(wrong_id)
    with pytest.raises(UsageError, match="expected an integer"):
        tokenizer.decode(["5"])  # type: ignore[list-item]


@pytest.mark.parametrize(("model", "limit_s"), [("smollm2", 0.5), ("gemma3", 2.0)])
def test_building_is_quick(smollm2_path: Path, gemma3_path: Path, model: str, limit_s: float) -> None:
    with read_gguf(smollm2_path if model == "smollm2" else gemma3_path) as file:
        metadata = file.metadata
        start = time.process_time()  # this process's own work, so that a busy machine does not fail the test
        Tokenizer.from_metadata(metadata)
        assert time.process_time() - start < limit_s


def test_importing_loads_nothing_heavy() -> None:
    modules = ", ".join(f"numba_meta.models.text.{name}" for name in ("tokenizer", "chat", "sampling"))
    code = f"import sys, {modules}; print(sorted({{'tokenizers', 'jinja2', 'numba'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("model", MODELS)
def test_long_text_without_spaces_takes_no_square_time(tokenizers: dict[str, Tokenizer], model: str) -> None:
    def seconds(n: int) -> float:
        text = "世界こんにちは" * n
        start = time.process_time()
        tokenizers[model].encode(text)
        return time.process_time() - start

    seconds(10)
    assert seconds(8000) < 24 * max(seconds(1000), 1e-3)  # 8 times the length; the square would be 64
