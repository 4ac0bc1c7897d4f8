"""What the drawings share: colours, panels whose rectangles carry labels where they fit, and a figure that a notebook shows by itself.

Lengths on paper are in points (1/72 inch). Matplotlib is imported when the first figure is made.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from fractions import Fraction
from io import BytesIO
from typing import Any

from numba_meta.errors import NumbaMetaError

# Okabe and Ito's palette: told apart by people with any common colour vision.
DEVICE_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
EVERYWHERE = "#E4E4E4"  # what every device holds whole
INK = "#222222"
FAINT = "#666666"
SMALL, NORMAL, LARGE = 7.5, 9.0, 12.0  # font sizes in points
_CHARACTER = 0.6  # width of a character over the font size, a little more than the mean, so that labels stay inside


def device_colour(device: int, strength: float = 1.0) -> str:
    """A device's colour, mixed with white where `strength` is below 1. After six devices colours come again."""
    colour = DEVICE_COLOURS[device % len(DEVICE_COLOURS)]
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - (255 - part) * strength):02X}" for part in parts)


def readable_ink(fill: str) -> str:
    """White or dark, whichever stands out from a background (WCAG's relative luminance; white from a contrast of 3:1 on)."""
    parts = [int(fill[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return "white" if 1.05 / (0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05) >= 3 else INK


def text_width(text: str, size: float) -> float:
    """About how wide a line is on paper, in points."""
    return max(map(len, text.split("\n"))) * size * _CHARACTER


def new_figure(width: float, height: float) -> Any:
    """An empty figure of this size in points. Raises `NumbaMetaError` where matplotlib is not installed."""
    return _figure_class()(figsize=(width / 72, height / 72), dpi=100, facecolor="white")


@functools.cache
def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise NumbaMetaError("drawings need matplotlib, which is not installed; install numba-meta with the extra 'plots'") from None

    class Drawing(Figure):
        """A matplotlib figure without pyplot's global state; a notebook shows it as the value of a cell."""

        def _repr_png_(self) -> bytes:
            out = BytesIO()
            self.savefig(out, format="png", dpi=144)
            return out.getvalue()

    return Drawing


@dataclass(frozen=True)
class Panel:
    """A pair of axes whose size on paper is known, so that a label is written only where it fits."""

    axes: Any
    width: float
    height: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        *,
        gid: str = "",
        label: str = "",
        ink: str = INK,
        edge: str = "white",
        line: float = 0.6,
        style: str = "solid",
        size: float = SMALL,
    ) -> None:
        """A rectangle in data units, with a label where it fits."""
        from matplotlib.patches import Rectangle

        patch = Rectangle((x, y), width, height, facecolor=fill, edgecolor=edge, linewidth=line, linestyle=style)
        patch.set_gid(gid or None)
        self.axes.add_patch(patch)
        if label:
            self.label(x, y, width, height, label, ink, size)

    def label(self, x: float, y: float, width: float, height: float, text: str, ink: str = INK, size: float = SMALL) -> None:
        """A text in the middle of what can be seen of a rectangle: across, else upwards, else not at all."""
        low, high = max(x, min(self.x_range)), min(x + width, max(self.x_range))
        across, upwards = (high - low) * self._points_per_x, height * self._points_per_y
        long, thick = text_width(text, size), size * 1.15 * (1 + text.count("\n"))
        if long <= across and thick <= upwards:
            rotation = 0
        elif long <= upwards and thick <= across < upwards:
            rotation = 90
        else:
            return
        self.axes.text((low + high) / 2, y + height / 2, text, fontsize=size, color=ink, ha="center", va="center", rotation=rotation)

    def text(self, x: float, y: float, text: str, size: float = SMALL, colour: str = INK, **how: Any) -> None:
        """A line of text at a place in data units."""
        self.axes.text(x, y, text, fontsize=size, color=colour, **how)

    @property
    def _points_per_x(self) -> float:
        return self.width / abs(self.x_range[1] - self.x_range[0])

    @property
    def _points_per_y(self) -> float:
        return self.height / abs(self.y_range[1] - self.y_range[0])


def add_panel(
    figure: Any, left: float, top: float, width: float, height: float, x_range: tuple[float, float], y_range: tuple[float, float]
) -> Panel:
    """A panel `left` and `top` points from the figure's upper left corner, without frame or ticks."""
    full_width, full_height = (72 * n for n in figure.get_size_inches())
    axes = figure.add_axes((left / full_width, 1 - (top + height) / full_height, width / full_width, height / full_height))
    axes.set_xlim(x_range)
    axes.set_ylim(y_range)
    axes.set_axis_off()
    return Panel(axes, width, height, x_range, y_range)


def show_axes(panel: Panel, x_label: str, y_label: str = "") -> None:
    """Quiet axes with ticks: below the panel, and to its left where `y_label` is given."""
    axes = panel.axes
    axes.set_axis_on()
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom" or (side == "left" and bool(y_label)))
        spine.set(color=FAINT, linewidth=0.8)
    axes.set_xlabel(x_label, fontsize=SMALL, color=FAINT)
    axes.set_ylabel(y_label, fontsize=SMALL, color=FAINT)
    axes.tick_params(labelsize=SMALL, colors=FAINT, length=3)
    if not y_label:
        axes.set_yticks([])


_TIME_UNITS = ((1, "s"), (1_000, "ms"), (1_000_000, "µs"))


def time_unit(seconds: Fraction) -> tuple[int, str]:
    """The unit (per second, name) in which a time is 1 or more."""
    return next(((scale, unit) for scale, unit in _TIME_UNITS if seconds * scale >= 1), _TIME_UNITS[-1])


def legend(panel: Panel, entries: list[tuple[str, str]], x: float, y: float) -> None:
    """Coloured squares with their meaning, in a row from (x, y) on; for a panel whose data units are points."""
    for colour, meaning in entries:
        panel.box(x, y, 10, 10, colour, edge=FAINT, line=0.4)
        panel.text(x + 15, y + 5.5, meaning, NORMAL, va="center")
        x += 15 + text_width(meaning, NORMAL) + 18
