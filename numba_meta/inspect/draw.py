"""Drawings of a loaded model: how a layer's tensors are cut, where the pieces lie, how a step uses its workspace.

Each returns a matplotlib figure, and needs the extra `plots`.
"""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING, Any

from numba_meta.devices.parse import format_bytes
from numba_meta.inspect import facts
from numba_meta.inspect.canvas import (
    EVERYWHERE,
    FAINT,
    INK,
    LARGE,
    NORMAL,
    SMALL,
    Panel,
    add_panel,
    device_colour,
    legend,
    new_figure,
    readable_ink,
    show_axes,
    text_width,
)
from numba_meta.inspect.facts import TensorCut

if TYPE_CHECKING:
    from numba_meta.models.model import Model

_WIDTH, _MARGIN = 800.0, 18.0
_TINT = 0.35
_MIB = 1 << 20


# ---- cuts ------------------------------------------------------------------------------------------------------------------------------


def draw_cuts(model: Model, layer: int = 0) -> Any:
    """A layer's matrices to one scale: axis 0 (the row of a weight) runs to the right, axis 1 downwards; one colour per device.

    Numbers are elements of the cut axis. A cache has its width to scale and is shortened where it is long; the vocabulary has a scale of
    its own. Raises `UsageError` for a layer that the model lacks.
    """
    names = facts.device_names(model)
    inside = facts.layer_cuts(model, layer)
    matrices = [cut for cut in inside if len(cut.shape) > 1]
    vectors = [cut for cut in inside if len(cut.shape) == 1]
    outside = [cut for cut in facts.weight_cuts(model) if cut.layer is None and len(cut.shape) > 1]
    bands = [
        ("Attention", _in_flow_order([cut for cut in matrices if not cut.short_name.startswith("ffn")])),
        ("Feed-forward", _in_flow_order([cut for cut in matrices if cut.short_name.startswith("ffn")])),
    ]
    scale = min(_fitting_scale(cuts) for _, cuts in bands if cuts)
    heights = [max((_height(cut, cuts, scale) for cut in cuts), default=0.0) for _, cuts in bands]
    height = 100 + sum(h + 96 for h in heights) + 62 * len(outside) + 24
    figure = new_figure(_WIDTH, height)
    page = add_panel(figure, 0, 0, _WIDTH, height, (0, _WIDTH), (height, 0))
    page.text(_MARGIN, 26, f"How layer {layer} of {model.plan.model} is cut", LARGE, weight="bold", va="center")
    legend(page, _device_entries(names, any(not cut.state.is_split for cut in (*matrices, *outside))), _MARGIN, 42)
    y = 80.0
    for (title, cuts), band_height in zip(bands, heights, strict=True):
        _draw_band(page, title, cuts, y, band_height, scale, len(names))
        y += band_height + 96
    for cut in outside:
        _draw_vocabulary(page, cut, y, tied=len(outside) == 1)
        y += 62
    if vectors:
        page.text(_MARGIN, y, _listed(vectors), SMALL, FAINT, va="top", linespacing=1.4)
    return figure


def _listed(vectors: list[TensorCut]) -> str:
    """Vectors are too thin to draw."""
    shown = (f"{cut.short_name} {facts.shown_shape(cut.shape)}{f' ({cut.state})' if cut.state.is_split else ''}" for cut in vectors)
    return textwrap.fill("Vectors, whole on every device unless said otherwise: " + ", ".join(shown), 160)


def _in_flow_order(cuts: list[TensorCut]) -> list[TensorCut]:
    """As data passes them: projections, caches, then what is multiplied last."""
    last = ("attn_output", "ffn_down")
    return sorted(cuts, key=lambda cut: (cut.short_name.startswith(last), cut.name.startswith("cache")))


_GAP, _MEETING_WIDTH, _MOST_HEIGHT = 24.0, 66.0, 400.0


def _fitting_scale(cuts: list[TensorCut]) -> float:
    """Points per element so that a band fits the page."""
    free = _WIDTH - 2 * _MARGIN - _GAP * len(cuts) - _MEETING_WIDTH
    most_rows = max(_n_rows(cut) for cut in cuts if not cut.name.startswith("cache"))
    scale = min(free / sum(cut.shape[0] for cut in cuts), _MOST_HEIGHT / most_rows)
    while sum(max(cut.shape[0] * scale, _title_width(cut)) for cut in cuts) > free and scale > 1e-4:
        scale *= 0.97
    return scale


def _n_rows(cut: TensorCut) -> int:
    return math.prod(cut.shape[1:])


def _title_width(cut: TensorCut) -> float:
    return max(text_width(line, SMALL) for line in (cut.short_name + "  ", _type_and_shape(cut), *_captions(cut)))


def _type_and_shape(cut: TensorCut) -> str:
    return f"{cut.dtype} {facts.shown_shape(cut.shape)}"


def _captions(cut: TensorCut) -> tuple[str, ...]:
    """What is said below a tensor: the cut, and what becomes of the product."""
    if not cut.state.is_split:
        return ()
    how = {0: "cut inside rows", 1: "cut between rows"}.get(cut.state.axis, f"cut on axis {cut.state.axis}")
    if cut.result is not None and cut.result.is_partial:
        return how, "gives summands"
    if cut.result is not None and cut.result.is_split:
        return how, "gives pieces"
    return (how,)


def _height(cut: TensorCut, band: list[TensorCut], scale: float) -> float:
    """On paper; a cache is not drawn longer than the weights beside it."""
    height = _n_rows(cut) * scale
    if cut.name.startswith("cache"):
        return min(height, max((_n_rows(other) * scale for other in band if not other.name.startswith("cache")), default=height))
    return height


def _draw_band(page: Panel, title: str, cuts: list[TensorCut], top: float, band_height: float, scale: float, n_devices: int) -> None:
    page.text(_MARGIN, top, title, NORMAL + 1, weight="bold", va="center")
    x, y = _MARGIN, top + 40
    for cut in cuts:
        width, height = cut.shape[0] * scale, _height(cut, cuts, scale)
        page.text(x, y - 17, cut.short_name, NORMAL, weight="bold", va="center")
        page.text(x, y - 6, _type_and_shape(cut), SMALL, FAINT, va="center")
        _draw_matrix(page, cut, x, y, width, height, n_devices)
        below = y + height + 8
        if height < _n_rows(cut) * scale * 0.999:
            page.text(x, below, f"… {cut.shape[1]} cells", SMALL, FAINT, va="center")
            below += 10
        for line in _captions(cut):
            page.text(x, below, line, SMALL, FAINT, va="center")
            below += 10
        x += max(width, _title_width(cut)) + _GAP
        if cut.result is not None and cut.result.is_partial:
            middle, tail = y + height / 2, x - _GAP + 3 - max(0, _title_width(cut) - width)
            page.axes.annotate("", (x + 2, middle), (tail, middle), arrowprops={"arrowstyle": "->", "color": FAINT})
            gid = f"{cut.name}/all-reduce"
            page.box(x + 3, middle - 18, _MEETING_WIDTH - 6, 36, "#D9F2D9", gid=gid, label="all-reduce\non all", edge=FAINT)


def _draw_matrix(page: Panel, cut: TensorCut, x: float, y: float, width: float, height: float, n_devices: int) -> None:
    """A tensor's pieces, each in its device's colour with its extent on the cut axis."""
    if not cut.state.is_split:
        page.box(x, y, width, height, EVERYWHERE if n_devices > 1 else device_colour(0, _TINT), gid=f"{cut.name}/all")
    else:
        extent = cut.shape[cut.state.axis]
        for device in range(n_devices):
            for start, stop in cut.state.ranges(device):
                low, part, fill, gid = start / extent, (stop - start) / extent, device_colour(device, _TINT), f"{cut.name}/{device}"
                if cut.state.axis == 0:
                    page.box(x + low * width, y, part * width, height, fill, gid=gid, label=str(stop - start))
                else:
                    page.box(x, y + low * height, width, part * height, fill, gid=gid, label=str(stop - start))
    page.box(x, y, width, height, "none", edge=FAINT)


def _draw_vocabulary(page: Panel, cut: TensorCut, y: float, tied: bool) -> None:
    """A tensor with a row per token, drawn lying: its rows run to the right."""
    role = ", embedding and output head in one" if tied else ""
    page.text(_MARGIN, y, cut.short_name, NORMAL, weight="bold", va="center")
    what = f"{_type_and_shape(cut)}{role}; drawn lying, one row per token, not to the scale above"
    page.text(_MARGIN + text_width(cut.short_name, NORMAL) + 14, y, what, SMALL, FAINT, va="center")
    width, n_devices = _WIDTH - 2 * _MARGIN, len(cut.piece_bytes)
    if not cut.state.is_split:
        page.box(_MARGIN, y + 9, width, 24, EVERYWHERE if n_devices > 1 else device_colour(0, _TINT), gid=f"{cut.name}/all", edge=FAINT)
        return
    extent = cut.shape[cut.state.axis]
    for device in range(n_devices):
        for start, stop in cut.state.ranges(device):
            label = f"{stop - start} rows, {format_bytes(cut.piece_bytes[device])}"
            x, part = _MARGIN + start / extent * width, (stop - start) / extent * width
            page.box(x, y + 9, part, 24, device_colour(device, _TINT), gid=f"{cut.name}/{device}", label=label)


def _device_entries(names: tuple[str, ...], some_whole: bool) -> list[tuple[str, str]]:
    entries = [(device_colour(device, _TINT), name) for device, name in enumerate(names)]
    return entries + ([(EVERYWHERE, "whole on every device")] if some_whole and len(names) > 1 else [])


# ---- placement -------------------------------------------------------------------------------------------------------------------------

_ROW, _BAR = 34.0, 24.0  # from device to device, and the height of its buffer
_LEFT, _RIGHT = 78.0, 132.0  # room for names and sizes


def draw_placement(model: Model) -> Any:
    """The buffers of every device and the pieces in them, at their offsets: weights, and the KV cache by share against the whole of it.

    A dashed frame is as long as the whole cache: what a device would reserve if its share were 1.
    """
    names, n = facts.device_names(model), len(model.context.device)
    height = 64 + 2 * (_ROW * n + 78)
    figure = new_figure(_WIDTH, height)
    page = add_panel(figure, 0, 0, _WIDTH, height, (0, _WIDTH), (height, 0))
    page.text(_MARGIN, 26, "Where the pieces lie", LARGE, weight="bold", va="center")
    top = 62.0
    weights = model.context.weight_plan
    what = "of a layer: attention darker, feed-forward lighter; numbers are layers"
    panel = _buffer_panel(figure, page, top, "Weights", what, max(weights.n_bytes), n)
    for device, name in enumerate(names):
        _name_row(page, top, device, name, format_bytes(weights.n_bytes[device]))
    _draw_weights(panel, model)
    top += _ROW * n + 78
    placement = model.context.cache_plan.placement
    what = f"of a layer: K darker, V lighter; the dashed frame is the whole cache, {format_bytes(placement.n_bytes)}"
    panel = _buffer_panel(figure, page, top, "KV cache", what, placement.n_bytes, n)
    for device, name in enumerate(names):
        size = f"{format_bytes(placement.simple_bytes(device))}, share {placement.shares[device] / 65536:.3f}"
        _name_row(page, top, device, name, size)
    _draw_caches(panel, model)
    for device in range(n):
        gid = f"cache/whole/{device}"
        panel.box(0, device * _ROW, placement.n_bytes / _MIB, _BAR, "none", gid=gid, edge=FAINT, line=0.8, style="dashed")
    return figure


def _buffer_panel(figure: Any, page: Panel, top: float, title: str, what: str, n_bytes: int, n_devices: int) -> Panel:
    """Axes in MiB to the right and in points downwards, one row per device."""
    page.text(_MARGIN, top, title, NORMAL + 1, weight="bold", va="center")
    page.text(_MARGIN + text_width(title, NORMAL + 1) + 12, top, what, SMALL, FAINT, va="center")
    height, most = _ROW * n_devices, max(1, n_bytes) / _MIB
    panel = add_panel(figure, _LEFT, top + 14, _WIDTH - _LEFT - _RIGHT, height, (-0.002 * most, 1.002 * most), (height, -0.5))
    show_axes(panel, "offset in the device's buffer, MiB")
    return panel


def _name_row(page: Panel, top: float, device: int, name: str, size: str) -> None:
    middle = top + 14 + device * _ROW + _BAR / 2
    page.text(_LEFT - 8, middle, name, NORMAL, ha="right", va="center", weight="bold")
    page.text(_WIDTH - _RIGHT + 8, middle, size, SMALL, va="center")


def _draw_weights(panel: Panel, model: Model) -> None:
    offsets = model.context.weight_plan.offsets
    layers: dict[tuple[int, int], list[int]] = {}  # (layer, device) -> offsets where its pieces begin and end
    for cut in facts.weight_cuts(model):
        strength = 0.18 if cut.short_name.startswith("ffn") else 0.5 if cut.layer is not None else 0.3
        for device, n_bytes in enumerate(cut.piece_bytes):
            if n_bytes:
                start, gid = offsets[cut.name][device], f"weights/{cut.name}/{device}"
                label = cut.short_name if cut.layer is None else ""
                panel.box(start / _MIB, device * _ROW, n_bytes / _MIB, _BAR, device_colour(device, strength), gid=gid, label=label, line=0)
                if cut.layer is not None:
                    layers.setdefault((cut.layer, device), []).extend((start, start + n_bytes))
    for (layer, device), ends in layers.items():
        _label_layer(panel, device, str(layer), min(ends), max(ends))


def _draw_caches(panel: Panel, model: Model) -> None:
    bindings = model.context.cache_plan.bindings
    for binding in bindings:
        name = binding.entry.name
        for device, n_bytes in enumerate(binding.entry.piece_bytes):
            if n_bytes:
                fill, x = device_colour(device, 0.5 if name.startswith("cache_k") else 0.2), binding.offsets[device] / _MIB
                panel.box(x, device * _ROW, n_bytes / _MIB, _BAR, fill, gid=f"cache/{name}/{device}", line=0)
    for k, v in zip(bindings[::2], bindings[1::2], strict=True):
        for device in range(len(k.offsets)):
            _label_layer(panel, device, k.entry.name.rsplit(".", 1)[-1], k.offsets[device], v.stop(device))


def _label_layer(panel: Panel, device: int, layer: str, start: int, stop: int) -> None:
    """A layer's number in the middle of its bytes, and a white line where they begin."""
    panel.axes.plot([start / _MIB] * 2, [device * _ROW, device * _ROW + _BAR], color="white", linewidth=0.8)
    panel.label(start / _MIB, device * _ROW, (stop - start) / _MIB, _BAR, layer, size=6.5)


# ---- workspace -------------------------------------------------------------------------------------------------------------------------

_WORKSPACE_HEIGHT = 190.0


def draw_workspace(model: Model, layer: int | None = 0, n_rows: int = 1) -> Any:
    """The workspace of every device during a step of `n_rows` tokens: calls to the right, offsets upwards, one rectangle per tensor.

    Shows the calls of one layer, or the whole step (`layer=None`). Dotted lines are meetings. Memory is used again where rectangles
    stand beside each other at one offset.
    """
    names, plan = facts.device_names(model), facts.step_plan(model, n_rows)
    height = 70 + len(names) * (_WORKSPACE_HEIGHT + 66)
    figure = new_figure(_WIDTH, height)
    page = add_panel(figure, 0, 0, _WIDTH, height, (0, _WIDTH), (height, 0))
    what = "a whole step" if layer is None else f"layer {layer}"
    tokens = "1 token" if n_rows == 1 else f"{n_rows} tokens"
    page.text(_MARGIN, 26, f"The workspace during {what}, {tokens}", LARGE, weight="bold", va="center")
    legend(page, [(_kind_colour(kind, 0), meaning) for kind, meaning in _KINDS.items()], _MARGIN, 42)
    top = 84.0
    for device, name in enumerate(names):
        used = format_bytes(plan.workspace.n_bytes[device])
        page.text(_MARGIN, top, name, NORMAL + 1, weight="bold", va="center")
        page.text(_MARGIN + text_width(name, NORMAL + 1) + 14, top, f"{used} for the whole step", SMALL, FAINT, va="center")
        _draw_lifetimes(figure, model, plan, device, layer, top + 14)
        top += _WORKSPACE_HEIGHT + 66
    return figure


_KINDS = {"tensor": "tensor", "summand": "summand or piece that all devices read at a meeting", "scratch": "scratch of a kernel"}


def _kind_colour(kind: str, device: int) -> str:
    return "#BBBBBB" if kind == "scratch" else device_colour(device, 0.85 if kind in ("summand", "piece") else 0.3)


def _draw_lifetimes(figure: Any, model: Model, plan: Any, device: int, layer: int | None, top: float) -> None:
    calls = plan.devices[device].calls
    shown = [i for i, call in enumerate(calls) if layer is None or str(layer) in call.node.split(".")]
    if not shown:
        facts.layer_cuts(model, layer or 0)  # raises for a layer that is not there
        return
    start, stop = min(shown), max(shown) + 1
    lives = [life for life in facts.lifetimes(plan, device) if life.first < stop and life.last >= start]
    most = max((life.offset + life.n_bytes for life in lives), default=1) / 1024
    panel = add_panel(figure, _LEFT, top, _WIDTH - _LEFT - _MARGIN, _WORKSPACE_HEIGHT, (start, stop), (0, most * 1.04))
    show_axes(panel, "call", "offset, KiB")
    for life in lives:
        label = ".".join(part for part in life.name.split(".") if part != "blk" and part != str(layer)) if layer is not None else ""
        x, width = life.first, life.last + 1 - life.first
        fill, gid = _kind_colour(life.kind, device), f"workspace/{life.name}/{device}"
        ink, line = readable_ink(fill), 0.5 if layer is not None else 0.1
        panel.box(x, life.offset / 1024, width, life.n_bytes / 1024, fill, gid=gid, label=label, ink=ink, line=line, size=7)
    for i in range(start, stop):
        if calls[i].meets:
            panel.axes.axvline(i + 0.5, color=INK, linewidth=0.9 if layer is not None else 0.4, linestyle=":", gid=f"meeting/{i}/{device}")
