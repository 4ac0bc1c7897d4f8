"""Pieces of whole tensors: they go out and come back unchanged, plain or in segments, as arrays or as block rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from split.strategies import split_states

from numba_meta.dtypes import F32, Q4_0, Q8_0, DType
from numba_meta.errors import SplitError
from numba_meta.split.pieces import assemble, copy_piece_rows, piece_rows, put_piece, take_piece
from numba_meta.split.state import MIRRORED, PARTIAL, SplitState, split, split_segments


@st.composite
def arrays_with_states(draw: st.DrawFn) -> tuple[np.ndarray, SplitState]:
    state = draw(split_states())
    n_axes = draw(st.integers(state.axis + 1, 4))
    shape = [draw(st.integers(1, 3)) for _ in range(n_axes)]
    shape[state.axis] = state.total
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape[::-1])
    return array, state


@given(arrays_with_states())
def test_pieces_round_trip(case: tuple[np.ndarray, SplitState]) -> None:
    array, state = case
    n_devices = state.n_devices or 0
    pieces = [take_piece(array, state, device) for device in range(n_devices)]
    for device, piece in enumerate(pieces):
        assert piece.shape[::-1] == state.piece_shape(array.shape[::-1], device)
    assert np.array_equal(assemble(pieces, state), array)
    again = np.full_like(array, np.nan)
    for device in reversed(range(n_devices)):
        put_piece(again, state, device, pieces[device])
    assert np.array_equal(again, array)


def test_a_fused_tensor_is_cut_part_by_part() -> None:
    qkv = np.arange(15)[:, None] * np.ones(4)  # [row, n_embd]: 9 rows of Q, 3 of K, 3 of V
    state = split_segments(1, [(6, 3), (2, 1), (2, 1)])
    assert take_piece(qkv, state, 0)[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 9, 10, 12, 13]
    assert take_piece(qkv, state, 1)[:, 0].tolist() == [6, 7, 8, 11, 14]


def test_one_range_is_a_view() -> None:
    array = np.zeros((4, 6))
    assert np.shares_memory(take_piece(array, split(0, (2, 4)), 1), array)
    assert np.shares_memory(take_piece(array, MIRRORED, 1), array)


def test_mirrored_and_partial() -> None:
    array = np.array([1.0, 2.0])
    put_piece(array, MIRRORED, 0, np.array([3.0, 4.0]))
    assert array.tolist() == [3.0, 4.0]
    assert assemble([array, array], MIRRORED).tolist() == [3.0, 4.0]
    summed = assemble([array, np.array([10.0, 20.0]), np.array([0.5, 0.5])], PARTIAL)
    assert summed.tolist() == [13.5, 24.5]
    assert array.tolist() == [3.0, 4.0]
    with pytest.raises(SplitError, match="partial"):
        take_piece(array, PARTIAL, 0)


def test_misfits_are_errors() -> None:
    array = np.zeros((4, 6))
    state = split(0, (2, 4))
    with pytest.raises(SplitError, match=r"a piece of shape \(3, 4\) for device 0"):
        put_piece(array, state, 0, np.zeros((4, 3)))
    with pytest.raises(SplitError, match="expected 6 elements on axis 1"):
        take_piece(array, split(1, (2, 4)), 0)
    with pytest.raises(SplitError, match="axis 2 of a tensor with 2 axes"):
        take_piece(array, split(2, (1, 0)), 0)
    with pytest.raises(SplitError, match="1 pieces"):
        assemble([array], state)


@st.composite
def block_tensors(draw: st.DrawFn) -> tuple[np.ndarray, tuple[int, ...], DType, SplitState]:
    """Raw rows of random bytes, the tensor's shape and type, and a state; its cut axis counts blocks if it is axis 0."""
    dtype = draw(st.sampled_from([F32, Q4_0, Q8_0]))
    state = draw(split_states(max_extent=3))
    state = state.scaled(dtype.block_size) if state.axis == 0 else state
    shape = [draw(st.integers(1, 3)) * (dtype.block_size if axis == 0 else 1) for axis in range(draw(st.integers(state.axis + 1, 4)))]
    shape[state.axis] = state.total
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    raw = rng.integers(0, 256, (int(np.prod(shape[1:])), dtype.row_bytes(shape[0])), dtype=np.uint8)
    return raw, tuple(shape), dtype, state


@given(block_tensors())
def test_block_rows_are_the_pieces_of_their_blocks(case: tuple[np.ndarray, tuple[int, ...], DType, SplitState]) -> None:
    raw, shape, dtype, state = case
    in_blocks = state.divided(dtype.block_size) if state.axis == 0 else state
    blocks = raw.view(f"V{dtype.block_bytes}").reshape(*shape[:0:-1], shape[0] // dtype.block_size)
    n_bytes = 0
    for device in range(state.n_devices or 0):
        views = piece_rows(raw, shape, dtype, state, device)
        assert all(np.shares_memory(view, raw) for view in views if view.size)
        piece = state.piece_shape(shape, device)
        out = np.full((int(np.prod(piece[1:])), dtype.row_bytes(piece[0])), 0xA5, np.uint8)
        copy_piece_rows(raw, shape, dtype, state, device, out)
        assert out.tobytes() == np.ascontiguousarray(take_piece(blocks, in_blocks, device)).tobytes()
        n_bytes += out.nbytes
    assert n_bytes == raw.nbytes


def test_views_of_plain_cuts() -> None:
    raw = np.arange(6 * 36, dtype=np.uint8).reshape(6, 36)  # two blocks of q4_0 in each of 6 rows
    shape = (64, 3, 2)
    (by_bytes,) = piece_rows(raw, shape, Q4_0, split(0, (32, 32)), 1)
    assert by_bytes.shape == (6, 18) and by_bytes[0, 0] == 18
    by_rows = piece_rows(raw, shape, Q4_0, split(1, (2, 1)), 0)
    assert [view.shape for view in by_rows] == [(2, 36), (2, 36)] and by_rows[1][0, 0] == raw[3, 0]
    (by_matrix,) = piece_rows(raw, shape, Q4_0, split(2, (1, 1)), 1)
    assert by_matrix.shape == (3, 36) and by_matrix[0, 0] == raw[3, 0]
    assert piece_rows(raw, shape, Q4_0, split(1, (3, 0)), 1) == []
    (whole,) = piece_rows(raw, shape, Q4_0, MIRRORED, 1)
    assert whole is raw


def test_raw_misfits_are_errors() -> None:
    raw = np.zeros((6, 36), np.uint8)
    with pytest.raises(SplitError, match="expected multiples of 32"):
        piece_rows(raw, (64, 6), Q4_0, split(0, (40, 24)), 0)
    with pytest.raises(SplitError, match=r"raw rows \(6, 36\) of a tensor \[64, 5\] q4_0: expected \(5, 36\)"):
        piece_rows(raw, (64, 5), Q4_0, split(0, (32, 32)), 0)
    with pytest.raises(SplitError, match="partial"):
        piece_rows(raw, (64, 6), Q4_0, PARTIAL, 0)
    with pytest.raises(SplitError, match=r"memory \(6, 36\) for device 0"):
        copy_piece_rows(raw, (64, 6), Q4_0, split(0, (32, 32)), 0, np.zeros((6, 36), np.uint8))
