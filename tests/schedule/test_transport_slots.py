"""Windows, slots and the ring: how a delivery lies in a slot."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule.transport_cases import assert_apart, delivery, models

from numba_meta.errors import PlacementError
from numba_meta.memory.placement import WHOLE_SHARE
from numba_meta.schedule.transport_slots import (
    Delivery,
    Ring,
    bucket_cells,
    choose_ring_shares,
    full_slot_entries,
    largest_slot,
    slot_entries,
    stable_prefix,
    window_cells,
)

# ---- windows ---------------------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 10**6))
def test_buckets_are_linear(n_cells: int) -> None:
    assert bucket_cells(n_cells) % 256 == 0
    assert n_cells <= bucket_cells(n_cells) < n_cells + 256


def test_windows() -> None:
    assert bucket_cells(4097) == 4352  # a power of two would be 8192
    assert (window_cells(512, 64), window_cells(512, 256), window_cells(1024, 512)) == (768, 768, 1536)


def test_stable_prefix_ends_at_the_lowest_written_cell() -> None:
    # Appended; into a hole of a unified cache; nothing; everything; past the window.
    assert stable_prefix([[100], [700, 3, 701], [], range(0, 64), [600]], 512) == (100, 3, 512, 0, 512)


@given(st.lists(st.sets(st.integers(0, 600)), max_size=4), st.integers(0, 512))
def test_stable_prefix_holds_no_written_cell_and_could_not_be_longer(written: list[set[int]], n_cells: int) -> None:
    for cells, prefix in zip(written, stable_prefix(written, n_cells), strict=True):
        assert not cells & set(range(prefix))
        assert prefix == n_cells or prefix in cells


# ---- slots and shares -----------------------------------------------------------------------------------------------------------------


@given(models())
def test_shares_do_not_depend_on_the_graph(model: tuple[int, int, list[Delivery]]) -> None:
    n_devices, alignment, layers = model
    now = choose_ring_shares(layers, n_devices, alignment)
    assert now == choose_ring_shares([replace(one, n_cells_now=one.n_cells_full, n_streams=1) for one in layers], n_devices, alignment)


def test_shares_hold_windows_that_padding_makes_less_even() -> None:
    # 256 cells of 100 B are padded from 25,600 to 28,672 B, their half from 12,800 to 16,384; 4,096 cells need no padding.
    layer = delivery(100, (1, 1), 256, 4096)
    (share, _) = choose_ring_shares([layer], 2, 4096)
    assert share == -(-WHOLE_SHARE * (16384 + 4096) // 28672)
    assert_apart(Ring(3, 57344, (share, share), 4096), layer)
    # An alignment that divides 256 pads no bucket: the full context alone decides.
    assert choose_ring_shares([layer], 2, 128)[0] == -(-WHOLE_SHARE * (204800 + 128) // 409600)


@given(
    st.integers(1, 6),
    st.lists(st.integers(1, WHOLE_SHARE), min_size=1, max_size=4),
    st.integers(0, 10**7),
    st.sampled_from([1, 64, 384, 512]),
)
def test_largest_slot_is_within_its_caps_and_the_next_one_is_not(n_slots: int, shares: list[int], cap: int, alignment: int) -> None:
    n_bytes = largest_slot(n_slots, shares, [cap] * len(shares), alignment)
    assert n_bytes is not None and n_bytes % alignment == 0
    assert max(Ring(n_slots, n_bytes, tuple(shares), alignment).ring_bytes) <= cap
    assert max(Ring(n_slots, n_bytes + alignment, tuple(shares), alignment).ring_bytes) > cap


def test_streams_lie_packed_and_padded_in_a_slot() -> None:
    one = Delivery(0, "layer.0", 0, 40, 80, (40, 0), (40, 40), 100, 100, n_streams=2, n_streams_full=3)
    (k, k_at), (v, v_at) = slot_entries(one, 128)
    assert (k.n_bytes, k.piece_bytes, k_at) == (2 * 4096, (2 * 4096, 0), 0)  # 4,000 bytes a stream
    assert (v.n_bytes, v.piece_bytes, v_at) == (2 * 8064, (2 * 4096, 2 * 4096), 2 * 4096)  # 8,000 and 4,000
    assert full_slot_entries(one, 128)[0][0].n_bytes == 3 * 4096


@pytest.mark.parametrize(
    "how",
    [{"n_cells": 100, "n_full": 200}, {"n_cells": 512, "n_full": 256}, {"n_cells": 256, "n_streams": 3, "n_streams_full": 2}],
)
def test_a_delivery_that_cannot_be(how: dict[str, int]) -> None:
    with pytest.raises(PlacementError, match="layer.0.*expected"):
        delivery(64, (1,), **how)
