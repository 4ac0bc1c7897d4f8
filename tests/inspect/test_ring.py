"""Drawings of the ring show every slot to scale and every turn of a slot once; the turns are those of the step."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations

import pytest
from schedule.test_virtual_step import N_LAYER, host_plan, random_cost

from numba_meta.inspect.ring import draw_ring, draw_slots, layer_of, slot_uses
from numba_meta.schedule.timeline import Span, Timeline
from numba_meta.schedule.transport_plan import DeviceFacts, TransportOptions, TransportPlan, plan_transport
from numba_meta.schedule.virtual_clock import Link
from numba_meta.schedule.virtual_step import virtual_step

LINKS = (Link(22 * 10**7), Link(53 * 10**6))
NAMES = ("cpu:0", "cpu:0#1")


def step(depth: int, architecture: str = "gemma3") -> Timeline:
    return virtual_step(host_plan(architecture, (1, 2), depth), random_cost(depth), LINKS, NAMES)


def transport(by_share: bool, depth: int = 1) -> TransportPlan:
    plan = host_plan("llama", (1, 2), 1).transport
    assert plan is not None
    deliveries = [decision.delivery for decision in plan.decisions]
    return plan_transport(deliveries, [DeviceFacts(name) for name in NAMES], 64, TransportOptions(depth, 0, 0, by_share))


def drawn(figure):
    found = {}
    for axes in figure.axes:
        for patch in axes.patches:
            if patch.get_gid():
                assert patch.get_gid() not in found
                found[patch.get_gid()] = patch
    return found


# ---- turns of slots --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_every_layer_has_its_turn_and_no_slot_is_used_twice_at_once(depth: int) -> None:
    uses = slot_uses(step(depth), depth + 2)
    assert [(use.device, use.layer) for use in uses] == [(name, layer) for name in NAMES for layer in range(N_LAYER)]
    assert all(use.slot == use.layer % (depth + 2) for use in uses)
    for use in uses:
        assert use.back is not None
        moments = [*use.fill, *use.read, *use.back]
        assert moments == sorted(moments)
    for first, second in combinations(uses, 2):
        if (first.device, first.slot) == (second.device, second.slot):
            assert first.back is not None and first.back[1] <= second.fill[0]


def test_turns_are_the_steps_own_times() -> None:
    timeline = step(1)
    use = slot_uses(timeline, 3)[N_LAYER + 4]  # layer 4 on the second device
    spans = {(span.label, span.kind): span for span in timeline.spans if span.stream.startswith("cpu:0#1 ")}
    assert use.fill == (spans["cache_k.4.window", "copy"].start, spans["cache_v.4.window", "copy"].stop)
    read = spans["attention.4", "attention"]
    assert use.read == (read.start, read.stop)
    assert use.back == (spans["cache_k.4.written_back", "copy"].start, spans["cache_v.4.written_back", "copy"].stop)


def test_an_ordered_step_uses_no_slot_and_a_part_of_a_step_only_whole_turns() -> None:
    assert slot_uses(step(0), 3) == ()
    timeline = step(1)
    part = slot_uses(timeline.between(0, timeline.stop / 2), 3)
    assert 0 < len(part) < 2 * N_LAYER


def test_layers_of_labels() -> None:
    assert [layer_of(label) for label in ("cache_k.12.window", "attention 3", "KV 0", "logits")] == [12, 3, 0, -1]


# ---- drawings --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_share", [True, False])
def test_slots_are_drawn_to_scale_with_what_lies_in_them(by_share: bool) -> None:
    pytest.importorskip("matplotlib", reason="drawings need the extra 'plots'")
    plan = transport(by_share)
    assert plan.ring is not None
    patches = drawn(draw_ring(plan, NAMES, "A ring"))
    n_slots = plan.n_slots
    assert {gid for gid in patches if gid.count("/") == 1} == {f"{j}/{slot}" for j in range(2) for slot in range(n_slots)}
    widths = [patch.get_width() for gid, patch in patches.items() if gid.endswith("/whole")]
    assert len(widths) == 2 * n_slots and max(widths) == pytest.approx(min(widths))
    whole_width = widths[0]
    for device in range(2):
        for slot in range(n_slots):
            box = patches[f"{device}/{slot}"]
            assert box.get_width() / whole_width == pytest.approx(plan.ring_bytes[device] / n_slots / plan.slot_bytes)
            for part, binding in zip("KV", plan.ring.bind(plan.staged[slot]), strict=True):
                inner = patches[f"{device}/{slot}/{part}"]
                at = (inner.get_x() - box.get_x()) / whole_width * plan.slot_bytes
                assert at == pytest.approx(binding.offsets[device], abs=1)
                assert inner.get_x() + inner.get_width() <= box.get_x() + box.get_width() + 1e-6


def test_without_a_ring_the_reason_is_drawn() -> None:
    pytest.importorskip("matplotlib", reason="drawings need the extra 'plots'")
    figure = draw_ring(transport(True, depth=0), NAMES, "No ring")
    assert drawn(figure) == {}
    assert "depth 0 asks for the ordered path" in {text.get_text() for axes in figure.axes for text in axes.texts}


@pytest.mark.parametrize("depth", [1, 4])
def test_every_turn_is_drawn_to_scale_in_its_lane(depth: int) -> None:
    pytest.importorskip("matplotlib", reason="drawings need the extra 'plots'")
    timeline = step(depth)
    patches = drawn(draw_slots(timeline, depth + 2, "Slots"))
    lanes: dict[tuple[str, int], set[float]] = {}
    for use in slot_uses(timeline, depth + 2):
        prefix = f"{use.device}/{use.slot}/{use.layer}"
        for state, (start, stop) in (("filled", use.fill), ("read", use.read)):
            patch = patches[f"{prefix}/{state}"]
            assert patch.get_x() == pytest.approx(float(start * 1000))  # milliseconds
            assert patch.get_width() == pytest.approx(float((stop - start) * 1000))
            lanes.setdefault((use.device, use.slot), set()).add(patch.get_y())
    assert len(lanes) == 2 * (depth + 2)
    assert all(len(ys) == 1 for ys in lanes.values())
    assert len({y for ys in lanes.values() for y in ys}) == len(lanes)


def test_nothing_to_draw() -> None:
    pytest.importorskip("matplotlib", reason="drawings need the extra 'plots'")
    stray = Timeline(("cpu:0 transfer",), (Span("cpu:0 transfer", "x", Fraction(), Fraction(1), "copy"),))
    for timeline in (Timeline((), ()), step(0), stray):
        assert drawn(draw_slots(timeline, 3)) == {}
