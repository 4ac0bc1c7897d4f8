"""Byte-level BPE (`tokenizer.ggml.model` = "gpt2"): text is cut by patterns, then bytes are merged by rank.

The work is done by the `tokenizers` package; this file says how a GGUF vocabulary is put into it so that ids equal llama.cpp's.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from numba_meta.errors import ModelFileError
from numba_meta.models.text.vocabulary import Vocabulary

_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# GPT-2's pattern: contractions, words, numbers and signs, each with one space before it.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _TAIL
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _TAIL

# Patterns in the order in which they cut; each cuts the pieces that the one before it left.
_FAMILIES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("default",): (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    ("gpt-2", "gpt2", "mpt", "olmo", "jais", "trillion", "granite-docling", "phi-2"): (_GPT2,),
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"): (r"\p{N}", _GPT2),
    ("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "dbrx"): (_LLAMA3,),
    ("qwen2", "deepseek-r1-qwen", "stablelm2"): (_QWEN2,),
    ("qwen35",): (_QWEN35,),
}
PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {name: patterns for names, patterns in _FAMILIES.items() for name in names}
_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3")  # a word of the vocabulary is taken as it is, without merging


def _byte_alphabet() -> dict[int, str]:
    """Byte → the visible character that stands for it in a byte-level vocabulary (GPT-2's table)."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {byte: chr(0x100 + i) for i, byte in enumerate(hidden)}


CHAR_OF_BYTE = _byte_alphabet()
BYTE_OF_CHAR = {char: byte for byte, char in CHAR_OF_BYTE.items()}


def token_bytes(text: str) -> bytes:
    """The bytes that a byte-level token stands for; a character outside the alphabet stands for itself in UTF-8."""
    return b"".join(bytes((BYTE_OF_CHAR[char],)) if char in BYTE_OF_CHAR else char.encode("utf-8", "replace") for char in text)


def merge_pairs(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """The two halves of every merge, in order of rank.

    Raises ModelFileError for an unknown pre-tokenizer and for merges that are malformed or not of tokens of the vocabulary.
    """
    if vocabulary.pre not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise ModelFileError(f"tokenizer.ggml.pre is {vocabulary.pre!r:.60}, a pre-tokenizer that is not known; known are {known}")
    merges, id_of = vocabulary.merges or (), vocabulary.id_of
    try:
        # A pair's left half may begin with a space, so the separator is the first space after the first character.
        pairs = [(merge[:cut], merge[cut + 1 :]) for merge in merges for cut in (merge.index(" ", 1),)]
    except ValueError:
        i, merge = next((i, merge) for i, merge in enumerate(merges) if " " not in merge[1:])
        raise ModelFileError(f"tokenizer.ggml.merges[{i}] is {merge!r:.60}, expected two token texts with a space between them") from None
    wrong = next((i for i, (a, b) in enumerate(pairs) if a not in id_of or b not in id_of or a + b not in id_of), None)
    if wrong is not None:
        missing = next(text for text in (*pairs[wrong], "".join(pairs[wrong])) if text not in id_of)
        what = f"merges[{wrong}] is {merges[wrong]!r:.60}, and {missing!r:.60} is no token"
        raise ModelFileError(f"tokenizer.ggml.merges do not fit tokenizer.ggml.tokens: {what}")
    return pairs


def build_encoder(vocabulary: Vocabulary) -> Callable[[str], list[int]]:
    """text without special tokens → ids. Bytes that the vocabulary lacks are left out, as llama.cpp does.

    Raises ModelFileError for an unknown pre-tokenizer and for merges that are malformed or make no token of the vocabulary.
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    pairs = merge_pairs(vocabulary)
    try:
        bpe = models.BPE(dict(vocabulary.id_of), pairs, ignore_merges=vocabulary.pre in _WHOLE_WORDS_FIRST)
    except MemoryError:
        raise
    except Exception as error:  # the package raises bare Exception
        raise ModelFileError(f"tokenizer.ggml.merges do not fit tokenizer.ggml.tokens: {' '.join(str(error).split()):.120}") from None

    patterns = PRE_TOKENIZERS[vocabulary.pre]
    steps: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    missing = "".join(char for char in CHAR_OF_BYTE.values() if char not in vocabulary.id_of)
    if missing:
        # Cutting there keeps the neighbours of a left-out byte from merging with each other.
        steps.append(pre_tokenizers.Split(Regex(f"[{re.escape(missing)}]"), "removed"))
    engine = Tokenizer(bpe)
    engine.pre_tokenizer = pre_tokenizers.Sequence(steps)

    def encode(text: str) -> list[int]:
        ids: list[int] = engine.encode(text, add_special_tokens=False).ids
        return ids

    return encode
