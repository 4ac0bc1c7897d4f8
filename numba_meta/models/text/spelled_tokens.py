"""Control tokens that a user's text spells, such as `<|im_end|>` in a question, stay text in a chat prompt.

The characters of every such spelling are exchanged for stand-ins before a template sees the messages: letters that occur nowhere in them.
What the template wrote is then cut at the control tokens, which are its own, and only after that the stand-ins are changed back. A
stand-in stands for one character, so a template may trim, cut, split, join and measure: it sees the same text but for these spellings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

from numba_meta.models.text.chat_messages import Arguments

# Letters of rare Chinese characters: printable, without case, never white space, so that every text operation leaves them alone.
_STAND_INS = range(0x20000, 0x2A6D0)
_NAMES = ("role", "type")  # keys of a message that say what it is; plain words in them are a template's to compare


class ControlTokens:
    """The texts of a vocabulary's control tokens, to be found in other texts."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = [text for text in texts if text]

    def disguise(self, values: Mapping[str, Any], kept_in_answers: frozenset[str], source: str) -> Disguise:
        """How spellings in `values` (messages, tools, …) are disguised; a template's `source` is a text that it writes itself.

        `kept_in_answers`: tokens that are left alone in what an assistant said, because the template looks for them there.
        """
        strings = list(_strings(values))
        used = set(source).union(*strings)
        at_edges = {i for i, text in enumerate(strings) if self._may_join(text)}
        spelled = self._in(strings)
        if not spelled and not at_edges:
            return Disguise([], {}, self, kept_in_answers)
        wanted = sorted(set().union(*spelled, *(strings[i][at] for i in at_edges for at in _edges(strings[i]))))
        free = (chr(code) for code in _STAND_INS if chr(code) not in used)
        return Disguise(spelled, dict(zip(wanted, free, strict=False)), self, kept_in_answers)

    def _in(self, strings: list[str]) -> list[str]:
        """The tokens that are spelled anywhere in `strings`."""
        together = "\0".join(strings)
        return [token for group, tokens in self._groups.items() if group in together for token in tokens if token in together]

    @cached_property
    def _groups(self) -> dict[str, list[str]]:
        """Tokens by their first characters: of thousands of names like <unused7> one group remains."""
        groups: dict[str, list[str]] = {}
        for text in self._texts:
            groups.setdefault(text[:4], []).append(text)
        return groups

    def begins_within(self, text: str) -> bool:
        """Whether a token could begin in `text` and end behind it."""
        return any(text[-n:] in self._beginnings for n in range(1, min(len(text), self._longest) + 1))

    def ends_within(self, text: str) -> bool:
        """Whether a token could begin before `text` and end in it."""
        return any(text[:n] in self._endings for n in range(1, min(len(text), self._longest) + 1))

    def _may_join(self, text: str) -> bool:
        return any(self.begins_within(one) or self.ends_within(one) for one in (text[start:stop] for start, stop in _extents(text)))

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._texts), default=0)

    @cached_property
    def _beginnings(self) -> frozenset[str]:
        return frozenset(text[:n] for text in self._texts for n in range(1, len(text)))

    @cached_property
    def _endings(self) -> frozenset[str]:
        return frozenset(text[n:] for text in self._texts for n in range(1, len(text)))


class Disguise:
    """The exchange for one conversation. `stand_ins` by character; both directions leave everything else as it is."""

    def __init__(self, spelled: list[str], stand_ins: Mapping[str, str], tokens: ControlTokens, kept_in_answers: frozenset[str]) -> None:
        self._stand_ins = stand_ins
        self._tokens = tokens
        self._spelled = _pattern(spelled)
        self._in_answers = _pattern([token for token in spelled if token not in kept_in_answers])
        self._to_stand_ins = str.maketrans(dict(stand_ins))
        self.originals = str.maketrans({stand_in: character for character, stand_in in stand_ins.items()})

    def values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """`values` with every text in them disguised; all else is the same object."""
        return {name: self._value(value, self._spelled) for name, value in values.items()} if self._stand_ins else dict(values)

    def text(self, text: str) -> str:
        """A text with the control tokens in it disguised."""
        return self._text(text, self._spelled)

    def undone(self, value: Any) -> Any:
        """A value, or text, with the stand-ins changed back."""
        if isinstance(value, str):
            return value.translate(self.originals)
        if isinstance(value, Mapping):
            return {self.undone(key): self.undone(one) for key, one in value.items()}
        return [self.undone(one) for one in value] if isinstance(value, (list, tuple)) else value

    def _value(self, value: Any, spelled: re.Pattern[str] | None) -> Any:
        if isinstance(value, str):
            return self._text(value, spelled, at_edges=True)
        if isinstance(value, Arguments):
            return Arguments({key: self._value(one, spelled) for key, one in value.items()}, self._text(value.text, spelled, True))
        if isinstance(value, Mapping):
            spelled = self._in_answers if value.get("role") == "assistant" and "content" in value else spelled
            return {self._key(key, spelled): self._entry(key, one, spelled) for key, one in value.items()}
        return [self._value(one, spelled) for one in value] if isinstance(value, (list, tuple)) else value

    def _key(self, key: Any, spelled: re.Pattern[str] | None) -> Any:
        return self._text(key, spelled) if isinstance(key, str) and not key.isidentifier() else key

    def _entry(self, key: Any, value: Any, spelled: re.Pattern[str] | None) -> Any:
        return value if key in _NAMES and _is_word(value) else self._value(value, spelled)

    def _text(self, text: str, spelled: re.Pattern[str] | None, at_edges: bool = False) -> str:
        if spelled is not None:
            text = spelled.sub(lambda match: match[0].translate(self._to_stand_ins), text)
        if at_edges:
            for start, stop in _extents(text):
                if self._tokens.begins_within(text[start:stop]):
                    text = self._with_stand_in(text, stop - 1)
                if self._tokens.ends_within(text[start:stop]):
                    text = self._with_stand_in(text, start)
        return text

    def _with_stand_in(self, text: str, at: int) -> str:
        return text[:at] + self._stand_ins.get(text[at], text[at]) + text[at + 1 :]


def _extents(text: str) -> set[tuple[int, int]]:
    """Where a text begins and ends: as it is, and as templates trim it, at either end or at both."""
    first, last = len(text) - len(text.lstrip()), len(text.rstrip())
    return {(start, stop) for start in (0, first) for stop in (len(text), last) if start < stop}


def _edges(text: str) -> set[int]:
    """Where the first and last characters of `_extents` are."""
    return {at for start, stop in _extents(text) for at in (start, stop - 1)}


def _pattern(tokens: list[str]) -> re.Pattern[str] | None:
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if tokens else None


def _is_word(value: object) -> bool:
    return isinstance(value, str) and value.isidentifier()


def _strings(value: Any) -> Iterator[str]:
    """Every text in a value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        if isinstance(value, Arguments):
            yield value.text
        for key, one in value.items():
            yield from _strings(key)
            if not (key in _NAMES and _is_word(one)):
                yield from _strings(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _strings(one)
