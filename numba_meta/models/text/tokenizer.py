"""Text ↔ token ids, built from a GGUF header: special tokens are cut out first, the rest goes to the vocabulary's own algorithm.

Comes in: metadata (`tokenizer.ggml.*`). Goes out: a `Tokenizer` whose ids equal llama.cpp's, and a `StreamDetokenizer` that gives
whole characters while tokens arrive.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

from numba_meta.errors import UsageError
from numba_meta.models.text.tokenizer_bpe import build_encoder, token_bytes
from numba_meta.models.text.tokenizer_spm import SPACE, SentencePieceEncoder
from numba_meta.models.text.vocabulary import TokenKind, Vocabulary, read_vocabulary

_PREFIX_CHARS = 4  # special tokens are grouped by so many leading characters (of 6,242 names like <unused7> one group remains)


class Tokenizer:
    """Ids of text and text of ids for one model. Safe to share between threads that only encode and decode."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.n_vocab: int = vocabulary.n_vocab
        self.bos_id: int | None = vocabulary.bos_id
        self.eos_id: int | None = vocabulary.eos_id
        self.eog_ids: frozenset[int] = vocabulary.eog_ids
        self._hidden = frozenset(i for i, kind in enumerate(vocabulary.kinds) if kind in (TokenKind.CONTROL, TokenKind.UNKNOWN))
        self._encode_plain: Callable[[str], list[int]]
        if vocabulary.model == "llama":
            self._encode_plain = SentencePieceEncoder(vocabulary)
        else:
            self._encode_plain = build_encoder(vocabulary)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """The tokenizer of a GGUF header's metadata. Raises ModelFileError (one line) where it is missing, unknown or inconsistent."""
        return cls(read_vocabulary(metadata))

    def __reduce__(self) -> tuple[type[Tokenizer], tuple[Vocabulary]]:
        return type(self), (self.vocabulary,)  # copies are built anew: what encodes is made of closures

    def __repr__(self) -> str:
        v = self.vocabulary
        ids = f"bos_id={v.bos_id}, eos_id={v.eos_id}, eog_ids={sorted(v.eog_ids)}"
        return f"Tokenizer(model={v.model!r}, pre={v.pre!r}, n_vocab={v.n_vocab}, {ids})"

    # -- text to ids

    def encode(
        self, text: str, add_special: bool | None = None, parse_special: bool = False, stand_ins: Mapping[int, str] | None = None
    ) -> list[int]:
        """The ids of `text`.

        `add_special`: whether the begin token that the model's file asks for is added; None is True, so Gemma gets its BOS and SmolLM2,
        whose file asks for none, gets none. No end token is ever added, whatever the file says: what follows it is another text.
        `parse_special`: whether control tokens written in the text (`<|im_end|>`) become those tokens; user-defined tokens always do.
        `stand_ins`: code points in `text` that stand for characters which are text, whatever they spell (`spelled_tokens`).
        Raises UsageError for anything but a string of Unicode characters.
        """
        if not isinstance(text, str):
            raise UsageError(f"text to tokenize is of type {type(text).__name__}, expected a string")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            half = f"U+{ord(text[error.start]):04X} at character {error.start}"
            raise UsageError(f"text to tokenize holds {half}, half a surrogate pair; give valid Unicode text") from None
        v = self.vocabulary
        add_special = True if add_special is None else add_special
        ids = [v.bos_id] if add_special and v.add_bos and v.bos_id is not None else []
        after_special = True
        for part in self._partition(text, parse_special, stand_ins):
            if isinstance(part, int):
                ids.append(part)
                after_special = True
            else:
                ids += self._encode_plain(" " + part if v.add_space_prefix and after_special else part)
                after_special = False
        return ids

    def _partition(self, text: str, parse_special: bool, stand_ins: Mapping[int, str] | None) -> list[str | int]:
        """`text` as plain stretches and ids of special tokens: the longest special texts are cut out first, wherever they are.

        Control tokens are looked for in the text as it is, all others in what its stand-ins stand for, character by character.
        """
        real_text = text.translate(stand_ins) if stand_ins else text
        parts: list[str | int] = [text] if text else []
        for token, token_id in self._specials_in(real_text, parse_special):
            hidden = stand_ins if token_id not in self.vocabulary.control_ids else None
            if not hidden and not any(isinstance(part, str) and token in part for part in parts):
                continue
            cut: list[str | int] = []
            for part in parts:
                if isinstance(part, int):
                    cut.append(part)
                    continue
                start = 0
                for i, stretch in enumerate((part.translate(hidden) if hidden else part).split(token)):
                    if i:
                        cut.append(token_id)
                    if stretch:
                        cut.append(part[start : start + len(stretch)])
                    start += len(stretch) + len(token)
            parts = cut
        return [part.translate(stand_ins) if stand_ins and isinstance(part, str) else part for part in parts]

    def _specials_in(self, text: str, parse_special: bool) -> list[tuple[str, int]]:
        """(text, id) of the special tokens that `text` may hold, in the order in which they are cut out."""
        groups = self._special_groups[parse_special]
        found = [entry for prefix, entries in groups.items() if prefix in text for entry in entries]
        return [(token, token_id) for _, token_id, token in sorted(found)]

    @cached_property
    def _special_groups(self) -> tuple[dict[str, list[tuple[int, int, str]]], dict[str, list[tuple[int, int, str]]]]:
        """For parse_special False and True: leading characters → [(-bytes of the text, id, text)]."""
        v = self.vocabulary
        only_user_defined: dict[str, list[tuple[int, int, str]]] = {}
        every: dict[str, list[tuple[int, int, str]]] = {}
        user_defined = (i for i, kind in enumerate(v.kinds) if kind == TokenKind.USER_DEFINED)
        for i in sorted({*user_defined, *v.control_ids}):
            token = v.tokens[i]
            entry = (-len(token.encode("utf-8", "replace")), i, token)
            every.setdefault(token[:_PREFIX_CHARS], []).append(entry)
            if i not in v.control_ids:
                only_user_defined.setdefault(token[:_PREFIX_CHARS], []).append(entry)
        return only_user_defined, every

    # -- ids to text

    def piece_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for: a special token's own text, a byte token's byte, else its text with spaces restored.

        They need not be whole characters. Raises UsageError for an id outside the vocabulary.
        """
        i = self._checked(token_id)
        v = self.vocabulary
        text, kind = v.tokens[i], v.kinds[i]
        if kind in (TokenKind.CONTROL, TokenKind.UNKNOWN, TokenKind.USER_DEFINED):
            return text.encode("utf-8", "replace")
        if kind == TokenKind.UNUSED:
            return b""
        if kind == TokenKind.BYTE and len(text) == 6 and text.startswith("<0x"):
            try:
                return bytes((int(text[3:5], 16),))
            except ValueError:
                return text.encode("utf-8", "replace")
        if v.model == "llama":
            return text.replace(SPACE, " ").encode("utf-8", "replace")
        return token_bytes(text)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of `ids`. Bytes that make no character become U+FFFD.

        `skip_special`: control tokens (BOS, `<|im_end|>`) are left out; else they appear as their names. The space that the model puts
        before a text (Llama 2, not Gemma) is taken off again. Raises UsageError for an id outside the vocabulary.
        """
        stream = StreamDetokenizer(self, skip_special=skip_special, at_start=True)
        return "".join([stream.push(i) for i in ids]) + stream.flush()

    def is_hidden(self, token_id: int) -> bool:
        """Whether `decode` leaves the token out: a control or unknown token."""
        return self._checked(token_id) in self._hidden

    def _checked(self, token_id: int) -> int:
        if isinstance(token_id, bool) or not hasattr(token_id, "__index__"):
            raise UsageError(f"token id is of type {type(token_id).__name__}, expected an integer")
        i = token_id.__index__()
        if not 0 <= i < self.n_vocab:
            raise UsageError(f"token id {i} is outside the vocabulary; expected 0 to {self.n_vocab - 1}")
        return i


class StreamDetokenizer:
    """Text of ids that arrive one by one: `push` gives the characters that are whole by now, `flush` what is left.

    The joined results equal `decode` of all the ids (with `at_start=True`). `at_start`: the ids begin a text, so the space that some models
    put before it is taken off; generation continues a prompt and keeps it.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, at_start: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._strip_space = at_start and tokenizer.vocabulary.add_space_prefix
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The characters that `token_id` completes; none while one is unfinished. Raises UsageError for an id outside the vocabulary."""
        hidden = self._tokenizer.is_hidden(token_id)
        if hidden and self._skip_special:
            return ""
        piece = self._tokenizer.piece_bytes(token_id)
        if self._strip_space and not hidden and piece:
            piece = piece.removeprefix(b" ")
            self._strip_space = False
        return self._decoder.decode(piece)

    def flush(self) -> str:
        """What an unfinished character leaves: U+FFFD, or nothing. The detokenizer can be used again afterwards."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
