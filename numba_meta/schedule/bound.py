"""How fast a step with a host-resident cache can be: a recursion over layers, exactly, on one device and on several. Pure.

Times are seconds, given as int, float or Fraction and computed as Fractions: what the virtual clock measures must be equal, not near.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from numba_meta.errors import UsageError

Seconds = int | float | Fraction


@dataclass(frozen=True)
class DeviceLoad:
    """What one device does in a step, in seconds.

    copy[l]: the delivery of layer l. attention[l]: from layer l's begin until its window has been read. segments[l]: layer l from its
    attention to the next layer's, cut where the devices meet (a reduction); the first segment holds the attention. before, after: the work
    before the first attention and after the last layer, cut in the same way. A reduction's own time belongs to the segment behind it.
    """

    copy: tuple[Seconds, ...]
    attention: tuple[Seconds, ...]
    segments: tuple[tuple[Seconds, ...], ...]
    before: tuple[Seconds, ...] = (0,)
    after: tuple[Seconds, ...] = (0,)

    def __post_init__(self) -> None:
        if not self.copy or not len(self.copy) == len(self.attention) == len(self.segments):
            raise UsageError(
                f"a step of {len(self.copy)} copies, {len(self.attention)} attentions and {len(self.segments)} layers: "
                "expected the same number of each, 1 or more"
            )
        if not all(self.segments) or not self.before or not self.after:
            raise UsageError("a part of a step without a segment: expected at least one each, of 0 s where nothing is done")
        times = (*self.copy, *self.attention, *self.before, *self.after, *(time for layer in self.segments for time in layer))
        if min(times) < 0:
            raise UsageError(f"a step with a part of {min(times)} s: expected 0 s or more")
        for layer, (attention, segments) in enumerate(zip(self.attention, self.segments, strict=True)):
            if attention > segments[0]:
                raise UsageError(f"layer {layer}: attention of {attention} s in a segment of {segments[0]} s; expected no more than that")

    @property
    def n_layers(self) -> int:
        """Layers whose windows are delivered."""
        return len(self.copy)

    @property
    def copy_seconds(self) -> Fraction:
        """All copies of a step."""
        return _total(self.copy)

    @property
    def compute_seconds(self) -> Fraction:
        """All work of a step, without waiting for other devices."""
        return _total(self.before) + _total(self.after) + sum(map(_total, self.segments), Fraction())


@dataclass(frozen=True)
class StepTimes:
    """When things happen on one device, in seconds from the step's begin; one per layer but for `step`, its end."""

    step: Fraction
    ready: tuple[Fraction, ...]  # the window lies in its slot
    start: tuple[Fraction, ...]  # attention begins
    freed: tuple[Fraction, ...]  # attention has read the slot
    done: tuple[Fraction, ...]  # the next layer may begin


@dataclass(frozen=True)
class MeetingTimes:
    """The times of several devices that meet at reductions; `step` is the last one's end."""

    step: Fraction
    devices: tuple[StepTimes, ...]


def step_bound(
    copy: Sequence[Seconds],
    compute: Sequence[Seconds],
    attention: Sequence[Seconds],
    before: Seconds = 0,
    after: Seconds = 0,
    depth: int = 1,
) -> StepTimes:
    """The least time of a step on one device, looking `depth` splits ahead (0: the ordered path, `before + copies + compute + after`).

    copy[l]: seconds of layer l's delivery; compute[l]: from its attention to the next one's, of which attention[l] reads the window.
    With s = depth + 2 slots:

        ready[l] = max(ready[l-1], freed[l-s]) + copy[l]        start[l] = max(done[l-1], ready[l])
        freed[l] = start[l] + attention[l]                      done[l]  = start[l] + compute[l]
    """
    load = DeviceLoad(tuple(copy), tuple(attention), tuple((time,) for time in compute), (before,), (after,))
    return step_bound_devices([load], depth).devices[0]


def step_bound_devices(loads: Sequence[DeviceLoad], depth: int = 1) -> MeetingTimes:
    """The same for devices that meet between segments: each goes on when the slowest has arrived.

    Each device has a link of its own; what shares a link is for the virtual clock. Raises `UsageError` where the devices' segments differ
    in number.
    """
    if not loads or len({_shape(load) for load in loads}) > 1:
        raise UsageError(f"{len(loads)} devices: expected one or more, with the same number of layers and meetings each")
    if depth < 0:
        raise UsageError(f"transport depth {depth}: expected 0 (ordered path) or more")
    tracks = [_Track(load, depth) for load in loads]
    _meet_between(tracks, [load.before for load in loads])
    for layer in range(loads[0].n_layers):
        for track in tracks:
            track.begin(layer)
        _meet_between(tracks, [load.segments[layer] for load in loads])
        for track in tracks:
            track.done.append(track.now)
    _meet_between(tracks, [load.after for load in loads])
    times = tuple(track.times() for track in tracks)
    return MeetingTimes(max(device.step for device in times), times)


@dataclass(frozen=True)
class StepPrediction:
    """What a plan says of a step: the slowest device's copies, the compute of a step that need not copy, and both paths; in seconds."""

    copy: Fraction
    compute: Fraction
    ordered: Fraction
    pipelined: Fraction

    @property
    def gain(self) -> float:
        """By what part pipelined steps come faster than ordered ones: 0.4 is 40% more tokens per second."""
        return float(self.ordered / self.pipelined) - 1 if self.pipelined else 0.0


def predict_step(loads: Sequence[DeviceLoad], depth: int = 1) -> StepPrediction:
    """Copy, compute, ordered and pipelined step of these devices by the recursion."""
    resident = [replace(load, copy=(0,) * load.n_layers) for load in loads]
    compute, ordered, pipelined = (
        step_bound_devices(devices, n).step for devices, n in ((resident, 0), (loads, 0), (loads, depth))
    )
    return StepPrediction(max(load.copy_seconds for load in loads), compute, ordered, pipelined)


def ordered_seconds(copy: Seconds, compute: Seconds) -> Fraction:
    """A step of the ordered path from all its copies and all its work: their sum."""
    return Fraction(copy) + Fraction(compute)


def tokens_per_second(step: Seconds, n_tokens: int = 1) -> float:
    """The rate of steps that make `n_tokens` each."""
    return float(n_tokens / Fraction(step))


def ring_bytes_at_peak(n_slots: int, n_layers: int, compute: Seconds, bytes_per_second: Seconds) -> Fraction:
    """The ring where pipelining gains most, that is where copy = compute: `slots / layers * compute * bandwidth`."""
    return Fraction(n_slots, n_layers) * Fraction(compute) * Fraction(bytes_per_second)


class _Track:
    """One device's side of the recursion: `now` is the time on its compute stream."""

    def __init__(self, load: DeviceLoad, depth: int) -> None:
        self.load, self.n_slots = load, depth + 2 if depth else 0
        self.now = Fraction()
        self.ready: list[Fraction] = []
        self.start: list[Fraction] = []
        self.freed: list[Fraction] = []
        self.done: list[Fraction] = []

    def begin(self, layer: int) -> None:
        """Waits for the layer's window; on the ordered path the copy begins only now."""
        copy = Fraction(self.load.copy[layer])
        if self.n_slots:
            free = self.freed[layer - self.n_slots] if layer >= self.n_slots else Fraction()
            self.ready.append(max(self.ready[-1] if self.ready else Fraction(), free) + copy)
        else:
            self.ready.append(self.now + copy)
        self.now = max(self.now, self.ready[-1])
        self.start.append(self.now)
        self.freed.append(self.now + Fraction(self.load.attention[layer]))

    def times(self) -> StepTimes:
        return StepTimes(self.now, tuple(self.ready), tuple(self.start), tuple(self.freed), tuple(self.done))


def _meet_between(tracks: Sequence[_Track], segments: Sequence[tuple[Seconds, ...]]) -> None:
    for index in range(len(segments[0])):
        if index:
            latest = max(track.now for track in tracks)
            for track in tracks:
                track.now = latest
        for track, times in zip(tracks, segments, strict=True):
            track.now += Fraction(times[index])


def _total(times: Sequence[Seconds]) -> Fraction:
    return sum((Fraction(time) for time in times), Fraction())


def _shape(load: DeviceLoad) -> tuple[int, int, tuple[int, ...]]:
    return len(load.before), len(load.after), tuple(map(len, load.segments))
