"""What may happen to deliveries, made to happen: poisoned memory, copies that come late and in another order, slow readers.

Each is a context manager; steps that are recorded inside it are affected. Faults that break results: `faults.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np

from numba_meta.schedule.calls import Call, Constant
from numba_meta.schedule.lower import DeviceLowering
from numba_meta.schedule.lower_transport import TransportLowering
from numba_meta.tensor import Tensor

POISON = 0xFF  # NaN as f32, f16, bf16 and as the scale of q8_0 and q4_0


def poison_call(to: DeviceLowering, window: Tensor) -> Call:
    """Fills a window, whole, with NaN bytes."""
    n = window.n_bytes
    poison = Constant(f"{window.name}.poison", np.full(n, POISON, np.uint8))
    arguments = {"source": poison, "source_pitch": n, "destination": window, "destination_pitch": n, "width": n, "height": 1}
    return Call(to.kernels.copy.copy_2d, arguments, (poison,), (window,), node=poison.name)


def pause_call(name: str, milliseconds: float) -> Call:
    """Holds a stream up: a delivery of no cells that arrives late."""
    from numba_meta.kernels.cpu.deliver import deliver_windows

    nothing = Constant(f"{name}.nothing", np.zeros(1, np.int64))
    sizes = {"stream_bytes": 0, "cell_bytes": 0, "width": 0, "bytes_per_second": 0, "delay_ns": int(milliseconds * 1e6)}
    places = {"source": nothing, "destination": nothing, "streams": nothing, "n_streams": nothing, "n_cells": nothing}
    return Call(deliver_windows, {**sizes, **places}, (nothing,), (), node=f"{name}.pause")


def is_delivery(call: Call) -> bool:
    """Whether a call brings a window from the host."""
    return call.kernel is not None and call.node.endswith(".window") and "n_cells" in call.arguments


@contextmanager
def patched(cls: type, name: str, wrap: Callable[..., Any]) -> Iterator[None]:
    """`wrap(original, self, *arguments)` in place of a method."""
    original = getattr(cls, name)

    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        return wrap(original, self, *arguments, **options)

    with mock.patch.object(cls, name, method):
        yield


@contextmanager
def poisoned() -> Iterator[None]:
    """Every window is filled with NaN bytes right before each delivery into it: in the ring, and on the ordered path."""

    def transfer_calls(original: Any, self: TransportLowering) -> list[Call]:
        calls = original(self)
        before = {id(call): [poison_call(self._to, call.arguments["destination"])] for call in calls if is_delivery(call)}
        return [new for call in calls for new in (*before.get(id(call), []), call)]

    def deliver(original: Any, self: TransportLowering, node: Tensor) -> None:
        before = len(self._to.calls)
        original(self, node)
        if any(is_delivery(call) for call in self._to.calls[before:]):
            self._to.calls.insert(before, poison_call(self._to, node))

    with patched(TransportLowering, "transfer_calls", transfer_calls), patched(TransportLowering, "deliver", deliver):
        yield


@contextmanager
def late_copies(microseconds: int = 120) -> Iterator[None]:
    """Each copy, there and back, comes later than the link says by another time: on each device, for each layer, for K and for V."""

    def later(self: TransportLowering, call: Call) -> Call:
        if call.kernel is None or "delay_ns" not in call.arguments:
            return call
        spread = (7 * self._to.device + 5 * sum(call.node.encode())) % 4
        return replace(call, arguments={**call.arguments, "delay_ns": call.arguments["delay_ns"] + spread * microseconds * 1000})

    def transfer_calls(original: Any, self: TransportLowering) -> list[Call]:
        return [later(self, call) for call in original(self)]

    def lowered(original: Any, self: TransportLowering, node: Tensor) -> None:
        before = len(self._to.calls)
        original(self, node)
        self._to.calls[before:] = [later(self, call) for call in self._to.calls[before:]]

    with (
        patched(TransportLowering, "transfer_calls", transfer_calls),
        patched(TransportLowering, "deliver", lowered),
        patched(TransportLowering, "write_back", lowered),
    ):
        yield
