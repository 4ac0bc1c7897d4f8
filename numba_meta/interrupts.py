"""Ctrl-C at points where it does no harm: what takes several steps to change is never left half-changed.

Python raises `KeyboardInterrupt` between any two instructions of the main thread: between the taking of memory and the noting of who has
it, between a cache that has grown and the step that fills it. Within `held_back()` an interrupt waits: until the block ends, or until long
work asks for it (`let_through`) where all that was begun is undone by whoever catches the exception, which is again undisturbed.
"""

from __future__ import annotations

import os
import signal
import threading
from threading import get_ident
from types import FrameType, TracebackType
from typing import Any, Final

try:  # what `signal` wraps: a step holds a signal back twice, and the wrappers take longer than all the rest of it
    from _signal import getsignal as _handler_of  # type: ignore[import-not-found]
    from _signal import signal as _handle
except ImportError:  # another interpreter than CPython
    from signal import getsignal as _handler_of
    from signal import signal as _handle


SIGINT: Final = int(signal.SIGINT)


class _HeldBack:
    """The one block of the main thread, entered as often as its calls nest. In other threads nothing is raised, and nothing is done."""

    def __init__(self) -> None:
        self._depth = 0
        self._before: Any = None  # who handles the signal outside
        self._came: FrameType | bool | None = None  # the frame in which a signal came that waits

    def __enter__(self) -> None:
        if get_ident() != _MAIN[0]:
            return
        if self._depth == 0:
            before = _handler_of(SIGINT)
            if before is None:  # of another language: Python has no part in it
                return
            self._before = before
            _handle(SIGINT, self._note)
        self._depth += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if get_ident() != _MAIN[0] or self._depth == 0:
            return
        if self._depth > 1:
            self._depth -= 1
            return
        before = self._before
        _handle(SIGINT, before)  # one that came until now was noted, one that comes now is handled by whom it is for
        self._depth, self._before = 0, None
        self._deliver(before)

    def let_through(self) -> None:
        """Raises what waits, if anything does."""
        if self._came is not None and get_ident() == _MAIN[0]:
            self._deliver(self._before)

    def _note(self, _number: int, frame: FrameType | None) -> None:
        self._came = frame or True

    def _deliver(self, handler: Any) -> None:
        came, self._came = self._came, None
        if came is None or handler == signal.SIG_IGN:
            return
        if callable(handler):
            handler(signal.SIGINT, came if isinstance(came, FrameType) else None)
        elif handler == signal.SIG_DFL and self._depth == 0:
            os.kill(os.getpid(), signal.SIGINT)


_MAIN: Final = [threading.main_thread().ident]
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _MAIN.__setitem__(0, get_ident()))
_held = _HeldBack()


def held_back() -> _HeldBack:
    """A block in which Ctrl-C waits. Blocks nest; the outermost one counts. For short work, and for long work that calls `let_through`."""
    return _held


def let_through() -> None:
    """Raises an interrupt that waits, within `held_back()`: for long work, where what is done so far can be given up."""
    _held.let_through()
