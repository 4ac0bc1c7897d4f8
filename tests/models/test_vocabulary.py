"""Tiny made-up vocabularies: what a header may say, what it may not, and how the algorithms use it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from numba_meta.errors import ModelFileError, UsageError
from numba_meta.models.text.tokenizer import StreamDetokenizer, Tokenizer
from numba_meta.models.text.tokenizer_bpe import BYTE_OF_CHAR, CHAR_OF_BYTE
from numba_meta.models.text.vocabulary import TokenKind, read_vocabulary

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = (
    int(kind)
    for kind in (TokenKind.NORMAL, TokenKind.UNKNOWN, TokenKind.CONTROL, TokenKind.USER_DEFINED, TokenKind.UNUSED, TokenKind.BYTE)
)


def header(**values: Any) -> dict[str, Any]:
    """Metadata with `tokenizer.ggml.` before each name; None leaves a name out."""
    return {f"tokenizer.ggml.{name}": value for name, value in values.items() if value is not None}


def spm(words: dict[str, float], **changes: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary: <unk>, <s>, </s>, 256 bytes, then `words` with their scores."""
    fixed = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL), *((f"<0x{byte:02X}>", BYTE) for byte in range(256))]
    values: dict[str, Any] = dict(
        model="llama", tokens=[text for text, _ in fixed] + list(words), token_type=[kind for _, kind in fixed] + [NORMAL] * len(words),
        scores=[0.0] * len(fixed) + list(words.values()), bos_token_id=1, eos_token_id=2, unknown_token_id=0, add_space_prefix=False,
    )  # fmt: skip
    return header(**values | changes)


def bpe(merges: list[str], specials: tuple[str, ...] = ("<|endoftext|>",), **changes: Any) -> dict[str, Any]:
    """A byte-level vocabulary: control tokens, all bytes, then what `merges` make."""
    tokens = [*specials, *CHAR_OF_BYTE.values(), *(merge.replace(" ", "") for merge in merges)]
    kinds = [CONTROL] * len(specials) + [NORMAL] * (len(tokens) - len(specials))
    return header(**dict(model="gpt2", pre="gpt-2", tokens=tokens, token_type=kinds, merges=merges, eos_token_id=0) | changes)


def pieces(tokenizer: Tokenizer, text: str, **how: bool) -> list[str]:
    return [tokenizer.vocabulary.tokens[i] for i in tokenizer.encode(text, **how)]


def test_the_byte_alphabet_is_one_to_one_and_visible() -> None:
    assert sorted(CHAR_OF_BYTE) == list(range(256)) and len(BYTE_OF_CHAR) == 256
    assert (CHAR_OF_BYTE[ord("A")], CHAR_OF_BYTE[ord(" ")], CHAR_OF_BYTE[ord("\n")]) == ("A", "Ġ", "Ċ")
    assert all(char.isprintable() and not char.isspace() for char in CHAR_OF_BYTE.values())


def test_sentencepiece_merges_by_score_and_equal_scores_from_the_left() -> None:
    words = {"a": -9.0, "b": -9.0, "c": -9.0, "ab": -3.0, "bc": -2.0, "aa": -1.0}
    tokenizer = Tokenizer.from_metadata(spm(words, add_bos_token=False))
    assert pieces(tokenizer, "abc") == ["a", "bc"]  # bc scores higher than ab
    assert pieces(tokenizer, "aaa") == ["aa", "a"]
    assert pieces(tokenizer, "é") == ["<0xC3>", "<0xA9>"]


def test_sentencepiece_words_are_cut_only_where_no_token_crosses() -> None:
    letters = {char: -9.0 for char in "ab▁"}
    crossing = Tokenizer.from_metadata(spm(letters | {"a▁": -1.0, "a▁b": -2.0}, add_bos_token=False))
    assert pieces(crossing, "a b") == ["a▁b"]
    apart = Tokenizer.from_metadata(spm(letters | {"▁b": -1.0}, add_bos_token=False))
    assert pieces(apart, "a b a b") == ["a", "▁b", "▁", "a", "▁b"]


def test_sentencepiece_puts_a_space_before_text_and_takes_it_off() -> None:
    tokenizer = Tokenizer.from_metadata(spm({"▁": -5.0, "h": -5.0, "i": -5.0, "hi": -1.0, "▁hi": -2.0}, add_space_prefix=None))
    ids = tokenizer.encode("hi")
    assert [tokenizer.vocabulary.tokens[i] for i in ids] == ["<s>", "▁hi"]
    assert tokenizer.decode(ids) == "hi"
    assert StreamDetokenizer(tokenizer).push(ids[1]) == " hi"  # continues a prompt
    assert tokenizer.decode(tokenizer.encode(" hi")) == " hi"


def test_the_begin_token_follows_the_file_and_the_caller_and_no_end_token_is_added() -> None:
    tokenizer = Tokenizer.from_metadata(spm({"x": 0.0}, add_eos_token=True))
    x = tokenizer.vocabulary.id_of["x"]
    assert tokenizer.encode("x") == tokenizer.encode("x", add_special=True) == [1, x]
    assert tokenizer.encode("x", add_special=False) == [x]
    assert Tokenizer.from_metadata(bpe([], add_eos_token=True)).encode("x") == Tokenizer.from_metadata(bpe([])).encode("x")
    assert Tokenizer.from_metadata(spm({"x": 0.0}, add_eos_token=True, eos_token_id=-1)).encode("x") == [1, x]


@pytest.mark.parametrize("none", [-1, 0xFFFFFFFF, np.uint32(0xFFFFFFFF), np.int32(-1), (1 << 64) - 1])
def test_a_special_id_of_minus_one_is_none(none: Any) -> None:
    names = ("bos", "eos", "unknown", "eot", "eom", "fim_pad", "fim_rep", "fim_sep", "padding", "mask", "cls", "seperator")
    keys = {f"{name}_token_id": none for name in names}
    vocabulary = read_vocabulary(spm({"x": 0.0}, **keys, add_bos_token=True))
    assert (vocabulary.bos_id, vocabulary.eos_id, vocabulary.unknown_id) == (None, None, None), "not SentencePiece's usual ones either"
    assert vocabulary.eog_ids == {2}, "</s> by its text"
    assert Tokenizer(vocabulary).encode("x") == [vocabulary.id_of["x"]]
    assert read_vocabulary(bpe([], ("<|endoftext|>",), **keys)).eog_ids == {0}
    named = bpe([], ("<|a|>", "<|b|>"), bos_token_id=none, eos_token_id=1)
    assert (read_vocabulary(named).bos_id, read_vocabulary(named).eos_id) == (None, 1)


def test_a_character_without_bytes_becomes_unknown_or_an_error() -> None:
    few = dict(model="llama", tokens=["<unk>", "a"], token_type=[UNKNOWN, NORMAL], scores=[0.0, 0.0], add_space_prefix=False)
    assert Tokenizer.from_metadata(header(**few)).encode("aé") == [1, 0]
    without = few | dict(tokens=["b", "a"], token_type=[NORMAL, NORMAL])
    with pytest.raises(UsageError, match="'é'"):
        Tokenizer.from_metadata(header(**without)).encode("aé")


def test_longer_special_tokens_are_cut_first_wherever_they_are() -> None:
    words = {"ab": 0.0, "bcd": 0.0} | {char: -1.0 for char in "abcd"}
    metadata = spm(words, add_bos_token=False)
    kinds = metadata["tokenizer.ggml.token_type"]
    kinds[259] = kinds[260] = USER
    tokenizer = Tokenizer.from_metadata(metadata)
    assert pieces(tokenizer, "abcd") == ["a", "bcd"]
    assert pieces(tokenizer, "abab") == ["ab", "ab"]
    assert pieces(tokenizer, "<s>ab", parse_special=True) == ["<s>", "ab"]
    assert "<s>" not in pieces(tokenizer, "<s>ab")


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["1234"]),
        ("smollm", ["1", "2", "3", "4"]),
        ("llama-bpe", ["123", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("default", ["123", "4"]),
        (None, ["123", "4"]),
    ],
)
def test_pre_tokenizers_cut_numbers_their_own_way(pre: str | None, expected: list[str]) -> None:
    tokenizer = Tokenizer.from_metadata(bpe(["1 2", "12 3", "123 4"], pre=pre, add_bos_token=False))
    assert pieces(tokenizer, "1234") == expected


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "a\tb", ["a", "ĉ", "b"]),  # a tab stays apart from the word after it
        ("llama-bpe", "a\tb", ["a", "ĉb"]),
        ("qwen2", "I'LL", ["I", "'LL"]),  # contractions in any case
        ("gpt-2", "I'LL", ["I", "'", "LL"]),
        ("llama-bpe", "!\n", ["!Ċ"]),  # signs take line ends with them
        ("smollm", "!\n", ["!", "Ċ"]),
        ("default", "a$", ["a", "$"]),
    ],
)
def test_pre_tokenizers_cut_words_their_own_way(pre: str, text: str, expected: list[str]) -> None:
    merges = ["ĉ b", "a ĉ", "L L", "' LL", "! Ċ", "I '", "a $"]
    assert pieces(Tokenizer.from_metadata(bpe(merges, pre=pre, add_bos_token=False)), text) == expected


def test_llama3_takes_a_known_word_whole_where_merges_would_not() -> None:
    metadata = bpe(["b c", "a b"], pre="llama-bpe", add_bos_token=False)
    metadata["tokenizer.ggml.tokens"].append("abc")
    metadata["tokenizer.ggml.token_type"].append(NORMAL)
    assert pieces(Tokenizer.from_metadata(metadata), "abc") == ["abc"]
    metadata["tokenizer.ggml.pre"] = "gpt-2"
    assert pieces(Tokenizer.from_metadata(metadata), "abc") == ["a", "bc"]


def test_bytes_that_a_vocabulary_lacks_are_left_out_and_still_separate() -> None:
    metadata = bpe(["a b"], add_bos_token=False)
    metadata["tokenizer.ggml.tokens"].remove("x")
    metadata["tokenizer.ggml.token_type"].pop()
    assert pieces(Tokenizer.from_metadata(metadata), "axb ab") == ["a", "b", "Ġ", "ab"]


def test_end_of_generation_is_found_by_name_and_by_key() -> None:
    specials = ("<|endoftext|>", "<|im_end|>", "<reponame>", "<|other|>", "<|mine|>")
    vocabulary = read_vocabulary(bpe([], specials))
    assert vocabulary.eog_ids == {0, 1, 2}
    assert read_vocabulary(bpe([], specials, eot_token_id=3, eom_token_id=4)).eog_ids == {0, 1, 2, 3, 4}
    harmony = read_vocabulary(bpe([], ("<|return|>", "<|call|>", "<|end|>")))
    assert harmony.eog_ids == {0, 1}


def test_arrays_may_be_numpy_and_kinds_may_be_missing() -> None:
    metadata = spm({"a": -1.0})
    usual = read_vocabulary(metadata)
    for name in ("scores", "token_type"):
        metadata[f"tokenizer.ggml.{name}"] = np.array(metadata[f"tokenizer.ggml.{name}"])
    assert read_vocabulary(metadata) == usual
    del metadata["tokenizer.ggml.token_type"]
    assert set(read_vocabulary(metadata).kinds) == {NORMAL}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(model=None), "tokenizer.ggml.model is missing"),
        (dict(model="bert"), "'bert'"),
        (dict(model=3), "expected a string"),
        (dict(tokens=None), "tokens is missing or empty"),
        (dict(tokens=[]), "tokens is missing or empty"),
        (dict(tokens="abc"), "expected an array"),
        (dict(tokens=["a", 1]), r"tokens\[1\] is of type int"),
        (dict(token_type=[1, 1]), "token_type holds 2 entries"),
        (dict(token_type=["1"] * 260), "expected one number per token"),
        (dict(scores=None), "scores is missing"),
        (dict(scores=[0.0]), "scores holds 1 entries"),
        (dict(scores=[float("nan")] * 260), "not finite"),
        (dict(bos_token_id=260), "bos_token_id is 260, outside the vocabulary of 260 tokens"),
        (dict(eos_token_id=-2), "eos_token_id is -2"),
        (dict(eot_token_id="2"), "expected an integer"),
        (dict(add_bos_token="yes"), "expected true or false"),
        (dict(pre=4), "expected a string"),
    ],
)
def test_a_faulty_sentencepiece_header_is_one_clear_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message) as caught:
        Tokenizer.from_metadata(spm({"a": -1.0}, **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(pre="made-up\nname"), r"'made-up\\nname', a pre-tokenizer that is not known; known are .*llama-bpe"),
        (dict(merges=None), "merges is missing"),
        (dict(merges=["a b", 5]), r"merges\[1\] is of type int"),
        (dict(merges=["a b", "ab"]), r"merges\[1\] is 'ab', expected two token texts"),
        (dict(merges=["a b", " b"]), r"merges\[1\] is ' b'"),
        (dict(merges=["a b", ""]), r"merges\[1\] is ''"),
        (dict(merges=["a z\n"]), "do not fit"),
        (dict(add_bos_token=True), "bos_token_id is missing"),
    ],
)
def test_a_faulty_byte_level_header_is_one_clear_line(changes: dict[str, Any], message: str) -> None:
    given = {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    with pytest.raises(ModelFileError, match=message) as caught:
        Tokenizer.from_metadata({name: value for name, value in (bpe(["a b"]) | given).items() if value is not None})
    assert "\n" not in str(caught.value)
