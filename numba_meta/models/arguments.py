"""What callers of a model give: prompts, sampling options, stop texts; checked, in one line where they are wrong."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from numba_meta.errors import UsageError
from numba_meta.models.sampling import SamplingOptions


def token_ids(prompt: Sequence[int]) -> list[int]:
    """Token ids as plain integers; numpy's are welcome, text as bytes and fractions are not."""
    try:
        if isinstance(prompt, (bytes, bytearray)):
            raise TypeError
        return [operator.index(i) for i in prompt]
    except TypeError:
        raise UsageError(f"the prompt is {type(prompt).__name__} {str(prompt)[:40]!r}; expected text or a sequence of token ids") from None


def sampling_options(sampling: dict[str, Any]) -> SamplingOptions:
    try:
        return SamplingOptions(**sampling)
    except TypeError:
        known = SamplingOptions.__dataclass_fields__
        wrong = ", ".join(name for name in sampling if name not in known)
        raise UsageError(f"unknown sampling options {wrong}; known are {', '.join(known)}") from None


def stop_texts(stop: str | Sequence[str]) -> list[str]:
    stops: list[Any] = list(stop) if isinstance(stop, Iterable) and not isinstance(stop, (str, bytes)) else [stop]
    wrong = next((text for text in stops if not isinstance(text, str) or not text), None)
    if wrong is not None:
        raise UsageError(f"a stop text is {wrong!r}; expected a text of at least one character")
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
