"""The KV cache of a context: which cell holds which token (on the host), and the memory of the cells (on the devices).

A cell is one token of one sequence. Layers that see everything share one set of cells, given out from a pool; a sliding-window layer keeps the
last `round_up(window + ubatch, 256)` positions of each sequence, at `position` modulo that number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from numba_meta.dtypes import DType
from numba_meta.errors import ContextFullError, UsageError
from numba_meta.memory.placement import Binding, Entry, Placement, bind_all, place_by_share, round_up
from numba_meta.split.state import SplitState


@dataclass(frozen=True)
class CacheShape:
    """Sizes of a context's cache. `n_positions` is how long one sequence can become."""

    n_sequences: int
    n_positions: int
    n_cells: int
    window: int  # 0 without sliding-window layers
    n_window_cells: int  # of one sequence
    unified: bool
    n_stream_cells: int  # memory of a stream: of the one stream if unified, else of each sequence

    @property
    def n_stored_cells(self) -> int:
        """Cells of memory of all streams."""
        return self.n_stream_cells * (1 if self.unified else self.n_sequences)


def plan_cache_shape(ctx_size: int, parallel: int, unified: bool, window: int, ubatch_size: int, on_host: bool = False) -> CacheShape:
    """The cells of a context of `ctx_size` tokens over `parallel` sequences.

    Unified: any sequence may take any free cell; else each has `ctx_size / parallel` cells of its own. In host memory streams are whole buckets, since
    deliveries are.
    """
    n_positions = ctx_size if unified else ctx_size // parallel
    if n_positions < 1:
        raise UsageError(f"a context of {ctx_size} tokens over {parallel} sequences leaves none for each; use a larger --ctx-size")
    n_window = min(round_up(window + ubatch_size, 256), round_up(n_positions, 256)) if window else 0
    n_cells = n_positions if unified else n_positions * parallel
    return CacheShape(parallel, n_positions, n_cells, window, n_window, unified, round_up(n_positions, 256) if on_host else n_positions)


class _Pool:
    """Free cells: those given back, last first, then the ones never used. A large context costs nothing until it is filled."""

    def __init__(self, start: int, stop: int) -> None:
        self._given_back: list[int] = []
        self._next, self._stop = start, stop

    @property
    def n_free(self) -> int:
        return len(self._given_back) + self._stop - self._next

    def take(self, n: int) -> list[int]:
        """At most `n_free` cells."""
        n_old = min(n, len(self._given_back))
        new = range(self._next, self._next + n - n_old)
        self._next += len(new)
        return [self._given_back.pop() for _ in range(n_old)] + list(new)

    def give_back(self, cells: Sequence[int]) -> None:
        self._given_back += cells


class Cells:
    """Which cells each sequence holds. Positions of a sequence run from 0 without gaps."""

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        starts = range(0, shape.n_stored_cells, shape.n_stream_cells)
        self._pools = [_Pool(start, start + shape.n_positions) for start in starts]
        self._held: list[list[int]] = [[] for _ in range(shape.n_sequences)]
        self._highest = [-1] * shape.n_sequences

    def length(self, sequence: int) -> int:
        """Tokens of a sequence in the cache."""
        return len(self._held[sequence])

    def held(self, sequence: int) -> Sequence[int]:
        """The cell of each position of a sequence."""
        return self._held[sequence]

    def highest(self, sequence: int) -> int:
        """The highest cell that a sequence has held since it was last cleared; -1 before its first."""
        return self._highest[sequence]

    def take(self, sequence: int, n_tokens: int) -> tuple[list[int], list[int]]:
        """Cells for the next tokens of a sequence: (cells, window cells). Raises `ContextFullError`; then nothing is taken."""
        start, pool = self.length(sequence), self._pool(sequence)
        room = min(self.shape.n_positions - start, pool.n_free)
        if n_tokens > room:
            raise ContextFullError(
                f"{n_tokens} more tokens do not fit the context: {start} are in sequence {sequence}, room for {room} is left; use a larger --ctx-size"
            )
        cells = pool.take(n_tokens)
        self._held[sequence] += cells
        self._highest[sequence] = max(self._highest[sequence], *cells) if cells else self._highest[sequence]
        return cells, self._window_cells(sequence, start, n_tokens)

    def truncate(self, sequence: int, n_tokens: int) -> None:
        """Forgets all but the first `n_tokens` of a sequence. What a window has already overwritten cannot come back."""
        back, spare = self.length(sequence) - n_tokens, self.shape.n_window_cells - self.shape.window
        if self.shape.window and n_tokens and back > spare and self.length(sequence) > self.shape.n_window_cells:
            raise UsageError(
                f"sequence {sequence} cannot go back from {self.length(sequence)} to {n_tokens} tokens: its sliding window keeps {spare} more; clear it instead"
            )
        held = self._held[sequence]
        self._pool(sequence).give_back(held[: n_tokens - 1 if n_tokens else None : -1])
        del held[n_tokens:]
        self._highest[sequence] = self._highest[sequence] if held else -1

    def clear(self) -> None:
        """Forgets all sequences."""
        for sequence in range(self.shape.n_sequences):
            self.truncate(sequence, 0)

    def _pool(self, sequence: int) -> _Pool:
        return self._pools[0 if self.shape.unified else sequence]

    def _window_cells(self, sequence: int, start: int, n_tokens: int) -> list[int]:
        n = self.shape.n_window_cells
        return [sequence * n + position % n for position in range(start, start + n_tokens)] if n else [-1] * n_tokens


@dataclass(frozen=True)
class CachePlan:
    """Where the cache lies: one meta buffer, its K and V of every layer bound in it, placed by share."""

    placement: Placement
    bindings: tuple[Binding, ...]

    def offset(self, name: str, device: int) -> int:
        """Bytes from the start of a device's buffer."""
        return self._by_name()[name].offsets[device]

    def _by_name(self) -> dict[str, Binding]:
        return {binding.entry.name: binding for binding in self.bindings}


def plan_cache(rows: Sequence[tuple[str, DType, int, int, SplitState]], n_devices: int, alignment: int) -> CachePlan:
    """Places caches given as (name, type, elements of a cell, cells, state) in one meta buffer."""
    entries: list[tuple[Entry, int]] = []
    end = 0
    for name, dtype, n, n_cells, state in rows:
        pieces = tuple(dtype.row_bytes(state.piece_shape((n, n_cells), device)[0]) * n_cells for device in range(n_devices))
        entry = Entry(name, dtype.row_bytes(n) * n_cells, pieces)
        entries.append((entry, end))
        end = round_up(end + entry.n_bytes, alignment)
    placement = place_by_share(end, [entry for entry, _ in entries], n_devices, alignment)
    return CachePlan(placement, bind_all(placement, entries))
