"""Lowering of deliveries: on the ordered path calls of the compute stream, on the pipelined path a program of the transfer stream.

A slot's cycle, per device: the transfer stream fills a free slot and records `ready`; the compute stream waits for it, stores this step's
rows, attends, records `release`; the transfer stream waits for that, writes the rows back to the host and fills the slot again.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

from numba_meta.errors import PlacementError
from numba_meta.schedule.calls import Call, DeviceCalls, EventName
from numba_meta.schedule.localize import DeviceGraph
from numba_meta.tensor import Tensor


def layers_read(graph: DeviceGraph) -> frozenset[int]:
    """The layers whose delivered windows a device reads: none without query heads, though it may hold K and V (mirrored)."""
    readers = [node for node in graph.graph.nodes if node.op == "attention" and node.n_elements]
    windows = [node.sources[1].storage for node in readers]
    return frozenset(window.params["layer"] for window in windows if window.op == "deliver")


@dataclass(frozen=True)
class Link:
    """How a simulated device is reached: bytes per second (0: as fast as memory), and how much later each copy arrives, in ns."""

    bytes_per_second: int = 0
    delay_ns: int = 0


@dataclass
class _Staged:
    """A layer that goes through the ring on this device."""

    layer: int
    ready: EventName
    release: EventName
    deliveries: list[Call] = field(default_factory=list)
    write_backs: list[Call] = field(default_factory=list)


class TransportLowering:
    """Turns `deliver` and `write_back` nodes into calls. `staged_layers` are those that use the ring, in the order of their slots."""

    def __init__(
        self, to: DeviceCalls, device_graphs: Sequence[DeviceGraph], staged_layers: Sequence[int], n_slots: int, link: Link
    ) -> None:
        self._to: DeviceCalls = weakref.proxy(to)  # which holds this: a circle would keep a plan until the next collection
        self._read_by = [layers_read(graph) for graph in device_graphs]
        self._slot_order = list(staged_layers)
        self._n_slots = n_slots
        self._link = link
        self._staged: dict[int, _Staged] = {}  # by layer; only those with bytes on this device

    def is_read(self, window: Tensor) -> bool:
        """Whether this device reads a delivered window; else nothing is delivered to it, nor stored in it."""
        return window.storage.params["layer"] in self._read_by[self._to.device]

    def deliver(self, node: Tensor) -> None:
        """The copy of a window from the host; the compute stream waits for it after both parts of a layer are on their way."""
        if not self.is_read(node):
            return
        cache, streams, n_streams, n_cells = node.sources
        cell_bytes = node.strides[1]  # in the host a device's heads of a cell lie together, as they do in the window
        per_stream = cache.shape[1] // node.params["n_streams_full"]
        call = Call(
            self._to.kernels.deliver.deliver_windows,
            {
                "source": cache,
                "stream_bytes": per_stream * cell_bytes,
                "cell_bytes": cell_bytes,
                "destination": node,
                "width": node.strides[1],
                "streams": streams,
                "n_streams": n_streams,
                "n_cells": n_cells,
                **self._pace(),
            },
            (cache, streams, n_streams, n_cells),
            (node,),
            node=node.name,
        )
        layer, part = node.params["layer"], node.params["part"]
        if layer not in self._slot_order:
            self._to.calls.append(call)
            return
        staged = self._staged.setdefault(layer, _Staged(layer, EventName(f"ready {layer}"), EventName(f"release {layer}")))
        staged.deliveries.append(call)
        if part == "v":
            self._to.calls.append(Call(None, waits=staged.ready, node=node.name))

    def write_back(self, node: Tensor) -> None:
        """New rows to the host: by every device its heads; where all devices hold them, by the first that reads them."""
        layer = node.params["layer"]
        readers = [device for device, layers in enumerate(self._read_by) if layer in layers]
        if self._to.device not in (readers[:1] if self._to.is_mirrored(node) else readers):
            return
        cache, window, slot_cells, cells = node.sources
        call = Call(
            self._to.kernels.deliver.write_back,
            {
                "slot": window,
                "width": window.strides[1],
                "slot_cells": slot_cells,
                "host": cache,
                "cell_bytes": window.strides[1],
                "cells": cells,
                "n_rows": self._to.count(cells),
                **self._pace(),
            },
            (window, slot_cells, cells),
            (cache,),
            node=node.name,
            max_rows=cells.shape[0],
        )
        staged = self._staged.get(layer)
        if staged is None or self._to.kernels.kind == "cuda":
            self._to.calls.append(call)  # a kernel on a GPU: between two copies it would hold the copy engine up
        else:
            staged.write_backs.append(call)

    def _pace(self) -> dict[str, int]:
        """How a simulated link is kept to: by CPU devices, whose copies are calls like others."""
        if self._to.kernels.kind != "cpu":
            return {}
        return {"bytes_per_second": self._link.bytes_per_second, "delay_ns": self._link.delay_ns}

    def done_reading(self, window: Tensor) -> None:
        """The kernels that read a layer's window are enqueued: its slot may be filled again."""
        deliver = window.storage
        if deliver.op == "deliver" and (staged := self._staged.get(deliver.params["layer"])):
            self._to.calls.append(Call(None, records=staged.release, node=window.name))

    def transfer_calls(self) -> list[Call]:
        """The transfer stream's program: every staged layer in turn, each after the layer that used its slot before."""
        calls: list[Call] = []
        n = self._n_slots
        for index, layer in enumerate([*self._slot_order, *[None] * n]):
            if index >= n and (before := self._staged.get(self._slot_order[index - n])):
                calls.append(Call(None, waits=before.release, node=f"slot {(index - n) % n}"))
                calls += before.write_backs
            if layer is not None and (staged := self._staged.get(layer)):
                if len(staged.deliveries) != 2:
                    raise PlacementError(f"layer {layer} delivers {len(staged.deliveries)} windows through the ring; expected K and V")
                calls += staged.deliveries
                calls.append(Call(None, records=staged.ready, node=f"slot {index % n}"))
        return calls
