"""Which cell holds what after any history: `Cells` against a plain model of sequences, cells and windows that are carried out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numba_meta.errors import ContextFullError, NumbaMetaError, UsageError
from numba_meta.models.cache.cells import NO_CELL, UNKNOWN, CacheShape, Cells, plan_cache_shape

WINDOW, N_WINDOW_CELLS, MOST_AT_ONCE = 3, 8, 5  # a step never overwrites what it sees: window + step <= window cells


def shape_of(n_sequences: int, n_positions: int, unified: bool, n_window_cells: int = N_WINDOW_CELLS) -> CacheShape:
    shape = plan_cache_shape(n_positions if unified else n_positions * n_sequences, n_sequences, unified, WINDOW, 1)
    return replace(shape, n_window_cells=n_window_cells)


@dataclass
class Sequence_:
    """A sequence as it should be: a token per position (None: removed), and the tokens that its window still has, by position."""

    tokens: list[int | None] = field(default_factory=list)
    window: dict[int, int] = field(default_factory=dict)
    was_shifted: bool = False

    def append(self, tokens: list[int], n_window_cells: int) -> None:
        for token in tokens:
            self.window[len(self.tokens)] = token
            self.window.pop(len(self.tokens) - n_window_cells, None)
            self.tokens.append(token)

    def keep(self, n: int) -> None:
        self.tokens = self.tokens[:n]
        self.window = {p: t for p, t in self.window.items() if p < n}
        self.was_shifted = self.was_shifted and n > 0

    def remove(self, start: int, stop: int) -> None:
        self.tokens[start:stop] = [None] * (stop - start)
        self.window = {p: t for p, t in self.window.items() if not start <= p < stop}

    def shift(self, keep: int, drop: int) -> None:
        del self.tokens[keep : keep + drop]
        gone = range(keep, keep + drop)
        self.window = {p - drop if p >= keep + drop else p: t for p, t in self.window.items() if p not in gone}
        self.was_shifted = True


class World:
    """`Cells`, the rows that it asks to write and move, and the sequences as they should be."""

    def __init__(self, shape: CacheShape) -> None:
        self.cells = Cells(shape)
        self.rows: dict[int, int] = {}  # cell -> the token whose row lies there
        self.window_rows: dict[int, int] = {}
        self.wanted = [Sequence_() for _ in range(shape.n_sequences)]
        self.next_token = 0

    def take(self, s: int, n: int) -> None:
        tokens = list(range(self.next_token, self.next_token + n))
        cells, window_cells = self.cells.take(s, n, tokens)
        self.next_token += n
        self.rows.update(zip(cells, tokens, strict=True))
        self.window_rows.update(zip(window_cells, tokens, strict=True))
        self.wanted[s].append(tokens, self.cells.shape.n_window_cells)

    def truncate(self, s: int, n: int) -> None:
        n = min(n, self.cells.length(s))
        self.cells.truncate(s, n)
        self.wanted[s].keep(n)
        whole = self.wanted[s].was_shifted or all(p in self.wanted[s].window for p in self.held(s) if p >= n - WINDOW)
        assert whole, "what the next token sees has its rows"

    def remove(self, s: int, start: int, n: int) -> None:
        length = self.cells.length(s)
        start = min(start, length)
        stop = min(start + n, length)
        self.cells.remove(s, start, stop)
        if stop == length:
            self.wanted[s].keep(start)
        else:
            self.wanted[s].remove(start, stop)

    def shift(self, s: int, keep: int, drop: int) -> None:
        keep = min(keep, self.cells.length(s))
        drop = min(drop, self.cells.length(s) - keep)
        self.move(self.cells.shift(s, keep, drop))
        self.wanted[s].shift(keep, drop)

    def copy(self, s: int, other: int) -> None:
        self.move(self.cells.copy(s, other))
        if s != other:
            source = self.wanted[s]
            self.wanted[other] = Sequence_(list(source.tokens), dict(source.window), source.was_shifted)

    def move(self, moves) -> None:  # type: ignore[no-untyped-def]
        for rows, (sources, destinations) in ((self.rows, moves.cells), (self.window_rows, moves.window_cells)):
            assert len(set(destinations.tolist())) == len(destinations)
            rows.update(zip(destinations.tolist(), [rows[cell] for cell in sources.tolist()], strict=True))

    def held(self, s: int) -> list[int]:
        return [p for p, token in enumerate(self.wanted[s].tokens) if token is not None]

    def check(self) -> None:
        shape, in_use = self.cells.shape, []
        for s, wanted in enumerate(self.wanted):
            assert self.cells.length(s) == len(wanted.tokens)
            assert list(self.cells.tokens(s)) == [UNKNOWN if t is None else t for t in wanted.tokens]
            row, local = self.cells.table_row(s, False), self.cells.table_row(s, True)
            assert row.dtype == local.dtype == np.int32
            assert row.tolist() == list(self.cells.held(s))
            assert [None if cell == NO_CELL else self.rows[cell] for cell in row.tolist()] == wanted.tokens
            assert {p: self.window_rows[cell] for p, cell in enumerate(local.tolist()) if cell != NO_CELL} == wanted.window
            cells = row[row != NO_CELL].tolist()
            assert max(cells, default=-1) <= self.cells.highest(s)
            if not shape.unified:
                assert all(cell == s * shape.n_stream_cells + p for p, cell in enumerate(row.tolist()) if cell != NO_CELL)
            in_use += cells
        assert len(set(in_use)) == len(in_use), "no cell is held twice"
        assert all(0 <= cell < shape.n_stored_cells for cell in in_use)
        left = shape.n_cells - len(in_use)
        for s, wanted in enumerate(self.wanted):
            own = shape.n_positions - len(wanted.tokens)
            assert self.cells.room(s) == (min(own, left) if shape.unified else own), "no cell is lost"


NUMBERS = st.integers(0, 30)
ACTIONS = st.sampled_from(("take", "take", "take", "truncate", "remove", "shift", "copy", "reload"))
STEPS = st.tuples(ACTIONS, st.integers(0, 2), NUMBERS, NUMBERS)


@settings(deadline=None, max_examples=300)
@given(st.integers(1, 3), st.booleans(), st.lists(STEPS, max_size=40))
def test_every_position_has_its_row_after_any_history(n_sequences: int, unified: bool, steps: list[tuple[str, int, int, int]]) -> None:
    world = World(shape_of(n_sequences, 40, unified))
    for action, s, a, b in steps:
        s %= n_sequences
        try:
            if action == "take":
                world.take(s, 1 + a % MOST_AT_ONCE)
            elif action == "truncate":
                world.truncate(s, a)
            elif action == "remove":
                world.remove(s, a, b)
            elif action == "shift":
                world.shift(s, a, b)
            elif action == "copy":
                world.copy(s, b % n_sequences)
            else:
                states = {i: world.cells.state(i) for i in range(n_sequences)}
                tables = [[world.cells.table_row(i, local) for i in range(n_sequences)] for local in (False, True)]
                world.cells.restore(states)
                assert {i: world.cells.state(i) for i in range(n_sequences)} == states
                for rows, local, before in zip((world.rows, world.window_rows), (False, True), tables, strict=True):
                    old = dict(rows)
                    for i in range(n_sequences):
                        after = world.cells.table_row(i, local)
                        rows.update((int(y), old[int(x)]) for x, y in zip(before[i], after, strict=True) if x != NO_CELL)
        except (ContextFullError, UsageError):
            pass  # nothing must have changed
        world.check()


@settings(deadline=None)
@given(st.lists(st.integers(1, MOST_AT_ONCE), max_size=8), st.integers(0, 30), st.integers(0, 30), st.sampled_from((8, 9, 12, 40)))
def test_a_state_restored_into_another_context(takes: list[int], keep: int, drop: int, n_window_cells: int) -> None:
    """Other numbers of sequences, positions and window cells: the same positions and tokens; of the window the rows that fit."""
    old = World(shape_of(1, 40, True))
    for n in takes:
        old.take(0, n)
    old.shift(0, keep, drop)
    for unified in (True, False):
        cells = Cells(shape_of(3, 50, unified, n_window_cells))
        cells.take(1, 7)
        cells.restore({2: old.cells.state(0)})
        assert [cells.length(s) for s in range(3)] == [0, 0, old.cells.length(0)]
        assert list(cells.tokens(2)) == list(old.cells.tokens(0))
        length = cells.length(2)
        with_row = set(np.flatnonzero(cells.table_row(2, True) != NO_CELL).tolist())
        assert with_row == {p for p in old.wanted[0].window if p >= length - n_window_cells}
        for n in (1, 2, 3):  # a step that was not made can always be taken back
            cells.take(2, n)
            cells.truncate(2, length)
            assert cells.length(2) == length


def test_going_back_twice_does_not_reach_what_was_overwritten() -> None:
    cells = Cells(shape_of(1, 40, True))
    for _ in range(4):
        cells.take(0, 5)
    cells.truncate(0, 15)  # 20 - 8 + 3: the window of position 15 is there
    with pytest.raises(UsageError, match=r"^sequence 0 cannot go back from 15 to 14 tokens: its sliding window keeps 0 more; clear"):
        cells.truncate(0, 14)
    cells.truncate(0, 0)
    cells.take(0, 5)
    cells.truncate(0, 1)
    assert cells.length(0) == 1


@pytest.mark.parametrize(
    ("n_sequences", "n_positions", "unified", "tokens", "line"),
    [
        (1, 40, True, {1: 3}, "sequence 1 does not fit a context of 1 sequence; use more sequences (parallel, --parallel)"),
        (2, 10, True, {0: 11}, "a sequence of 11 tokens does not fit the 10 of the context; use a larger context (ctx_size, --ctx-size)"),
        (2, 10, False, {1: 11}, "a sequence of 11 tokens does not fit the 10 of the context; use a larger context (ctx_size, --ctx-size)"),
        (2, 10, True, {0: 6, 1: 5}, "11 tokens in all do not fit the 10 cells of the context; use a larger context (ctx_size, --ctx-size)"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(
    n_sequences: int, n_positions: int, unified: bool, tokens: dict[int, int], line: str
) -> None:
    source = Cells(shape_of(2, 40, False))
    for s, n in tokens.items():
        source.take(s, n)
    cells = Cells(shape_of(n_sequences, n_positions, unified))
    cells.take(0, 4, [5, 6, 7, 8])
    with pytest.raises(NumbaMetaError) as caught:
        cells.restore({s: source.state(s) for s in tokens})
    assert str(caught.value) == line
    assert list(cells.tokens(0)) == [5, 6, 7, 8]


def test_a_copy_without_room_changes_nothing() -> None:
    cells = Cells(shape_of(2, 10, True))
    cells.take(0, 6)
    cells.take(1, 4, [1, 2, 3, 4])
    with pytest.raises(ContextFullError, match=r"^a copy of sequence 0 needs 6 cells, 4 are free for sequence 1; use a larger context "):
        cells.copy(0, 1)
    assert list(cells.tokens(1)) == [1, 2, 3, 4]
    cells.remove(0, 1, 3)
    cells.copy(0, 1)
    assert cells.length(1) == 6 and list(cells.held(1)).count(NO_CELL) == 2
