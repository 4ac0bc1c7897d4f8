"""The file of `--prompt-cache`: read before a generation, written after it, also where the generation ends early.

The state of a cache is right between two steps. So a signal waits for the end of the step in which it comes; a second one does not.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from numba_meta.cli.terminal import say
from numba_meta.errors import ContextFullError, NumbaMetaError, UsageError

if TYPE_CHECKING:
    from numba_meta.models.model import Model

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """A signal that ends the command; `status` is what it ends with."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.status = 128 + number


class _StoppedBetweenSteps(Stopped):
    """The same where the state of the cache is right."""


def check_path(path: Path) -> None:
    """Raises `UsageError` where no state can be read from or written to `path`, before a model is loaded for it."""
    from numba_meta.models.cache.state_file import check_state_file

    if not os.access(path.absolute().parent, os.W_OK):
        raise UsageError(f"{path}: no file can be written there; give --prompt-cache a path in a folder of yours")
    if path.exists():
        check_state_file(path)


class PromptCache:
    """A context manager around a generation, whose pieces go through `watched`."""

    def __init__(self, model: Model, path: Path) -> None:
        self._model = model
        self._path = path
        self._is_right = False
        self._signal: int | None = None
        self._old_handlers: dict[int, Any] = {}

    def watched(self, pieces: Iterator[str]) -> Iterator[str]:
        """The same pieces, up to the one behind which a signal ends the generation."""
        for piece in pieces:
            self._is_right = True
            yield piece
            if self._signal is not None:
                raise _StoppedBetweenSteps(self._signal)

    def __enter__(self) -> Self:
        if self._path.exists():
            self._model.load_state(self._path)
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # by nohup, or a shell's background job: it stays so
                self._old_handlers[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        is_early = isinstance(error, (ContextFullError, BrokenPipeError, _StoppedBetweenSteps)) and self._is_right
        not_saved = f"numba-meta: the state was not saved; {self._path} is what it was before"
        try:
            if error is not None and not is_early:
                say(not_saved)
                return
            self._is_right = False  # a signal from here on does not wait
            self._model.save_state(self._path)
        except NumbaMetaError as failure:
            if error is None:
                raise
            say(f"numba-meta: {failure}")  # the error that ended the text goes on
        except KeyboardInterrupt:
            say(not_saved)
            raise
        finally:
            for number, handler in self._old_handlers.items():
                signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self._signal is not None or not self._is_right:
            raise Stopped(number)
        self._signal = number
