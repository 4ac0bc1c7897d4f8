"""Summands and pieces that go through host memory: everything that is read there was brought there, and nothing overwrites it too early."""

from __future__ import annotations

import itertools

import pytest
from schedule.test_cuda_order import cuda_plan

from numba_meta.errors import PlacementError
from numba_meta.schedule.calls import AddressList
from numba_meta.schedule.cuda_staging import ALIGNMENT, Staging, plan_staging
from numba_meta.schedule.plan import StepPlan

LINKS = {
    "none reach": lambda reader, owner: reader == owner,
    "all reach": lambda reader, owner: True,
    "one way": lambda reader, owner: reader >= owner,
    "two share a GPU": lambda reader, owner: reader // 2 == owner // 2,
}


def lists(plan: StepPlan) -> list[tuple[int, int, AddressList]]:
    """(reader, meeting, list) of all that is read of other devices."""
    found = []
    for reader, device in enumerate(plan.devices):
        meeting = -1
        for call in device.calls:
            meeting += call.meets
            found += [(reader, meeting, value) for value in call.arguments.values() if isinstance(value, AddressList)]
    return found


def ranges(staging: Staging, meeting: int) -> list[tuple[int, int]]:
    return [(part.offset, part.offset + part.tensor.n_bytes) for part in staging.parts.get(meeting, ())]


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("n_rows", (1, 40))
@pytest.mark.parametrize("proportions", ((2, 1), (1, 1, 1), (1, 0)))
@pytest.mark.parametrize("architecture", ("llama", "gemma3"))
def test_what_is_read_in_host_memory_is_there(architecture: str, proportions: tuple[int, ...], n_rows: int, link: str) -> None:
    plan, can_read = cuda_plan(architecture, proportions, n_rows, None), LINKS[link]
    staging, n_far = plan_staging(plan.devices, can_read), 0
    for reader, meeting, value in lists(plan):
        places = staging.places.get((reader, value), (None,) * len(value.peers))
        for peer, place in zip(value.peers, places, strict=True):
            is_far = peer.tensor.n_bytes > 0 and not can_read(reader, peer.device)
            copied = [part.offset for part in staging.parts.get(meeting, ()) if (part.owner, part.tensor) == (peer.device, peer.tensor)]
            assert place == (copied[0] if is_far else None)
            n_far += is_far
    assert (n_far > 0) == (staging.n_bytes > 0) == (link != "all reach" and (len(proportions), link) != (2, "two share a GPU"))


@pytest.mark.parametrize("proportions", ((2, 1), (1, 1, 1)))
def test_nothing_is_overwritten_while_it_may_be_read(proportions: tuple[int, ...]) -> None:
    """A device reads between a meeting and its next one; what the next one brings may already come then."""
    staging = plan_staging(cuda_plan("llama", proportions, 16, None).devices, LINKS["none reach"])
    assert len(staging.parts) > 4
    for meeting in staging.parts:
        for one, other in itertools.combinations(ranges(staging, meeting) + ranges(staging, meeting + 1), 2):
            assert one[1] <= other[0] or other[1] <= one[0]
        assert all(0 <= begin < end <= staging.n_bytes and begin % ALIGNMENT == 0 for begin, end in ranges(staging, meeting))


def test_a_list_that_is_read_too_early() -> None:
    plan = cuda_plan("llama", (2, 1), 1, None)
    calls = [call for call in plan.devices[0].calls if not call.meets]
    unmet = type(plan.devices[0])(plan.devices[0].graph, tuple(calls), plan.devices[0].places)
    with pytest.raises(PlacementError, match="device 0 reads of others before it has met them"):
        plan_staging([unmet, plan.devices[1]], LINKS["none reach"])
