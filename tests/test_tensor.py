"""Shapes, strides, bytes, views and storages."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from numba_meta.dtypes import F16, F32, I64, Q4_0, Q6_K
from numba_meta.errors import ShapeError
from numba_meta.graph import Graph
from numba_meta.ops import layout
from numba_meta.tensor import Role, contiguous_strides, format_shape, pad_shape

SHAPES = st.lists(st.integers(0, 5), min_size=1, max_size=4)


def test_shapes_are_padded_and_printed_without_padding() -> None:
    assert pad_shape([7]) == (7, 1, 1, 1)
    assert pad_shape((2, 3, 4, 5)) == (2, 3, 4, 5)
    assert format_shape((576, 9, 4, 1)) == "[576, 9, 4]"
    assert format_shape((1, 1, 1, 1)) == "[1]"
    assert format_shape((3, 1, 2, 1)) == "[3, 1, 2]"


@pytest.mark.parametrize("shape", [(), (1, 2, 3, 4, 5), (4, -1)])
def test_impossible_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=r"^a shape has one to four extents of at least 0, not \(.*\)$"):
        pad_shape(shape)


@given(SHAPES)
def test_strides_are_those_of_a_contiguous_array(shape: list[int]) -> None:
    array = np.zeros(pad_shape([max(1, n) for n in shape]), np.float32, order="F")
    if 0 not in shape:
        expected = [4]
        for n in array.shape[:3]:
            expected.append(expected[-1] * n)
        assert contiguous_strides(F32, pad_shape(shape)) == tuple(expected)
    tensor = Graph().leaf("x", F32, shape, Role.INPUT)
    assert tensor.is_contiguous
    assert tensor.n_elements == math.prod(shape)
    assert tensor.n_bytes == 4 * math.prod(shape)


def test_blocks_count_as_a_whole() -> None:
    assert contiguous_strides(Q4_0, (64, 3, 2, 1)) == (18, 36, 108, 216)
    tensor = Graph().leaf("x", Q6_K, [512, 3], Role.WEIGHT)
    assert tensor.n_bytes == 3 * 2 * 210
    with pytest.raises(ShapeError, match=r"^a row of 48 elements does not fill blocks of q4_0 \(32 elements each\)$"):
        contiguous_strides(Q4_0, (48, 1, 1, 1))


@given(SHAPES.filter(lambda shape: 0 not in shape), st.permutations([0, 1, 2, 3]), st.data())
def test_bytes_reach_from_the_first_to_the_last_element(shape: list[int], axes: list[int], data: st.DataObject) -> None:
    graph = Graph()
    x = graph.leaf("x", F16, shape, Role.INPUT)
    axis = data.draw(st.integers(0, 3))
    start = data.draw(st.integers(0, x.shape[axis] - 1))
    stop = data.draw(st.integers(start + 1, x.shape[axis]))
    view = layout.permute(graph, layout.slice_axis(graph, x, axis, start, stop), axes)
    array = np.arange(x.n_elements, dtype=np.int64).reshape(x.shape, order="F")
    elements = np.take(array, range(start, stop), axis=axis)
    assert view.storage is x
    assert view.storage_offset == 2 * elements.min()
    assert view.n_bytes == 2 * (elements.max() - elements.min() + 1)
    assert view.n_elements == elements.size
    assert view.storage_offset + view.n_bytes <= x.n_bytes


def test_a_view_without_elements_has_no_bytes() -> None:
    graph = Graph()
    x = graph.leaf("x", F32, [4, 6], Role.INPUT)
    empty = layout.slice_axis(graph, x, 1, 3, 3)
    assert (empty.n_elements, empty.n_bytes) == (0, 0)


def test_views_of_views_share_the_storage_of_the_first() -> None:
    graph = Graph()
    x = graph.leaf("x", I64, [4, 6, 2], Role.CACHE)
    first = layout.slice_axis(graph, x, 1, 2, 6)
    second = layout.slice_axis(graph, first, 2, 1, 2)
    copy = layout.contiguous(graph, second)
    assert second.storage is x and second.role is Role.CACHE
    assert second.storage_offset == 2 * 32 + 6 * 32
    assert not first.is_contiguous
    assert copy.storage is copy and copy.role is Role.NODE and copy.storage_offset == 0


def test_tensors_print_what_they_are() -> None:
    graph = Graph("sketch")
    x = graph.leaf("x", F16, [4, 6], Role.WEIGHT)
    assert repr(x) == "<x: f16[4, 6] weight>"
    assert repr(layout.reshape(graph, x, [24], "flat")) == "<flat: f16[24] = reshape(x)>"
    assert repr(graph) == "<Graph sketch: 1 leaves, 1 nodes>"


def test_tensors_are_themselves_only() -> None:
    x, y = (Graph().leaf("x", F32, [4], Role.INPUT) for _ in range(2))
    assert x != y and len({x, y}) == 2
