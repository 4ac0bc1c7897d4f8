"""From noted times to a timeline and to what transport waited for: by hand, on the calls of a real plan."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from schedule.test_virtual_step import HEAD_BYTES, N_LAYER, host_plan

from numba_meta.devices.cpu_stream import StreamTimes
from numba_meta.schedule.plan import StepPlan
from numba_meta.schedule.timeline import KINDS
from numba_meta.schedule.trace import Mark, StepTrace, kind_of, label_of, mean_times

BEGIN = 10**15  # the clock counts from some moment in the past


def trace_of(plan: StepPlan, seconds: dict[str, int], n_rows: int = 1) -> StepTrace:
    """Calls one after the other on every stream, each as long as its kind says, in ns."""
    streams = []
    for device, own in enumerate(plan.devices):
        for purpose, calls in own.streams().items():
            took = [seconds.get(kind_of(call) or "", 0) for call in calls]
            ends = BEGIN + 7 + np.cumsum(took)
            times = np.stack([ends - took, ends], axis=1)
            marks = tuple(Mark(device, purpose, call) for call in calls)
            streams.append(StreamTimes(f"cpu:{device} {purpose}", marks, times, (BEGIN, int(ends[-1]) + 5)))
    return StepTrace(tuple(streams), {layer: (1, 512) for layer in range(N_LAYER)}, n_rows)


@pytest.mark.parametrize("depth", [0, 2])
def test_a_timeline_has_every_call_that_took_time(depth: int) -> None:
    plan = host_plan("llama", (2, 1), depth)
    timeline = trace_of(plan, dict.fromkeys(KINDS, 1000)).timeline()
    for device, own in enumerate(plan.devices):
        for purpose, calls in own.streams().items():
            spans = timeline.of(f"cpu:{device} {purpose}")
            assert [(s.label, s.kind) for s in spans] == [(label_of(c), kind_of(c)) for c in calls if kind_of(c)]
            assert spans[0].start == Fraction(7, 10**9)  # from the step's begin
            assert {s.seconds for s in spans} == {Fraction(1, 10**6)}
    assert len(timeline.streams) == (4 if depth else 2)
    moved = {span.label.split(".", 2)[2]: span.n_bytes for span in timeline.spans if span.kind == "copy" and "cpu:1" in span.stream}
    assert moved == {"window": HEAD_BYTES * 512, "written_back": HEAD_BYTES}  # the second device has one head


def test_calls_without_a_mark_or_of_no_time_leave_gaps() -> None:
    plan = host_plan("llama", (1,), 1)
    whole = trace_of(plan, {"copy": 10})
    assert {span.kind for span in whole.timeline().spans} == {"copy"}
    stream = whole.streams[1]
    unmarked = StreamTimes(stream.stream, (None,) * len(stream.marks), stream.times, stream.whole)
    assert StepTrace((whole.streams[0], unmarked), {}, 1).timeline().of(stream.stream) == ()


def test_what_transport_waited_for() -> None:
    ordered = trace_of(host_plan("gemma3", (1, 2), 0), {"copy": 10, "wait": 1000}).transport_times(2)
    assert ordered.ordered_copy == pytest.approx([4 * N_LAYER * 1e-8] * 2)  # K and V, there and back
    assert ordered.consumer_wait == ordered.recycle_wait == (0.0, 0.0)
    for depth in (1, 4):
        times = trace_of(host_plan("gemma3", (1, 2), depth), {"copy": 10, "wait": 1000}).transport_times(2)
        assert times.ordered_copy == (0.0, 0.0)
        assert times.consumer_wait == pytest.approx([N_LAYER * 1e-6] * 2)
        # The waits after the last delivery hold nobody up, nor does the first one, for the inputs.
        assert times.recycle_wait == pytest.approx([(N_LAYER - depth - 2) * 1e-6] * 2)


def test_a_mean_of_steps() -> None:
    plan = host_plan("llama", (2, 1), 1)
    steps = [trace_of(plan, {"wait": ns}).transport_times(2) for ns in (1000, 3000)]
    assert mean_times(steps).consumer_wait == pytest.approx([N_LAYER * 2e-6] * 2)
    assert mean_times(steps[:1]) == steps[0]
