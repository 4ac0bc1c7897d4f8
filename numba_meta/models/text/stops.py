"""Texts at which a generation stops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from numba_meta.arguments import is_iterable
from numba_meta.errors import UsageError


def stop_texts(stop: str | Sequence[str] | None) -> list[str]:
    """The texts that end a generation; None is none."""
    if stop is None:
        return []
    stops: list[Any] = list(stop) if is_iterable(stop) and not isinstance(stop, (str, bytes)) else [stop]
    wrong = [text for text in stops if not isinstance(text, str) or not text]
    if wrong:
        raise UsageError(f"a stop text is {wrong[0]!r:.60}; expected a text of at least one character")
    return stops


def until_stop(pieces: Iterator[str], stops: Sequence[str]) -> Iterator[str]:
    """Passes text on, up to the first stop text; holds back what could be the beginning of one."""
    held = ""
    for piece in pieces:
        held += piece
        found = [held.find(stop) for stop in stops if stop in held]
        if found:
            if min(found):
                yield held[: min(found)]
            return
        keep = max((n for stop in stops for n in range(1, len(stop)) if held.endswith(stop[:n])), default=0)
        ready, held = held[: len(held) - keep], held[len(held) - keep :]
        if ready:
            yield ready
    if held:
        yield held
