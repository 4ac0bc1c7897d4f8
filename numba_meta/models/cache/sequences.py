"""`model.cache`: what a user may do with the sequences in the cache, between generations."""

from __future__ import annotations

from collections.abc import Callable

from numba_meta.arguments import integer
from numba_meta.models.cache.operations import CacheOperations
from numba_meta.one_process import OneProcess


class Cache(OneProcess):
    """The sequences in a model's cache; `generate` uses sequence 0. Positions run from 0; a token that is removed leaves a hole in them.

    Every change ends a generation that is under way: its next token is an error. `generate(..., reuse_prefix=True)` goes on from what
    sequence 0 holds. Raises `UsageError` for a sequence or position that is not there; then nothing has changed.
    """

    _what = "the cache of a loaded model"

    def __init__(
        self, operations: CacheOperations, check_open: Callable[[], None], begin_call: Callable[..., None], begin_use: Callable[[], None]
    ) -> None:
        super().__init__()
        self._operations = operations
        self._check_open = check_open
        self._begin_call = begin_call
        self._begin_use = begin_use

    def length(self, sequence: int = 0) -> int:
        """Positions of a sequence: where its next token goes."""
        return self._operations.cells.length(self._sequence(sequence))

    def tokens(self, sequence: int = 0) -> list[int]:
        """The token id at every position of a sequence; -1 where it was removed."""
        return list(self._operations.cells.tokens(self._sequence(sequence)))

    def clear(self, sequence: int | None = None) -> None:
        """Forgets a sequence, or all."""
        self._check_open()
        number = None if sequence is None else self._sequence(sequence)
        self._begin_call("cache.clear", sequence=number)
        self._operations.clear(number)
        self._begin_use()

    def remove(self, sequence: int, start: int, stop: int | None = None) -> None:
        """Forgets the positions start..stop (None: the end) of a sequence. What comes behind them stays; nothing attends to the hole.

        A sliding window cannot go back to what it has overwritten: an end that would need that is a `UsageError`.
        """
        sequence, start, stop = self._sequence(sequence), integer("start", start), None if stop is None else integer("stop", stop)
        self._begin_call("cache.remove", sequence=sequence, start=start, stop=stop)
        self._operations.remove(sequence, start, stop)
        self._begin_use()

    def copy(self, source: int, destination: int) -> None:
        """Makes `destination` equal to `source`, with cells of its own. Raises `ContextFullError` where there is no room."""
        source, destination = self._sequence(source), self._sequence(destination)
        self._begin_call("cache.copy", source=source, destination=destination)
        self._operations.copy(source, destination)
        self._begin_use()

    def shift(self, sequence: int, keep: int, drop: int) -> None:
        """Keeps the first `keep` tokens, forgets the `drop` behind them, and moves all later ones down by `drop` positions.

        Keys are rotated to their new positions and rounded to the cache's type again. What is kept was computed with the dropped tokens in
        sight: it is not what the shorter text alone would give. Kept tokens that a sliding window had lost already stay lost for its
        layers.
        """
        sequence, keep, drop = self._sequence(sequence), integer("keep", keep), integer("drop", drop)
        self._begin_call("cache.shift", sequence=sequence, keep=keep, drop=drop)
        self._operations.shift(sequence, keep, drop)
        self._begin_use()

    def _sequence(self, sequence: int) -> int:
        """The number of a sequence that is there, in a model that is open."""
        self._check_open()
        number = integer("sequence", sequence)
        self._operations.check_sequence(number)
        return number
