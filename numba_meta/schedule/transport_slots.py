"""What a delivery is and how it lies in a slot of the ring. Pure; integers only.

A slot holds one layer's window: K of all streams, then V, each stream's window padded to the alignment. Every device holds its share.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from numba_meta.errors import PlacementError
from numba_meta.memory.placement import WHOLE_SHARE, Binding, Entry, Placement, bind_all, choose_shares, round_up

BUCKET_CELLS = 256


def bucket_cells(n_cells: int, bucket: int = BUCKET_CELLS) -> int:
    """Cells that a delivery of a window of `n_cells` copies: the next multiple of `bucket`, never a power of two."""
    return round_up(n_cells, bucket)


def window_cells(window: int, ubatch: int) -> int:
    """Cells of one sequence that a sliding-window layer stores and delivers at most: `round_up(window + ubatch, 256)`."""
    return round_up(window + ubatch, BUCKET_CELLS)


def stable_prefix(written_cells: Sequence[Iterable[int]], n_cells: int) -> tuple[int, ...]:
    """Per stream, the leading cells of its window of `n_cells` that a graph does not write: those below the lowest written one.

    `written_cells[s]` are the cells that this graph writes in stream s, in any order; a stream without any is stable as a whole.
    """
    return tuple(min(n_cells, min(cells, default=n_cells)) for cells in written_cells)


class Producer(Enum):
    """Who wrote what a delivery copies. Only the host's and the consumer's own writes can be ordered by the consumer's events."""

    HOST = "the host"
    CONSUMER = "its consumer"
    OTHER = "another device"


@dataclass(frozen=True)
class Delivery:
    """One layer's K and V window, to be copied from the host to the devices before split `consumer` (counted from 0) reads it.

    `k_cell_bytes` is a whole cell (one token, all heads); `k_piece_bytes[j]` what device j holds of it: all of it where K is mirrored,
    0 where j has no heads. `n_cells_now` is this graph's window (a multiple of 256, or all of `n_cells_full`) in each of `n_streams`;
    the largest window that can come is `n_cells_full` in each of `n_streams_full` (0: `n_streams`). Raises `PlacementError`.
    """

    layer: int
    name: str
    consumer: int
    k_cell_bytes: int
    v_cell_bytes: int
    k_piece_bytes: tuple[int, ...]
    v_piece_bytes: tuple[int, ...]
    n_cells_now: int
    n_cells_full: int
    n_streams: int = 1
    n_streams_full: int = 0
    late_rows: int = 0  # rows of all streams that are copied after the step's store: those without write-through
    is_marked: bool = True  # a persistent host input that is marked for transport
    is_pinned: bool = True  # the host memory is pinned
    producer: Producer = Producer.HOST
    is_read_later: bool = False  # a later split reads the same copy

    def __post_init__(self) -> None:
        whole, full = self.n_cells_now % BUCKET_CELLS == 0, self.n_cells_now == self.n_cells_full
        if not 1 <= self.n_cells_now <= self.n_cells_full or not (whole or full):
            raise PlacementError(
                f"{self.name} delivers {self.n_cells_now} of {self.n_cells_full} cells: expected a multiple of {BUCKET_CELLS} or all"
            )
        if not 1 <= self.n_streams <= (self.n_streams_full or self.n_streams):
            raise PlacementError(f"{self.name} delivers {self.n_streams} of {self.n_streams_full} streams: expected 1 to all of them")
        if len(self.k_piece_bytes) != len(self.v_piece_bytes) or not self.k_piece_bytes:
            raise PlacementError(
                f"{self.name} has K on {len(self.k_piece_bytes)} devices and V on {len(self.v_piece_bytes)}: expected both on the same"
            )
        if min(self.k_cell_bytes, self.v_cell_bytes, self.late_rows) < 0:
            raise PlacementError(f"{self.name} has a negative number of bytes or rows; expected 0 or more")

    @property
    def n_devices(self) -> int:
        """Devices that it is delivered to, those with nothing to receive counted."""
        return len(self.k_piece_bytes)

    def window_bytes(self, device: int) -> int:
        """Bytes that travel to a device in one step, without padding."""
        return self.n_streams * self.n_cells_now * self.cell_bytes(device)

    def cell_bytes(self, device: int) -> int:
        """Bytes of a cell, K and V, that a device holds."""
        return self.k_piece_bytes[device] + self.v_piece_bytes[device]


def stream_bytes(cell_bytes: int, n_cells: int, alignment: int) -> int:
    """Bytes from one stream's window to the next one's in a slot. `cell_bytes`: of the device's piece, or whole for meta offsets."""
    return round_up(cell_bytes * n_cells, alignment)


def slot_entries(delivery: Delivery, alignment: int) -> tuple[tuple[Entry, int], tuple[Entry, int]]:
    """K and V of this graph's window as entries of a slot, with their meta offsets: K at 0, V right behind it."""
    return _entries(delivery, delivery.n_cells_now, delivery.n_streams, alignment)


def full_slot_entries(delivery: Delivery, alignment: int) -> tuple[tuple[Entry, int], tuple[Entry, int]]:
    """The same at the full context."""
    return _entries(delivery, delivery.n_cells_full, delivery.n_streams_full or delivery.n_streams, alignment)


def slot_need(deliveries: Iterable[Delivery], alignment: int, full: bool = False) -> int:
    """Meta bytes of a slot that can hold any of the deliveries: at this graph's window, or at the full context."""
    entries_of = full_slot_entries if full else slot_entries
    return max((sum(entry.n_bytes for entry, _ in entries_of(delivery, alignment)) for delivery in deliveries), default=0)


def choose_ring_shares(deliveries: Sequence[Delivery], n_devices: int, alignment: int) -> tuple[int, ...]:
    """The share of every device, taken once over all layers, good for every window that can come.

    Padded pieces are multiples of the alignment, so a share that is at least piece/whole of K and V keeps them apart in a slot of any
    size. That ratio is the cells' own wherever nothing is padded; else it repeats after `lcm(alignment, 256)` cells and is worst below.
    """
    entries = dict.fromkeys(
        (entry.n_bytes, entry.piece_bytes)
        for delivery in deliveries
        for n_cells in _windows(delivery.n_cells_full, alignment)
        for entry, _ in _entries(delivery, n_cells, delivery.n_streams_full or delivery.n_streams, alignment)
    )
    return choose_shares([Entry("window", n_bytes, pieces) for n_bytes, pieces in entries], n_devices, alignment)


def _windows(n_cells_full: int, alignment: int) -> list[int]:
    period = math.lcm(alignment, BUCKET_CELLS)
    if period == BUCKET_CELLS and n_cells_full % BUCKET_CELLS == 0:
        return [n_cells_full]
    return [n_cells_full, *range(BUCKET_CELLS, min(n_cells_full, period) + 1, BUCKET_CELLS)]


def _entries(delivery: Delivery, n_cells: int, n_streams: int, alignment: int) -> tuple[tuple[Entry, int], tuple[Entry, int]]:
    def entry(part: str, cell_bytes: int, piece_bytes: tuple[int, ...]) -> Entry:
        pieces = tuple(n_streams * stream_bytes(n_bytes, n_cells, alignment) for n_bytes in piece_bytes)
        return Entry(f"{delivery.name}.{part}", n_streams * stream_bytes(cell_bytes, n_cells, alignment), pieces)

    k = entry("k", delivery.k_cell_bytes, delivery.k_piece_bytes)
    return (k, 0), (entry("v", delivery.v_cell_bytes, delivery.v_piece_bytes), k.n_bytes)


@dataclass(frozen=True)
class Ring:
    """`n_slots` slots of `slot_bytes` meta bytes, each placed by share; a device's slots lie one after the other in one buffer."""

    n_slots: int
    slot_bytes: int
    shares: tuple[int, ...]
    alignment: int

    @property
    def placement(self) -> Placement:
        """Of one slot."""
        return Placement(self.slot_bytes, self.alignment, self.shares)

    @property
    def ring_bytes(self) -> tuple[int, ...]:
        """Bytes that each device allocates."""
        placement = self.placement
        return tuple(self.n_slots * placement.simple_bytes(device) for device in range(len(self.shares)))

    def slot_offset(self, slot: int, device: int) -> int:
        """Where a slot begins in a device's buffer."""
        return slot * self.placement.simple_bytes(device)

    def bind(self, delivery: Delivery) -> tuple[Binding, ...]:
        """K and V of a delivery in a slot: per device the offset from the slot's begin. Raises `PlacementError` where they do not fit."""
        return bind_all(self.placement, slot_entries(delivery, self.alignment))


def largest_slot(n_slots: int, shares: Sequence[int], caps: Sequence[int | None], alignment: int) -> int | None:
    """The largest slot (meta bytes, aligned) whose ring stays within `caps[j]` bytes on every device; None: as large as you like."""
    limits = []
    for share, cap in zip(shares, caps, strict=True):
        if cap is not None and share:
            per_slot = max(0, cap) // n_slots // alignment * alignment
            limits.append(per_slot * WHOLE_SHARE // share // alignment * alignment)
    return min(limits, default=None)
