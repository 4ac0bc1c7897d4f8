"""The account of a device's memory: what is in use, counted down by itself when a buffer goes, whoever let go of it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any


class Account:
    """Bytes in use on one device, the most that were, and the buffers, which this does not keep."""

    def __init__(self) -> None:
        self.n_bytes = 0
        self.peak_bytes = 0
        self.buffers: weakref.WeakSet[Any] = weakref.WeakSet()

    def take(self, buffer: Any, n_bytes: int, free: Callable[[], None] | None = None) -> Callable[[], object]:
        """Counts a buffer until nobody holds it, or until what this returns is called (twice is once); then `free` is called too.

        `free` must not refer to the buffer, which would never go.
        """
        self.n_bytes += n_bytes
        self.peak_bytes = max(self.peak_bytes, self.n_bytes)
        self.buffers.add(buffer)
        return at_end(buffer, self._give_back, n_bytes, free)

    def _give_back(self, n_bytes: int, free: Callable[[], None] | None) -> None:
        self.n_bytes -= n_bytes
        if free is not None:
            free()

    def by_label(self) -> dict[str, int]:
        """Bytes of buffers by what they are for, largest first."""
        sums: dict[str, int] = {}
        for buffer in self.buffers:
            sums[buffer.label] = sums.get(buffer.label, 0) + buffer.n_bytes
        return dict(sorted(sums.items(), key=lambda item: (-item[1], item[0])))


def at_end(owner: object, end: Callable[..., None], *arguments: Any) -> Callable[[], object]:
    """Calls `end(*arguments)` when nobody holds `owner`, or when what this returns is called; once.

    Not at the end of the process, which takes all along, nor in a forked one: what was opened belongs to its parent.
    """
    finalizer = weakref.finalize(owner, _end_here, os.getpid(), end, arguments)
    finalizer.atexit = False
    return finalizer


def _end_here(process: int, end: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    if process == os.getpid():
        end(*arguments)
