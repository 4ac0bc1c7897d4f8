"""Whether calls that touch the same memory are ordered, and find there what was meant for them: of a plan, without memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from numba_meta.lowering import Scratch
from numba_meta.schedule.calls import AddressList, Call, Constant, EventName, Peer, Place, storage_of
from numba_meta.schedule.plan import StepPlan
from numba_meta.schedule.record import Binder, InputBlock
from numba_meta.tensor import Role, Tensor

Stream = tuple[int, str]
Clock = dict[Stream, int]  # how many calls of each stream have ended before


@dataclass(frozen=True)
class Access:
    """A call's access to memory: bytes `start..stop`, what they were taken for, and when."""

    start: int
    stop: int
    what: tuple[int, Place]
    is_write: bool
    stream: Stream
    number: int
    node: str


def bind(plan: StepPlan) -> Binder:
    """Addresses for a plan as on devices; every buffer is far from all others."""
    bases: dict[tuple[int, str], int] = {}

    def persistent(device: int, tensor: Tensor) -> int:
        return bases.setdefault((device, tensor.name), (len(bases) + 1) << 32)

    n = len(plan.devices)
    names = [leaf.name for leaf in plan.split.graph.leaves if leaf.role is Role.INPUT]
    inputs = InputBlock(1 << 60, tuple((1 << 60) + ((j + 1) << 40) for j in range(n)), 0, {name: i << 20 for i, name in enumerate(names)})
    return Binder(plan, [(j + 1) << 48 for j in range(n)], inputs, persistent, [((j + 1) << 48) + (1 << 44) for j in range(n)])


def _in_order(plan: StepPlan) -> Iterator[tuple[Stream, Call]]:
    """Calls in an order in which they could run; a meeting stands once for each device."""
    queues = {(j, purpose): deque(calls) for j, device in enumerate(plan.devices) for purpose, calls in device.streams().items()}
    recorded: set[tuple[int, EventName]] = set()
    while any(queues.values()):
        moved = False
        for stream, calls in queues.items():
            while calls and not calls[0].meets and (calls[0].waits is None or (stream[0], calls[0].waits) in recorded):
                call, moved = calls.popleft(), True
                if call.records is not None:
                    recorded.add((stream[0], call.records))
                yield stream, call
        heads = [queues[j, "compute"] for j in range(len(plan.devices))]
        if all(calls and calls[0].meets for calls in heads):
            moved = True
            yield from [((j, "compute"), calls.popleft()) for j, calls in enumerate(heads)]
        assert moved, "streams wait for each other"


def faults(plan: StepPlan) -> list[str]:
    """Pairs of accesses that nothing orders, and reads of what was never written or is overwritten."""
    binder, events, found = bind(plan), dict[tuple[int, EventName], Clock](), list[str]()
    clocks = {(j, purpose): Clock() for j, device in enumerate(plan.devices) for purpose in device.streams()}
    accesses: list[Access] = []
    meeting: list[Stream] = []
    for stream, call in _in_order(plan):
        clock = clocks[stream]
        if call.records is not None:
            events[stream[0], call.records] = dict(clock)
        if call.waits is not None:
            _join(clock, events[stream[0], call.waits])
        if call.meets:
            meeting.append(stream)
            if len(meeting) == len(plan.devices):
                together = Clock()
                for each in meeting:
                    _join(together, clocks[each])
                for each in meeting:
                    clocks[each].update(together)
                meeting = []
        if call.kernel is None:
            continue
        clock[stream] = clock.get(stream, 0) + 1
        # A product over no elements may read what nobody wrote: it counts for nothing.
        reads = () if call.arguments.get("k") == 0 else call.reads
        own = [_access(binder, stream, clock[stream], call, place, False) for place in reads]
        own += [_access(binder, stream, clock[stream], call, place, True) for place in call.writes]
        for access in filter(None, own):
            before = [a for a in accesses if a.start < access.stop and access.start < a.stop]
            for other in before:
                if (access.is_write or other.is_write) and clock.get(other.stream, 0) < other.number:
                    found.append(f"{access.node} and {other.node}: {access.what[1].name} and {other.what[1].name} are not ordered")
            writers = [a for a in before if a.is_write]
            if not access.is_write and _is_of_step(access.what[1]) and (not writers or writers[-1].what != access.what):
                found.append(f"{access.node} reads {access.what[1].name}, written by {writers[-1].node if writers else 'nobody'}")
        accesses += filter(None, own)
    return found


def _join(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, 0), number)


def _is_of_step(place: Place) -> bool:
    return isinstance(place, Scratch) or (isinstance(place, Tensor) and place.role is Role.NODE)


def _access(binder: Binder, stream: Stream, number: int, call: Call, place: Place, is_write: bool) -> Access | None:
    device = place.device if isinstance(place, Peer) else stream[0]
    storage = storage_of(place.tensor if isinstance(place, Peer) else place)
    if isinstance(storage, (AddressList, Constant)) or (isinstance(storage, Tensor) and storage.role in (Role.INPUT, Role.WEIGHT)):
        return None
    if storage.n_bytes == 0:  # of a device without a share
        return None
    start = binder.address(device, storage)
    return Access(start, start + storage.n_bytes, (device, storage), is_write, stream, number, f"{stream} {call.node}")
