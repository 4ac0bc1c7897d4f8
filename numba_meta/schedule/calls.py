"""Kernel calls as data: which kernel with which arguments, in which order. Places stand for addresses, which are not known yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from numba_meta.lowering import Constant, Kernel, Scratch
from numba_meta.tensor import Tensor

if TYPE_CHECKING:
    from numba_meta.kernels import KernelSet


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


class DeviceCalls(Protocol):
    """The calls of one device as they are collected, for those who lower what devices do together: ranks, deliveries."""

    device: int
    calls: list[Call]
    kernels: KernelSet

    def call(self, kernel: Kernel, reads: Sequence[Place], writes: Sequence[Place], **arguments: Any) -> None:
        """Adds a call."""

    def count(self, tensor: Tensor) -> Place:
        """Where a kernel finds how many rows of a tensor are live (int64)."""

    def constant(self, name: str, data: np.ndarray) -> Constant:
        """Data that calls read; the same name gives the same constant."""

    def scratch(self, name: str, n_bytes: int) -> Scratch:
        """Memory for this node's calls alone."""

    def row_extent(self, tensor: Tensor) -> tuple[int, int]:
        """(elements of one row, bytes from row to row)."""

    def whole(self, tensor: Tensor) -> Tensor:
        """The tensor of the whole graph that this device's tensor is a piece of."""

    def is_mirrored(self, tensor: Tensor) -> bool:
        """Whether all devices of this process hold the whole of this tensor."""

    def is_used(self, tensor: Tensor) -> bool:
        """Whether this device computes with a tensor, or the host reads it here."""

    def meet(self) -> None:
        """All devices of this process wait for each other."""

    def peers(self, own: Tensor) -> tuple[Peer, ...]:
        """The tensors of all devices of this process that belong to the same tensor of the whole graph."""

    def add_up(self, parts: AddressList, out: Place, n: int, stride: int, rows: Place) -> None:
        """The sum of the peers' tensors."""

    def join_columns(self, peers: tuple[Peer, ...], out: Place, out_stride: int, rows: Place, name: str) -> None:
        """Rows of the peers' pieces side by side."""
