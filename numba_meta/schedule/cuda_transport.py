"""Deliveries of a host-resident cache in a recorded graph: copies whose extent follows the window, rows that go back to the host."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from numba_meta.devices.cuda import CudaDevice
from numba_meta.devices.cuda_driver import GpuContext, PinnedMemory
from numba_meta.devices.cuda_graph import Copy2D, CudaGraph
from numba_meta.schedule.record import Binder, InputBlock


@dataclass(frozen=True)
class Delivery:
    """A window that the copy engine brings: one copy per stream that there is room for. `inputs` names who says what is live."""

    gpu: GpuContext  # whose copy engine
    source: int
    stream_bytes: int
    cell_bytes: int
    destination: int
    width: int
    max_streams: int
    inputs: tuple[str, str, str]  # numbers of the streams, how many, cells of each

    def copies(self, streams: Sequence[int], n_cells: int) -> list[Copy2D]:
        """The copies of a window; streams lie one after the other on the device."""
        found = []
        for i in range(self.max_streams):
            stream, height = (streams[i], n_cells) if i < len(streams) else (0, 0)
            source = self.source + stream * self.stream_bytes
            found.append(Copy2D(source, self.cell_bytes, self.destination + i * n_cells * self.width, self.width, self.width, height))
        return found


class LiveWindows:
    """Sets a graph's copies before a step, where the windows differ from those of the step before: another bucket, other streams."""

    def __init__(self, graph: CudaGraph, binder: Binder, deliveries: Sequence[tuple[Delivery, Sequence[Any]]]) -> None:
        self._graph = graph
        inputs = binder.inputs
        self._groups: list[tuple[tuple[np.ndarray, np.ndarray, np.ndarray], list[tuple[Delivery, Sequence[Any]]]]] = []
        self._set: list[tuple[tuple[int, ...], int] | None] = []
        for names in dict.fromkeys(delivery.inputs for delivery, _ in deliveries):
            group = [each for each in deliveries if each[0].inputs == names]
            n_streams = max(delivery.max_streams for delivery, _ in group)
            kinds, sizes = (np.int32, np.int64, np.int64), (n_streams, 1, 1)
            streams, count, cells = (input_view(inputs, *each) for each in zip(names, kinds, sizes, strict=True))
            self._groups.append(((streams, count, cells), group))
            self._set.append(None)

    def update(self) -> None:
        for i, ((streams, count, cells), group) in enumerate(self._groups):
            live = tuple(streams[: int(count[0])].tolist()), int(cells[0])
            if live != self._set[i]:
                self._set[i] = None  # a copy that cannot be set leaves others that are
                for delivery, nodes in group:
                    for node, copy in zip(nodes, delivery.copies(*live), strict=True):
                        self._graph.set_copy(delivery.gpu, node, copy)
                self._set[i] = live


def input_view(inputs: InputBlock, name: str, kind: Any, n: int) -> np.ndarray:
    """The first elements of an input as the host writes it."""
    n_bytes = n * np.dtype(kind).itemsize
    return np.ctypeslib.as_array((ctypes.c_uint8 * n_bytes).from_address(inputs.host_address + inputs.offsets[name])).view(kind)


class LateRows:
    """New rows for a cache in pageable memory, which no kernel reaches: they are left in pinned memory, and copied when the step has ended.

    Rows of `width` bytes; `cells` names the input with the cell of each (int32, -1: not stored), `count` the one with their number.
    """

    def __init__(self, device: CudaDevice, binder: Binder, host: int, width: int, max_rows: int, cells: str, count: str) -> None:
        self.memory: PinnedMemory = device.pinned(max(1, max_rows * width))
        self._host, self._width = host, width
        self._cells = input_view(binder.inputs, cells, np.int32, max_rows)
        self._count = input_view(binder.inputs, count, np.int64, 1)

    def arguments(self, values: Mapping[str, Any], rows: int) -> dict[str, Any]:
        """The arguments of a write-back that leaves row r in place r; `rows` is the address of int32 0, 1, 2 ..."""
        return {**values, "host": self.memory.address, "cell_bytes": self._width, "cells": rows}

    def store(self) -> None:
        """Copies a step's rows to their cells."""
        for row, cell in enumerate(self._cells[: int(self._count[0])].tolist()):
            if cell >= 0:
                ctypes.memmove(self._host + cell * self._width, self.memory.address + row * self._width, self._width)
