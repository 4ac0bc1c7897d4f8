"""Sums and gathers between GPUs that cannot read each other's memory: summands and pieces go through pinned host memory. Pure.

A device reads from another one behind a meeting. At that meeting the owner first copies the tensor to host memory, where the kernel of who
reads it finds it. Meetings take turns at two regions: who comes to the next meeting has read what the last one brought, so that its region
is free for the one after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

from numba_meta.errors import PlacementError
from numba_meta.memory.placement import round_up
from numba_meta.schedule.calls import AddressList
from numba_meta.schedule.plan import DevicePlan
from numba_meta.tensor import Tensor

ALIGNMENT = 256


@dataclass(frozen=True)
class StagedPart:
    """A tensor that its owner copies to host memory, `offset` bytes behind the begin."""

    owner: int
    tensor: Tensor
    offset: int


@dataclass(frozen=True)
class Staging:
    """What goes through host memory in a step.

    `parts`: what is copied there, by meeting, counted from 0. `places`: by reader and list, where each peer's tensor is found there; None:
    where it lies on its device.
    """

    n_bytes: int
    parts: Mapping[int, tuple[StagedPart, ...]]
    places: Mapping[tuple[int, AddressList], tuple[int | None, ...]]


def plan_staging(plans: Sequence[DevicePlan], can_read: Callable[[int, int], bool]) -> Staging:
    """What must be staged where `can_read(reader, owner)` is false. Raises `PlacementError` for a list that is read before a meeting."""
    needed: dict[int, dict[tuple[int, Tensor], None]] = {}
    lists: list[tuple[int, AddressList, int, list[bool]]] = []  # reader, list, meeting, which of its peers are far
    for reader, plan in enumerate(plans):
        meeting = -1
        for call in plan.calls:
            meeting += call.meets
            for value in call.arguments.values():
                if not isinstance(value, AddressList):
                    continue
                is_far = [peer.tensor.n_bytes > 0 and not can_read(reader, peer.device) for peer in value.peers]
                if any(is_far) and meeting < 0:
                    raise PlacementError(f"{call.node}: device {reader} reads of others before it has met them")
                for peer in compress(value.peers, is_far):
                    needed.setdefault(meeting, {})[peer.device, peer.tensor] = None
                lists.append((reader, value, meeting, is_far))
    region = max((sum(round_up(tensor.n_bytes, ALIGNMENT) for _, tensor in tensors) for tensors in needed.values()), default=0)
    parts = {}
    for turn, meeting in enumerate(sorted(needed)):
        offset, found = turn % 2 * region, []
        for owner, tensor in needed[meeting]:
            found.append(StagedPart(owner, tensor, offset))
            offset += round_up(tensor.n_bytes, ALIGNMENT)
        parts[meeting] = tuple(found)
    offsets = {(meeting, part.owner, part.tensor): part.offset for meeting, staged in parts.items() for part in staged}
    places = {
        (reader, value): tuple(
            offsets[meeting, peer.device, peer.tensor] if far else None for peer, far in zip(value.peers, is_far, strict=True)
        )
        for reader, value, meeting, is_far in lists
        if any(is_far)
    }
    return Staging(region * min(2, len(needed)), parts, places)
