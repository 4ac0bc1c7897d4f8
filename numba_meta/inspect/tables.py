"""Plans as text and HTML tables."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from numba_meta.devices.parse import format_bytes

if TYPE_CHECKING:
    from numba_meta.models.plan import ModelPlan

_HEADER = ("device", "threads", "weights", "KV cache", "KV share", "workspace")


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to equal width, two spaces between them."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (header, *rows)]
    return "\n".join(lines)


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same for a notebook."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def plan_facts(plan: ModelPlan) -> list[str]:
    """The lines above the table of devices."""
    window = f", {plan.n_window_cells} cells per sequence in layers with a sliding window" if plan.n_window_cells else ""
    arithmetic = "float32 activations (exact)" if plan.exact else "8-bit activations"
    return [
        f"{plan.model}: {plan.architecture}, {arithmetic}, kernels for {plan.isa}",
        f"KV cache on the device: {plan.n_cells} cells for {plan.n_sequences} sequences, {'/'.join(plan.cache_types)}{window}",
        f"{plan.collectives_per_step} meetings of {len(plan.devices)} devices per step",
        *plan.cuts,
    ]


def device_rows(plan: ModelPlan) -> list[list[str]]:
    """One row per device, under the header of the table."""
    return [
        [
            d.name,
            str(d.n_threads),
            format_bytes(d.weight_bytes),
            format_bytes(d.cache_bytes),
            f"{d.kv_share / 65536:.3f}",
            ", ".join(f"{kind} {format_bytes(n)}" for kind, n in d.workspace_bytes.items()) or "none yet",
        ]
        for d in plan.devices
    ]


def plan_table(plan: ModelPlan) -> str:
    """A `ModelPlan` for a terminal."""
    return "\n".join([*plan_facts(plan), text_table(_HEADER, device_rows(plan))])


def plan_html(plan: ModelPlan) -> str:
    """A `ModelPlan` for a notebook."""
    facts = "<br>".join(escape(line) for line in plan_facts(plan))
    return f"<p>{facts}</p>{html_table(_HEADER, device_rows(plan))}"
