"""A step plan on the virtual clock: the same calls in the same order with the same events and meetings, without arithmetic. Pure.

`virtual_step` runs a plan against given times and says exactly what every stream would do; `step_loads` gives the same plan to the
recursion of `bound.py`. What the host copies in before a step (token ids, positions) takes no time here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from statistics import median

from numba_meta.errors import UsageError
from numba_meta.schedule.bound import DeviceLoad, Seconds
from numba_meta.schedule.calls import Call, EventName
from numba_meta.schedule.plan import StepPlan
from numba_meta.schedule.timeline import Timeline
from numba_meta.schedule.trace import Mark, StepTrace, WindowSizes, copy_bytes, is_delivery, is_write_back, kind_of
from numba_meta.schedule.virtual_clock import Copy, Item, Link, Meet, Record, Wait, Work, simulate

Cost = Callable[[int, Call], Seconds]  # of a device's call that computes


def virtual_step(
    plan: StepPlan,
    cost: Cost,
    links: Sequence[Link],
    names: Sequence[str] | None = None,
    windows: WindowSizes | None = None,
    n_rows: int | None = None,
    writes_back: bool = True,
) -> Timeline:
    """The timeline of a step of this plan.

    `cost(device, call)`: seconds of a call that computes. `links[j]`: how device j is reached, by deliveries and by rows that go back.
    `windows` and `n_rows`: what the step delivers and stores (None: all that the plan has room for). `writes_back=False`: rows go back in
    no time, as the recursion of `bound.py` has it. Streams are called as real ones are: `cpu:0 compute`, `cpu:0 transfer`. Raises
    `UsageError`.
    """
    names = _device_names(plan, links, names)
    sizes = _Sizes(windows, n_rows, writes_back)
    programs: dict[str, list[Item]] = {}
    for device, (name, own) in enumerate(zip(names, plan.devices, strict=True)):
        for purpose, calls in own.streams().items():
            items = (_item(device, name, call, cost, len(names), sizes) for call in calls)
            programs[f"{name} {purpose}"] = [item for item in items if item is not None]
    return simulate(programs, {_link_name(name): link for name, link in zip(names, links, strict=True)})


def measured_cost(traces: Sequence[StepTrace]) -> Cost:
    """The cost of every call as its median over traced steps of one recording, for the plan of that recording.

    Raises `UsageError` without steps, and for a call that the steps did not make.
    """
    times: dict[int, list[int]] = {}
    for trace in traces:
        for stream in trace.streams:
            for mark, (start, stop) in zip(stream.marks, stream.times.tolist(), strict=True):
                if isinstance(mark, Mark):
                    times.setdefault(id(mark.call), []).append(stop - start)
    if not times:
        raise UsageError("costs of 0 traced steps: expected at least one step, as Model.record_timeline gives them")
    kept = tuple(traces)  # keeps the calls, and so their ids
    medians = {call: Fraction(round(median(ns)), 10**9) for call, ns in times.items()}

    def cost(device: int, call: Call) -> Fraction:
        if id(call) not in medians:
            raise UsageError(f"{len(kept)} traced steps did not make the call {call.node} on device {device}; expected steps of this plan")
        return medians[id(call)]

    return cost


@dataclass(frozen=True)
class _Sizes:
    windows: WindowSizes | None
    n_rows: int | None
    writes_back: bool

    def bytes_of(self, call: Call) -> int | None:
        """Bytes that a call moves over the link; None where it moves none, or where that takes no time."""
        if is_delivery(call) or (self.writes_back and is_write_back(call)):
            return copy_bytes(call, self.windows, self.n_rows)
        return None


def _link_name(device: str) -> str:
    return f"to {device}"


def _device_names(plan: StepPlan, links: Sequence[Link], names: Sequence[str] | None) -> Sequence[str]:
    n = len(plan.devices)
    names = [f"cpu:{device}" for device in range(n)] if names is None else names
    if not len(links) == len(names) == n or len(set(names)) != n:
        raise UsageError(f"a step of {n} devices with {len(links)} links and names {', '.join(names)}: expected {n} of each, all different")
    return names


def _item(device: int, name: str, call: Call, cost: Cost, n_devices: int, sizes: _Sizes) -> Item | None:
    if call.waits is not None:
        return Wait(f"{name} {call.waits.name}")
    if call.records is not None:
        return Record(f"{name} {call.records.name}")
    if call.meets:
        return Meet(call.node, n_devices)
    n_bytes = sizes.bytes_of(call)
    if n_bytes is not None:
        return Copy(call.node, n_bytes, _link_name(name))
    kind = kind_of(call)
    if kind == "copy":
        return None
    return Work(call.node, cost(device, call), kind or "compute")


# ---- the same for the recursion --------------------------------------------------------------------------------------------------------


def step_loads(
    plan: StepPlan,
    cost: Cost,
    links: Sequence[Link],
    windows: WindowSizes | None = None,
    n_rows: int | None = None,
    writes_back: bool = True,
) -> tuple[DeviceLoad, ...]:
    """What each device does in a step of this plan, for `step_bound_devices`; arguments as for `virtual_step`.

    g is all up to the wait for the first layer's window; a[l] goes from there until layer l's window is read, k[l] up to the next layer's
    wait; h is in the last k. A device without heads of a layer begins it with the segment in which others do. Rows that go back are part of
    a[l] on the ordered path; in the ring they are copied before the slot's next window, and counted with it. Raises `UsageError` for a plan
    that delivers nothing.
    """
    _device_names(plan, links, None)
    sizes = _Sizes(windows, n_rows, writes_back)
    sides = [_Side(plan, device, cost, link, sizes) for device, link in enumerate(links)]
    begins = {layer: n_meetings for side in sides for layer, n_meetings in side.begins().items()}
    if not begins:
        raise UsageError("a step that delivers nothing has no layers to look ahead to; expected a plan with a cache in host memory")
    order = sorted(begins, key=lambda layer: (begins[layer], layer))
    n_slots = plan.transport.n_slots if plan.transport else 0
    return tuple(side.load(order, begins, n_slots) for side in sides)


@dataclass
class _Part:
    """A layer on a device, or what comes before all layers: seconds of work between meetings, and until the window was read."""

    segments: list[Fraction] = field(default_factory=lambda: [Fraction()])
    attention: Fraction = Fraction()


class _Side:
    """One device's side of a step."""

    def __init__(self, plan: StepPlan, device: int, cost: Cost, link: Link, sizes: _Sizes) -> None:
        self.device, self.cost, self.link, self.sizes = device, cost, link, sizes
        self.calls = plan.devices[device].calls
        self.transfer_calls = plan.devices[device].transfer_calls
        self.ready = self._ready_events()

    def _ready_events(self) -> dict[EventName, int]:
        """Which layer's window has come with an event."""
        events: dict[EventName, int] = {}
        layer: int | None = None
        for call in self.transfer_calls:
            layer = _layer(call) if is_delivery(call) else layer
            if call.records is not None and layer is not None:
                events[call.records] = layer
        return events

    def _begun(self, call: Call) -> int | None:
        """The layer that a call of the compute stream waits for, or copies itself."""
        if call.waits is not None:
            return self.ready[call.waits]
        return _layer(call) if is_delivery(call) and not self.transfer_calls else None

    def begins(self) -> dict[int, int]:
        """Meetings before each layer's begin, for the layers of which this device has heads."""
        found: dict[int, int] = {}
        n_meetings = 0
        for call in self.calls:
            n_meetings += call.meets
            layer = self._begun(call)
            if layer is not None:
                found.setdefault(layer, n_meetings)
        return found

    def load(self, order: Sequence[int], begins: Mapping[int, int], n_slots: int) -> DeviceLoad:
        """This device's step, cut where layers begin and where all meet."""
        before, layers = _Part(), {layer: _Part() for layer in order}
        own = self.begins()
        absent = {begins[layer]: layer for layer in order if layer not in own}
        part, n_meetings = layers[absent[0]] if 0 in absent else before, 0
        for call in self.calls:
            if call.meets:
                n_meetings += 1
                part.segments.append(Fraction())
                if n_meetings in absent:
                    part = layers[absent[n_meetings]]
                continue
            layer = self._begun(call)
            if layer is not None:
                part = layers[layer]
            part.segments[-1] += self._work(call)
            if kind_of(call) == "attention":
                part.attention = part.segments[-1]
        copies, back = self._moved()
        times = [copies.get(layer, Fraction()) for layer in order]
        for index in range(n_slots, len(order)) if n_slots else ():
            times[index] += back.get(order[index - n_slots], Fraction())
        parts = [layers[layer] for layer in order]
        return DeviceLoad(
            tuple(times), tuple(part.attention for part in parts), tuple(tuple(part.segments) for part in parts), tuple(before.segments)
        )

    def _work(self, call: Call) -> Fraction:
        """Seconds of a call on the compute stream, without what is counted as a layer's copy."""
        if call.kernel is None or (is_delivery(call) and not self.transfer_calls):
            return Fraction()
        n_bytes = self.sizes.bytes_of(call)
        if n_bytes is not None:
            return self.link.seconds(n_bytes)
        return Fraction() if kind_of(call) == "copy" else Fraction(self.cost(self.device, call))

    def _moved(self) -> tuple[dict[int, Fraction], dict[int, Fraction]]:
        """Seconds on the link by layer: of its window, and of its rows on the transfer stream's way back."""
        copies: dict[int, Fraction] = {}
        back: dict[int, Fraction] = {}
        for call in self.transfer_calls or self.calls:
            n_bytes = self.sizes.bytes_of(call)
            if n_bytes is not None and (self.transfer_calls or is_delivery(call)):
                times = copies if is_delivery(call) else back
                times[_layer(call)] = times.get(_layer(call), Fraction()) + self.link.seconds(n_bytes)
        return copies, back


def _layer(call: Call) -> int:
    """Of a delivery or of rows that go back."""
    window = call.arguments["destination"] if is_delivery(call) else call.arguments["slot"].storage
    return int(window.params["layer"])
