"""Kernel calls as data: which kernel with which arguments, in which order. Places stand for addresses, which are not known yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numba_meta.ops.lowering import Constant, Kernel, Scratch
from numba_meta.tensor import Tensor


@dataclass(frozen=True)
class Peer:
    """A tensor of another device's graph, which a collective reads."""

    device: int
    tensor: Tensor


@dataclass(eq=False)
class AddressList:
    """The addresses of several devices' tensors, as an int64 array that is filled when the step is bound."""

    peers: tuple[Peer, ...]


Place = Tensor | Scratch | Constant | Peer | AddressList


@dataclass(frozen=True)
class Offset:
    """An address some bytes into a place."""

    place: Place
    n_bytes: int


def storage_of(place: Place | Offset) -> Place:
    """The place that owns the bytes."""
    if isinstance(place, Offset):
        return storage_of(place.place)
    return place.storage if isinstance(place, Tensor) else place


@dataclass(frozen=True)
class EventName:
    """A point in one stream of a device that another stream of it waits for; once a step."""

    name: str


@dataclass(frozen=True)
class Call:
    """One kernel with its arguments. Places stand for their addresses. `meets`: all devices wait for each other here.

    `records`, `waits`: nothing is computed, an event is recorded or waited for. `max_rows`: how many rows can be live at most, where the
    kernel reads how many are (`n_rows`).
    """

    kernel: Kernel | None  # None: only a meeting or an event
    arguments: Mapping[str, Any] = field(default_factory=dict)
    reads: tuple[Place, ...] = ()
    writes: tuple[Place, ...] = ()
    meets: bool = False
    records: EventName | None = None
    waits: EventName | None = None
    node: str = ""
    max_rows: int = 1
