"""What a GGUF header says about tokens: their texts, kinds and special ids, checked once.

Comes in: the header's metadata. Goes out: a `Vocabulary`, from which `tokenizer.py` builds its parts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from numba_meta.errors import ModelFileError


class TokenKind(IntEnum):
    """`tokenizer.ggml.token_type` of the GGUF format."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# llama.cpp recognizes these by their text, because files rarely say which tokens end a turn (llama-vocab.cpp, "end-of-generation").
_ENDING_TEXTS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>", "<|endoftext|>", "</s>",
    "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
)  # fmt: skip
_SPECIAL_KINDS = (TokenKind.CONTROL, TokenKind.UNKNOWN)
_NO_TOKEN = (-1, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF)  # -1, also as an unsigned number: the file says that there is none
_DEEPSEEK_END = "<｜end▁of▁sentence｜>"
# Names that chat templates have for tokens, and the keys of a file that say which they are ("seperator" is how the format spells it).
_TEMPLATE_NAMES = {
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}
# Fill-in-the-middle tokens after which no text of the same file can follow: metadata key, texts that stand for it.
_FILL_IN_ENDINGS = (
    ("fim_pad_token_id", ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]")),
    ("fim_rep_token_id", ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>")),
    ("fim_sep_token_id", ("<|file_sep|>",)),
)


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of one model file. `tokens[i]`, `kinds[i]` and `scores[i]` belong to id i.

    `add_eos_token` of a file is not here: an end token belongs behind a text that is finished (in training), and every text that is
    tokenized here is one to be continued or scored.
    """

    model: str  # "gpt2" (byte-level BPE by merge rank) or "llama" (SentencePiece BPE by score)
    pre: str  # name of the pre-tokenizer; "default" where the file gives none
    tokens: Sequence[str]
    kinds: Sequence[int]
    scores: Sequence[float] | None
    merges: Sequence[str] | None
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    eog_ids: frozenset[int]
    control_ids: frozenset[int]  # matched in text only where special tokens are parsed
    add_bos: bool
    add_space_prefix: bool
    id_of: Mapping[str, int]  # of equal texts the last id, as llama.cpp
    named_ids: Mapping[str, int] = field(default_factory=dict)  # ids that only chat templates know, by their names there: pad_token, …

    @property
    def n_vocab(self) -> int:
        return len(self.tokens)


def read_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """The `Vocabulary` of a GGUF header's metadata.

    Raises ModelFileError, in one line, for keys that are missing, of another type, of another length, or ids outside the vocabulary.
    """
    model = _text(metadata, "model", None)
    if model is None:
        raise ModelFileError("tokenizer.ggml.model is missing: the file holds no tokenizer; use a GGUF file with its vocabulary")
    if model not in ("gpt2", "llama"):
        raise ModelFileError(f"tokenizer.ggml.model is {model!r:.60}, expected 'gpt2' (byte-level BPE) or 'llama' (SentencePiece)")
    tokens = _strings(metadata, "tokens")
    if not tokens:
        raise ModelFileError("tokenizer.ggml.tokens is missing or empty: a tokenizer needs its list of token texts")
    n_vocab = len(tokens)
    if "" in tokens:
        tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(tokens)]  # as llama.cpp names them; never matched in text
    kinds = _numbers(metadata, "token_type", n_vocab) or [int(TokenKind.NORMAL)] * n_vocab
    id_of = dict(zip(tokens, range(n_vocab), strict=True))

    sentence_piece = model == "llama"
    scores = _numbers(metadata, "scores", n_vocab) if sentence_piece else None
    if sentence_piece and scores is None:
        raise ModelFileError("tokenizer.ggml.scores is missing: a 'llama' tokenizer merges by the scores of its tokens")
    if scores is not None and not math.isfinite(sum(scores)):
        raise ModelFileError("tokenizer.ggml.scores holds entries that are not finite numbers; the file is damaged")
    merges = None if sentence_piece else _strings(metadata, "merges")
    if not sentence_piece and merges is None:
        raise ModelFileError("tokenizer.ggml.merges is missing: a 'gpt2' tokenizer needs its list of merges")
    pre = _text(metadata, "pre", "default") or "default"

    bos_id, eos_id, unknown_id = (_token_id(metadata, f"{name}_token_id", n_vocab) for name in ("bos", "eos", "unknown"))
    if sentence_piece:  # SentencePiece's own defaults, where the file is silent; -1 says that there is none
        unknown_id, bos_id, eos_id = (
            usual if _get(metadata, f"{name}_token_id") is None and usual < n_vocab and kinds[usual] in _SPECIAL_KINDS else given
            for name, given, usual in (("unknown", unknown_id, 0), ("bos", bos_id, 1), ("eos", eos_id, 2))
        )
    eog_ids, named_ids = _end_of_generation(metadata, id_of, n_vocab, eos_id)
    control_ids = frozenset(i for i, kind in enumerate(kinds) if kind in _SPECIAL_KINDS) | named_ids

    add_bos = _flag(metadata, "add_bos_token", sentence_piece or pre in ("llama3", "llama-v3", "llama-bpe"))
    if add_bos and bos_id is None and _get(metadata, "add_bos_token") is not None and _get(metadata, "bos_token_id") is None:
        raise ModelFileError("tokenizer.ggml.add_bos_token is set but tokenizer.ggml.bos_token_id is missing")
    return Vocabulary(
        model=model, pre=pre, tokens=tokens, kinds=kinds, scores=scores, merges=merges, bos_id=bos_id, eos_id=eos_id, unknown_id=unknown_id,
        eog_ids=eog_ids, control_ids=control_ids, add_bos=add_bos,
        add_space_prefix=_flag(metadata, "add_space_prefix", sentence_piece), id_of=id_of,
        named_ids=_named_ids(metadata, n_vocab),
    )  # fmt: skip


def _named_ids(metadata: Mapping[str, Any], n_vocab: int) -> dict[str, int]:
    """Ids that tokenizing does not need; one outside the vocabulary is none."""
    found = {}
    for name, key in _TEMPLATE_NAMES.items():
        value = _get(metadata, key)
        if hasattr(value, "__index__") and not isinstance(value, bool) and 0 <= int(value) < n_vocab:
            found[name] = int(value)
    return found


def _end_of_generation(
    metadata: Mapping[str, Any], id_of: Mapping[str, int], n_vocab: int, eos_id: int | None
) -> tuple[frozenset[int], frozenset[int]]:
    """(ids that end generation, ids among them that were recognized by text and so count as control tokens)."""
    named = {id_of[text] for text in _ENDING_TEXTS if text in id_of}
    for key, texts in _FILL_IN_ENDINGS:
        given = _token_id(metadata, key, n_vocab)
        named.update([given] if given is not None else [id_of[text] for text in texts if text in id_of][:1])
    given_ids = {eos_id, *(_token_id(metadata, f"{name}_token_id", n_vocab) for name in ("eot", "eom"))} - {None}
    ids = named | {i for i in given_ids if i is not None} | ({id_of[_DEEPSEEK_END]} if _DEEPSEEK_END in id_of else set())

    present = {text for text in _ENDING_TEXTS if text in id_of}
    # In the Harmony and Solar formats <|end|> closes a message, not the turn; beside <|tool_response> the text </s> is HTML.
    if "<|end|>" in present and (present >= {"<|return|>", "<|call|>"} or ("<|flush|>" in present and present & {"<|call|>", "<|calls|>"})):
        ids.discard(id_of["<|end|>"])
    if present >= {"<|tool_response>", "</s>"}:
        ids.discard(id_of["</s>"])
    return frozenset(ids), frozenset(named & ids)


def _get(metadata: Mapping[str, Any], name: str) -> Any:
    return metadata.get(f"tokenizer.ggml.{name}")


def _text(metadata: Mapping[str, Any], name: str, default: str | None) -> str | None:
    value = _get(metadata, name)
    if value is None:
        return default
    if not isinstance(value, str):
        raise ModelFileError(f"tokenizer.ggml.{name} is of type {type(value).__name__}, expected a string")
    return value


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    value = _get(metadata, name)
    if value is None:
        return default
    if not hasattr(value, "__bool__") or value not in (True, False):
        raise ModelFileError(f"tokenizer.ggml.{name} is {value!r:.60}, expected true or false")
    return bool(value)


def _token_id(metadata: Mapping[str, Any], name: str, n_vocab: int) -> int | None:
    """The id under a key; None where the file has none, or says so with -1."""
    value = _get(metadata, name)
    if value is None:
        return None
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ModelFileError(f"tokenizer.ggml.{name} is {value!r:.60}, expected an integer")
    token_id = int(value)
    if token_id in _NO_TOKEN:
        return None
    if not 0 <= token_id < n_vocab:
        raise ModelFileError(f"tokenizer.ggml.{name} is {token_id}, outside the vocabulary of {n_vocab} tokens")
    return token_id


def _plain_list(value: Any, name: str) -> list[Any]:
    """A metadata array as a list of Python values (a numpy array's elements become Python numbers)."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        raise ModelFileError(f"tokenizer.ggml.{name} is of type {type(value).__name__}, expected an array")
    return list(value)


def _strings(metadata: Mapping[str, Any], name: str) -> list[str] | None:
    value = _get(metadata, name)
    if value is None:
        return None
    items = _plain_list(value, name)
    if set(map(type, items)) - {str}:
        i, item = next((i, item) for i, item in enumerate(items) if type(item) is not str)
        raise ModelFileError(f"tokenizer.ggml.{name}[{i}] is of type {type(item).__name__}, expected a string")
    return items


def _numbers(metadata: Mapping[str, Any], name: str, n_vocab: int) -> list[Any] | None:
    value = _get(metadata, name)
    if value is None:
        return None
    items = _plain_list(value, name)
    if len(items) != n_vocab:
        raise ModelFileError(f"tokenizer.ggml.{name} holds {len(items)} entries for {n_vocab} tokens; expected one per token")
    if set(map(type, items)) - {int, float}:
        raise ModelFileError(f"tokenizer.ggml.{name} holds entries that are not numbers, expected one number per token")
    return items
