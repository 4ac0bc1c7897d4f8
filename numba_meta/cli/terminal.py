"""What the commands write: lines on standard error, progress on a terminal, tables in plain text and Markdown."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

ERASE_LINE = "\r\x1b[K"
REDRAW_SECONDS = 0.1


def say(line: str) -> None:
    """Write one line to standard error."""
    print(line, file=sys.stderr, flush=True)


class Progress:
    """Draws `stage  done/total` in place on a terminal; a pipe gets a line about work that is slow only once, and one per milestone.

    Called as `progress(stage, done, total)` by whatever works long; `total` 0 means that nobody knows. The line is erased at
    `done == total` and by `clear()`, so that results start on a clean line.
    """

    def __init__(self) -> None:
        self.on_terminal = sys.stderr.isatty()
        self._drawn = False
        self._last_time = 0.0
        self._announced: set[str] = set()

    def __call__(self, stage: str, done: int, total: int) -> None:
        if not self.on_terminal:
            if stage.startswith("compil") and stage not in self._announced:
                self._announced.add(stage)
                say(f"numba-meta: {stage}")
            return
        if total and done >= total:
            self.clear()
            return
        now = time.monotonic()
        if self._drawn and now - self._last_time < REDRAW_SECONDS:
            return
        self._last_time = now
        amount = f" {100 * done // total}%" if total else f" {done}" if done else ""
        sys.stderr.write(f"{ERASE_LINE}{stage}{amount}")
        sys.stderr.flush()
        self._drawn = True

    def milestone(self, line: str) -> None:
        """Tell a pipe that a part of long work is done; on a terminal the drawn progress says so."""
        if not self.on_terminal:
            say(f"numba-meta: {line}")

    def clear(self) -> None:
        """Erase the line if one is drawn."""
        if self._drawn:
            sys.stderr.write(ERASE_LINE)
            sys.stderr.flush()
            self._drawn = False


def table(header: Sequence[str], rows: Sequence[Sequence[str]], markdown: bool = False) -> str:
    """Lay out `rows` under `header`: the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = [cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))]
        return f"| {' | '.join(cells)} |" if markdown else "  ".join(cells).rstrip()

    rule = ["-" * width if i == 0 else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    return "\n".join([line(header), *([line(rule)] if markdown else []), *map(line, rows)])
