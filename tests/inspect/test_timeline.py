"""A timeline's drawing shows every span once, to scale and in its lane; its trace says the same as JSON."""

from __future__ import annotations

import json
import sys
from fractions import Fraction
from itertools import combinations
from pathlib import Path

import pytest

from numba_meta.errors import NumbaMetaError
from numba_meta.inspect import canvas
from numba_meta.inspect.timeline import draw_timeline, to_chrome_trace, write_chrome_trace
from numba_meta.schedule.timeline import KINDS, Span, Timeline
from numba_meta.schedule.virtual_clock import DeviceStep, Link, simulate, step_programs

US = Fraction(1, 10**6)
LINKS = {"x16": Link(22 * 10**9), "x4": Link(5_300_000_000)}


def step_timeline(depth: int, n_layers: int = 6, n_devices: int = 2) -> Timeline:
    """Two devices of different speed and link, five local layers and a global one."""
    windows = tuple(768 if (layer + 1) % 6 else 8192 for layer in range(n_layers))
    steps = []
    for device, link in list(enumerate(LINKS))[:n_devices]:
        attention = tuple(n_cells * US / (50 + 100 * device) for n_cells in windows)
        segments = tuple((read + 40 * US, 150 * US / (1 + device), 90 * US) for read in attention)
        copy_bytes = tuple(1088 * n for n in windows)
        steps.append(DeviceStep(f"cpu:{device}", link, copy_bytes, attention, segments, (40 * US,), (300 * US,)))
    return simulate(step_programs(steps, depth), LINKS)


def drawn_spans(figure):
    found = {}
    for axes in figure.axes:
        for patch in axes.patches:
            if patch.get_gid():
                assert patch.get_gid() not in found
                found[patch.get_gid()] = patch
    return found


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_every_span_is_drawn_to_scale_in_its_lane(depth: int) -> None:
    pytest.importorskip("matplotlib", reason="drawings need the extra 'plots'")
    timeline = step_timeline(depth)
    assert {span.kind for span in timeline.spans} == set(KINDS) - ({"wait"} if depth == 0 else set())
    drawn = drawn_spans(draw_timeline(timeline))
    expected = {f"{name}/{n}": span for name in timeline.streams for n, span in enumerate(timeline.of(name))}
    assert drawn.keys() == expected.keys()
    colours = {}
    lanes = {}
    for gid, span in expected.items():
        patch = drawn[gid]
        assert patch.get_x() == pytest.approx(float(span.start * 1000))  # milliseconds
        assert patch.get_width() == pytest.approx(float(span.seconds * 1000))
        colours.setdefault(span.kind, set()).add(patch.get_facecolor())
        lanes.setdefault(span.stream, set()).add(patch.get_y() + patch.get_height() / 2)
    assert all(len(found) == 1 for found in colours.values())
    assert len({colour for found in colours.values() for colour in found}) == len(colours)
    assert [len(found) for found in lanes.values()] == [1] * len(timeline.streams)
    assert sorted(min(found) for found in lanes.values()) == [min(lanes[name]) for name in timeline.streams]


@pytest.mark.parametrize("n_layers", [1, 6, 30])
@pytest.mark.parametrize("depth", [0, 2])
def test_no_label_lies_over_another_or_outside(n_layers: int, depth: int) -> None:
    pytest.importorskip("matplotlib", reason="drawings need the extra 'plots'")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = draw_timeline(step_timeline(depth, n_layers), "A step")
    FigureCanvasAgg(figure).draw()
    texts = [text for axes in figure.axes for text in axes.texts]
    shown = {text.get_text() for text in texts}
    assert {"A step", "attention", "copy", "cpu:0 compute", "cpu:1 compute", "after"} <= shown
    assert "KV 0" in shown or "0" in shown
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts]
    page = figure.bbox
    for name, box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= page.x1 and box.y1 <= page.y1, name
    for (first, a), (second, b) in combinations(boxes, 2):
        apart = min(a.x1, b.x1) - max(a.x0, b.x0) <= 0.5 or min(a.y1, b.y1) - max(a.y0, b.y0) <= 0.5
        assert apart, f"{first} over {second}"


@pytest.mark.parametrize(("seconds", "unit"), [(Fraction(3), "s"), (Fraction(3, 1000), "ms"), (3 * US, "µs")])
def test_the_axis_has_a_unit_that_fits(seconds: Fraction, unit: str) -> None:
    pytest.importorskip("matplotlib", reason="drawings need the extra 'plots'")
    figure = draw_timeline(Timeline(("a",), (Span("a", "w", Fraction(), seconds, "compute"),)))
    (patch,) = drawn_spans(figure).values()
    assert patch.get_width() == pytest.approx(3)
    assert f"time ({unit})" in {axes.get_xlabel() for axes in figure.axes}


def test_an_empty_timeline_is_drawn() -> None:
    pytest.importorskip("matplotlib", reason="drawings need the extra 'plots'")
    figure = draw_timeline(Timeline(("a",), ()))
    assert drawn_spans(figure) == {}
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_a_drawing_without_matplotlib_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    canvas._figure_class.cache_clear()
    with pytest.raises(NumbaMetaError, match="extra 'plots'"):
        draw_timeline(step_timeline(1))
    canvas._figure_class.cache_clear()


def test_chrome_trace_holds_every_span_in_microseconds(tmp_path: Path) -> None:
    timeline = step_timeline(2)
    write_chrome_trace(timeline, tmp_path / "trace.json", process="a step")
    trace = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    assert trace == to_chrome_trace(timeline, "a step")
    threads = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert tuple(threads[tid] for tid in sorted(threads)) == timeline.streams
    assert trace["traceEvents"][0]["args"] == {"name": "a step"}
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(events) == len(timeline.spans)
    for event, span in zip(events, timeline.spans, strict=True):
        assert (threads[event["tid"]], event["name"], event["cat"]) == (span.stream, span.label, span.kind)
        assert event["ts"] == pytest.approx(float(span.start) * 1e6)
        assert event["ts"] + event["dur"] == pytest.approx(float(span.stop) * 1e6)
        assert event.get("args", {}).get("bytes", 0) == span.n_bytes
    copied = sum(event["args"]["bytes"] for event in events if event["cat"] == "copy")
    assert copied == 2 * 1088 * (5 * 768 + 8192)


def test_a_part_of_a_timeline() -> None:
    timeline = step_timeline(1)
    start, stop = timeline.stop / 3, timeline.stop / 2
    part = timeline.between(start, stop)
    assert part.streams == timeline.streams
    assert part.stop <= stop - start
    for name in part.streams:
        for kind in KINDS:
            inside = [max(Fraction(), min(s.stop, stop) - max(s.start, start)) for s in timeline.of(name) if s.kind == kind]
            assert part.seconds(name, kind) == sum(inside, Fraction())
    assert timeline.between(0, timeline.stop) == timeline
    assert timeline.between(timeline.stop, 2 * timeline.stop).spans == ()


def test_a_label_that_does_not_fit_is_its_layer() -> None:
    pytest.importorskip("matplotlib", reason="drawings need the extra 'plots'")
    spans = tuple(Span("a", f"cache_k.{n}.window", n * US, (n + 1) * US, "copy") for n in range(20))
    texts = {text.get_text() for axes in draw_timeline(Timeline(("a",), spans)).axes for text in axes.texts}
    assert {str(n) for n in range(20)} <= texts
    assert "cache_k.3.window" in {text.get_text() for axes in draw_timeline(Timeline(("a",), spans[:4])).axes for text in axes.texts}
