"""Rows of text as a table: for a terminal, and for a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True, repr=False)
class Table:
    """Rows of text under a header: aligned columns in a terminal, a table in a notebook."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __repr__(self) -> str:
        return text_table(self.header, self.rows)

    def _repr_html_(self) -> str:
        return html_table(self.header, self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def head(self, n_rows: int) -> Table:
        """The first rows."""
        return Table(self.header, self.rows[:n_rows])


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to equal width, two spaces between them."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (header, *rows)]
    return "\n".join(lines)


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same for a notebook."""
    left = ' style="text-align: left"'
    head = "".join(f"<th{left}>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td{left}>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
