"""Windows of a host-resident cache: which cells a step needs on the devices, and where each lies in a slot.

Layers that see everything deliver the cells up to the highest that a sequence of the batch holds (unified: one stream), or those of each of
its sequences (a stream per sequence); sliding-window layers always deliver a stream per sequence. Streams lie one after the other, each
`n_cells` long: a bucket of 256 cells, the same for all. Pure bookkeeping; the context writes the results to the devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from numba_meta.models.cache.cells import NO_CELL, CacheShape, Cells
from numba_meta.ops.transport import WindowShape
from numba_meta.schedule.transport_slots import BUCKET_CELLS, bucket_cells


@dataclass(frozen=True)
class Window:
    """The deliveries of a step for one kind of layers: the first `n_cells` cells of each of `streams`."""

    streams: tuple[int, ...]
    n_cells: int


def full_window(shape: CacheShape, local: bool) -> WindowShape:
    """The largest window that can come: all cells of all streams."""
    n_streams = shape.n_sequences if local or not shape.unified else 1
    n_cells = shape.n_window_cells if local else shape.n_stream_cells
    return WindowShape(n_cells, n_streams, n_cells, n_streams)


def choose_window_shape(window: Window, full: WindowShape, known: WindowShape | None) -> WindowShape:
    """Room for a window: what is there if it fits, else grown in powers of two, up to all that can come."""
    n_cells, n_streams = max(1, window.n_cells), max(1, len(window.streams))
    if known and known.n_cells >= n_cells and known.n_streams >= n_streams:
        return known
    grown = BUCKET_CELLS
    while grown < n_cells:
        grown *= 2
    streams = max(n_streams, known.n_streams if known else 0)
    return WindowShape(min(grown, full.n_cells_full), streams, full.n_cells_full, full.n_streams_full)


def tight_window_shape(window: Window, full: WindowShape) -> WindowShape:
    """Room for a window alone: where there is no memory to grow into."""
    n_cells = min(bucket_cells(max(1, window.n_cells)), full.n_cells_full)
    return WindowShape(n_cells, max(1, len(window.streams)), full.n_cells_full, full.n_streams_full)


class WindowLayout:
    """Slot cells of one kind of layers, from step to step. A device's table of slot cells stays right until `stale_rows` says otherwise."""

    def __init__(self, cells: Cells, local: bool) -> None:
        self._cells = cells
        self._shape = cells.shape
        self._per_sequence = local or not cells.shape.unified
        self._local = local
        self._in_table: tuple[object, ...] | None = None  # what the tables on the devices were made for

    def window(self, sequences: Iterable[int]) -> Window:
        """What a step of these sequences needs, its own rows included."""
        used = tuple(dict.fromkeys(sequences))
        if not self._per_sequence:
            return Window((0,), bucket_cells(1 + max(self._cells.highest(s) for s in used)))
        longest = max(self._cells.length(s) for s in used)
        most = self._shape.n_window_cells if self._local else self._shape.n_stream_cells
        return Window(used, min(bucket_cells(longest), most))

    def slot_cells(self, window: Window, sequences: Sequence[int], positions: Sequence[int]) -> list[int]:
        """Where each of a step's rows lies in a slot."""
        if not self._per_sequence:
            return [self._cells.held(s)[p] for s, p in zip(sequences, positions, strict=True)]
        rank = {s: i * window.n_cells for i, s in enumerate(window.streams)}
        n = self._shape.n_window_cells
        if self._local:
            return [rank[s] + p % n for s, p in zip(sequences, positions, strict=True)]
        base = self._shape.n_stream_cells
        return [rank[s] + self._cells.held(s)[p] - s * base for s, p in zip(sequences, positions, strict=True)]

    def stale_rows(self, window: Window, sequences: Iterable[int]) -> dict[int, np.ndarray]:
        """Rows of the tables to write before this step: int32 slot cell of every position of a sequence; none in most steps."""
        key: tuple[object, ...] = (window.streams, window.n_cells if len(window.streams) > 1 else 0) if self._per_sequence else ("unified",)
        if key == self._in_table:
            return {}
        self._in_table = key
        if not self._per_sequence:
            return {s: self._cells.table_row(s, False) for s in range(self._shape.n_sequences)}
        return {s: self._slot_row(window, s) for s in window.streams}

    def _slot_row(self, window: Window, sequence: int) -> np.ndarray:
        """Slot cells of a sequence's positions in its stream; NO_CELL stays."""
        cells = self._cells.table_row(sequence, self._local)
        base = sequence * (self._shape.n_window_cells if self._local else self._shape.n_stream_cells)
        return np.where(cells == NO_CELL, cells, cells - base + window.streams.index(sequence) * window.n_cells).astype(np.int32)

    def forget_tables(self) -> None:
        """The host has changed which cells sequences hold: all rows are written again."""
        self._in_table = None
