"""Memory of a context's cache: on the devices (by share), in host memory, and the tables that say which cell holds a position."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from numba_meta.devices.cpu import ALIGNMENT
from numba_meta.devices.meta import MetaBuffer, MetaDevice
from numba_meta.errors import OutOfMemoryError
from numba_meta.memory.placement import round_up
from numba_meta.models.kv_cache import CachePlan, plan_cache
from numba_meta.split.state import SplitState
from numba_meta.tensor import Role, Tensor

Indices = npt.NDArray[Any]
RawRows = npt.NDArray[np.uint8]


class HostMemory:
    """Zeroed host memory whose pages are taken as they are filled: `data` uint8 `[n_bytes]`, page-aligned.

    `is_pinned`: whether devices can copy from it while they compute. CPU devices reach all memory; a simulated one may refuse.
    """

    def __init__(self, n_bytes: int, is_pinned: bool) -> None:
        self.is_pinned = is_pinned
        try:
            self._pages = np.frombuffer(mmap.mmap(-1, max(1, n_bytes)), np.uint8)  # never empty: no bytes have no address
        except (OSError, OverflowError, ValueError):
            what = f"a KV cache of {n_bytes} bytes is more than this machine gives"
            raise OutOfMemoryError(f"the host: {what}; use a smaller context") from None
        self.data = self._pages[:n_bytes]

    @property
    def address(self) -> int:
        return int(self._pages.ctypes.data)


@dataclass(frozen=True)
class _Place:
    """A cache tensor: in the host whole cells from `host_offset` on; on the devices (None) each its piece of every cell."""

    leaf: Tensor
    state: SplitState
    host_offset: int | None = None

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
        self.host: HostMemory | None = None
        if hosted:
            self._place_hosted(hosted, state_of, is_pinned)

    def _place_hosted(self, leaves: Sequence[Tensor], state_of: Callable[[Tensor], SplitState], is_pinned: bool) -> None:
        """Whole cells in host memory; a device's address is that of its heads in the first cell."""
        offsets, end = {}, 0
        for leaf in leaves:
            offsets[leaf.name] = end
            end = round_up(end + leaf.n_bytes, ALIGNMENT)
        self.host = HostMemory(end, is_pinned)
        self._places |= {leaf.name: _Place(leaf, state_of(leaf), offsets[leaf.name]) for leaf in leaves}
        for j, addresses in enumerate(self._addresses):
            for leaf in leaves:
                state = state_of(leaf)
                ranges = state.ranges(j) if state.is_split else ()
                start = leaf.dtype.row_bytes(ranges[0][0]) if ranges else 0
                addresses[leaf.name] = self.host.address + offsets[leaf.name] + start

    def address(self, device: int, name: str) -> int:
        """Where a device finds a cache tensor or table."""
        return self._addresses[device][name]

    # ---- whole cells, between steps: a step has ended when its run returns, so nothing is on its way to or from these bytes -------------

    def cell_bytes(self, name: str) -> int:
        """Bytes of a whole cell of a cache tensor, all heads together."""
        return self._places[name].cell_bytes

    def read_cells(self, name: str, cells: Indices) -> RawRows:
        """Cells of a cache tensor, uint8 `[len(cells), cell_bytes]`, put together from the devices that hold their heads."""
        place = self._places[name]
        if place.host_offset is not None:
            return self._host_rows(place)[cells]
        out = np.empty((len(cells), place.cell_bytes), np.uint8)
        for device in range(len(self._addresses) if place.state.is_split else 1):
            first, start, n_bytes, span = self._span(place, device, cells)
            piece, at = self._resident.pieces[device].read(start, span * n_bytes).reshape(span, n_bytes)[cells - first], 0
            for start, stop in place.ranges(device):
                out[:, start:stop] = piece[:, at : at + stop - start]
                at += stop - start
        return out

    def write_cells(self, name: str, cells: Indices, rows: RawRows) -> None:
        """Writes whole cells, uint8 `[len(cells), cell_bytes]`, to every device that holds a part of them, or to the host."""
        place = self._places[name]
        if place.host_offset is not None:
            self._host_rows(place)[cells] = rows
            return
        for device in range(len(self._addresses)):
            ranges = place.ranges(device)
            if ranges and len(cells):
                first, at, n_bytes, span = self._span(place, device, cells)
                with self._resident.pieces[device].edit(at, span * n_bytes) as held:
                    part = np.concatenate([rows[:, start:stop] for start, stop in ranges], axis=1)
                    held.reshape(span, n_bytes)[cells - first] = part

    def _host_rows(self, place: _Place) -> RawRows:
        """All cells in the host: a view `[n_cells, cell_bytes]`."""
        assert self.host is not None and place.host_offset is not None
        n_cells = place.leaf.shape[1]
        return self.host.data[place.host_offset : place.host_offset + n_cells * place.cell_bytes].reshape(n_cells, place.cell_bytes)

    def _span(self, place: _Place, device: int, cells: Indices) -> tuple[int, int, int, int]:
        """From the first to the last of some cells on a device: (first cell, where it begins, bytes of a cell's piece, number of cells)."""
        n_bytes = sum(stop - start for start, stop in place.ranges(device))
        first, last = (int(cells.min()), int(cells.max())) if len(cells) else (0, -1)
        return first, self.plan.offset(place.leaf.name, device) + first * n_bytes, n_bytes, last + 1 - first

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
