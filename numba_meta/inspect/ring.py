"""The ring of a host-resident cache as drawings: how its slots are placed on the devices, and how they are used in a step.

They need the extra `plots`. `slot_uses` is the same as data.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from numba_meta.devices.parse import format_bytes
from numba_meta.inspect.canvas import (
    DEVICE_COLOURS,
    FAINT,
    INK,
    LARGE,
    SMALL,
    Panel,
    add_panel,
    device_colour,
    legend,
    new_figure,
    show_axes,
    text_width,
    time_unit,
)
from numba_meta.schedule.timeline import Span, Timeline
from numba_meta.schedule.transport_plan import TransportPlan

_MARGIN, _GAP = 18.0, 10.0


# ---- where slots lie -------------------------------------------------------------------------------------------------------------------


def draw_ring(plan: TransportPlan, names: Sequence[str], title: str = "", width: float = 800.0) -> Any:
    """Every device's slots to one scale, in the dashed frames of whole slots; K and V of the first windows where they lie.

    `names` of the devices. Returns a matplotlib figure; a plan without a ring is drawn as the reason for that. Raises `NumbaMetaError`
    where matplotlib is not installed.
    """
    lane, top = 46.0, 64.0 if title else 36.0
    height = top + len(names) * (lane + _GAP) + 24
    figure = new_figure(width, height)
    page = add_panel(figure, 0, 0, width, height, (0, width), (height, 0))
    if title:
        page.text(_MARGIN, 24, title, LARGE, weight="bold", va="center")
    page.text(_MARGIN, top - 18, plan.reason, SMALL, FAINT, va="center")
    if plan.ring is None:
        return figure
    left = _MARGIN + max(text_width(name, SMALL) for name in names) + 10
    right = max(text_width(format_bytes(n), SMALL) for n in plan.ring_bytes) + 10
    pitch = (width - left - right - _MARGIN) / plan.n_slots
    scale = (pitch - _GAP) / plan.slot_bytes
    for device, name in enumerate(names):
        y = top + device * (lane + _GAP)
        page.text(left - 8, y + lane / 2, name, SMALL, ha="right", va="center")
        page.text(width - _MARGIN, y + lane / 2, format_bytes(plan.ring_bytes[device]), SMALL, ha="right", va="center")
        for slot in range(plan.n_slots):
            _draw_slot(page, plan, device, slot, left + slot * pitch, y, lane, scale)
    return figure


def _draw_slot(page: Panel, plan: TransportPlan, device: int, slot: int, x: float, y: float, lane: float, scale: float) -> None:
    assert plan.ring is not None
    held = plan.ring.ring_bytes[device] / plan.n_slots
    page.box(x, y, plan.slot_bytes * scale, lane, "none", gid=f"{device}/{slot}/whole", edge=FAINT, style="dashed")
    page.box(x, y, held * scale, lane, device_colour(device, 0.15), gid=f"{device}/{slot}", edge=FAINT)
    if slot < len(plan.staged):
        delivery = plan.staged[slot]
        k, v = plan.ring.bind(delivery)
        for part, binding, cell_bytes, strength in (
            ("K", k, delivery.k_piece_bytes[device], 0.55),
            ("V", v, delivery.v_piece_bytes[device], 0.4),
        ):
            long = delivery.n_streams * delivery.n_cells_now * cell_bytes * scale
            label, gid = f"{part} {delivery.layer}", f"{device}/{slot}/{part}"
            page.box(x + binding.offsets[device] * scale, y + 6, long, lane - 12, device_colour(device, strength), gid=gid, label=label)
    page.box(x, y, held * scale, lane, "none", edge=FAINT)  # once more, over the windows


# ---- slots in motion -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SlotUse:
    """One turn of a slot on one device, in seconds from the step's begin: filled, read by attention, new rows taken back to the host."""

    device: str
    slot: int
    layer: int
    fill: tuple[Fraction, Fraction]
    read: tuple[Fraction, Fraction]
    back: tuple[Fraction, Fraction] | None


def slot_uses(timeline: Timeline, n_slots: int) -> tuple[SlotUse, ...]:
    """The turns of every slot in a pipelined step, real or virtual: windows go into the slots in the order in which they are copied."""
    uses = []
    for stream in timeline.streams:
        device, _, purpose = stream.rpartition(" ")
        if purpose != "transfer":
            continue
        copies: dict[int, list[Span]] = {}
        for span in timeline.of(stream):
            if span.kind == "copy":
                copies.setdefault(layer_of(span.label), []).append(span)
        reads = {layer_of(span.label): span for span in timeline.of(f"{device} compute") if span.kind == "attention"}
        for index, (layer, spans) in enumerate(copies.items()):
            read = reads.get(layer)
            if read is None:  # not in this part of a step
                continue
            there = [span for span in spans if span.start < read.stop]
            if not there:
                continue
            back = [span for span in spans if span.start >= read.stop]
            fill = (there[0].start, there[-1].stop)
            returned = (back[0].start, back[-1].stop) if back else None
            uses.append(SlotUse(device, index % n_slots, layer, fill, (read.start, read.stop), returned))
    return tuple(uses)


def layer_of(label: str) -> int:
    """The first number of a label: `cache_k.3.window`, `attention 3`; -1 without any."""
    found = re.search(r"\d+", label)
    return int(found[0]) if found else -1


_STATES = {
    "filled": (DEVICE_COLOURS[4], "is filled"),
    "full": ("#F8E3BF", "full, waits for its reader"),
    "read": ("#00476F", "is read"),
    "done": ("#E4E4E4", "read, waits for the way back"),
    "back": (DEVICE_COLOURS[3], "new rows go back"),
}


def draw_slots(timeline: Timeline, n_slots: int, title: str = "", width: float = 800.0) -> Any:
    """Slots in motion: a lane per device and slot, time to the right; numbers are layers.

    Takes a pipelined step's timeline, real or virtual; `n_slots` as its plan has them. Returns a matplotlib figure. Raises `NumbaMetaError`
    where matplotlib is not installed.
    """
    uses = slot_uses(timeline, n_slots)
    scale, unit = time_unit(timeline.stop)
    devices = list(dict.fromkeys(use.device for use in uses))
    lanes = [(device, slot) for device in devices for slot in range(n_slots)]
    lane, left = 22.0, _MARGIN + max((text_width(f"{device} slot {n_slots}", SMALL) for device in devices), default=0.0) + 8
    top = 74.0 if title else 46.0
    inner, long = width - left - _MARGIN, max(1, len(lanes)) * (lane + 4.0)
    height = top + long + 44
    figure = new_figure(width, height)
    page = add_panel(figure, 0, 0, width, height, (0, width), (height, 0))
    if title:
        page.text(_MARGIN, 24, title, LARGE, weight="bold", va="center")
    legend(page, list(_STATES.values()), _MARGIN, top - 30)
    panel = add_panel(figure, left, top, inner, long, (0, float(timeline.stop * scale) or 1.0), (long, 0))
    show_axes(panel, f"time ({unit})")
    for index, (device, slot) in enumerate(lanes):
        y = index * (lane + 4.0) + 2
        page.text(left - 8, top + y + lane / 2, f"{device} slot {slot}", SMALL, ha="right", va="center")
        for use in uses:
            if (use.device, use.slot) == (device, slot):
                _draw_use(panel, use, y, lane, scale)
    return figure


def _draw_use(panel: Panel, use: SlotUse, y: float, lane: float, scale: int) -> None:
    parts = [("filled", use.fill), ("full", (use.fill[1], use.read[0])), ("read", use.read)]
    if use.back is not None:
        parts += [("done", (use.read[1], use.back[0])), ("back", use.back)]
    for state, (start, stop) in parts:
        if stop > start:
            gid = f"{use.device}/{use.slot}/{use.layer}/{state}"
            ink = "white" if state == "read" else INK
            label = str(use.layer) if state in ("filled", "read") else ""
            x, long = float(start * scale), float((stop - start) * scale)
            panel.box(x, y, long, lane, _STATES[state][0], gid=gid, label=label, ink=ink, line=0.3)
