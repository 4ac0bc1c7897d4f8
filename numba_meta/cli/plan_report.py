"""A forecast as lines for a reader and as plain data for JSON."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from numba_meta.cli.terminal import table
from numba_meta.devices.parse import format_bytes
from numba_meta.errors import counted
from numba_meta.memory.placement import WHOLE_SHARE

if TYPE_CHECKING:
    from numba_meta.models.loading.planner import ModelForecast, StepForecast


def forecast_lines(name: str, forecast: ModelForecast, measured_at: float | None = None) -> Iterator[str]:
    """Cuts, memory, ring and a row per context. `measured_at`: when this machine's speeds were measured (s of `time.time`)."""
    from numba_meta.models.plan import cache_place
    from numba_meta.split.policy import describe_cuts

    load = forecast.load
    shape, host = load.cache_shape, load.host_cache
    place = cache_place(host.n_device_layers if host else None, forecast.memory.host)
    types = "/".join(dtype.name for dtype in load.cache_types)
    yield f"{name}: {load.cuts.architecture}; nothing was loaded"
    yield f"{place}: {shape.n_cells} cells for {shape.n_sequences} {'sequence' if shape.n_sequences == 1 else 'sequences'}, {types}"
    meetings = f"{forecast.n_meetings} {'meeting' if forecast.n_meetings == 1 else 'meetings'}"
    yield f"{meetings} of {len(forecast.devices)} {'device' if len(forecast.devices) == 1 else 'devices'} per step"
    yield from describe_cuts(load.cuts)
    yield ""
    yield device_table(forecast)
    yield ""
    yield step_table(forecast)
    yield from reasons(forecast)
    if forecast.speeds:
        yield f"speeds of this machine: {age(measured_at, time.time())}, as busy as it was then; --calibrate measures anew"
    elif load.specs[0].kind == "cuda":
        if unknown := list(dict.fromkeys(spec.name for spec in load.specs if spec.memory_limit is None)):
            names = ", ".join(unknown)
            yield f"memory of {names} is not known here and nothing was checked against it; give it, as in {unknown[0]}?mem=24G"
        yield "how long a step takes is foreseen for CPU devices alone; `numba-meta bench` measures it"


def age(measured_at: float | None, now: float) -> str:
    """`measured 3 hours ago`; both in seconds of `time.time`."""
    if measured_at is None:
        return "measured at an unknown time"
    seconds = max(0.0, now - measured_at)
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            return f"measured {counted(int(seconds // length), unit)} ago"
    return "measured just now"


def device_table(forecast: ModelForecast) -> str:
    """Memory of each device; bytes that a token adds to what is delivered."""
    memory = forecast.memory
    ring = forecast.steps[-1].transport
    rows = []
    for j, device in enumerate(forecast.devices):
        per_token = sum(n[j] for n in forecast.cell_bytes.values())
        link = f"{forecast.links[j].bytes_per_second / 1e9:.1f} GB/s" if forecast.links else "-"
        rows.append(
            (
                device,
                str(forecast.load.n_threads[j]),
                format_bytes(memory.weights[j]),
                format_bytes(memory.cache[j]),
                format_bytes(memory.workspace[j]),
                f"{ring.shares[j] / WHOLE_SHARE:.3f}" if ring and ring.shares else "-",
                format_bytes(ring.ring_bytes[j]) if ring else "-",
                f"{per_token} B",
                link,
            )
        )
    return table(("device", "threads", "weights", "cache", "workspace", "ring share", "ring", "per token", "link"), rows)


def step_table(forecast: ModelForecast) -> str:
    """What a step of one token takes after each context."""
    rows = []
    for step in forecast.steps:
        row = [str(step.context), step.path, format_bytes(sum(step.delivered))]
        if step.times is not None:
            times = step.times
            row += [f"{1e3 * float(seconds):.2f} ms" for seconds in (times.copy, times.compute, times.ordered, times.pipelined)]
            row += [f"{1 / float(times.ordered):.1f}", f"{1 / float(times.pipelined):.1f}", f"{1 / step.seconds:.1f}"]
        rows.append(row)
    header = ["context", "path", "delivered"]
    if forecast.speeds:
        header += ["copy", "compute", "ordered", "pipelined", "ordered t/s", "pipelined t/s", "t/s"]
    return table(header, rows)


def reasons(forecast: ModelForecast) -> Iterator[str]:
    """Why each path, from the first context on of which it is true; of pipelined ones the last says enough."""
    said = None
    for step, following in zip(forecast.steps, [*forecast.steps[1:], None], strict=True):
        plan = step.transport
        if plan is None or plan.reason == said or (plan.ring and following and following.path == plan.path):
            continue
        said = plan.reason
        yield f"{'at' if plan.ring else 'from'} {step.context}: {plan.path}: {said}"


def forecast_data(name: str, forecast: ModelForecast, measured_at: float | None = None) -> dict[str, Any]:
    """Everything as plain data: bytes, seconds, tokens per second; when speeds were measured, in UTC."""
    load, memory = forecast.load, forecast.memory
    return {
        "model": name,
        "architecture": load.cuts.architecture,
        "cache": {
            "place": "host" if load.host_cache else "device",
            "types": [dtype.name for dtype in load.cache_types],
            "cells": load.cache_shape.n_cells,
            "host_bytes": memory.host,
        },
        "speeds_measured_at": None if measured_at is None else datetime.fromtimestamp(measured_at, UTC).isoformat(timespec="seconds"),
        "meetings": forecast.n_meetings,
        "cuts": {
            f"{group.name} {group.layer}" if group.layer is not None else group.name: list(group.extents) for group in load.cuts.groups
        },
        "devices": [
            {
                "name": device,
                "threads": load.n_threads[j],
                "memory_limit_bytes": load.specs[j].memory_limit,
                "weight_bytes": memory.weights[j],
                "cache_bytes": memory.cache[j],
                "workspace_bytes": memory.workspace[j],
                "bytes_per_token": sum(n[j] for n in forecast.cell_bytes.values()),
                "link_bytes_per_second": float(forecast.links[j].bytes_per_second) if forecast.links else None,
            }
            for j, device in enumerate(forecast.devices)
        ],
        "steps": [_step_data(step) for step in forecast.steps],
    }


def _step_data(step: StepForecast) -> dict[str, Any]:
    data: dict[str, Any] = {"context": step.context, "path": step.path, "delivered_bytes": list(step.delivered)}
    if step.transport is not None:
        plan = step.transport
        data |= {
            "reason": plan.reason,
            "slots": plan.n_slots,
            "slot_bytes": plan.slot_bytes,
            "shares": list(plan.shares),
            "ring_bytes": list(plan.ring_bytes),
        }
    if step.times is not None:
        seconds = {name: float(getattr(step.times, name)) for name in ("copy", "compute", "ordered", "pipelined")}
        data |= {f"{name}_seconds": value for name, value in seconds.items()}
        data["tokens_per_second"] = 1 / step.seconds
    return data
