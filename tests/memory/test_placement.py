"""Placement by share: known vectors, and random layouts against a brute-force interval check."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from numba_meta.errors import PlacementError
from numba_meta.memory.placement import (
    WHOLE_SHARE,
    Entry,
    Placement,
    bind,
    bind_all,
    choose_shares,
    meta_alignment,
    place_by_share,
    place_whole,
    round_up,
    share,
)

KIB = 1024
HALVED = [Entry(f"{name}.{layer}", 4096 * KIB, (2048 * KIB, 2048 * KIB)) for layer in range(3) for name in ("k", "v")]
ON_FIRST = [Entry(f"{name}.3", 4096 * KIB, (4096 * KIB, 0)) for name in ("k", "v")]


def kib(n_bytes: int) -> int:
    """KiB as the page shows them, rounded up."""
    return -(-n_bytes // KIB)


def test_halved_layers() -> None:
    placement = place_by_share(8192 * KIB, HALVED, 2, 128)
    assert placement.shares == (32770, 32770)
    assert [kib(placement.simple_bytes(device)) for device in (0, 1)] == [4097, 4097]
    assert placement.simple_bytes(0) == 4_194_560
    assert placement.offset(4_194_304, 0) == 2_097_280


def test_one_layer_on_the_first_device() -> None:
    placement = place_by_share(8192 * KIB, HALVED + ON_FIRST, 2, 128)
    assert [kib(placement.simple_bytes(device)) for device in (0, 1)] == [8192, 4097]


@given(st.integers(1, 10**12), st.sampled_from([1, 32, 128, 4096]))
def test_one_mirrored_entry_is_whole_placement(n_bytes: int, alignment: int) -> None:
    entries = [*HALVED, Entry("mirrored", n_bytes, (n_bytes, n_bytes))]
    size = round_up(max(n_bytes, 8192 * KIB), alignment)
    assert place_by_share(size, entries, 2, alignment) == place_whole(size, 2, alignment)
    assert place_whole(size, 2, alignment).simple_bytes(1) == size
    assert place_whole(size, 2, alignment).offset(7 * alignment, 1) == 7 * alignment


def test_shares_are_exact_beyond_floats() -> None:
    # 65536 * bytes passes 2^53, where neighbouring integers are one float.
    n_bytes = 2**53 + 1
    half = Entry("half", 2 * n_bytes, (n_bytes - 1, n_bytes))
    assert share([half], 0, 1) == 32768
    assert share([half], 1, 1) == 32769
    placement = Placement(2**60, 1, (32769,))
    assert placement.offset(2**59 + 1, 0) == -(-(2**59 + 1) * 32769 // 65536)


def test_zero_bytes_are_left_out() -> None:
    assert share([Entry("none", 0, (0, 0))], 0, 128) == 0
    placement = place_by_share(0, [Entry("none", 0, (0, 0))], 2, 128)
    assert (placement.simple_bytes(0), placement.offset(0, 1)) == (0, 0)
    assert bind(placement, Entry("none", 0, (0, 0)), 0).offsets == (0, 0)


@st.composite
def aligned_layouts(draw: st.DrawFn) -> tuple[int, int, list[tuple[Entry, int]]]:
    """A meta size, an alignment, and entries at ascending aligned offsets with random pieces on 1 to 4 devices."""
    alignment = draw(st.sampled_from([1, 2, 16, 32, 128, 512]))
    n_devices = draw(st.integers(1, 4))
    sizes = st.one_of(st.integers(0, 1), st.integers(1, alignment), st.integers(0, 100_000))
    pieces = st.sampled_from(["none", "one", "half", "some", "all"])
    entries: list[tuple[Entry, int]] = []
    offset = 0
    for i in range(draw(st.integers(1, 8))):
        offset = round_up(offset, alignment) + alignment * draw(st.integers(0, 3))
        n_bytes = draw(sizes)
        by_kind = {"none": 0, "one": min(1, n_bytes), "half": n_bytes // 2, "some": draw(st.integers(0, n_bytes)), "all": n_bytes}
        # Mostly small shares, else one mirrored entry would make most layouts whole ones.
        held = tuple(by_kind[draw(pieces)] if draw(st.booleans()) else n_bytes // 3 for _ in range(n_devices))
        entries.append((Entry(f"entry {i}", n_bytes, held), offset))
        offset += n_bytes
    return offset + draw(st.integers(0, 1000)), alignment, entries


@given(aligned_layouts())
def test_pieces_never_overlap_nor_leave_their_buffers(case: tuple[int, int, list[tuple[Entry, int]]]) -> None:
    n_bytes, alignment, entries = case
    n_devices = len(entries[0][0].piece_bytes)
    placement = place_by_share(n_bytes, [entry for entry, _ in entries], n_devices, alignment)
    bindings = bind_all(placement, entries)
    one_by_one = [bind(placement, entry, offset, bindings[:i]) for i, (entry, offset) in enumerate(entries)]
    assert one_by_one == list(bindings)
    for device in range(n_devices):
        size = placement.simple_bytes(device)
        assert size % alignment == 0 and size <= round_up(n_bytes, alignment)
        taken: set[tuple[int, int]] = set()
        for binding in bindings:
            start, stop = binding.offsets[device], binding.stop(device)
            assert start % alignment == 0
            if start < stop:
                assert stop <= size
                assert all(stop <= other_start or other_stop <= start for other_start, other_stop in taken)
                taken.add((start, stop))


@given(aligned_layouts())
def test_shares_are_the_least_that_the_formula_allows(case: tuple[int, int, list[tuple[Entry, int]]]) -> None:
    _, alignment, entries = case
    for device in range(len(entries[0][0].piece_bytes)):
        found = share([entry for entry, _ in entries], device, alignment)
        fits = [found * entry.n_bytes >= 65536 * (entry.piece_bytes[device] + alignment) for entry, _ in entries if entry.n_bytes]
        less = [(found - 1) * e.n_bytes >= 65536 * (e.piece_bytes[device] + alignment) for e, _ in entries if e.n_bytes]
        assert 0 <= found <= WHOLE_SHARE
        assert found == WHOLE_SHARE or all(fits)
        assert not fits or not all(less)


def test_an_overlap_names_both_tensors_device_offsets_and_bytes() -> None:
    # Shares that were taken without looking at the pieces.
    placement = Placement(1024, 128, (WHOLE_SHARE, 16384))
    first = bind(placement, Entry("cache_k", 512, (512, 200)), 0)
    with pytest.raises(PlacementError) as caught:
        bind(placement, Entry("cache_v", 512, (512, 100)), 512, [first])
    message = str(caught.value)
    assert "cache_v overlaps cache_k on device 1: 100 bytes at offset 128 and 200 bytes at offset 0" in message
    assert "\n" not in message
    with pytest.raises(PlacementError, match="cache_v overlaps cache_k on device 1"):
        bind_all(placement, [(Entry("cache_v", 512, (512, 100)), 512), (Entry("cache_k", 512, (512, 200)), 0)])


def test_one_entry_inside_another_is_an_overlap() -> None:
    placement = place_whole(1024, 1, 128)
    large, small, last = Entry("large", 1024, (1024,)), Entry("small", 1, (1,)), Entry("last", 1, (1,))
    with pytest.raises(PlacementError, match="overlaps large"):
        bind_all(placement, [(large, 0), (small, 128), (last, 512)])
    with pytest.raises(PlacementError, match="small overlaps last"):
        bind(placement, small, 512, [bind(placement, last, 512)])


def test_empty_pieces_overlap_nothing() -> None:
    placement = place_by_share(1024, [Entry("a", 512, (256, 0)), Entry("b", 512, (0, 256))], 2, 128)
    a, b = bind_all(placement, [(Entry("a", 512, (256, 0)), 0), (Entry("b", 512, (0, 256)), 512)])
    assert a.stop(1) == a.offsets[1] == 0
    assert b.stop(0) == b.offsets[0]


@pytest.mark.parametrize(
    ("entry", "offset", "words"),
    [
        (Entry("far", 512, (512, 512)), 640, "far of 512 bytes at meta offset 640"),
        (Entry("odd", 512, (512, 512)), 64, "a multiple of 128"),
        (Entry("before", 512, (512, 512)), -128, "before"),
        (Entry("wide", 512, (512, 512)), 512, "wide on device 1: its 512 bytes at offset 256 end behind the buffer of 512 bytes"),
        (Entry("single", 512, (512,)), 0, "single has pieces for 1 devices: expected 2"),
    ],
)
def test_what_does_not_fit_its_buffer_is_an_error(entry: Entry, offset: int, words: str) -> None:
    with pytest.raises(PlacementError, match=words) as caught:
        bind(Placement(1024, 128, (WHOLE_SHARE, 32768)), entry, offset)
    assert "\n" not in str(caught.value)


def test_alignment_is_the_largest_and_all_divide_it() -> None:
    assert meta_alignment([32, 128, 64]) == 128
    assert meta_alignment([1]) == 1
    for alignments in ([], [48, 128], [0, 128], [-32]):
        with pytest.raises(PlacementError, match="divide the largest"):
            meta_alignment(alignments)


def test_impossible_values_are_errors() -> None:
    with pytest.raises(PlacementError, match="pieces of"):
        Entry("more", 10, (11,))
    with pytest.raises(PlacementError, match="pieces of"):
        Entry("less", 10, (-1,))
    with pytest.raises(PlacementError, match="a share of 0 to 65536 per device"):
        Placement(10, 1, (65537,))
    with pytest.raises(PlacementError, match="expected 3"):
        choose_shares([Entry("two", 10, (5, 5))], 3, 1)
