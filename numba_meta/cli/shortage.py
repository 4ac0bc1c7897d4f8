"""Errors that mean too little memory, however a library words them; what was missing, in a line."""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from pathlib import Path

from numba_meta.devices.parse import format_bytes

_WORDS = ("cannot allocate memory", "failed to map segment", "can't start new thread", "unable to allocate", "out of memory", "memoryerror")
_VAGUE = (OSError, ImportError, SystemError, RuntimeError)  # what libraries raise where a call of theirs got no memory
_NEAR_BYTES = 512 << 20  # so little left under a limit is the likely cause of an error that names none: libraries map some 200 MiB at once
_USUAL = "use a smaller context or a smaller model"


def describe_shortage(error: BaseException) -> str | None:
    """What was missing; None for an error that has another cause."""
    limit, used = resource.getrlimit(resource.RLIMIT_AS)[0], address_space()
    is_limited = limit != resource.RLIM_INFINITY
    if not any(map(_is_short, _with_causes(error))):
        is_vague = isinstance(error, _VAGUE) and not (isinstance(error, OSError) and error.strerror)
        if not (is_vague and is_limited and limit - used < _NEAR_BYTES):
            return None
    if any(_is_refused_thread(each) for each in _with_causes(error)):
        what, do = "the system refused another thread", "use fewer threads, or allow more processes (ulimit -u) and memory (ulimit -v)"
        return f"{what}; {do}"
    if is_limited:
        in_use = f", {format_bytes(used)} of it are in use" if used else ""
        return f"out of memory: this process may have {format_bytes(limit)} of addresses{in_use}; raise that limit (ulimit -v), or {_USUAL}"
    return f"this machine is out of memory; {_USUAL}"


def address_space() -> int:
    """Bytes of addresses that this process has taken; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (OSError, ValueError, MemoryError):
        return 0


def _is_short(error: BaseException) -> bool:
    text = str(error).lower()
    is_system = isinstance(error, OSError) and error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or is_system or (not isinstance(error, OSError) or not error.filename) and _has_words(text)


def _has_words(text: str) -> bool:
    return any(words in text for words in _WORDS)


def _is_refused_thread(error: BaseException) -> bool:
    return "can't start new thread" in str(error)


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    told: BaseException | None = error
    seen: set[int] = set()
    while told is not None and id(told) not in seen:
        seen.add(id(told))
        yield told
        told = told.__cause__ or told.__context__
