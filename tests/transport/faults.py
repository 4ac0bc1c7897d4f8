"""Faults put in on purpose, one context manager each: what a delivery may do wrong. The gate must see every one of them.

Steps that are recorded inside are faulty. A pause holds the compute stream up where the fault would else be a matter of luck.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from transport.hazards import is_delivery, patched, pause_call

from numba_meta.models.cache import windows
from numba_meta.models.cache.windows import Window, WindowLayout
from numba_meta.ops.rows import SetRows
from numba_meta.schedule.calls import Call, Offset
from numba_meta.schedule.lower_transport import TransportLowering
from numba_meta.schedule.record import Binder
from numba_meta.tensor import Tensor

PAUSE_MS = 1.5


@contextmanager
def slow_readers() -> Iterator[None]:
    """No fault: attention begins late, long after its window has come."""

    def done_reading(original: Any, self: TransportLowering, window: Tensor) -> None:
        self._to.calls.insert(-1, pause_call(window.name, PAUSE_MS))  # before the attention
        original(self, window)

    with patched(TransportLowering, "done_reading", done_reading):
        yield


@contextmanager
def late_windows() -> Iterator[None]:
    """No fault: every window of the ring comes late."""

    def transfer_calls(original: Any, self: TransportLowering) -> list[Call]:
        return [new for call in original(self) for new in ((pause_call(call.node, PAUSE_MS), call) if is_delivery(call) else (call,))]

    with patched(TransportLowering, "transfer_calls", transfer_calls):
        yield


@contextmanager
def a_cell_too_few() -> Iterator[None]:
    """Of `n` cells, the last of which this step writes, the last stable one is not delivered."""
    with mock.patch.object(windows, "bucket_cells", lambda n_cells: max(1, n_cells - 2)):
        yield


@contextmanager
def bucket_rounded_down() -> Iterator[None]:
    """A window just past a bucket is cut to whole buckets."""
    with mock.patch.object(windows, "bucket_cells", lambda n_cells: max(256, n_cells // 256 * 256)):
        yield


@contextmanager
def last_cell_of_the_ring_of_cells_missing() -> Iterator[None]:
    """Of a sliding window's cells the last one is not delivered: needed only where the text has wrapped around it."""

    def window(original: Any, self: WindowLayout, *arguments: Any, **options: Any) -> Window:
        whole: Window = original(self, *arguments, **options)
        return replace(whole, n_cells=whole.n_cells - 1) if self._local else whole

    with patched(WindowLayout, "window", window):
        yield


@contextmanager
def streams_in_another_order() -> Iterator[None]:
    """Streams are delivered in the order of their numbers, whatever the batch's order is."""
    from numba_meta.models.running.context import Context

    def add_windows(original: Any, self: Context, values: dict[str, Any], *arguments: Any) -> None:
        original(self, values, *arguments)
        for name in values.keys() & {"streams", "window_streams"}:
            values[name] = sorted(values[name])

    with patched(Context, "_add_windows", add_windows):
        yield


@contextmanager
def stale_slot_cells() -> Iterator[None]:
    """The tables that say where a position lies in a slot are not written again when other streams are delivered."""
    with patched(WindowLayout, "stale_rows", lambda original, self, *arguments: {}):
        yield


@contextmanager
def release_too_early() -> Iterator[None]:
    """A slot is given back as soon as its window has come, before anything has read it."""

    def deliver(original: Any, self: TransportLowering, node: Tensor) -> None:
        original(self, node)
        if self._to.calls and self._to.calls[-1].waits is not None:
            self._to.calls += [Call(None, records=self._staged[node.params["layer"]].release), pause_call(node.name, PAUSE_MS)]

    with patched(TransportLowering, "deliver", deliver), patched(TransportLowering, "done_reading", lambda original, self, window: None):
        yield


@contextmanager
def ready_not_waited_for() -> Iterator[None]:
    """The compute stream goes on without its window, which comes late."""

    def deliver(original: Any, self: TransportLowering, node: Tensor) -> None:
        original(self, node)
        self._to.calls = [call for call in self._to.calls if call.waits is None]

    with patched(TransportLowering, "deliver", deliver), late_windows():
        yield


@contextmanager
def a_slot_too_few() -> Iterator[None]:
    """Windows lie in the slots as if there were one fewer: a delivery waits for another layer's release than it should."""

    def place_windows(original: Any, self: Binder, transport: Any, ring: Any, rings: Any) -> None:
        original(self, transport, replace(ring, n_slots=ring.n_slots - 1), rings)

    with patched(Binder, "_place_windows", place_windows), slow_readers():
        yield


@contextmanager
def late_row_not_stored() -> Iterator[None]:
    """This step's rows do not get into the delivered window."""

    def lower(original: Any, self: SetRows, node: Tensor, to: Any) -> None:
        if node.storage.op != "deliver":
            original(self, node, to)

    with patched(SetRows, "lower", lower):
        yield


@contextmanager
def late_row_not_written_back() -> Iterator[None]:
    """This step's rows do not get into the host's cache."""
    with patched(TransportLowering, "write_back", lambda original, self, node: None):
        yield


@contextmanager
def written_back_to_another_cell() -> Iterator[None]:
    """Rows go to the host at the place that they have in the slot."""

    def write_back(original: Any, self: TransportLowering, node: Tensor) -> None:
        before, staged = len(self._to.calls), self._staged.get(node.params["layer"])
        original(self, node)
        for calls in (self._to.calls[before:], staged.write_backs if staged else []):
            for call in calls:
                call.arguments["cells"] = call.arguments["slot_cells"]  # type: ignore[index]

    with patched(TransportLowering, "write_back", write_back):
        yield


@contextmanager
def ranges_beside_the_heads() -> Iterator[None]:
    """Every device but the first receives the heads of the one before it."""

    def deliver(original: Any, self: TransportLowering, node: Tensor) -> None:
        before = len(self._to.calls)
        original(self, node)
        staged = self._staged.get(node.params["layer"])
        for calls in (self._to.calls[before:], staged.deliveries[-1:] if staged else []):
            for call in filter(is_delivery, calls):
                if self._to.device and not self._to.is_mirrored(node):
                    call.arguments["source"] = Offset(node.sources[0], -int(call.arguments["width"]))  # type: ignore[index]

    with patched(TransportLowering, "deliver", deliver):
        yield
