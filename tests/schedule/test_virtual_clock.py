"""The virtual clock runs the streams of a step in exactly the time that the recursion predicts, and sees what waits for ever."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from numba_meta.errors import DeviceError, UsageError
from numba_meta.schedule.bound import step_bound, step_bound_devices
from numba_meta.schedule.timeline import Span, Timeline
from numba_meta.schedule.virtual_clock import (
    Copy,
    DeviceStep,
    Item,
    Link,
    Meet,
    Record,
    Wait,
    Work,
    ordered_programs,
    pipelined_programs,
    simulate,
    step_programs,
)

US = Fraction(1, 10**6)
LINKS = {"x16": Link(22 * 10**9), "x4": Link(5_300_000_000)}
CELL_BYTES = 1088
UNIFORM = (4096,) * 12
MIXED = (768, 768, 768, 768, 768, 8192) * 2  # five local layers, then a global one


def device_step(name: str, link: str, windows: tuple[int, ...], speed: int, n_segments: int) -> DeviceStep:
    """Attention takes the longer the more cells it reads; layers of `n_segments` parts between meetings."""
    attention = tuple(n_cells * US / 100 / speed for n_cells in windows)
    rest = (150 * US / speed,) * (n_segments - 1)
    segments = tuple((read + 60 * US / speed, *rest) for read in attention)
    return DeviceStep(name, link, tuple(CELL_BYTES * n for n in windows), attention, segments, (40 * US,), (900 * US / speed,))


# ---- step == bound ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 2, 4])
@pytest.mark.parametrize("windows", [UNIFORM, MIXED], ids=["uniform", "mixed"])
@pytest.mark.parametrize("link", ["x16", "x4"])
def test_one_device_takes_what_the_recursion_says(link: str, windows: tuple[int, ...], depth: int) -> None:
    step = device_step("cpu:0", link, windows, speed=1, n_segments=2)
    copy = [CELL_BYTES * n / Fraction(LINKS[link].bytes_per_second) for n in windows]
    compute = [sum(segments, Fraction()) for segments in step.segments]
    bound = step_bound(copy, compute, step.attention, step.before[0], step.after[0], depth)
    timeline = simulate(step_programs([step], depth), LINKS)
    assert timeline.stop == bound.step  # exactly, not to a tolerance
    copies = [span for span in timeline.spans if span.kind == "copy"]
    attentions = [span for span in timeline.spans if span.label.startswith("attention")]
    assert [span.stop for span in copies] == list(bound.ready)
    assert [span.start for span in attentions] == list(bound.start)
    assert [span.stop for span in attentions] == list(bound.freed)
    assert sum(span.n_bytes for span in copies) == CELL_BYTES * sum(windows)


@pytest.mark.parametrize("depth", [0, 1, 2, 4])
@pytest.mark.parametrize("windows", [UNIFORM, MIXED], ids=["uniform", "mixed"])
@pytest.mark.parametrize("speeds", [(1, 1), (3, 1), (1, 4)])
def test_two_devices_on_two_links_meet_as_the_recursion_says(windows: tuple[int, ...], depth: int, speeds: tuple[int, int]) -> None:
    steps = [device_step(f"cpu:{n}", link, windows, speeds[n], 3) for n, link in enumerate(LINKS)]
    bound = step_bound_devices([step.load(LINKS) for step in steps], depth)
    timeline = simulate(step_programs(steps, depth), LINKS)
    assert timeline.stop == bound.step
    for step, times in zip(steps, bound.devices, strict=True):
        assert timeline.of(f"{step.name} compute")[-1].stop == times.step


def test_two_devices_on_one_link_share_it() -> None:
    steps = [device_step(f"cpu:{n}", "x4", UNIFORM, speed=50, n_segments=3) for n in (0, 1)]
    timeline = simulate(pipelined_programs(steps, 1), LINKS)
    alone = step_bound_devices([step.load(LINKS) for step in steps], 1)
    assert alone.step < timeline.stop
    copies = sorted((span for span in timeline.spans if span.kind == "copy"), key=lambda span: span.start)
    assert all(first.stop <= second.start for first, second in zip(copies, copies[1:], strict=False))
    assert copies[-1].stop == 2 * step_bound_devices([steps[0].load(LINKS)], 1).devices[0].ready[-1]  # the link never rests


def test_a_pipelined_step_overlaps_and_an_ordered_one_does_not() -> None:
    step = device_step("cpu:0", "x4", UNIFORM, speed=1, n_segments=2)
    load = step.load(LINKS)
    ordered, pipelined = (simulate(step_programs([step], depth), LINKS).stop for depth in (0, 1))
    assert ordered == load.copy_seconds + load.compute_seconds
    assert max(load.copy_seconds, load.compute_seconds) <= pipelined < ordered


@st.composite
def random_steps(draw: st.DrawFn) -> tuple[list[DeviceStep], dict[str, Link]]:
    """One to three devices, each with a link of its own; a link may delay its copies."""
    n_devices = draw(st.integers(1, 3))
    counts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=8))
    micro = st.integers(0, 500).map(lambda n: n * US)
    links = {
        f"link {n}": Link(draw(st.integers(1, 10**10)), draw(st.sampled_from([0, Fraction(1, 1000)]))) for n in range(n_devices)
    }
    steps = []
    for n in range(n_devices):
        segments = tuple(tuple(draw(micro) for _ in range(count)) for count in counts)
        attention = tuple(layer[0] * draw(st.integers(0, 4)) / 4 for layer in segments)
        copy_bytes = tuple(draw(st.integers(0, 10**7)) for _ in counts)
        steps.append(DeviceStep(f"cpu:{n}", f"link {n}", copy_bytes, attention, segments, (draw(micro), draw(micro)), (draw(micro),)))
    return steps, links


@given(random_steps(), st.integers(0, 5))
def test_any_step_takes_what_the_recursion_says(case: tuple[list[DeviceStep], dict[str, Link]], depth: int) -> None:
    steps, links = case
    bound = step_bound_devices([step.load(links) for step in steps], depth)
    programs = step_programs(steps, depth)
    timeline = simulate(programs, links)
    assert timeline.stop == bound.step
    for name in programs:
        spans = timeline.of(name)
        assert all(span.seconds > 0 for span in spans)
        assert all(first.stop == second.start for first, second in zip(spans, spans[1:], strict=False))  # no gap without a reason


def test_a_release_too_early_or_a_missing_wait_shows() -> None:
    # What the clock is for: a stream that forgets to wait is faster than the bound, so equality with it is a check.
    step = device_step("cpu:0", "x4", UNIFORM, speed=1, n_segments=2)
    good = pipelined_programs([step], 1)
    bound = step_bound_devices([step.load(LINKS)], 1)
    careless = {name: [item for item in items if item != Wait("cpu:0 ready 7")] for name, items in good.items()}
    assert simulate(careless, LINKS).of("cpu:0 compute") != simulate(good, LINKS).of("cpu:0 compute")
    attention = [span for span in simulate(careless, LINKS).spans if span.label == "attention 7"]
    assert attention[0].start < bound.devices[0].ready[7]


# ---- the clock itself ------------------------------------------------------------------------------------------------------------------


def test_events_order_streams() -> None:
    programs: dict[str, list[Item]] = {
        "a": [Work("one", 3), Record("x"), Work("two", 1)],
        "b": [Wait("x"), Work("three", 2), Wait("x")],
    }
    timeline = simulate(programs, {})
    assert timeline == Timeline(
        ("a", "b"),
        (
            Span("a", "one", Fraction(0), Fraction(3), "compute"),
            Span("a", "two", Fraction(3), Fraction(4), "compute"),
            Span("b", "x", Fraction(0), Fraction(3), "wait"),
            Span("b", "three", Fraction(3), Fraction(5), "compute"),
        ),
    )
    assert (timeline.stop, timeline.seconds("b", "wait"), timeline.seconds("a", "copy")) == (5, 3, 0)


def test_a_link_serves_in_order_of_arrival() -> None:
    # b comes at 1, a at 2: b goes first although a is named first.
    programs: dict[str, list[Item]] = {
        "a": [Work("w", 2), Copy("late", 30, "link")],
        "b": [Work("w", 1), Copy("early", 50, "link")],
        "c": [Copy("first", 10, "link"), Copy("other", 10, "free")],
    }
    timeline = simulate(programs, {"link": Link(10), "free": Link(10, delay_seconds=2)})
    spans = {span.label: (span.start, span.stop, span.n_bytes) for span in timeline.spans if span.kind == "copy"}
    assert spans == {"first": (0, 1, 10), "early": (1, 6, 50), "late": (6, 9, 30), "other": (1, 4, 10)}
    assert timeline.seconds("a", "wait") == 4


def test_a_meeting_waits_for_the_last_and_may_be_held_again() -> None:
    programs: dict[str, list[Item]] = {
        name: [Work("one", one), Meet("sum", 2), Work("two", two), Meet("sum", 2)] for name, one, two in (("a", 1, 5), ("b", 4, 1))
    }
    timeline = simulate(programs, {})
    assert timeline.stop == 9
    assert (timeline.seconds("a", "meet"), timeline.seconds("b", "meet")) == (3, 4)


def test_thirds_are_exact() -> None:
    programs: dict[str, list[Item]] = {"a": [Copy("c", 1, "link")] * 3}
    assert simulate(programs, {"link": Link(3)}).stop == 1


def test_streams_that_wait_for_ever_are_named() -> None:
    programs: dict[str, list[Item]] = {
        "a": [Wait("x"), Record("y")],
        "b": [Work("w", 1), Wait("y"), Record("x")],
        "c": [Meet("sum", 3)],
        "d": [Work("w", 1)],
    }
    with pytest.raises(DeviceError) as error:
        simulate(programs, {})
    assert str(error.value).startswith("streams wait for ever: a waits for x; b waits for y; c waits for 2 more at sum; ")
    assert "\n" not in str(error.value)


def test_too_few_slots_for_what_is_awaited_is_a_deadlock() -> None:
    step = device_step("cpu:0", "x4", UNIFORM, speed=1, n_segments=1)
    programs = pipelined_programs([step], 1)
    programs["cpu:0 transfer"].insert(0, Wait("cpu:0 release 0"))  # a release that only comes after the delivery
    with pytest.raises(DeviceError, match="transfer waits for cpu:0 release 0; cpu:0 compute waits for cpu:0 ready 0"):
        simulate(programs, LINKS)


def test_mistakes_in_programs() -> None:
    with pytest.raises(UsageError, match="unknown link 'x1': expected one of x16, x4"):
        simulate({"a": [Copy("c", 1, "x1")]}, LINKS)
    with pytest.raises(UsageError, match="records x a second time"):
        simulate({"a": [Record("x"), Record("x")]}, LINKS)
    with pytest.raises(UsageError, match="a link of 0 B/s"):
        Link(0)
    with pytest.raises(UsageError, match="depth 0"):
        pipelined_programs([device_step("cpu:0", "x4", UNIFORM, 1, 1)], 0)


def test_nothing_to_do() -> None:
    assert simulate({"a": []}, {}) == Timeline(("a",), ())
    assert simulate({}, {}).stop == 0


def test_ordered_streams_copy_on_the_consumers_own_stream() -> None:
    step = device_step("cpu:0", "x4", (256, 512), speed=1, n_segments=1)
    assert list(ordered_programs([step])) == ["cpu:0 compute"]
    labels = [item.label for item in ordered_programs([step])["cpu:0 compute"] if isinstance(item, Copy | Work)]
    assert labels == ["before", "KV 0", "attention 0", "layer 0", "KV 1", "attention 1", "layer 1", "after"]
