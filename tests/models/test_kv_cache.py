"""Which cell holds which token, on the host: properties of `Cells`, and the sizes of a cache."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from numba_meta.dtypes import F16, F32, Q4_0
from numba_meta.errors import ContextFullError, UsageError
from numba_meta.models.cache.cells import Cells, plan_cache, plan_cache_shape
from numba_meta.split.state import MIRRORED


def cells_of(n_sequences: int, n_positions: int, unified: bool, window: int = 0) -> Cells:
    return Cells(plan_cache_shape(n_positions if unified else n_positions * n_sequences, n_sequences, unified, window, 512))


def ring(n_sequences: int) -> Cells:
    """100 positions of sequences whose windows of 3 go around in 8 cells."""
    return Cells(replace(plan_cache_shape(100, n_sequences, True, 3, 512), n_window_cells=8))


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, bool, list[tuple[str, int, int]]]:
    """Sequences, unified or not, and what happens to them: (take or truncate, sequence, tokens)."""
    n_sequences = draw(st.integers(1, 4))
    steps = st.tuples(st.sampled_from(("take", "truncate")), st.integers(0, n_sequences - 1), st.integers(0, 40))
    return n_sequences, draw(st.booleans()), draw(st.lists(steps, max_size=30))


@given(histories())
def test_no_cell_is_held_twice_and_none_is_lost(history: tuple[int, bool, list[tuple[str, int, int]]]) -> None:
    n_sequences, unified, steps = history
    cells = cells_of(n_sequences, 64, unified)
    lengths = [0] * n_sequences
    for action, sequence, n in steps:
        before = list(cells.held(sequence))
        if action == "take":
            try:
                taken, _ = cells.take(sequence, n)
            except ContextFullError:
                in_use = sum(lengths) if unified else lengths[sequence]
                assert in_use + n > 64
                assert list(cells.held(sequence)) == before, "nothing is taken"
                continue
            lengths[sequence] += n
            assert list(cells.held(sequence)) == before + list(taken)
        else:
            n = min(n, lengths[sequence])
            cells.truncate(sequence, n)
            lengths[sequence] = n
            assert list(cells.held(sequence)) == before[:n]
        held = [cell for s in range(n_sequences) for cell in cells.held(s)]
        assert len(set(held)) == len(held) == sum(lengths)
        assert all(0 <= cell < cells.shape.n_stored_cells for cell in held)
        if not unified:
            owners = [(cell // cells.shape.n_stream_cells, s) for s in range(n_sequences) for cell in cells.held(s)]
            assert all(stream == s for stream, s in owners), "each keeps to its own cells"
    cells.clear()
    for sequence in range(n_sequences):
        cells.take(sequence, 64 // n_sequences if unified else 64)


def test_a_full_context_names_what_is_there_and_what_is_left() -> None:
    cells = cells_of(2, 10, unified=True)
    cells.take(0, 4)
    cells.take(1, 3)
    with pytest.raises(ContextFullError, match=r"^4 more tokens do not fit the context: 4 are in sequence 0, room for 3 is left; use .*$"):
        cells.take(0, 4)


def test_window_cells_go_around_and_each_sequence_has_its_own() -> None:
    cells = ring(2)
    assert cells.take(1, 10)[1] == [8, 9, 10, 11, 12, 13, 14, 15, 8, 9]
    assert cells.take(0, 3)[1] == [0, 1, 2]
    assert cells_of(1, 100, True).take(0, 3)[1] == [-1, -1, -1]


def test_a_window_does_not_go_back_to_what_is_overwritten() -> None:
    cells = ring(1)
    cells.take(0, 8)
    cells.truncate(0, 1)  # nothing was overwritten yet
    cells.take(0, 19)
    with pytest.raises(UsageError, match="cannot go back from 20 to 14 tokens: its sliding window keeps 5 more"):
        cells.truncate(0, 14)
    assert cells.length(0) == 20
    cells.truncate(0, 15)
    cells.truncate(0, 0)
    assert cells.length(0) == 0


@given(st.integers(1, 5000), st.integers(1, 8), st.booleans(), st.integers(0, 600), st.integers(1, 600))
def test_the_sizes_of_a_cache(ctx_size: int, parallel: int, unified: bool, window: int, ubatch: int) -> None:
    if not unified and ctx_size < parallel:
        with pytest.raises(UsageError, match=f"context of {ctx_size} tokens? that .* divides over {parallel} sequences"):
            plan_cache_shape(ctx_size, parallel, unified, window, ubatch)
        return
    shape = plan_cache_shape(ctx_size, parallel, unified, window, ubatch)
    assert shape.n_cells <= ctx_size < shape.n_cells + parallel
    assert shape.n_positions == (ctx_size if unified else ctx_size // parallel)
    if window:  # a step of ubatch rows must not overwrite what its first row still sees
        assert shape.n_window_cells % 256 == 0
        assert shape.n_window_cells >= min(shape.n_positions, window + ubatch - 1)
        assert shape.n_window_cells < min(shape.n_positions, window + ubatch) + 256
    else:
        assert shape.n_window_cells == 0


def test_a_huge_context_costs_nothing_until_it_is_filled() -> None:
    tracemalloc.start()
    try:
        cells = cells_of(4, 1 << 30, unified=True)
        assert cells.take(0, 3)[0] == [0, 1, 2]
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_the_cache_lies_by_share() -> None:
    plan = plan_cache([("k", F16, 64, 10, MIRRORED), ("v", Q4_0, 64, 10, MIRRORED), ("w", F32, 2, 3, MIRRORED)], 2, 64)
    assert plan.offset("k", 0) == 0
    assert plan.offset("v", 0) >= 64 * 2 * 10
    assert plan.offset("w", 1) >= plan.offset("v", 1) + 2 * 18 * 10
    assert plan.placement.simple_bytes(0) >= 1280 + 360 + 24
