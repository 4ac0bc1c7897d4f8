"""The KV cache of a context: which cell holds which token (on the host), and the memory of the cells (on the devices).

A cell is one token of one sequence. Layers that see everything share one set of cells, given out from a pool; a sliding-window layer
keeps the last `round_up(window + ubatch, 256)` positions of each sequence, at `position` modulo that number.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from numba_meta.dtypes import DType
from numba_meta.errors import ContextFullError, UsageError, counted
from numba_meta.memory.placement import Binding, Entry, Placement, bind_all, place_by_share, round_up
from numba_meta.split.state import SplitState

NO_CELL = -1  # of a position that was removed
UNKNOWN = -1  # a token that nobody has told
_LARGER = "use a larger context (ctx_size, --ctx-size)"
IntArray = npt.NDArray[Any]
CellPairs = tuple[IntArray, IntArray]  # int64 (sources, destinations)


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

    @property
    def room(self) -> str:
        """What a sequence has room in, for messages."""
        if self.unified or self.n_sequences == 1:
            return "the context"
        return f"a sequence's part of the context (kv_unified=False, -no-kvu: divided by {self.n_sequences})"

    def check_prompt(self, n_tokens: int) -> None:
        """Raises `ContextFullError` for a prompt that a sequence has no room for."""
        if n_tokens > self.n_positions:
            has = f"the prompt has {counted(n_tokens, 'token')}, {self.room} has room for {self.n_positions}"
            raise ContextFullError(f"{has}; shorten it or {_LARGER}")


def plan_cache_shape(ctx_size: int, parallel: int, unified: bool, window: int, ubatch_size: int, on_host: bool = False) -> CacheShape:
    """The cells of a context of `ctx_size` tokens over `parallel` sequences.

    Unified: any sequence may take any free cell; else each has `ctx_size / parallel` cells of its own. In host memory streams are whole
    buckets, since deliveries are.
    """
    n_positions = ctx_size if unified else ctx_size // parallel
    if n_positions < 1:
        raise UsageError(
            f"a context of {counted(ctx_size, 'token')} that kv_unified=False (-no-kvu) divides over {parallel} sequences "
            f"leaves none for each; use a context (ctx_size, --ctx-size) of {parallel} or more, or let them share it (kv_unified, -kvu)"
        )
    n_window = min(round_up(window + ubatch_size, 256), round_up(n_positions, 256)) if window else 0
    n_cells = n_positions if unified else n_positions * parallel
    return CacheShape(parallel, n_positions, n_cells, window, n_window, unified, round_up(n_positions, 256) if on_host else n_positions)


class _Pool:
    """Free cells, lowest first, so that windows stay short. Cells never used are not listed: a large context costs nothing until filled."""

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
        return [heapq.heappop(self._given_back) for _ in range(n_old)] + list(new)

    def give_back(self, cells: Sequence[int]) -> None:
        self._given_back += cells
        heapq.heapify(self._given_back)


@dataclass(frozen=True)
class Moves:
    """Rows that go from cell to cell, in this order: of layers that see everything, and of those with a sliding window."""

    cells: CellPairs
    window_cells: CellPairs


@dataclass(frozen=True)
class SequenceState:
    """What is known of a sequence beside its rows. Token and cell lists by position; a removed position keeps its place."""

    tokens: tuple[int, ...]  # UNKNOWN where the position was removed
    is_held: tuple[bool, ...]  # False where the position was removed
    window_start: int  # the lowest position of which windows have a row
    shortest: int  # the lowest length above 0 that windows can go back to


class Cells:
    """Which cells each sequence holds, and which tokens.

    Positions of a sequence run from 0; those that were removed have no cell (NO_CELL). A sequence with cells of its own
    keeps position p in its cell p.
    """

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        self._pool = _Pool(0, shape.n_positions)
        n = shape.n_sequences
        self._held: list[list[int]] = [[] for _ in range(n)]
        self._tokens: list[list[int]] = [[] for _ in range(n)]
        self._highest = [-1] * n
        self._window_start = [0] * n
        self._shortest = [0] * n

    # ---- what is there -----------------------------------------------------------------------------------------------------------------

    def length(self, sequence: int) -> int:
        """Positions of a sequence in the cache: where its next token goes."""
        return len(self._held[sequence])

    def held(self, sequence: int) -> Sequence[int]:
        """The cell of each position of a sequence; NO_CELL where it was removed."""
        return self._held[sequence]

    def tokens(self, sequence: int) -> Sequence[int]:
        """The token of each position of a sequence; UNKNOWN where it was removed or never told."""
        return self._tokens[sequence]

    def highest(self, sequence: int) -> int:
        """No cell of a sequence lies above this one; -1 before its first."""
        return self._highest[sequence]

    def room(self, sequence: int) -> int:
        """Tokens that can be appended to a sequence."""
        left = self.shape.n_positions - self.length(sequence)
        return min(left, self._pool.n_free) if self.shape.unified else left

    def state(self, sequence: int) -> SequenceState:
        """All that is known of a sequence: what `restore` takes."""
        held = tuple(cell != NO_CELL for cell in self._held[sequence])
        return SequenceState(tuple(self._tokens[sequence]), held, self._window_start[sequence], self._shortest[sequence])

    def table_row(self, sequence: int, local: bool) -> IntArray:
        """int32 cell of each position, NO_CELL where there is none; `local`: in the layers with a sliding window."""
        held = np.array(self._held[sequence], np.int32)
        if not local:
            return held
        positions = np.arange(len(held), dtype=np.int32)
        has_row = (held != NO_CELL) & (positions >= self._window_start[sequence])
        n = self.shape.n_window_cells
        return np.where(has_row, sequence * n + positions % max(1, n), NO_CELL).astype(np.int32)

    # ---- tokens come and go ------------------------------------------------------------------------------------------------------------

    def take(self, sequence: int, n_tokens: int, tokens: Sequence[int] | None = None) -> tuple[list[int], list[int]]:
        """Cells for the next tokens of a sequence: (cells, window cells). Raises `ContextFullError`; then nothing is taken."""
        start, room = self.length(sequence), self.room(sequence)
        if n_tokens > room:
            do = "does" if n_tokens == 1 else "do"
            raise ContextFullError(
                f"{counted(n_tokens, 'more token')} {do} not fit {self.shape.room}: {start} are in sequence {sequence}, "
                f"room for {room} is left; {_LARGER}"
            )
        cells = self._take_cells(sequence, range(start, start + n_tokens))
        self._held[sequence] += cells
        self._tokens[sequence] += [UNKNOWN] * n_tokens if tokens is None else tokens
        self._highest[sequence] = max(self._highest[sequence], *cells) if cells else self._highest[sequence]
        self._overwrite(sequence)
        return cells, self._window_cells(sequence, start, n_tokens)

    def truncate(self, sequence: int, n_tokens: int) -> None:
        """Forgets all but the first `n_tokens` of a sequence. What a window has already overwritten cannot come back: `UsageError`."""
        length = self.length(sequence)
        if n_tokens and n_tokens < min(length, self._shortest[sequence]):
            raise UsageError(
                f"sequence {sequence} cannot go back from {length} to {counted(n_tokens, 'token')}: its sliding window keeps "
                f"{length - self._shortest[sequence]} more; clear it instead"
            )
        held = self._held[sequence]
        self._give_back(held[: n_tokens - 1 if n_tokens else None : -1])
        del held[n_tokens:]
        del self._tokens[sequence][n_tokens:]
        if not held:
            self._highest[sequence] = -1
            self._window_start[sequence] = self._shortest[sequence] = 0

    def clear(self) -> None:
        """Forgets all sequences."""
        for sequence in range(self.shape.n_sequences):
            self.truncate(sequence, 0)

    # ---- operations --------------------------------------------------------------------------------------------------------------------

    def remove(self, sequence: int, start: int, stop: int) -> None:
        """Forgets the positions start..stop; the others stay where they are. At the end of a sequence that is `truncate`."""
        if stop == self.length(sequence):
            self.truncate(sequence, start)
            return
        held = self._held[sequence]
        self._give_back(held[start:stop][::-1])
        held[start:stop] = [NO_CELL] * (stop - start)
        self._tokens[sequence][start:stop] = [UNKNOWN] * (stop - start)
        self._highest[sequence] = max(held)

    def shift(self, sequence: int, keep: int, drop: int) -> Moves:
        """Forgets the positions keep..keep + drop and moves those behind them down by `drop`: the rows that this moves.

        Rows of a unified cache stay in their cells. Where a window no longer has rows of the kept positions, they count as removed there.
        """
        held, later = self._held[sequence], range(keep + drop, self.length(sequence))
        moved = [p for p in later if held[p] != NO_CELL]
        windowed = [p for p in moved if p >= self._window_start[sequence]]
        window_pairs = self._window_pairs(sequence, windowed, sequence, [p - drop for p in windowed])
        sources = [held[p] for p in moved]
        self._give_back(held[keep : keep + drop][::-1])
        del held[keep : keep + drop]
        del self._tokens[sequence][keep : keep + drop]
        if not self.shape.unified:
            for p in moved:
                held[p - drop] -= drop
        self._highest[sequence] = max(held, default=-1)
        start, length = self._window_start[sequence], self.length(sequence)
        start = start - drop if start > keep + drop else min(start, keep)
        self._window_start[sequence] = start = min(start, length)
        self._shortest[sequence] = min(length, start + self.shape.window) if start else 0
        return Moves(_pairs(sources, [held[p - drop] for p in moved]), window_pairs)

    def copy(self, source: int, destination: int) -> Moves:
        """Makes a sequence equal to another one: the rows to copy. Raises `ContextFullError` without room; then nothing has changed."""
        if source == destination:
            return Moves(_pairs([], []), _pairs([], []))
        held = self._held[source]
        positions = [p for p, cell in enumerate(held) if cell != NO_CELL]
        spare = self._pool.n_free + sum(cell != NO_CELL for cell in self._held[destination])
        if self.shape.unified and len(positions) > spare:
            raise ContextFullError(
                f"a copy of sequence {source} needs {counted(len(positions), 'cell')}, {spare} are free for "
                f"sequence {destination}; {_LARGER}"
            )
        self._fill(destination, self.state(source))
        copied = self._held[destination]
        windowed = [p for p in positions if p >= self._window_start[source]]
        pairs = _pairs([held[p] for p in positions], [copied[p] for p in positions])
        return Moves(pairs, self._window_pairs(source, windowed, destination, windowed))

    def restore(self, states: Mapping[int, SequenceState]) -> None:
        """Forgets all sequences and makes these, without rows. Where they do not fit, an error says so and nothing has changed."""
        shape = self.shape
        if states and max(states) >= shape.n_sequences:
            where = f"a context of {counted(shape.n_sequences, 'sequence')}"
            raise ContextFullError(f"sequence {max(states)} does not fit {where}; use more sequences (parallel, --parallel)")
        longest = max((len(state.is_held) for state in states.values()), default=0)
        if longest > shape.n_positions:
            where = f"the {shape.n_positions} of the context"
            raise ContextFullError(f"a sequence of {counted(longest, 'token')} does not fit {where}; {_LARGER}")
        n_cells = sum(sum(state.is_held) for state in states.values())
        if n_cells > shape.n_cells:
            raise ContextFullError(f"{n_cells} tokens in all do not fit the {shape.n_cells} cells of the context; {_LARGER}")
        self.clear()
        for sequence, state in states.items():
            self._fill(sequence, state)

    # ---- parts -------------------------------------------------------------------------------------------------------------------------

    def _fill(self, sequence: int, state: SequenceState) -> None:
        """Makes a sequence from a state that fits; a shorter window than the state's holds its last positions."""
        self.truncate(sequence, 0)
        positions = [p for p, is_held in enumerate(state.is_held) if is_held]
        held = self._held[sequence] = [NO_CELL] * len(state.is_held)
        for p, cell in zip(positions, self._take_cells(sequence, positions), strict=True):
            held[p] = cell
        self._tokens[sequence] = list(state.tokens)
        self._highest[sequence] = max(held, default=-1)
        self._window_start[sequence], self._shortest[sequence] = state.window_start, state.shortest
        self._overwrite(sequence)

    def _overwrite(self, sequence: int) -> None:
        """A window keeps the last positions of a sequence alone: notes what it has lost."""
        start = self.length(sequence) - self.shape.n_window_cells
        if self.shape.window and start > self._window_start[sequence]:
            self._window_start[sequence] = start
            self._shortest[sequence] = max(self._shortest[sequence], start + self.shape.window)

    def _take_cells(self, sequence: int, positions: Sequence[int]) -> list[int]:
        if self.shape.unified:
            return self._pool.take(len(positions))
        base = sequence * self.shape.n_stream_cells
        return [base + p for p in positions]

    def _give_back(self, cells: Sequence[int]) -> None:
        if self.shape.unified:
            self._pool.give_back([cell for cell in cells if cell != NO_CELL])

    def _window_pairs(self, source: int, source_positions: Sequence[int], destination: int, positions: Sequence[int]) -> CellPairs:
        n = self.shape.n_window_cells
        if not n:
            return _pairs([], [])
        return _pairs([source * n + p % n for p in source_positions], [destination * n + p % n for p in positions])

    def _window_cells(self, sequence: int, start: int, n_tokens: int) -> list[int]:
        n = self.shape.n_window_cells
        return [sequence * n + position % n for position in range(start, start + n_tokens)] if n else [NO_CELL] * n_tokens


def _pairs(sources: Sequence[int], destinations: Sequence[int]) -> CellPairs:
    return np.array(sources, np.int64), np.array(destinations, np.int64)


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
