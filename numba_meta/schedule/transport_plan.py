"""Which deliveries are staged through the ring, how large it is, and why anything stays ordered. Pure.

In: the deliveries of a graph, what its devices can do and have free, the options, the ring that is held. Out: a `TransportPlan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from numba_meta.errors import PlacementError, UsageError
from numba_meta.memory.placement import WHOLE_SHARE, round_up
from numba_meta.schedule.transport_slots import Delivery, Producer, Ring, choose_ring_shares, largest_slot, slot_need

MAX_DEPTH = 64
MAX_BUDGET_MIB = 65536
_MIB = 1 << 20


@dataclass(frozen=True)
class TransportOptions:
    """What the user may ask for. Raises `UsageError` for a number out of range.

    depth: splits to look ahead, 0 for the ordered path. budget_mib: cap on one device's ring, 0 for none. headroom_mib: what every device
    must keep free beside it. by_share: each device allocates its own share of a slot; else each allocates all of it.
    """

    depth: int = 1
    budget_mib: int = 128
    headroom_mib: int = 512
    by_share: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.depth <= MAX_DEPTH:
            raise UsageError(f"transport depth {self.depth}: expected 0 (ordered path) to {MAX_DEPTH} splits")
        if not 0 <= self.budget_mib <= MAX_BUDGET_MIB:
            raise UsageError(f"transport budget {self.budget_mib} MiB: expected 0 (no cap) to {MAX_BUDGET_MIB} MiB")
        if self.headroom_mib < 0:
            raise UsageError(f"transport headroom {self.headroom_mib} MiB: expected 0 MiB or more")

    @property
    def n_slots(self) -> int:
        """Slots of the ring; two more than the depth, so that a delivery need not wait for the split enqueued a moment ago."""
        return self.depth + 2 if self.depth else 0


@dataclass(frozen=True)
class DeviceFacts:
    """What transport must know of a simple device. `free_bytes`: free now, beside a ring that is held; None without a limit."""

    name: str
    free_bytes: int | None = None
    has_async_copies: bool = True
    has_events: bool = True
    is_foreign: bool = False
    gave_up_ring: bool = False  # a graph did not fit beside its ring once: it stays ordered from then on
    is_refused_by_peer: bool = False  # another rank cannot, and all take the same path


class Change(Enum):
    """What is to be done with the ring that is held."""

    NONE = "none"
    KEEP = "keep"
    LAY_OUT = "lay out"  # there was none, or one of another number of slots
    GROW = "grow"
    SHRINK = "shrink"  # less memory is free than when it was laid out
    RELEASE = "release"


@dataclass(frozen=True)
class Decision:
    """One delivery: staged through the ring, or ordered; and why."""

    delivery: Delivery
    is_staged: bool
    reason: str


@dataclass(frozen=True)
class TransportPlan:
    """How a graph's deliveries travel. Byte counts are per device; `early_bytes` and `late_bytes` are per step.

    Early: on the transfer stream, ahead of the reader. Late: on the consumer's own stream, right before it. `need_bytes` is the ring that
    this graph needs, `full_bytes` the one that the full context would need, also where the plan is to do without.
    """

    path: str  # "ordered" or "pipelined"
    reason: str
    depth: int
    decisions: tuple[Decision, ...]
    ring: Ring | None
    change: Change
    ring_bytes: tuple[int, ...]
    need_bytes: tuple[int, ...]
    full_bytes: tuple[int, ...]
    early_bytes: tuple[int, ...]
    late_bytes: tuple[int, ...]

    @property
    def staged(self) -> tuple[Delivery, ...]:
        """The deliveries that go through the ring, in the order of their consumers."""
        return tuple(sorted((d.delivery for d in self.decisions if d.is_staged), key=lambda delivery: delivery.consumer))

    @property
    def is_too_large(self) -> bool:
        """Whether something could be staged, but not within budget and headroom."""
        return self.ring is None and any(self.need_bytes)

    @property
    def is_pipelined_or_empty(self) -> bool:
        """Whether it has a ring, or nothing to deliver to any of its devices."""
        return self.ring is not None or not any(sum(d.delivery.k_piece_bytes) + sum(d.delivery.v_piece_bytes) for d in self.decisions)

    @property
    def n_slots(self) -> int:
        """Slots of the ring; 0 on the ordered path."""
        return self.ring.n_slots if self.ring else 0

    @property
    def slot_bytes(self) -> int:
        """Meta bytes of a slot; 0 on the ordered path."""
        return self.ring.slot_bytes if self.ring else 0

    @property
    def shares(self) -> tuple[int, ...]:
        """What each device holds of a slot, in 1/65536; empty on the ordered path."""
        return self.ring.shares if self.ring else ()

    def stats(self) -> dict[str, object]:
        """The plan's part of `transport.stats`: plain data."""
        return {
            "path": self.path,
            "reason": self.reason,
            "depth": self.depth if self.ring else 0,
            "n_slots": self.n_slots,
            "slot_bytes": self.slot_bytes,
            "shares": self.shares,
            "ring_bytes": self.ring_bytes,
            "need_bytes": self.need_bytes,
            "full_bytes": self.full_bytes,
            "early_bytes": self.early_bytes,
            "late_bytes": self.late_bytes,
            "staged": tuple(delivery.name for delivery in self.staged),
            "ordered": {d.delivery.name: d.reason for d in self.decisions if not d.is_staged},
        }


def why_ordered(delivery: Delivery, devices: Sequence[DeviceFacts]) -> str | None:
    """Why a delivery cannot be staged, in one line; None where it can. A meta device can where every simple device can."""
    if not delivery.is_marked:
        return "it is not a persistent host input marked for transport"
    if delivery.producer is Producer.OTHER:
        return "its producer is neither the host nor its consumer"
    if delivery.is_read_later:
        return "a later split reads the same copy"
    if not delivery.is_pinned:
        return "its host memory is not pinned"
    for device in devices:
        if device.is_foreign:
            return f"{device.name} is of a foreign type"
        if not device.has_async_copies:
            return f"{device.name} has no asynchronous copies"
        if not device.has_events:
            return f"{device.name} has no events"
        if device.is_refused_by_peer:
            return "another rank has no ring for it, and all ranks take the same path"
        if device.gave_up_ring:
            return f"{device.name} gave its ring up for a graph that did not fit beside it"
    return None


def plan_transport(
    deliveries: Sequence[Delivery],
    devices: Sequence[DeviceFacts],
    alignment: int,
    options: TransportOptions | None = None,
    held: Ring | None = None,
) -> TransportPlan:
    """Plans the transport of one graph. `held` is the ring that earlier plans laid out; it only grows while memory allows.

    Over budget or headroom, or with nothing to stage, the plan is ordered and says why. Raises `PlacementError` for deliveries to another
    number of devices.
    """
    for delivery in deliveries:
        if delivery.n_devices != len(devices):
            raise PlacementError(f"{delivery.name} is delivered to {delivery.n_devices} devices: expected {len(devices)}")
    return _Planner(deliveries, devices, alignment, options or TransportOptions(), held).plan()


class _Planner:
    """The steps of `plan_transport` with what they share."""

    def __init__(
        self, deliveries: Sequence[Delivery], devices: Sequence[DeviceFacts], alignment: int, options: TransportOptions, held: Ring | None
    ) -> None:
        self.deliveries, self.devices, self.alignment, self.options = deliveries, devices, alignment, options
        self.held = held if held and len(held.shares) == len(devices) else None
        self.change_without = Change.RELEASE if held else Change.NONE
        self.refusals = [why_ordered(delivery, devices) for delivery in deliveries]
        self.staged = [delivery for delivery, refusal in zip(deliveries, self.refusals, strict=True) if refusal is None]

    def plan(self) -> TransportPlan:
        if self.options.depth == 0:
            return self._ordered("depth 0 asks for the ordered path")
        need = slot_need(self.staged, self.alignment)
        if need == 0:
            return self._ordered(self._why_nothing())
        full = slot_need(self.staged, self.alignment, full=True)
        n_slots, shares = self.options.n_slots, self._shares()
        needed = Ring(n_slots, need, shares, self.alignment).ring_bytes
        wanted = Ring(n_slots, full, shares, self.alignment).ring_bytes
        caps = self._caps()
        if refusal := self._over_budget(needed, wanted) or self._over_headroom(needed, wanted, caps):
            return self._ordered(refusal, needed, wanted)
        ring, change = self._fit(need, full, shares, [self._budget if cap is None else min(cap, self._budget or cap) for cap in caps])
        reason = (
            f"{len(self.staged)} of {len(self.deliveries)} deliveries go through {n_slots} slots of {_mib(ring.slot_bytes)} "
            f"(depth {self.options.depth}), at most {_mib(max(ring.ring_bytes))} on a device"
        )
        return self._finish("pipelined", reason, ring, change, needed, wanted)

    def _shares(self) -> tuple[int, ...]:
        if self.options.by_share:
            return choose_ring_shares(self.staged, len(self.devices), self.alignment)
        return (WHOLE_SHARE,) * len(self.devices)

    @property
    def _budget(self) -> int | None:
        return self.options.budget_mib * _MIB or None

    def _caps(self) -> list[int | None]:
        """What the headroom leaves for the ring of each device: a held ring is given back before another is laid out."""
        held = self.held.ring_bytes if self.held else (0,) * len(self.devices)
        headroom = self.options.headroom_mib * _MIB
        return [
            None if device.free_bytes is None else max(0, device.free_bytes + n_bytes - headroom)
            for device, n_bytes in zip(self.devices, held, strict=True)
        ]

    def _over_budget(self, needed: tuple[int, ...], wanted: tuple[int, ...]) -> str | None:
        if self._budget is None or max(needed) <= self._budget:
            return None
        name = self.devices[needed.index(max(needed))].name
        return (
            f"over budget: the ring needs {_mib(max(needed))} on {name} for this graph and {_mib(max(wanted))} at the full context, "
            f"the budget is {self.options.budget_mib} MiB"
        )

    def _over_headroom(self, needed: tuple[int, ...], wanted: tuple[int, ...], caps: Sequence[int | None]) -> str | None:
        for device, n_bytes, n_full, cap in zip(self.devices, needed, wanted, caps, strict=True):
            if cap is not None and n_bytes > cap:
                return (
                    f"no headroom: the ring needs {_mib(n_bytes)} on {device.name} for this graph and {_mib(n_full)} at the full context, "
                    f"{cap / _MIB:.1f} MiB are free beyond the headroom of {self.options.headroom_mib} MiB"
                )
        return None

    def _fit(self, need: int, full: int, shares: tuple[int, ...], caps: Sequence[int | None]) -> tuple[Ring, Change]:
        """The held ring where it serves, else a new one: the next power of two, up to the full context's, within the caps."""
        n_slots, held = self.options.n_slots, self.held
        if held and (held.n_slots != n_slots or held.alignment != self.alignment):
            held = None
        if held:
            merged = tuple(max(pair) for pair in zip(held.shares, shares, strict=True))
            held_fits = all(cap is None or n_bytes <= cap for n_bytes, cap in zip(held.ring_bytes, caps, strict=True))
            if held.slot_bytes >= need and merged == held.shares and held_fits:
                return held, Change.KEEP
            limit = largest_slot(n_slots, merged, caps, self.alignment)
            if limit is None or limit >= need:
                shares = merged
        slot_bytes = max(min(round_up(_power_of_two(need), self.alignment), full), held.slot_bytes if held else 0)
        limit = largest_slot(n_slots, shares, caps, self.alignment)
        ring = Ring(n_slots, slot_bytes if limit is None else min(slot_bytes, limit), shares, self.alignment)
        if not held:
            return ring, Change.LAY_OUT
        return ring, Change.GROW if max(ring.ring_bytes) >= max(held.ring_bytes) else Change.SHRINK

    def _why_nothing(self) -> str:
        reasons = list(dict.fromkeys(filter(None, self.refusals)))
        if not reasons and self.deliveries:
            return "no device of this process has heads of a layer that is delivered"
        if not reasons:
            return "no layer has a history in host memory to deliver"
        return f"no delivery can be staged: {'; '.join(reasons)}"

    def _ordered(self, reason: str, needed: tuple[int, ...] = (), wanted: tuple[int, ...] = ()) -> TransportPlan:
        return self._finish("ordered", reason, None, self.change_without, needed, wanted)

    def _finish(
        self, path: str, reason: str, ring: Ring | None, change: Change, needed: tuple[int, ...], wanted: tuple[int, ...]
    ) -> TransportPlan:
        eligible = f"staged through {ring.n_slots} slots" if ring else reason
        decisions = tuple(
            Decision(delivery, ring is not None and refusal is None, refusal or eligible)
            for delivery, refusal in zip(self.deliveries, self.refusals, strict=True)
        )
        none = (0,) * len(self.devices)
        early, late = list(none), list(none)
        for decision in decisions:
            for device in range(len(self.devices)):
                in_time = decision.delivery.window_bytes(device)
                (early if decision.is_staged else late)[device] += in_time
                late[device] += decision.delivery.late_rows * decision.delivery.cell_bytes(device) if decision.is_staged else 0
        ring_bytes = ring.ring_bytes if ring else none
        return TransportPlan(
            path, reason, self.options.depth, decisions, ring, change, ring_bytes, needed or none, wanted or none, tuple(early), tuple(late)
        )


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _mib(n_bytes: int) -> str:
    """Rounded up to a tenth, so that what is over a limit also reads so."""
    tenths = -(-10 * n_bytes // _MIB)
    return f"{tenths // 10}.{tenths % 10} MiB"
