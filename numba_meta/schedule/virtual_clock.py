"""A clock for plans: what every stream would do and when, exactly, without doing it.

In: a program per stream (work, copies over links, events, meetings). Out: a `Timeline`. The streams follow the rules of the real ones, so a
schedule that is tested here to the microsecond is wrong on a machine only where times differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from numba_meta.errors import DeviceError, UsageError
from numba_meta.schedule.bound import DeviceLoad, Seconds
from numba_meta.schedule.timeline import Span, Timeline


@dataclass(frozen=True)
class Link:
    """A way from the host. Streams that copy over one link take turns, in the order in which they come to it."""

    bytes_per_second: Seconds
    delay_seconds: Seconds = 0  # of every copy, before its first byte

    def __post_init__(self) -> None:
        if self.bytes_per_second <= 0 or self.delay_seconds < 0:
            raise UsageError(
                f"a link of {self.bytes_per_second} B/s with a delay of {self.delay_seconds} s: expected more than 0 B/s and 0 s or more"
            )

    def seconds(self, n_bytes: int) -> Fraction:
        """How long a copy holds the link."""
        return Fraction(self.delay_seconds) + n_bytes / Fraction(self.bytes_per_second)


@dataclass(frozen=True)
class Work:
    """Computes for a while. `kind`: attention, for what reads a delivery, or compute."""

    label: str
    seconds: Seconds
    kind: str = "compute"


@dataclass(frozen=True)
class Copy:
    """Moves bytes over a link."""

    label: str
    n_bytes: int
    link: str


@dataclass(frozen=True)
class Record:
    """Marks an event as reached. An event is recorded once in a program."""

    event: str


@dataclass(frozen=True)
class Wait:
    """Goes on when an event has been reached."""

    event: str


@dataclass(frozen=True)
class Meet:
    """Goes on when this many streams have come to the meeting of this name. A name may be used again for a later meeting."""

    name: str
    n_participants: int


Item = Work | Copy | Record | Wait | Meet


def simulate(programs: Mapping[str, Sequence[Item]], links: Mapping[str, Link]) -> Timeline:
    """Runs the streams' programs against the clock; streams in the order given, which also decides who of two at a link goes first.

    Raises `DeviceError` for streams that wait for ever, naming who waits for what, and `UsageError` for an unknown link.
    """
    return _Clock(programs, links).run()


class _Clock:
    """Always steps the runnable stream that is furthest behind, so that what reaches a link, event or meeting does so in order of time."""

    def __init__(self, programs: Mapping[str, Sequence[Item]], links: Mapping[str, Link]) -> None:
        self.programs, self.links = programs, links
        self.now = dict.fromkeys(programs, Fraction())
        self.next = dict.fromkeys(programs, 0)
        self.blocked: dict[str, Wait | Meet] = {}
        self.reached: dict[str, Fraction] = {}
        self.link_free = dict.fromkeys(links, Fraction())
        self.spans: list[Span] = []

    def run(self) -> Timeline:
        while running := [name for name, n in self.next.items() if n < len(self.programs[name])]:
            runnable = [name for name in running if name not in self.blocked]
            if not runnable:
                who = "; ".join(self._waits_for(name) for name in running)
                raise DeviceError(f"streams wait for ever: {who}; record each event before it is waited for, in an order that can end")
            stream = min(runnable, key=lambda name: self.now[name])
            self._step(stream, self.programs[stream][self.next[stream]])
        order = {name: index for index, name in enumerate(self.programs)}
        return Timeline(tuple(self.programs), tuple(sorted(self.spans, key=lambda span: (order[span.stream], span.start, span.stop))))

    def _step(self, stream: str, item: Item) -> None:
        match item:
            case Work(label, seconds, kind):
                self._go_on(stream, label, kind, self.now[stream] + Fraction(seconds))
            case Copy():
                self._copy(stream, item)
            case Record(event):
                self._record(stream, event)
            case Wait(event):
                if event in self.reached:
                    self._go_on(stream, event, "wait", max(self.now[stream], self.reached[event]))
                else:
                    self.blocked[stream] = item
            case Meet():
                self._meet(stream, item)

    def _copy(self, stream: str, item: Copy) -> None:
        if item.link not in self.links:
            known = ", ".join(self.links) or "(none)"
            raise UsageError(f"stream {stream} copies {item.label} over an unknown link {item.link!r}: expected one of {known}")
        start = max(self.now[stream], self.link_free[item.link])
        self._span(stream, item.link, "wait", start)
        self.link_free[item.link] = start + self.links[item.link].seconds(item.n_bytes)
        self._go_on(stream, item.label, "copy", self.link_free[item.link], item.n_bytes)

    def _record(self, stream: str, event: str) -> None:
        if event in self.reached:
            raise UsageError(f"stream {stream} records {event} a second time; expected a name of its own for every record")
        self.reached[event] = self.now[stream]
        self.next[stream] += 1
        for waiter in [name for name, item in self.blocked.items() if item == Wait(event)]:
            del self.blocked[waiter]
            self._go_on(waiter, event, "wait", max(self.now[waiter], self.now[stream]))

    def _meet(self, stream: str, item: Meet) -> None:
        self.blocked[stream] = item
        present = [name for name, other in self.blocked.items() if other == item]
        if len(present) >= item.n_participants:
            latest = max(self.now[name] for name in present)
            for name in present:
                del self.blocked[name]
                self._go_on(name, item.name, "meet", latest)

    def _go_on(self, stream: str, label: str, kind: str, stop: Fraction, n_bytes: int = 0) -> None:
        self._span(stream, label, kind, stop, n_bytes)
        self.next[stream] += 1

    def _span(self, stream: str, label: str, kind: str, stop: Fraction, n_bytes: int = 0) -> None:
        if stop > self.now[stream]:
            self.spans.append(Span(stream, label, self.now[stream], stop, kind, n_bytes))
        self.now[stream] = stop

    def _waits_for(self, stream: str) -> str:
        item = self.blocked[stream]
        if isinstance(item, Wait):
            return f"{stream} waits for {item.event}"
        present = sum(other == item for other in self.blocked.values())
        return f"{stream} waits for {item.n_participants - present} more at {item.name}"


# ---- the streams of a step -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceStep:
    """What one device does in a step: as `DeviceLoad`, but with the bytes of each delivery and the link that they come over."""

    name: str
    link: str
    copy_bytes: tuple[int, ...]
    attention: tuple[Seconds, ...]
    segments: tuple[tuple[Seconds, ...], ...]
    before: tuple[Seconds, ...] = (0,)
    after: tuple[Seconds, ...] = (0,)

    def load(self, links: Mapping[str, Link]) -> DeviceLoad:
        """For the bound: copies in seconds, with the link to itself."""
        copy = tuple(links[self.link].seconds(n_bytes) for n_bytes in self.copy_bytes)
        return DeviceLoad(copy, self.attention, self.segments, self.before, self.after)


def step_programs(steps: Sequence[DeviceStep], depth: int) -> dict[str, list[Item]]:
    """The streams of a step at a look-ahead of `depth` splits; 0: the ordered path."""
    return pipelined_programs(steps, depth) if depth else ordered_programs(steps)


def pipelined_programs(steps: Sequence[DeviceStep], depth: int) -> dict[str, list[Item]]:
    """Two streams per device: the transfer stream fills the slots in turn, the compute stream reads and releases them."""
    if depth < 1:
        raise UsageError(f"transport depth {depth}: expected 1 or more for a pipelined step; 0 is the ordered path")
    programs: dict[str, list[Item]] = {}
    for step in steps:
        programs[f"{step.name} transfer"] = _transfer_stream(step, depth + 2)
        programs[f"{step.name} compute"] = _compute_stream(step, len(steps), is_ordered=False)
    return programs


def ordered_programs(steps: Sequence[DeviceStep]) -> dict[str, list[Item]]:
    """One stream per device: each copy right before the attention that reads it."""
    return {f"{step.name} compute": _compute_stream(step, len(steps), is_ordered=True) for step in steps}


def _transfer_stream(step: DeviceStep, n_slots: int) -> list[Item]:
    program: list[Item] = []
    for layer, n_bytes in enumerate(step.copy_bytes):
        if layer >= n_slots:
            program.append(Wait(f"{step.name} release {layer - n_slots}"))
        program += [Copy(f"KV {layer}", n_bytes, step.link), Record(f"{step.name} ready {layer}")]
    return program


def _compute_stream(step: DeviceStep, n_devices: int, is_ordered: bool) -> list[Item]:
    program = _segments("before", step.before, n_devices)
    for layer, n_bytes in enumerate(step.copy_bytes):
        seconds, segments = Fraction(step.attention[layer]), step.segments[layer]
        attention = Work(f"attention {layer}", seconds, "attention")
        if is_ordered:
            program += [Copy(f"KV {layer}", n_bytes, step.link), attention]
        else:
            program += [Wait(f"{step.name} ready {layer}"), attention, Record(f"{step.name} release {layer}")]
        program += _segments(f"layer {layer}", (Fraction(segments[0]) - seconds, *segments[1:]), n_devices)
    return program + _segments("after", step.after, n_devices)


def _segments(label: str, segments: Sequence[Seconds], n_devices: int) -> list[Item]:
    """Work with a meeting of all devices between any two segments."""
    program: list[Item] = []
    for index, seconds in enumerate(segments):
        if index:
            program.append(Meet(f"{label} meeting {index}", n_devices))
        program.append(Work(label, seconds))
    return program
