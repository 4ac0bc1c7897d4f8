"""What a real step did: the times of its calls as a timeline, and how long its streams copied and waited for each other. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from numba_meta.schedule.calls import Call
from numba_meta.schedule.plan import INPUTS_THERE
from numba_meta.schedule.timeline import Span, Timeline
from numba_meta.tensor import Role, Tensor

if TYPE_CHECKING:
    from numba_meta.devices.cpu_stream import StreamTimes

WindowSizes = Mapping[int, tuple[int, int]]  # by layer: (streams, cells of each) that a step delivers
_NS = 10**9


@dataclass(frozen=True)
class Mark:
    """What an entry of a recorded program is: a call of a device's stream, `compute` or `transfer`."""

    device: int
    purpose: str
    call: Call


def is_delivery(call: Call) -> bool:
    """Whether a call brings a window from the host."""
    window = call.arguments.get("destination")
    return isinstance(window, Tensor) and window.op == "deliver"


def is_write_back(call: Call) -> bool:
    """Whether a call takes this step's rows to the host."""
    return bool(call.writes) and isinstance(call.writes[0], Tensor) and call.writes[0].role is Role.HOST


def kind_of(call: Call) -> str | None:
    """What a call is in a timeline; None for what takes no time, an event that is recorded."""
    if call.waits is not None:
        return "wait"
    if call.meets:
        return "meet"
    if call.kernel is None:
        return None
    if is_delivery(call) or is_write_back(call) or call.node == INPUTS_THERE.name:
        return "copy"
    written = {place.storage for place in call.writes if isinstance(place, Tensor)}
    reads = (place.storage for place in call.reads if isinstance(place, Tensor))
    reads_window = any((storage.op == "deliver" or storage.role is Role.CACHE) and storage not in written for storage in reads)
    return "attention" if reads_window else "compute"


def label_of(call: Call) -> str:
    """What a call is called in a timeline: its event, or the node that it is for."""
    event = call.waits or call.records
    return event.name if event is not None else call.node


def copy_bytes(call: Call, windows: WindowSizes | None = None, n_rows: int | None = None) -> int:
    """Bytes that a delivery or a write-back moves, 0 for other calls.

    `windows` and `n_rows` are a step's own; None: all that the plan has room for.
    """
    if is_delivery(call):
        params = call.arguments["destination"].params
        room = (int(params["n_streams"]), int(params["n_cells"]))
        n_streams, n_cells = (windows or {}).get(params["layer"], room)
        return int(call.arguments["width"]) * n_streams * n_cells
    if is_write_back(call):
        cells = call.arguments["cells"]
        return int(call.arguments["width"]) * int(cells.shape[0] if n_rows is None else n_rows)
    return int(call.arguments["width"]) if call.node == INPUTS_THERE.name else 0


@dataclass(frozen=True)
class TransportTimes:
    """Seconds of a step, per device.

    ordered_copy: copies on the compute stream. consumer_wait: the compute stream waits for a delivery. recycle_wait: the transfer stream
    waits for a slot to be free before it fills it again.
    """

    ordered_copy: tuple[float, ...]
    consumer_wait: tuple[float, ...]
    recycle_wait: tuple[float, ...]


@dataclass(frozen=True)
class StepTrace:
    """The times of one step's calls. `windows` and `n_rows` say what it delivered and wrote back."""

    streams: tuple[StreamTimes, ...]
    windows: WindowSizes
    n_rows: int

    def timeline(self) -> Timeline:
        """Streams and spans, from the moment when the first stream began. A wait for the stream's own threads is a gap."""
        begin = min(stream.whole[0] for stream in self.streams)
        spans = []
        for stream in self.streams:
            for mark, (start, stop) in zip(stream.marks, stream.times.tolist(), strict=True):
                kind = kind_of(mark.call) if isinstance(mark, Mark) else None
                if isinstance(mark, Mark) and kind is not None and stop > start:
                    n_bytes = copy_bytes(mark.call, self.windows, self.n_rows) if kind == "copy" else 0
                    at, until = Fraction(start - begin, _NS), Fraction(stop - begin, _NS)
                    spans.append(Span(stream.stream, label_of(mark.call), at, until, kind, n_bytes))
        return Timeline(tuple(stream.stream for stream in self.streams), tuple(spans))

    def transport_times(self, n_devices: int) -> TransportTimes:
        """How long copies and waits for slots took."""
        ordered, consumer, recycle = ([0] * n_devices for _ in range(3))
        for stream in self.streams:
            marks = [mark for mark in stream.marks if isinstance(mark, Mark)]
            last = max((i for i, mark in enumerate(marks) if is_delivery(mark.call)), default=0)
            for i, (mark, (start, stop)) in enumerate(zip(marks, stream.times.tolist(), strict=True)):
                call, took = mark.call, stop - start
                if mark.purpose == "compute":
                    ordered[mark.device] += took if is_delivery(call) or is_write_back(call) else 0
                    consumer[mark.device] += took if call.waits is not None else 0
                elif call.waits not in (None, INPUTS_THERE) and i < last:  # later ones are for rows that go back to the host
                    recycle[mark.device] += took
        return TransportTimes(*(tuple(ns / _NS for ns in sums) for sums in (ordered, consumer, recycle)))


def mean_times(times: Sequence[TransportTimes]) -> TransportTimes:
    """The mean of one or more steps."""

    def mean(steps: Iterable[tuple[float, ...]]) -> tuple[float, ...]:
        return tuple(sum(column) / len(times) for column in zip(*steps, strict=True))

    return TransportTimes(
        mean(each.ordered_copy for each in times), mean(each.consumer_wait for each in times), mean(each.recycle_wait for each in times)
    )
