"""Placement: where each device's piece of a tensor lies in memory. Integers only.

A meta buffer has a size and offsets of its own, which allocators use as if it were one buffer; under it lies one simple
buffer per device. Placement maps a meta offset to an offset in each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from numba_meta.errors import PlacementError

WHOLE_SHARE = 65536  # shares are counted in 1/65536


def round_up(n: int, alignment: int) -> int:
    """The least multiple of `alignment` that is not below `n`."""
    return -(-n // alignment) * alignment


def meta_alignment(alignments: Sequence[int]) -> int:
    """The alignment of a meta buffer: the largest of its simple buffers'. Each of theirs must divide it, else `PlacementError`."""
    largest = max(alignments, default=0)
    if largest < 1 or any(alignment < 1 or largest % alignment for alignment in alignments):
        raise PlacementError(f"alignments {', '.join(map(str, alignments))} of one meta buffer: expected each to divide the largest")
    return largest


@dataclass(frozen=True)
class Entry:
    """A tensor that is to lie in a meta buffer: its bytes as a whole, and what each device holds of it.

    `piece_bytes[j]` includes the padding of device j's own layout (a window of several streams pads each of them).
    """

    name: str
    n_bytes: int
    piece_bytes: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.n_bytes < 0 or min(self.piece_bytes, default=0) < 0 or max(self.piece_bytes, default=0) > self.n_bytes:
            raise PlacementError(
                f"{self.name} of {self.n_bytes} bytes with pieces of {self.piece_bytes}: expected 0 to {self.n_bytes} bytes per device"
            )


@dataclass(frozen=True)
class Placement:
    """A meta buffer of `n_bytes` over simple buffers, one share (in 1/65536) per device; made by a `place_*` function."""

    n_bytes: int
    alignment: int
    shares: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.n_bytes < 0 or self.alignment < 1 or not self.shares or min(self.shares) < 0 or max(self.shares) > WHOLE_SHARE:
            raise PlacementError(
                f"a meta buffer of {self.n_bytes} bytes, alignment {self.alignment}, shares {self.shares}: "
                f"expected sizes from 0, alignment from 1, and a share of 0 to {WHOLE_SHARE} per device"
            )

    @property
    def n_devices(self) -> int:
        """Simple buffers under the meta buffer."""
        return len(self.shares)

    def simple_bytes(self, device: int) -> int:
        """Bytes of a device's simple buffer: `round_up(ceil(size * share / 65536), alignment)`."""
        return self._scaled(self.n_bytes, device)

    def offset(self, meta_offset: int, device: int) -> int:
        """Where a tensor at `meta_offset` lies in a device's simple buffer; at `meta_offset` itself with the whole share."""
        return meta_offset if self.shares[device] == WHOLE_SHARE else self._scaled(meta_offset, device)

    def _scaled(self, n: int, device: int) -> int:
        return round_up(-(-n * self.shares[device] // WHOLE_SHARE), self.alignment)


def share(entries: Iterable[Entry], device: int, alignment: int) -> int:
    """The part of a meta buffer that `device` needs for any of `entries`, in 1/65536.

    `min(65536, ceil(65536 * max over e of (bytes_j(e) + A) / bytes(e)))`: the one alignment A per entry pays for the
    rounding of its offset. Entries of zero bytes are left out; 0 where none is left.
    """
    needed = (-(-WHOLE_SHARE * (entry.piece_bytes[device] + alignment) // entry.n_bytes) for entry in entries if entry.n_bytes)
    return min(WHOLE_SHARE, max(needed, default=0))


def choose_shares(entries: Sequence[Entry], n_devices: int, alignment: int) -> tuple[int, ...]:
    """The share of every device, over all entries that will ever lie in the buffer (the ring: over all layers)."""
    for entry in entries:
        if len(entry.piece_bytes) != n_devices:
            raise PlacementError(f"{entry.name} has pieces for {len(entry.piece_bytes)} devices: expected {n_devices}")
    return tuple(share(entries, device, alignment) for device in range(n_devices))


def place_by_share(n_bytes: int, entries: Sequence[Entry], n_devices: int, alignment: int) -> Placement:
    """A meta buffer of `n_bytes` whose simple buffers are as small as their shares of `entries` allow."""
    return Placement(n_bytes, alignment, choose_shares(entries, n_devices, alignment))


def place_whole(n_bytes: int, n_devices: int, alignment: int) -> Placement:
    """A meta buffer whose every simple buffer has its size: pieces lie at their meta offsets."""
    return Placement(n_bytes, alignment, (WHOLE_SHARE,) * n_devices)


@dataclass(frozen=True)
class Binding:
    """An entry that was bound: its meta offset, and per device the offset and bytes of its piece."""

    entry: Entry
    meta_offset: int
    offsets: tuple[int, ...]

    def stop(self, device: int) -> int:
        """The byte behind the device's piece."""
        return self.offsets[device] + self.entry.piece_bytes[device]


def bind(placement: Placement, entry: Entry, meta_offset: int, bound: Iterable[Binding] = ()) -> Binding:
    """Binds `entry` at `meta_offset`, checked against its buffers' ends and against every entry that is `bound`.

    Empty pieces take no room. A view lies inside its parent and is not bound. Raises `PlacementError`, which names the
    tensors, the device, the offsets and the bytes.
    """
    binding = _place(placement, entry, meta_offset)
    for other in bound:
        _check_apart(binding, other)
    return binding


def bind_all(placement: Placement, entries: Sequence[tuple[Entry, int]]) -> tuple[Binding, ...]:
    """Binds entries given with their meta offsets, all checked against each other; the result is in the order given."""
    bindings = tuple(_place(placement, entry, meta_offset) for entry, meta_offset in entries)
    for device in range(placement.n_devices):
        pieces = [binding for binding in bindings if binding.entry.piece_bytes[device]]
        pieces.sort(key=lambda binding: binding.offsets[device])
        for first, second in zip(pieces, pieces[1:], strict=False):
            _check_apart(second, first)
    return bindings


def _place(placement: Placement, entry: Entry, meta_offset: int) -> Binding:
    if len(entry.piece_bytes) != placement.n_devices:
        raise PlacementError(f"{entry.name} has pieces for {len(entry.piece_bytes)} devices: expected {placement.n_devices}")
    if meta_offset < 0 or meta_offset % placement.alignment or meta_offset + entry.n_bytes > placement.n_bytes:
        raise PlacementError(
            f"{entry.name} of {entry.n_bytes} bytes at meta offset {meta_offset}: "
            f"expected a multiple of {placement.alignment} and an end within the {placement.n_bytes} bytes of its meta buffer"
        )
    binding = Binding(entry, meta_offset, tuple(placement.offset(meta_offset, device) for device in range(placement.n_devices)))
    for device in range(placement.n_devices):
        if entry.piece_bytes[device] and binding.stop(device) > placement.simple_bytes(device):
            raise PlacementError(
                f"{entry.name} on device {device}: its {entry.piece_bytes[device]} bytes at offset {binding.offsets[device]} "
                f"end behind the buffer of {placement.simple_bytes(device)} bytes; take its share into account when the buffer is placed"
            )
    return binding


def _check_apart(binding: Binding, other: Binding) -> None:
    for device, (start, other_start) in enumerate(zip(binding.offsets, other.offsets, strict=True)):
        n_bytes, other_bytes = binding.entry.piece_bytes[device], other.entry.piece_bytes[device]
        if n_bytes and other_bytes and start < other.stop(device) and other_start < binding.stop(device):
            raise PlacementError(
                f"{binding.entry.name} overlaps {other.entry.name} on device {device}: {n_bytes} bytes at offset {start} "
                f"and {other_bytes} bytes at offset {other_start}; take both into account when the buffer is placed"
            )
