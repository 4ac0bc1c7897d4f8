"""Operations on the cache of a context: clear, remove a range, copy a sequence, shift. The same bytes wherever the rows lie.

All of it runs between steps. A step has ended when its run returns, its deliveries and write-backs too, so whole cells are read and
written in place; what the devices know of cells (their tables) is written anew where it has changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from numba_meta.dtypes import DType
from numba_meta.errors import ContextFullError, UsageError, counted
from numba_meta.graph import Graph
from numba_meta.interrupts import held_back
from numba_meta.models.cache.cells import CellPairs, Cells, Moves
from numba_meta.models.cache.memory import CacheMemory
from numba_meta.models.cache.windows import WindowLayout
from numba_meta.quants import dequantize, quantize
from numba_meta.tensor import Tensor

RawRows = npt.NDArray[np.uint8]
_ELEMENTS_AT_ONCE = 1 << 22  # of rows that are moved: bounds the memory that an operation takes


@dataclass(frozen=True)
class Rotation:
    """How the first dims of each head (of `head_dim`) of a key are turned: angle = position * inverse_frequencies."""

    inverse_frequencies: tuple[float, ...]
    interleaved: bool
    head_dim: int


@dataclass(frozen=True)
class CacheTensor:
    """K or V of a layer: cells of `n_elements`. `rotation` is None where rows do not depend on their position (V)."""

    name: str
    dtype: DType
    n_elements: int
    rotation: Rotation | None

    @property
    def cell_bytes(self) -> int:
        """Bytes of a whole cell."""
        return self.dtype.row_bytes(self.n_elements)


@dataclass(frozen=True)
class CacheLayer:
    """The cache of a layer; `window` in positions, 0: it sees everything."""

    window: int
    k: CacheTensor
    v: CacheTensor


def find_cache_layers(graph: Graph) -> tuple[CacheLayer, ...]:
    """The cache of every attention in the order of a step's graph, with the rotation that this graph gives its keys."""
    rows = {node.storage: node.sources[1] for node in graph.nodes if node.op == "set_rows"}
    layers = []
    for node in graph.nodes:
        if node.op == "attention":
            k, v = (source.storage for source in node.sources[1:3])
            layers.append(CacheLayer(int(node.params["window"]), _tensor(k, _rotation_of(rows[k])), _tensor(v, None)))
    return tuple(layers)


def _tensor(storage: Tensor, rotation: Rotation | None) -> CacheTensor:
    leaf = storage.sources[0] if storage.op == "deliver" else storage  # a window is that of a cache in host memory
    return CacheTensor(leaf.name, leaf.dtype, leaf.shape[0], rotation)


def _rotation_of(rows: Tensor) -> Rotation | None:
    """The rope that rows `[head_dim * heads, t]` come from."""
    while rows.op in ("reshape", "permute"):
        rows = rows.sources[0]
    if rows.op != "rope":
        return None
    angles = rows.sources[1].params
    return Rotation(tuple(angles["inverse_frequencies"]), bool(rows.params["interleaved"]), rows.shape[0])


def rotate_keys(rows: RawRows, dtype: DType, rotation: Rotation, n_positions: int) -> RawRows:
    """Keys uint8 `[n, cell_bytes]` as they would be `n_positions` further on (negative: earlier), rounded to their type again.

    A rotation by p and then by d is one by p + d: for each pair (a, b) of dims, (a cos - b sin, a sin + b cos) of the angle of d. Pairs are
    (2i, 2i + 1) if interleaved, else (i, i + half).
    """
    values = dequantize(rows, dtype)
    heads = values.reshape(len(rows), -1, rotation.head_dim)
    angles = n_positions * np.asarray(rotation.inverse_frequencies, np.float64)
    cosines, sines = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    half = len(angles)
    first, second = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if rotation.interleaved else (slice(0, half), slice(half, 2 * half))
    a, b = heads[..., first].copy(), heads[..., second].copy()
    heads[..., first] = a * cosines - b * sines
    heads[..., second] = a * sines + b * cosines
    return quantize(values, dtype)


def choose_shift(length: int, keep: int) -> tuple[int, int]:
    """(keep, drop) that make room in a full sequence: half of what is not kept goes, the oldest first.

    Raises `ContextFullError` where all is kept.
    """
    keep = min(keep, length)
    if keep >= length:
        full = f"the context is full with {counted(length, 'token')}"
        raise ContextFullError(f"{full} and all of them are kept; keep fewer or use a larger context (ctx_size, --ctx-size)")
    return keep, max(1, (length - keep) // 2)


class CacheOperations:
    """Changes what sequences hold: their cells, the rows in them, and the tables on the devices."""

    def __init__(self, cells: Cells, memory: CacheMemory, layers: Sequence[CacheLayer], layouts: Iterable[WindowLayout]) -> None:
        self.cells = cells
        self.memory = memory
        self.layers = tuple(layers)
        self._layouts = tuple(layouts)

    def clear(self, sequence: int | None = None) -> None:
        """Forgets a sequence, or all."""
        if sequence is not None:
            self.check_sequence(sequence)
        with held_back():
            for each in range(self.cells.shape.n_sequences) if sequence is None else (sequence,):
                self.cells.truncate(each, 0)

    def remove(self, sequence: int, start: int, stop: int | None = None) -> None:
        """Forgets the positions start..stop (None: the end). Positions behind them stay: nothing attends to the hole.

        Raises `UsageError` for positions that are not there, and for an end that a sliding window cannot go back to.
        """
        self.check_sequence(sequence)
        length = self.cells.length(sequence)
        stop = length if stop is None else stop
        if not 0 <= start <= stop <= length:
            wanted = f"expected 0 <= start <= stop <= {length}"
            raise UsageError(f"positions {start} to {stop} of sequence {sequence} cannot be removed; {wanted}")
        with held_back():
            self.cells.remove(sequence, start, stop)
            self.write_tables([sequence])

    def copy(self, source: int, destination: int) -> None:
        """Makes `destination` equal to `source`, with cells of its own. Without room a `ContextFullError`; then nothing has changed."""
        self.check_sequence(source)
        self.check_sequence(destination)
        with held_back():
            moves = self.cells.copy(source, destination)
            self._move_all(moves, 0)
            self.write_tables([destination])

    def shift(self, sequence: int, keep: int, drop: int) -> None:
        """Forgets `drop` positions behind the first `keep` and moves all later ones down by `drop`; their keys are rotated back by as much.

        In a layer with a sliding window, kept positions that the window has lost stay lost. Raises `UsageError` for positions that are not
        there.
        """
        self.check_sequence(sequence)
        length = self.cells.length(sequence)
        if keep < 0 or drop < 0 or keep + drop > length:
            wanted = f"expected 0 or more, {length} in all at most"
            raise UsageError(f"sequence {sequence} has {counted(length, 'token')}: {keep} cannot be kept and {drop} dropped; {wanted}")
        with held_back():
            moves = self.cells.shift(sequence, keep, drop)
            self._move_all(moves, -drop)
            self.write_tables([sequence])

    def write_tables(self, sequences: Iterable[int]) -> None:
        """Writes anew, on every device, which cells these sequences hold; slot tables follow before the next step."""
        for table, local in (("cell_table", False), ("window_cell_table", True)):
            if self.memory.has_table(table):
                for sequence in sequences:
                    self.memory.write_table_row(table, sequence, self.cells.table_row(sequence, local))
        for layout in self._layouts:
            layout.forget_tables()

    def _move_all(self, moves: Moves, n_positions: int) -> None:
        """Where layers see everything, rows only move down or to another sequence: some at a time are safe. A window goes around."""
        for layer in self.layers:
            pairs, around = (moves.window_cells, True) if layer.window else (moves.cells, False)
            self._move(layer.k, pairs, n_positions, around)
            self._move(layer.v, pairs, 0, around)

    def _move(self, tensor: CacheTensor, pairs: CellPairs, n_positions: int, at_once: bool) -> None:
        """Moves rows from cell to cell, keys as they would be `n_positions` further on; `at_once`: all are read before any is written."""
        sources, destinations = pairs
        rotation = tensor.rotation if n_positions else None
        if rotation is None and np.array_equal(sources, destinations):
            return
        step = max(1, len(sources) if at_once else _ELEMENTS_AT_ONCE // tensor.n_elements)
        for at in range(0, len(sources), step):
            rows = self.memory.read_cells(tensor.name, sources[at : at + step])
            if rotation is not None:
                rows = rotate_keys(rows, tensor.dtype, rotation, n_positions)
            self.memory.write_cells(tensor.name, destinations[at : at + step], rows)

    def check_sequence(self, sequence: int) -> None:
        """Raises `UsageError` for a sequence that the context does not have."""
        n = self.cells.shape.n_sequences
        if not 0 <= sequence < n:
            raise UsageError(f"sequence {sequence} is impossible; expected 0 to {n - 1}")
