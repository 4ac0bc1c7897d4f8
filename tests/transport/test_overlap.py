"""Copies go on under compute, on real threads with simulated links. `benchmarks/overlap.py` says how near a step comes to its bound.

What is asked is what ran at the same time, not how long a step took: on a busy machine a step takes long for many reasons.
"""

from __future__ import annotations

from typing import Any

import pytest
from synthetic import write_model

from benchmarks.overlap import Case, choose_links, prepared, traced
from numba_meta.schedule.timeline import Span
from numba_meta.schedule.trace import Mark, StepTrace, is_delivery, kind_of


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Eight layers whose deliveries are long enough to sleep through: who waits for a link leaves its core to others."""
    sizes: dict[str, Any] = {"n_layer": 8, "n_embd": 512, "n_head": 8, "n_head_kv": 4, "head_dim": 64, "n_ff": 4096, "n_vocab": 512}
    path = write_model(tmp_path_factory.mktemp("overlap") / "model.gguf", types="q8_0", context_length=4096, **sizes)
    return Case(path, {"ctx_size": 1024, "ubatch_size": 256}, n_tokens=700)


def spans(trace: StepTrace, device: int, *, deliveries: bool) -> list[Span]:
    """A device's deliveries, or what it computes, whichever stream they are on."""
    found = []
    for stream in trace.streams:
        for mark, (start, stop) in zip(stream.marks, stream.times.tolist(), strict=True):
            if isinstance(mark, Mark) and mark.device == device and mark.call.kernel is not None:
                kind = kind_of(mark.call)
                if is_delivery(mark.call) if deliveries else kind in ("compute", "attention"):
                    found.append(Span(stream.stream, mark.call.node, start, stop, kind or ""))
    return found


def part_under_copies(trace: StepTrace, device: int) -> float:
    """The part of a device's computing during which a delivery of its own was on the way."""
    copies, computing = spans(trace, device, deliveries=True), spans(trace, device, deliveries=False)
    shared = sum(max(0, min(a.stop, b.stop) - max(a.start, b.start)) for a in copies for b in computing)
    return float(shared / sum(span.seconds for span in computing))


@pytest.mark.parametrize("n_devices", (1, 2))
def test_deliveries_travel_while_the_devices_compute(n_devices: int, case: Case) -> None:
    """Copies twice as long as compute: all but the first and the last layer's part can be hidden; a quarter of it is on a busy machine."""
    links = choose_links(case, n_devices, 2.0, (1.0, 1.0))
    devices = ",".join(f"cpu:0?link={speed / 1e9:.9f}" for speed in links)
    parts = {}
    for depth in (0, 1):
        with prepared(case, devices, depth) as model:
            parts[depth] = [min(part_under_copies(trace, j) for j in range(n_devices)) for trace in traced(case, model, 24)]
    assert set(parts[0]) == {0.0}
    assert max(parts[1]) > 0.25, parts[1]
