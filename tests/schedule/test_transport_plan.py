"""The transport plan: the design's vectors, then budget, headroom, growth and slots by property."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule.transport_cases import GIB, KIB, MIB, assert_apart, delivery, devices, mirrored, models

from numba_meta.errors import PlacementError, UsageError
from numba_meta.memory.placement import WHOLE_SHARE
from numba_meta.schedule.transport_plan import MAX_DEPTH, Change, DeviceFacts, TransportOptions, TransportPlan, plan_transport, why_ordered
from numba_meta.schedule.transport_slots import (
    Delivery,
    Producer,
    Ring,
    bucket_cells,
    choose_ring_shares,
    slot_need,
)

NO_HEADROOM = TransportOptions(headroom_mib=0)


def kib(n_bytes: int) -> int:
    return -(-n_bytes // KIB)


# ---- the design's vectors --------------------------------------------------------------------------------------------------------------

LAYERS = [delivery(1024, (1, 1), 4096, layer=layer) for layer in range(3)]  # K and V of 4,096 KiB each, halved


def plan_kib(deliveries: list[Delivery]) -> list[int]:
    """KiB of one slot on each device."""
    plan = plan_transport(deliveries, devices(2), 128)
    assert plan.path == "pipelined" and plan.slot_bytes == 8192 * KIB
    return [kib(n_bytes // 3) for n_bytes in plan.ring_bytes]


def test_halved_layers_take_half_of_a_slot() -> None:
    assert plan_kib(LAYERS) == [4097, 4097]
    plan = plan_transport(LAYERS, devices(2), 128)
    assert plan.shares == (32770, 32770)
    assert plan.ring_bytes == (3 * 4_194_560,) * 2
    k, v = plan.ring.bind(LAYERS[0])  # type: ignore[union-attr]
    assert (k.offsets, v.offsets) == ((0, 0), (2_097_280, 2_097_280))  # V at 2,097,280 B


def test_a_layer_on_the_first_device_makes_it_whole() -> None:
    assert plan_kib([*LAYERS, delivery(1024, (1, 0), 4096, layer=3)]) == [8192, 4097]


@pytest.mark.parametrize("alignment", [1, 64, 128, 4096])
def test_a_mirrored_layer_makes_every_device_whole(alignment: int) -> None:
    plan = plan_transport([*LAYERS, mirrored(136, 2, 4096)], devices(2), alignment)
    assert plan.shares == (WHOLE_SHARE,) * 2
    assert plan.ring_bytes == (3 * plan.slot_bytes,) * 2


def slot_of(mib: float, parts: tuple[int, ...], n_full: int = 256) -> Delivery:
    """A delivery whose slot has about this many MiB (cells are multiples of 4 bytes)."""
    return delivery(round(mib * MIB / 512 / 4) * 4, parts, 256, n_full)


@pytest.mark.parametrize(
    ("mib", "parts", "by_share", "need", "path"),
    [
        (70.7, (1, 1), False, 212.1, "ordered"),  # the page shows 212
        (69.0, (1, 1), True, 103.5, "pipelined"),
        (70.7, (1, 1), True, 106.1, "pipelined"),  # its half
        (42.6, (1,), True, 127.8, "pipelined"),
        (42.7, (1,), True, 128.1, "ordered"),
    ],
)
def test_default_budget(mib: float, parts: tuple[int, ...], by_share: bool, need: float, path: str) -> None:
    plan = plan_transport([slot_of(mib, parts)], devices(len(parts)), 128, TransportOptions(by_share=by_share))
    assert [n_bytes / MIB for n_bytes in plan.need_bytes] == pytest.approx([need] * len(parts), abs=0.06)
    assert plan.path == path
    assert plan.ring_bytes == (plan.need_bytes if path == "pipelined" else (0,) * len(parts))


def test_over_budget_says_both_numbers() -> None:
    plan = plan_transport([slot_of(42.7, (1,), n_full=1024)], devices(1), 128)
    assert plan.reason == (
        "over budget: the ring needs 128.1 MiB on cpu:0 for this graph and 512.4 MiB at the full context, the budget is 128 MiB"
    )
    assert plan.decisions[0].reason == plan.reason


def test_budget_is_for_this_graph_not_for_the_full_context() -> None:
    plan = plan_transport([slot_of(42.6, (1,), n_full=2560)], devices(1), 128)
    assert plan.path == "pipelined"
    assert plan.full_bytes[0] > 10 * 127 * MIB
    assert plan.need_bytes[0] <= plan.ring_bytes[0] <= 128 * MIB


# ---- options ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value"),
    [("depth", -1), ("depth", MAX_DEPTH + 1), ("budget_mib", -1), ("budget_mib", 65537), ("headroom_mib", -1)],
)
def test_options_out_of_range(option: str, value: int) -> None:
    with pytest.raises(UsageError, match=f"{value}.*: expected 0") as error:
        TransportOptions(**{option: value})
    assert "\n" not in str(error.value)


def test_options_at_their_ends() -> None:
    assert plan_transport([slot_of(42.7, (1,))], devices(1), 128, TransportOptions(budget_mib=0)).path == "pipelined"
    assert plan_transport([slot_of(42.7, (1,))], devices(1), 128, TransportOptions(budget_mib=65536)).path == "pipelined"
    assert plan_transport([slot_of(42.7, (1,))], devices(1), 128, TransportOptions(budget_mib=1)).path == "ordered"


@pytest.mark.parametrize("depth", [1, 2, 4, MAX_DEPTH])
def test_depth_gives_two_slots_more(depth: int) -> None:
    assert plan_transport([delivery(64, (1,), 256)], devices(1), 128, TransportOptions(depth=depth)).n_slots == depth + 2


def test_depth_zero_is_ordered() -> None:
    plan = plan_transport(LAYERS, devices(2), 128, TransportOptions(depth=0))
    assert (plan.path, plan.n_slots, plan.ring_bytes, plan.change) == ("ordered", 0, (0, 0), Change.NONE)
    assert plan.early_bytes == (0, 0)
    assert plan.late_bytes == (3 * 4096 * KIB,) * 2


# ---- eligibility -----------------------------------------------------------------------------------------------------------------------

REFUSALS = [
    ({"is_marked": False}, {}, "marked for transport"),
    ({"producer": Producer.OTHER}, {}, "producer"),
    ({"is_read_later": True}, {}, "later split"),
    ({"is_pinned": False}, {}, "pinned"),
    ({}, {"is_foreign": True}, "foreign"),
    ({}, {"has_async_copies": False}, "asynchronous"),
    ({}, {"has_events": False}, "events"),
    ({}, {"gave_up_ring": True}, "gave its ring up"),
]


@pytest.mark.parametrize(("input_is", "device_is", "why"), REFUSALS)
def test_each_refusal_alone_keeps_a_delivery_ordered(input_is: dict[str, object], device_is: dict[str, bool], why: str) -> None:
    facts = devices(2)
    facts[1] = replace(facts[1], **device_is)  # a meta device can only what every simple device can
    one = replace(LAYERS[0], **input_is)
    assert why in (why_ordered(one, facts) or "")
    plan = plan_transport([one], facts, 128)
    assert (plan.path, plan.ring, plan.staged) == ("ordered", None, ())
    assert why in plan.reason and "\n" not in plan.reason


def test_what_can_be_staged_is_staged_beside_what_cannot() -> None:
    plan = plan_transport([LAYERS[2], replace(LAYERS[1], is_read_later=True), LAYERS[0]], devices(2), 128)
    assert plan.path == "pipelined"
    assert [one.layer for one in plan.staged] == [0, 2]
    assert plan.stats()["ordered"] == {"layer.1": "a later split reads the same copy"}
    assert plan.early_bytes == (2 * 4096 * KIB,) * 2
    assert plan.late_bytes == (4096 * KIB,) * 2
    assert "2 of 3" in plan.reason


def test_a_delivery_that_the_consumer_wrote_is_staged() -> None:
    assert why_ordered(replace(LAYERS[0], producer=Producer.CONSUMER), devices(2)) is None


def test_late_rows_are_counted_late() -> None:
    plan = plan_transport([replace(LAYERS[0], late_rows=3)], devices(2), 128)
    assert plan.early_bytes == (4096 * KIB,) * 2
    assert plan.late_bytes == (3 * 1024,) * 2  # 512 bytes of K and 512 of V in a row


def test_nothing_to_deliver() -> None:
    plan = plan_transport([], devices(2), 128)
    assert plan.path == "ordered" and "no layer" in plan.reason


def test_deliveries_to_other_devices() -> None:
    with pytest.raises(PlacementError, match="layer.0 is delivered to 2 devices: expected 3"):
        plan_transport(LAYERS, devices(3), 128)


# ---- headroom and growth ---------------------------------------------------------------------------------------------------------------


def test_each_device_is_judged_with_its_own_share() -> None:
    uneven = [delivery(1024, (3, 1), 4096)]
    need = plan_transport(uneven, devices(2), 128, TransportOptions(headroom_mib=100)).need_bytes
    assert need[0] > 2.9 * need[1]
    free = [DeviceFacts("cpu:0", need[0] + 100 * MIB), DeviceFacts("cpu:1", need[1] + 100 * MIB)]
    assert plan_transport(uneven, free, 128, TransportOptions(headroom_mib=100)).ring_bytes == need
    for device in (0, 1):
        tight = list(free)
        tight[device] = replace(free[device], free_bytes=need[device] + 100 * MIB - 1)
        plan = plan_transport(uneven, tight, 128, TransportOptions(headroom_mib=100))
        assert plan.path == "ordered"
        assert plan.reason.startswith("no headroom") and f"cpu:{device}" in plan.reason


def grown(plan: TransportPlan, n_cells: int, **how: object) -> TransportPlan:
    """The plan of a later graph with a larger window."""
    deliveries = [replace(decision.delivery, n_cells_now=n_cells) for decision in plan.decisions]
    return plan_transport(deliveries, devices(2, **how), 128, TransportOptions(budget_mib=0, headroom_mib=0), plan.ring)


def test_slots_grow_in_powers_of_two_up_to_the_full_context() -> None:
    layers = [delivery(1000, (1, 1), 256, 2560, layer=layer) for layer in range(2)]
    plan = plan_transport(layers, devices(2), 128)
    assert (plan.slot_bytes, plan.change) == (512 * KIB, Change.LAY_OUT)  # 512,000 needed
    sizes = []
    for n_cells in range(256, 2561, 256):
        plan = grown(plan, n_cells)
        sizes.append((plan.slot_bytes, plan.change))
    keep, grow = Change.KEEP, Change.GROW
    assert [change for _, change in sizes] == [keep, grow, grow, keep, grow, keep, keep, keep, grow, keep]
    assert [size for size, change in sizes if change is grow] == [1 * MIB, 2 * MIB, 4 * MIB, 5_120_000]
    assert grown(plan, 256).ring == plan.ring  # a shorter window keeps it


def test_growth_counts_the_ring_that_it_replaces_as_free() -> None:
    layers = [delivery(1024, (1, 1), 256, 4096)]
    first = plan_transport(layers, devices(2, 3584 * KIB), 128, NO_HEADROOM)
    left = 3584 * KIB - first.ring_bytes[0]
    second = grown(first, 1024, free_bytes=left)
    assert second.change is Change.GROW
    assert left < second.ring_bytes[0] <= 3584 * KIB
    third = grown(second, 4096, free_bytes=3584 * KIB - second.ring_bytes[0])
    assert (third.path, third.change, third.ring_bytes) == ("ordered", Change.RELEASE, (0, 0))


def test_less_free_memory_shrinks_a_ring_before_it_declines() -> None:
    layers = [delivery(1024, (1, 1), 1024, 4096)]
    held = Ring(3, 4 * MIB, choose_ring_shares(layers, 2, 128), 128)
    plan = plan_transport(layers, devices(2, 0), 128, NO_HEADROOM, held)
    assert plan.change is Change.KEEP
    needed = plan.need_bytes[0]
    short = [DeviceFacts(f"cpu:{index}", 600 * MIB - held.ring_bytes[0] + needed) for index in (0, 1)]
    plan = plan_transport(layers, short, 128, TransportOptions(headroom_mib=600), held)
    assert (plan.change, plan.ring_bytes) == (Change.SHRINK, plan.need_bytes)
    short = [replace(device, free_bytes=(device.free_bytes or 0) - 1) for device in short]
    assert plan_transport(layers, short, 128, TransportOptions(headroom_mib=600), held).change is Change.RELEASE


def test_another_depth_lays_a_ring_out_anew() -> None:
    held = plan_transport(LAYERS, devices(2), 128).ring
    assert plan_transport(LAYERS, devices(2), 128, TransportOptions(depth=2), held).change is Change.LAY_OUT


def test_a_larger_share_grows_the_ring_and_no_share_is_lost() -> None:
    left, right = delivery(1024, (3, 1), 4096), delivery(1024, (1, 3), 4096)
    first = plan_transport([left], devices(2), 128)
    second = plan_transport([right], devices(2), 128, None, first.ring)
    assert second.change is Change.GROW
    assert second.shares == (first.shares[0], first.shares[0])
    assert plan_transport([left], devices(2), 128, None, second.ring).change is Change.KEEP


# ---- by property -----------------------------------------------------------------------------------------------------------------------


@given(models(), st.booleans(), st.integers(1, 8), st.data())
def test_every_window_fits_its_slot(model: tuple[int, int, list[Delivery]], by_share: bool, depth: int, data: st.DataObject) -> None:
    n_devices, alignment, layers = model
    options = TransportOptions(depth, 0, 0, by_share)
    plan = plan_transport(layers, devices(n_devices), alignment, options)
    assert plan.ring is not None
    for one in layers:
        # The ring keeps every smaller window too, of fewer streams too.
        other = min(one.n_cells_now, bucket_cells(data.draw(st.integers(1, one.n_cells_now))))
        for n_cells in (one.n_cells_now, other if other % 256 == 0 else one.n_cells_now):
            for n_streams in (1, one.n_streams):
                assert_apart(plan.ring, replace(one, n_cells_now=n_cells, n_streams=n_streams))
    assert plan.slot_bytes <= slot_need(layers, alignment, full=True)
    assert plan.slot_bytes >= slot_need(layers, alignment)
    assert all(a >= b for a, b in zip(plan.ring_bytes, plan.need_bytes, strict=True))
    if not by_share or any(max(one.k_piece_bytes) == one.k_cell_bytes for one in layers):
        assert max(plan.shares) == WHOLE_SHARE


@given(models(), st.integers(1, 4), st.integers(0, 2), st.lists(st.integers(0, 4 * MIB), min_size=4, max_size=4))
def test_a_ring_stays_within_budget_and_headroom(
    model: tuple[int, int, list[Delivery]], depth: int, budget_mib: int, free: list[int]
) -> None:
    n_devices, alignment, layers = model
    facts = [DeviceFacts(f"cpu:{index}", free[index]) for index in range(n_devices)]
    plan = plan_transport(layers, facts, alignment, TransportOptions(depth, budget_mib, 1))
    caps = [min(free[index] - MIB, budget_mib * MIB or GIB) for index in range(n_devices)]
    if plan.path == "pipelined":
        assert all(n_bytes <= cap for n_bytes, cap in zip(plan.ring_bytes, caps, strict=True))
        assert sum(plan.late_bytes) == 0
    else:
        assert any(n_bytes > max(0, cap) for n_bytes, cap in zip(plan.need_bytes, caps, strict=True))
        assert plan.ring_bytes == (0,) * n_devices and sum(plan.early_bytes) == 0
    travelled = [sum(one.window_bytes(index) for one in layers) for index in range(n_devices)]
    assert [a + b for a, b in zip(plan.early_bytes, plan.late_bytes, strict=True)] == travelled


@given(models(), st.lists(st.integers(1, 40), min_size=2, max_size=8), st.integers(1, 3))
def test_a_ring_never_shrinks_while_memory_stays(model: tuple[int, int, list[Delivery]], windows: list[int], depth: int) -> None:
    n_devices, alignment, layers = model
    total, ring, size = 8 * MIB, None, 0
    for window in windows:
        now = [replace(one, n_cells_now=min(one.n_cells_full, 256 * window)) for one in layers]
        held = ring.ring_bytes if ring else (0,) * n_devices
        facts = [DeviceFacts(f"cpu:{index}", total - n_bytes) for index, n_bytes in enumerate(held)]
        plan = plan_transport(now, facts, alignment, TransportOptions(depth, 8, 1), ring)
        if plan.ring is None:
            assert plan.change is (Change.RELEASE if ring else Change.NONE)
            ring, size = None, 0
            continue
        assert plan.slot_bytes >= size
        assert plan.change is (Change.LAY_OUT if ring is None else Change.KEEP if plan.ring == ring else Change.GROW)
        for one in now:
            assert_apart(plan.ring, one)
        ring, size = plan.ring, plan.slot_bytes
