"""The recursion for a step's time: by hand, by property, and against figures that were measured elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from numba_meta.errors import UsageError
from numba_meta.schedule.bound import (
    DeviceLoad,
    MeetingTimes,
    ordered_seconds,
    predict_step,
    ring_bytes_at_peak,
    step_bound,
    step_bound_devices,
    tokens_per_second,
)

US = st.integers(0, 1000)


def test_copy_bound_by_hand() -> None:
    # Copies of 10 follow each other but for the third slot's release; work of 2 hides under them.
    times = step_bound([10] * 4, [2] * 4, [1] * 4, before=5, after=7, depth=1)
    assert times.ready == (10, 20, 30, 40)
    assert times.start == (10, 20, 30, 40)
    assert times.done == (12, 22, 32, 42)
    assert times.freed == (11, 21, 31, 41)
    assert times.step == 49


def test_compute_bound_by_hand() -> None:
    # Only the first copy shows; with three slots the fourth copy waits for the first attention's end.
    times = step_bound([2] * 4, [10] * 4, [9] * 4, before=1, after=7, depth=1)
    assert times.start == (2, 12, 22, 32)
    assert times.freed == (11, 21, 31, 41)
    assert times.ready == (2, 4, 6, 13)
    assert times.step == 49


def test_ordered_by_hand() -> None:
    times = step_bound([2, 3], [10, 20], [3, 3], before=1, after=7, depth=0)
    assert times.ready == times.start == (3, 16)
    assert times.step == 1 + 2 + 3 + 10 + 20 + 7


def test_mixed_windows_gain_from_depth() -> None:
    # Five local layers, then a global one, twice: its long copy needs more than one split to hide under.
    copy, compute = [1] * 5 + [12] + [1] * 5 + [12], [3] * 12
    steps = [step_bound(copy, compute, [1] * 12, depth=depth).step for depth in (0, 1, 2, 4)]
    # By hand, depth 1: the global copy starts when layer 2 is freed (at 8) and ends at 20, the second one at 23 + 6 + 1 + 12.
    assert steps[:2] == [34 + 36, 45]
    assert steps[1] > steps[2] > steps[3] >= 36


@st.composite
def loads(draw: st.DrawFn, n_devices: int = 1) -> list[DeviceLoad]:
    """Devices with layers of one to three segments between meetings, times in whole microseconds."""
    counts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=10))
    n_before, n_after = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    result = []
    for _ in range(n_devices):
        segments = tuple(tuple(draw(US) for _ in range(n)) for n in counts)
        attention = tuple(draw(st.integers(0, layer[0])) for layer in segments)
        copy = tuple(draw(US) for _ in counts)
        result.append(
            DeviceLoad(copy, attention, segments, tuple(draw(US) for _ in range(n_before)), tuple(draw(US) for _ in range(n_after)))
        )
    return result


@given(loads(), st.integers(1, 6))
def test_one_device_is_between_its_limits(one: list[DeviceLoad], depth: int) -> None:
    load = one[0]
    step = step_bound_devices(one, depth).step
    last = sum(load.segments[-1]) + sum(load.after)
    assert step >= max(load.compute_seconds, load.copy_seconds + last)
    assert step <= ordered_seconds(load.copy_seconds, load.compute_seconds)
    assert step_bound_devices(one, 0).step == ordered_seconds(load.copy_seconds, load.compute_seconds)


@given(loads())
def test_with_a_slot_for_every_layer_no_copy_waits(one: list[DeviceLoad]) -> None:
    load = one[0]
    (times,) = step_bound_devices(one, load.n_layers).devices
    assert list(times.ready) == [sum(load.copy[: layer + 1]) for layer in range(load.n_layers)]
    # The step is the longest way through it: copies up to some layer, then all work from there on.
    layers = [sum(layer) for layer in load.segments]
    ways = [sum(load.before) + sum(layers)] + [sum(load.copy[: n + 1]) + sum(layers[n:]) for n in range(load.n_layers)]
    assert times.step == max(ways) + sum(load.after)


@given(st.integers(1, 3).flatmap(lambda n: loads(n)))
def test_depth_never_costs(devices: list[DeviceLoad]) -> None:
    steps = [step_bound_devices(devices, depth).step for depth in range(6)]
    assert steps == sorted(steps, reverse=True)


@given(st.integers(1, 3).flatmap(lambda n: loads(n)), st.integers(0, 4))
def test_devices_wait_for_each_other_and_for_nothing_else(devices: list[DeviceLoad], depth: int) -> None:
    together = step_bound_devices(devices, depth)
    alone = [step_bound_devices([load], depth).step for load in devices]
    assert together.step >= max(alone)
    assert together.step == max(times.step for times in together.devices)
    assert step_bound_devices([*devices, *devices], depth) == MeetingTimes(together.step, together.devices * 2)


@given(loads(), st.integers(0, 4))
def test_order_of_what_happens_to_a_layer(one: list[DeviceLoad], depth: int) -> None:
    (times,) = step_bound_devices(one, depth).devices
    for ready, start, freed, done in zip(times.ready, times.start, times.freed, times.done, strict=True):
        assert ready <= start <= freed <= done
    assert list(times.ready) == sorted(times.ready)
    n_slots = depth + 2
    if depth:
        for layer in range(n_slots, one[0].n_layers):
            assert times.ready[layer] - one[0].copy[layer] >= times.freed[layer - n_slots]


def test_two_devices_by_hand() -> None:
    # The slow link's device is met after its attention (10 + 4), then the other one's second segment is the longer.
    fast = DeviceLoad((2,), (1,), ((3, 6),), (1,), (1,))
    slow = DeviceLoad((10,), (1,), ((4, 2),), (1,), (5,))
    times = step_bound_devices([fast, slow], 1)
    assert [device.start for device in times.devices] == [(2,), (10,)]
    assert [device.done for device in times.devices] == [(20,), (16,)]
    assert [device.step for device in times.devices] == [21, 21]
    assert times.step == 21


@pytest.mark.parametrize(
    ("copy", "compute", "attention"),
    [([1], [1, 2], [1]), ([], [], []), ([-1], [1], [1]), ([1], [1], [2])],
)
def test_steps_that_cannot_be(copy: Sequence[int], compute: Sequence[int], attention: Sequence[int]) -> None:
    with pytest.raises(UsageError, match="expected"):
        step_bound(copy, compute, attention)


@given(st.integers(1, 3).flatmap(lambda n: loads(n)), st.integers(1, 4))
def test_prediction(devices: list[DeviceLoad], depth: int) -> None:
    told = predict_step(devices, depth)
    assert told.ordered == step_bound_devices(devices, 0).step
    assert told.pipelined == step_bound_devices(devices, depth).step
    assert max(told.copy, told.compute) <= told.pipelined <= told.ordered
    # Devices that meet need not be slowest at the same places: each at all meetings is more than the slowest alone.
    assert told.ordered <= sum(load.copy_seconds for load in devices) + told.compute
    assert told.compute >= max(load.compute_seconds for load in devices)
    assert told.gain >= 0


def test_gain_peaks_where_copy_is_compute() -> None:
    # The published curve's shape: a context that grows, layers of 2 ms each.
    gains = [predict_step([DeviceLoad((ms,) * 16, (1,) * 16, ((2,),) * 16)]).gain for ms in (Fraction(1, 2), 1, 2, 4, 8)]
    assert gains.index(max(gains)) == 2
    assert gains[:3] == sorted(gains[:3]) and gains[2:] == sorted(gains[2:], reverse=True)
    assert gains[2] == 64 / 34 - 1  # the first copy shows


def test_devices_that_do_not_meet() -> None:
    with pytest.raises(UsageError, match="2 devices.*same number of layers and meetings"):
        step_bound_devices([DeviceLoad((1,), (1,), ((1,),)), DeviceLoad((1,), (1,), ((1, 1),))])
    with pytest.raises(UsageError, match="depth -1"):
        step_bound([1], [1], [1], depth=-1)


# ---- figures that were measured elsewhere ----------------------------------------------------------------------------------------------

# Copy and compute of a step in ms, tokens/s ordered and pipelined, depth 1, 16 attention layers.
TWO_GPUS = (103.8, 31.1, 7.08, 8.78)
ONE_GPU = (28.3, 25.7, 17.785, 29.833)


@pytest.mark.parametrize(("copy_ms", "compute_ms", "ordered", "pipelined"), [TWO_GPUS, ONE_GPU])
def test_published_ordered_figures_follow_from_copy_and_compute(
    copy_ms: float, compute_ms: float, ordered: float, pipelined: float
) -> None:
    predicted = tokens_per_second(ordered_seconds(copy_ms / 1000, compute_ms / 1000))
    assert predicted == pytest.approx(ordered, rel=0.05)  # 7.41 (4.7% above) and 18.52 (4.1% above)
    # A bound: nothing that was measured may be faster, ordered or pipelined.
    layers = [[Fraction(ms) / 16000] * 16 for ms in (copy_ms, compute_ms)]
    assert tokens_per_second(step_bound(*layers, layers[1], depth=0).step) == pytest.approx(predicted)
    assert ordered < predicted
    assert pipelined < tokens_per_second(step_bound(*layers, [0] * 16, depth=1).step)


def test_ring_where_the_gain_peaks() -> None:
    assert float(ring_bytes_at_peak(3, 16, 0.0257, 22.0e9)) / (1 << 20) == pytest.approx(101, abs=0.5)


def test_tokens_of_several_sequences() -> None:
    assert tokens_per_second(Fraction(1, 10), 8) == 80
