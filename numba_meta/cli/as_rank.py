"""The command line as one rank of a launch: rank 0 speaks, the others are silent; whatever fails ends all of them with one reason."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

from numba_meta.comm.launch import detect_launch
from numba_meta.errors import UsageError

if TYPE_CHECKING:
    from numba_meta.comm.failure import RankLaunch


@contextlib.contextmanager
def as_rank() -> Iterator[RankLaunch | None]:
    """Runs its body as one rank; None in a process that works alone."""
    if detect_launch().alone:
        yield None
        return
    from numba_meta.comm.failure import ranks

    with ranks() as launch, _silent() if launch.rank else contextlib.nullcontext():
        yield launch


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Nothing of the body reaches the terminal. What is raised does, where this rank is the one that says so."""
    before: tuple[TextIO, TextIO] = sys.stdout, sys.stderr
    with open(os.devnull, "w", encoding="utf-8", errors="replace") as nothing:  # whatever the locale, no text is an error
        sys.stdout = sys.stderr = nothing
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before


def check_alone(n_ranks: int, what: str, why: str = "only rank 0 can read standard input") -> None:
    """Raises `UsageError` for what several ranks cannot do."""
    if n_ranks > 1:
        raise UsageError(f"{what} is not there yet for {n_ranks} ranks: {why}; use one process")
