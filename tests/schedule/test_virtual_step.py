"""Real plans on the virtual clock: a step takes what the recursion says, exactly; order, events and bytes are the plan's own."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule.model_graphs import ModelGraph

from numba_meta.devices.cpu_stream import StreamTimes
from numba_meta.dtypes import F16
from numba_meta.errors import DeviceError, UsageError
from numba_meta.models.architectures.builder import BatchShape
from numba_meta.models.cache.transport import deliveries_of
from numba_meta.ops.transport import WindowShape
from numba_meta.schedule.bound import step_bound_devices
from numba_meta.schedule.calls import Call
from numba_meta.schedule.infer import infer_splits
from numba_meta.schedule.plan import StepPlan, plan_step
from numba_meta.schedule.trace import Mark, StepTrace, is_delivery, is_write_back, kind_of, label_of
from numba_meta.schedule.transport_plan import DeviceFacts, TransportOptions, plan_transport
from numba_meta.schedule.virtual_clock import Link
from numba_meta.schedule.virtual_step import Cost, measured_cost, step_loads, virtual_step

US = Fraction(1, 10**6)
N_LAYER, HEAD_BYTES = 8, 2 * 32  # f16 heads of 32 elements
GLOBAL, LOCAL = 2048, 256  # cells of a window
LINKS = (Link(22 * 10**7, 3 * US), Link(53 * 10**6, 7 * US))


@functools.cache
def host_plan(architecture: str, proportions: tuple[int, ...], depth: int, n_rows: int = 1, n_device_layers: int = 0) -> StepPlan:
    """The plan of a step whose cache lies in host memory, as a context makes it."""
    n_devices = len(proportions)
    model = ModelGraph(architecture, proportions, n_layer=N_LAYER, n_head=6, n_head_kv=3, n_rows=n_rows)
    is_gemma = architecture == "gemma3"
    windows = {False: WindowShape(GLOBAL, 1, 2 * GLOBAL, 1)} | ({True: WindowShape(LOCAL, 1, LOCAL, 1)} if is_gemma else {})
    batch = BatchShape(n_rows, n_rows, 1, 2 * GLOBAL, 2 * GLOBAL, LOCAL if is_gemma else 0, F16, F16, n_device_layers, windows)
    split = infer_splits(model.build(batch), model.leaf_state, n_devices)
    devices = [DeviceFacts(f"cpu:{j}") for j in range(n_devices)]
    transport = plan_transport(deliveries_of(split, n_devices, is_pinned=True), devices, 64, TransportOptions(depth, 0, 0))
    return plan_step(split, [1] * n_devices, False, 64, transport)


def random_cost(seed: int, slowest: int = 200) -> Cost:
    """Up to so many microseconds for a node, different on every device; attention takes longer the more cells it reads."""

    def cost(device: int, call: Call) -> Fraction:
        if kind_of(call) == "attention":
            return Fraction(call.reads[1].shape[1], 10**7)
        return zlib.crc32(f"{seed} {device} {call.node}".encode()) % slowest * US

    return cost


def is_v_window(label: str) -> bool:
    return label.startswith("cache_v") and label.endswith("window")


PLANS = [("llama", (1,)), ("gemma3", (1,)), ("llama", (2, 1)), ("gemma3", (1, 2)), ("llama", (1, 0)), ("llama", (1, 1, 1))]


def links_for(plan: StepPlan) -> tuple[Link, ...]:
    return (*LINKS, Link(10**8))[: len(plan.devices)]


@pytest.mark.parametrize("depth", [0, 1, 2, 4])
@pytest.mark.parametrize(("architecture", "proportions"), PLANS, ids=str)
def test_a_plan_takes_what_the_recursion_says(architecture: str, proportions: tuple[int, ...], depth: int) -> None:
    """llama: uniform windows. gemma3: local and global ones in turns. Rows go back in no time, as the recursion of `bound.py` has it."""
    plan = host_plan(architecture, proportions, depth)
    assert plan.transport is not None and plan.transport.path == ("pipelined" if depth else "ordered")
    cost, links = random_cost(depth), links_for(plan)
    bound = step_bound_devices(step_loads(plan, cost, links, writes_back=False), depth)
    timeline = virtual_step(plan, cost, links, writes_back=False)
    assert timeline.stop == bound.step  # exactly, not to a tolerance
    for device, times in enumerate(bound.devices):
        own = timeline.of(f"cpu:{device} compute")
        attention = [span for span in own if span.kind == "attention"]
        if plan.devices[device].transfer_calls or (depth == 0 and proportions[device]):
            assert [span.stop for span in attention] == list(times.freed)
            arrived = [span.stop for span in timeline.spans if span.stream.startswith(f"cpu:{device} ") and is_v_window(span.label)]
            assert arrived == list(times.ready)


@given(st.sampled_from(PLANS), st.sampled_from([0, 1, 2, 4]), st.integers(0, 10**6), st.sampled_from([1, 50, 2000]))
def test_the_rows_that_go_back_cost_what_the_loads_say(case: tuple[str, tuple[int, ...]], depth: int, seed: int, slowest: int) -> None:
    """They share the transfer stream with deliveries: the bound knows by how much. Only the step's end waits for the last ones."""
    plan = host_plan(*case, depth, n_rows=3)
    cost, links = random_cost(seed, slowest), links_for(plan)
    bound = step_bound_devices(step_loads(plan, cost, links), depth)
    timeline = virtual_step(plan, cost, links)
    ends = [max((span.stop for span in timeline.of(f"cpu:{device} compute")), default=0) for device in range(len(links))]
    assert ends == [times.step for times in bound.devices]
    assert timeline.stop >= bound.step >= step_bound_devices(step_loads(plan, cost, links, writes_back=False), depth).step


def test_the_loads_hold_all_the_work_and_all_the_bytes() -> None:
    cost = random_cost(3)
    for depth in (0, 2):
        plan = host_plan("gemma3", (1, 2), depth)
        loads = step_loads(plan, cost, LINKS, writes_back=False)
        for device, (load, link) in enumerate(zip(loads, LINKS, strict=True)):
            calls = [call for call in plan.devices[device].calls if kind_of(call) in ("attention", "compute")]
            assert load.compute_seconds == sum(cost(device, call) for call in calls)
            n_heads = (1, 2)[device]
            window = [2 * n_heads * HEAD_BYTES * (GLOBAL if layer % 2 else LOCAL) for layer in range(N_LAYER)]  # K and V
            assert load.copy == tuple(2 * link.delay_seconds + n / Fraction(link.bytes_per_second) for n in window)


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_streams_do_the_plans_calls_in_its_order(depth: int) -> None:
    plan = host_plan("llama", (2, 1), depth)
    timeline = virtual_step(plan, lambda device, call: US, LINKS, names=("left", "right"))
    both = zip(("left", "right"), plan.devices, strict=True)
    streams = {f"{name} {purpose}": calls for name, own in both for purpose, calls in own.streams().items()}
    assert timeline.streams == tuple(streams)
    for name, calls in streams.items():
        expected = [(label_of(call), kind_of(call)) for call in calls if kind_of(call) in ("attention", "compute", "copy")]
        assert [(span.label, span.kind) for span in timeline.of(name) if span.kind not in ("wait", "meet")] == expected
        waits = {f"{name.split()[0]} {call.waits.name}" for call in calls if call.waits is not None}
        assert {span.label for span in timeline.of(name) if span.kind == "wait"} <= waits


def test_a_window_of_its_own_size() -> None:
    """The plan has room for 2048 cells; a step delivers what it holds."""
    plan, windows = host_plan("llama", (1,), 1), {layer: (1, 512) for layer in range(N_LAYER)}
    spans = virtual_step(plan, random_cost(1), LINKS[:1], windows=windows).spans
    assert sum(span.n_bytes for span in spans if "window" in span.label) == N_LAYER * 2 * 3 * HEAD_BYTES * 512
    assert sum(span.n_bytes for span in spans if "written_back" in span.label) == N_LAYER * 2 * 3 * HEAD_BYTES
    full = virtual_step(plan, random_cost(1), LINKS[:1]).spans
    assert sum(span.n_bytes for span in full if "window" in span.label) == N_LAYER * 2 * 3 * HEAD_BYTES * GLOBAL


def test_more_depth_is_never_slower_and_ordered_is_copy_plus_compute() -> None:
    cost = random_cost(5)
    steps = {depth: virtual_step(host_plan("gemma3", (1,), depth), cost, LINKS[:1], writes_back=False).stop for depth in (0, 1, 2, 4)}
    (load,) = step_loads(host_plan("gemma3", (1,), 0), cost, LINKS[:1], writes_back=False)
    assert steps[0] == load.copy_seconds + load.compute_seconds
    assert steps[0] > steps[1] >= steps[2] >= steps[4] >= max(load.copy_seconds, load.compute_seconds)


def test_layers_on_the_device_come_before_the_first_delivery() -> None:
    plan = host_plan("llama", (2, 1), 1, n_device_layers=3)
    cost = random_cost(2)
    loads = step_loads(plan, cost, LINKS, writes_back=False)
    assert [load.n_layers for load in loads] == [N_LAYER - 3] * 2
    assert virtual_step(plan, cost, LINKS, writes_back=False).stop == step_bound_devices(loads, 1).step


# ---- faults ----------------------------------------------------------------------------------------------------------------------------


def without(plan: StepPlan, stream: str, matches: Sequence[str]) -> StepPlan:
    """The plan with calls left out, by the names of their events."""
    (device,) = plan.devices
    kept = tuple(call for call in getattr(device, stream) if label_of(call) not in matches or call.kernel is not None)
    assert len(kept) == len(getattr(device, stream)) - len(matches)
    return replace(plan, devices=(replace(device, **{stream: kept}),))


def test_a_wait_that_is_left_out_shows() -> None:
    plan = host_plan("llama", (1,), 1)
    cost = random_cost(4)
    bound = step_bound_devices(step_loads(plan, cost, LINKS[:1], writes_back=False), 1)
    careless = virtual_step(without(plan, "calls", ["ready 7"]), cost, LINKS[:1], writes_back=False)
    last = [span for span in careless.of("cpu:0 compute") if span.kind == "attention"][-1]
    assert last.start < bound.devices[0].ready[7]


def test_a_delivery_that_does_not_wait_for_its_slot_shows() -> None:
    """The consumer is slow: a slot is read long after the next windows could come."""
    plan, cost = host_plan("llama", (1,), 1), random_cost(4, slowest=3000)
    bound = step_bound_devices(step_loads(plan, cost, LINKS[:1], writes_back=False), 1)
    hasty = without(plan, "transfer_calls", [f"release {layer}" for layer in range(N_LAYER)])
    arrived = [span.stop for span in virtual_step(hasty, cost, LINKS[:1], writes_back=False).spans if is_v_window(span.label)]
    assert arrived[:3] == list(bound.devices[0].ready[:3])
    assert all(early < ready for early, ready in zip(arrived[3:], bound.devices[0].ready[3:], strict=True))


def test_a_release_that_is_left_out_waits_for_ever() -> None:
    plan = without(host_plan("llama", (1,), 1), "calls", ["release 2"])
    with pytest.raises(DeviceError, match="cpu:0 transfer waits for cpu:0 release 2"):
        virtual_step(plan, random_cost(1), LINKS[:1])


def test_mistakes() -> None:
    plan = host_plan("llama", (2, 1), 1)
    with pytest.raises(UsageError, match="2 devices with 1 links"):
        virtual_step(plan, random_cost(1), LINKS[:1])
    with pytest.raises(UsageError, match="all different"):
        virtual_step(plan, random_cost(1), LINKS, names=("a", "a"))
    resident = host_plan("llama", (1,), 1, n_device_layers=N_LAYER)
    with pytest.raises(UsageError, match="delivers nothing"):
        step_loads(resident, random_cost(1), LINKS[:1])
    assert virtual_step(resident, lambda device, call: US, LINKS[:1]).stop == len([c for c in resident.devices[0].calls if c.kernel]) * US


def test_kinds_of_calls() -> None:
    """One attention per layer, which reads the window; K and V come and go, once a layer."""
    for n_rows in (1, 40):
        for depth in (0, 1):
            (device,) = host_plan("gemma3", (1,), depth, n_rows).devices
            calls = [*device.calls, *device.transfer_calls]
            assert [label_of(c) for c in device.calls if kind_of(c) == "attention"] == [f"attention.{layer}" for layer in range(N_LAYER)]
            assert sum(map(is_delivery, calls)) == sum(map(is_write_back, calls)) == 2 * N_LAYER
            assert [kind_of(c) for c in calls].count("copy") == 4 * N_LAYER
            assert all(kind_of(c) is None for c in calls if c.records)


def test_measured_costs_are_medians_of_the_plans_own_calls() -> None:
    plan = host_plan("llama", (1,), 1)
    steps = []
    for took in (5000, 1000, 3000):
        streams = []
        for purpose, calls in plan.devices[0].streams().items():
            times = np.array([[10 * took * i, 10 * took * i + took + i] for i in range(len(calls))])
            streams.append(StreamTimes(f"cpu:0 {purpose}", tuple(Mark(0, purpose, call) for call in calls), times, (0, 10**9)))
        steps.append(StepTrace(tuple(streams), {}, 1))
    cost = measured_cost(steps)
    for i, call in enumerate(plan.devices[0].calls, start=1):  # the first one records that the inputs are there
        assert cost(0, call) == Fraction(3000 + i, 10**9)
    with pytest.raises(UsageError, match="did not make the call attention.0 on device 0"):
        cost(0, next(call for call in host_plan("llama", (1,), 2).devices[0].calls if kind_of(call) == "attention"))
    with pytest.raises(UsageError, match="0 traced steps"):
        measured_cost([])
