"""Taking a device's piece out of a whole tensor and putting it back, by split state.

Arrays are numpy ones over the axes of GGUF files in reverse: axis 0, the fastest-varying one, is the last numpy axis.
Weights come as raw block rows, uint8 `[n_rows, row_bytes]`, as a file holds them; there a piece is a list of views, or of spans to read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from numba_meta.dtypes import DType
from numba_meta.errors import SplitError
from numba_meta.split.state import SplitState

Array = npt.NDArray[Any]
RawRows = npt.NDArray[np.uint8]


def take_piece(array: Array, state: SplitState, device: int) -> Array:
    """What `device` holds of a whole tensor: a view where that is one range (or all, if mirrored), else a copy.

    Raises `SplitError` for a `PARTIAL` state: summands cannot be told from their sum.
    """
    views = [array[index] for index in _piece_indices(array, state, device)]
    return views[0] if len(views) == 1 else np.concatenate(views, axis=_numpy_axis(array, state))


def put_piece(array: Array, state: SplitState, device: int, piece: Array) -> None:
    """Writes a device's piece, of the shape that `take_piece` gives, to its places in the whole tensor `array`."""
    indices = _piece_indices(array, state, device)
    expected = state.piece_shape(array.shape[::-1], device)[::-1]
    if piece.shape != expected:
        raise SplitError(
            f"a piece of shape {piece.shape[::-1]} for device {device} of a tensor split on {state}: expected shape {expected[::-1]}"
        )
    start = 0
    for index in indices:
        target = array[index]
        if state.is_split:
            axis = _numpy_axis(array, state)
            stop = start + target.shape[axis]
            target[...] = piece[(slice(None),) * axis + (slice(start, stop),)]
            start = stop
        else:
            target[...] = piece


def assemble(pieces: Sequence[Array], state: SplitState) -> Array:
    """The whole tensor from one piece per device: joined by ranges, the first one if mirrored, summed in device order if partial."""
    if not pieces or (state.is_split and len(pieces) != state.n_devices):
        raise SplitError(f"{len(pieces)} pieces of a tensor split on {state}: expected one per device")
    if state.is_mirrored:
        return pieces[0].copy()
    whole: Array
    if state.is_partial:
        whole = pieces[0].copy()
        for piece in pieces[1:]:
            whole = whole + piece
        return whole
    axis = _numpy_axis(pieces[0], state)
    shape = (*pieces[0].shape[:axis], state.total, *pieces[0].shape[axis + 1 :])
    whole = np.empty(shape, pieces[0].dtype)
    for device, piece in enumerate(pieces):
        put_piece(whole, state, device, piece)
    return whole


@dataclass(frozen=True)
class PieceSpans:
    """Which rows of a tensor's block rows a device holds, and which bytes of each: joined in this order they are its piece."""

    rows: tuple[tuple[int, int], ...]
    columns: tuple[tuple[int, int], ...]  # in bytes

    def rows_between(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The rows of the tensor that are the rows start..stop of the piece."""
        at = 0
        for first, last in self.rows:
            begin, end = max(start, at), min(stop, at + last - first)
            if begin < end:
                yield first + begin - at, first + end - at
            at += last - first

    def joined(self, rows: RawRows) -> RawRows:
        """The piece's bytes of whole rows: a view where they are one range, else a copy."""
        parts = [rows[:, start:stop] for start, stop in self.columns]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def piece_spans(shape: Sequence[int], dtype: DType, state: SplitState, device: int) -> PieceSpans:
    """What `device` holds of a tensor stored as block rows `[n_rows, row_bytes]`. Raises `SplitError` where the state does not fit."""
    state.validate(shape, dtype)
    n_rows, row_bytes = int(np.prod(shape[1:], dtype=np.int64)), dtype.row_bytes(shape[0])
    if state.is_partial:
        raise SplitError("a piece of a partial tensor: it has no piece in memory before it is computed; expected mirrored or an axis")
    if state.is_mirrored:
        return PieceSpans(((0, n_rows),), ((0, row_bytes),))
    if state.axis == 0:
        columns = tuple((dtype.row_bytes(start), dtype.row_bytes(stop)) for start, stop in state.ranges(device))
        return PieceSpans(((0, n_rows),), columns)
    # A step of the cut axis is `inner` rows; everything outside of it repeats the ranges.
    inner = int(np.prod(shape[1 : state.axis], dtype=np.int64))
    period = inner * (shape[state.axis] if state.axis < len(shape) else 1)
    ranges = state.ranges(device)
    rows = [(base + start * inner, base + stop * inner) for base in range(0, n_rows, period or 1) for start, stop in ranges]
    return PieceSpans(tuple(rows), ((0, row_bytes),))


def piece_rows(raw: RawRows, shape: Sequence[int], dtype: DType, state: SplitState, device: int) -> list[RawRows]:
    """What `device` holds of a tensor stored as block rows, as views `[rows, bytes]` of `raw`: nothing is copied.

    The views are to be joined along their bytes (numpy axis 1) for a cut on axis 0, along their rows (numpy axis 0)
    otherwise; `copy_piece_rows` does it. No views where the device holds nothing. `raw` has `row_bytes` of axis 0 in
    each row, and a row for every element of the other axes. Raises `SplitError` where the state does not fit.
    """
    spans = piece_spans(shape, dtype, state, device)
    n_rows = int(np.prod(shape[1:], dtype=np.int64))
    if raw.shape != (n_rows, dtype.row_bytes(shape[0])):
        raise SplitError(f"raw rows {raw.shape} of a tensor {list(shape)} {dtype}: expected {(n_rows, dtype.row_bytes(shape[0]))}")
    if state.is_mirrored:
        return [raw]
    return [raw[start:stop, begin:end] for start, stop in spans.rows for begin, end in spans.columns]


def copy_piece_rows(raw: RawRows, shape: Sequence[int], dtype: DType, state: SplitState, device: int, out: RawRows) -> None:
    """Copies `piece_rows` into `out`, uint8 `[rows of the piece, row bytes of the piece]`, each byte once."""
    views = piece_rows(raw, shape, dtype, state, device)
    piece = state.piece_shape(shape, device)
    expected = (int(np.prod(piece[1:], dtype=np.int64)), dtype.row_bytes(piece[0]))
    if out.shape != expected:
        raise SplitError(f"memory {out.shape} for device {device} of a tensor split on {state}: expected {expected} rows and bytes")
    start = 0
    for view in views:
        if state.axis == 0:
            out[:, start : start + view.shape[1]] = view
            start += view.shape[1]
        else:
            out[start : start + view.shape[0]] = view
            start += view.shape[0]


def _numpy_axis(array: Array, state: SplitState) -> int:
    if state.axis >= array.ndim:
        raise SplitError(f"a split on axis {state.axis} of a tensor with {array.ndim} axes ({array.shape[::-1]})")
    return array.ndim - 1 - state.axis


def _piece_indices(array: Array, state: SplitState, device: int) -> list[tuple[slice, ...]]:
    """Indices of the ranges that a device holds, in the order in which it stores them; one empty range if it holds nothing."""
    if state.is_partial:
        raise SplitError("a piece of a partial tensor: summands cannot be told from their sum; expected mirrored or an axis")
    if state.is_mirrored:
        return [()]
    axis = _numpy_axis(array, state)
    if array.shape[axis] != state.total:
        raise SplitError(f"a tensor {array.shape[::-1]} split on {state}: expected {state.total} elements on axis {state.axis}")
    return [(slice(None),) * axis + (slice(start, stop),) for start, stop in state.ranges(device) or ((0, 0),)]
