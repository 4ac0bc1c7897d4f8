"""A timeline as a drawing and as a trace: which stream did what and when. The drawing needs the extra `plots`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from numba_meta.inspect.canvas import (
    DEVICE_COLOURS,
    INK,
    LARGE,
    SMALL,
    Panel,
    add_panel,
    legend,
    new_figure,
    show_axes,
    text_width,
    time_unit,
)
from numba_meta.schedule.timeline import Span, Timeline

_MARGIN, _LANE, _GAP = 18.0, 30.0, 10.0
_COLOURS = {"attention": "#00476F", "compute": DEVICE_COLOURS[5], "copy": DEVICE_COLOURS[4], "wait": "#EFEFEF", "meet": "#D5D5D5"}
_MEANINGS = {
    "attention": "attention",
    "compute": "other compute",
    "copy": "copy",
    "wait": "waits for an event or a link",
    "meet": "waits for the other devices",
}


def draw_timeline(timeline: Timeline, title: str = "", width: float = 800.0) -> Any:
    """One lane per stream, time to the right; colours say what a stream does, labels which layer it is for where they fit.

    `width` in points (1/72 inch): use a larger one for steps of many layers. Returns a matplotlib figure. Raises `NumbaMetaError` where
    matplotlib is not installed.
    """
    scale, unit = time_unit(timeline.stop)
    left = _MARGIN + max((text_width(name, SMALL) for name in timeline.streams), default=0.0) + 8
    top = 74.0 if title else 46.0
    lanes = len(timeline.streams) * (_LANE + _GAP)
    height = top + lanes + 44
    figure = new_figure(width, height)
    page = add_panel(figure, 0, 0, width, height, (0, width), (height, 0))
    if title:
        page.text(_MARGIN, 24, title, LARGE, weight="bold", va="center")
    present = {span.kind for span in timeline.spans}
    legend(page, [(_COLOURS[kind], meaning) for kind, meaning in _MEANINGS.items() if kind in present], _MARGIN, top - 30)
    inner = width - left - _MARGIN
    panel = add_panel(figure, left, top, inner, lanes, (0, float(timeline.stop * scale) or 1.0), (lanes, 0))
    show_axes(panel, f"time ({unit})")
    for index, name in enumerate(timeline.streams):
        y = index * (_LANE + _GAP) + _GAP / 2
        page.text(left - 8, top + y + _LANE / 2, name, SMALL, ha="right", va="center")
        for number, span in enumerate(timeline.of(name)):
            _draw_span(panel, span, f"{name}/{number}", y, scale)
    return figure


def _draw_span(panel: Panel, span: Span, gid: str, y: float, scale: int) -> None:
    is_busy = span.kind not in ("wait", "meet")
    ink = "white" if span.kind == "attention" else INK
    label = span.label if is_busy else ""
    # Waits are thin: what matters is what fills the lane.
    inset = 0.0 if is_busy else _LANE / 3
    x, long = float(span.start * scale), float(span.seconds * scale)
    panel.box(x, y + inset, long, _LANE - 2 * inset, _COLOURS[span.kind], gid=gid, label=_short(panel, label, long), ink=ink, line=0.3)


def _short(panel: Panel, label: str, long: float) -> str:
    """The whole label where it fits across, else its layer alone (`attention 12`, `cache_k.12.window`: 12)."""
    points = long * panel.width / abs(panel.x_range[1] - panel.x_range[0])
    number = re.search(r"\d+", label)
    return label if number is None or text_width(label, SMALL) <= points else number[0]


def to_chrome_trace(timeline: Timeline, process: str = "numba_meta") -> dict[str, Any]:
    """The timeline in the Trace Event Format of chrome://tracing and Perfetto: one thread per stream, times in µs, plain data for JSON."""
    threads = {name: index for index, name in enumerate(timeline.streams)}
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": process}}]
    for name, index in threads.items():
        events.append({"ph": "M", "pid": 0, "tid": index, "name": "thread_name", "args": {"name": name}})
        events.append({"ph": "M", "pid": 0, "tid": index, "name": "thread_sort_index", "args": {"sort_index": index}})
    for span in timeline.spans:
        event = {
            "ph": "X",
            "pid": 0,
            "tid": threads[span.stream],
            "name": span.label,
            "cat": span.kind,
            "ts": float(span.start * 1_000_000),
            "dur": float(span.seconds * 1_000_000),
        }
        events.append(event | ({"args": {"bytes": span.n_bytes}} if span.n_bytes else {}))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_chrome_trace(timeline: Timeline, path: str | Path, process: str = "numba_meta") -> None:
    """Writes `to_chrome_trace` as a JSON file."""
    Path(path).write_text(json.dumps(to_chrome_trace(timeline, process)), encoding="utf-8")
