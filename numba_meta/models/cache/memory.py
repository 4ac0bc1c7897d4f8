"""Memory of a context's cache: on the devices (by share), in host memory, and the tables that say which cell holds a position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from numba_meta.devices.cpu import ALIGNMENT
from numba_meta.devices.host_memory import HostMemory
from numba_meta.devices.meta import MetaBuffer, MetaDevice
from numba_meta.memory.placement import round_up
from numba_meta.models.cache.cells import CachePlan, plan_cache
from numba_meta.split.state import SplitState
from numba_meta.tensor import Role, Tensor

if TYPE_CHECKING:
    from numba_meta.devices.cuda_driver import PinnedMemory

Indices = npt.NDArray[Any]
RawRows = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class _Place:
    """A cache tensor: each device's heads of all cells lie together, in the host at `host_offsets[j]`, or on the device (none of them)."""

    leaf: Tensor
    state: SplitState
    host_offsets: tuple[int, ...] = ()

    @property
    def cell_bytes(self) -> int:
        """Bytes of a whole cell."""
        return self.leaf.dtype.row_bytes(self.leaf.shape[0])

    def ranges(self, device: int) -> list[tuple[int, int]]:
        """The byte ranges of a cell that a device holds, in the order in which it stores them."""
        if not self.state.is_split:
            return [(0, self.cell_bytes)]
        dtype = self.leaf.dtype
        return [(dtype.row_bytes(start), dtype.row_bytes(stop)) for start, stop in self.state.ranges(device)]

    def piece_bytes(self, device: int) -> int:
        """Bytes of a cell that a device holds."""
        return sum(stop - start for start, stop in self.ranges(device))


class CacheMemory:
    """Where every cache tensor and cell table of a context lies. `state_of`: the policy; leaves: those of any of the context's graphs."""

    def __init__(self, device: MetaDevice, leaves: Sequence[Tensor], state_of: Callable[[Tensor], SplitState], is_pinned: bool) -> None:
        n_devices = len(device)
        kept = [leaf for leaf in leaves if leaf.role is Role.CACHE and leaf.name.startswith("cache_")]
        tables = [leaf for leaf in leaves if leaf.role is Role.CACHE and leaf not in kept]
        hosted = [leaf for leaf in leaves if leaf.role is Role.HOST]
        rows = [(leaf.name, leaf.dtype, leaf.shape[0], leaf.shape[1], state_of(leaf)) for leaf in kept]
        self.plan: CachePlan = plan_cache(rows, n_devices, ALIGNMENT)
        sizes = [self.plan.placement.simple_bytes(j) for j in range(n_devices)] if kept else [0] * n_devices
        resident = device.allocate(sizes, "the KV cache", sparse=True)
        self._addresses: list[dict[str, int]] = [
            {binding.entry.name: resident.addresses[j] + binding.offsets[j] for binding in self.plan.bindings} for j in range(n_devices)
        ]
        self._resident = resident
        self._places = {leaf.name: _Place(leaf, state_of(leaf)) for leaf in kept}
        self._tables: dict[str, tuple[MetaBuffer, Tensor]] = {}
        for leaf in tables:
            buffer = device.allocate([leaf.n_bytes] * n_devices, leaf.name, sparse=True)
            self._tables[leaf.name] = (buffer, leaf)
            for j, addresses in enumerate(self._addresses):
                addresses[leaf.name] = buffer.addresses[j]
        self.host: HostMemory | PinnedMemory | None = None
        if hosted:
            self._place_hosted(device, hosted, state_of, is_pinned)

    def _place_hosted(
        self, device: MetaDevice, leaves: Sequence[Tensor], state_of: Callable[[Tensor], SplitState], is_pinned: bool
    ) -> None:
        """Host memory for caches: all cells of a device's heads together, so that any range of cells is one run of bytes.

        Where all devices hold the same, it is there once.
        """
        end = 0
        for leaf in leaves:
            place = _Place(leaf, state_of(leaf))
            offsets = []
            for j in range(len(device)):
                if j == 0 or place.state.is_split:
                    offsets.append(end)
                    end = round_up(end + leaf.shape[1] * place.piece_bytes(j), ALIGNMENT)
                else:
                    offsets.append(offsets[0])
            self._places[leaf.name] = replace(place, host_offsets=tuple(offsets))
        self.host = device.host_memory(end, is_pinned)
        for leaf in leaves:
            for addresses, offset in zip(self._addresses, self._places[leaf.name].host_offsets, strict=True):
                addresses[leaf.name] = self.host.address + offset

    def address(self, device: int, name: str) -> int:
        """Where a device finds a cache tensor or table."""
        return self._addresses[device][name]

    # ---- whole cells, between steps: a step has ended when its run returns, so nothing is on its way to or from these bytes -------------

    def cell_bytes(self, name: str) -> int:
        """Bytes of a whole cell of a cache tensor, all heads together."""
        return self._places[name].cell_bytes

    def read_cells(self, name: str, cells: Indices) -> RawRows:
        """Cells of a cache tensor, uint8 `[len(cells), cell_bytes]`, put together from where each device's heads lie."""
        place = self._places[name]
        out = np.empty((len(cells), place.cell_bytes), np.uint8)
        for device in range(len(self._addresses) if place.state.is_split else 1):
            memory, at, first, n = self._span(place, device, cells)
            piece, column = memory.read(at, n * place.piece_bytes(device)).reshape(n, place.piece_bytes(device))[cells - first], 0
            for start, stop in place.ranges(device):
                out[:, start:stop] = piece[:, column : column + stop - start]
                column += stop - start
        return out

    def write_cells(self, name: str, cells: Indices, rows: RawRows) -> None:
        """Writes whole cells, uint8 `[len(cells), cell_bytes]`, wherever a part of them lies."""
        place = self._places[name]
        is_once = place.host_offsets and not place.state.is_split  # mirrored, in the host
        for device in range(1 if is_once else len(self._addresses)):
            ranges = place.ranges(device)
            if ranges and len(cells):
                memory, at, first, n = self._span(place, device, cells)
                with memory.edit(at, n * place.piece_bytes(device)) as held:
                    part = np.concatenate([rows[:, start:stop] for start, stop in ranges], axis=1)
                    held.reshape(n, place.piece_bytes(device))[cells - first] = part

    def _span(self, place: _Place, device: int, cells: Indices) -> tuple[Any, int, int, int]:
        """From the first to the last of some cells: (the memory that holds a device's heads, where they begin, first cell, how many)."""
        first, last = (int(cells.min()), int(cells.max())) if len(cells) else (0, -1)
        if place.host_offsets:
            memory: Any = self.host
            start = place.host_offsets[device]
        else:
            memory, start = self._resident.pieces[device], self.plan.offset(place.leaf.name, device)
        return memory, start + first * place.piece_bytes(device), first, last + 1 - first

    # ---- tables ------------------------------------------------------------------------------------------------------------------------

    def has_table(self, table: str) -> bool:
        """Whether some layer of the context reads this cell table."""
        return table in self._tables

    def write_table_row(self, table: str, sequence: int, cells: np.ndarray) -> None:
        """Sets the cells of positions 0.. of a sequence, on every device."""
        buffer, leaf = self._tables[table]
        for piece in buffer.pieces:
            with piece.edit(4 * sequence * leaf.shape[0], 4 * len(cells), keep=False) as row:
                row.view(np.int32)[:] = cells
