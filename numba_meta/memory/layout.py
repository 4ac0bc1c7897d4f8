"""The graph allocator as a pure function: offsets for tensors by when they live, reusing memory after the last reader.

A request lives from the step that writes it to the step of its last reader, both included: an output never lies over
an input of the same step. Operations that may work in place are one request in the eyes of this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from numba_meta.errors import PlacementError
from numba_meta.memory.placement import round_up


@dataclass(frozen=True)
class Request:
    """`n_bytes` (0 is legal) that are needed from step `first_use` to step `last_use`, both included."""

    name: str
    n_bytes: int
    first_use: int
    last_use: int

    def __post_init__(self) -> None:
        if self.n_bytes < 0 or self.last_use < self.first_use:
            raise PlacementError(
                f"{self.name}: {self.n_bytes} bytes from step {self.first_use} to step {self.last_use}; "
                "expected 0 or more bytes and steps in order"
            )


@dataclass(frozen=True)
class Layout:
    """Byte offsets, one per request in the order given, and the bytes of memory that hold them all."""

    offsets: tuple[int, ...]
    n_bytes: int


def plan_layout(requests: Sequence[Request], alignment: int) -> Layout:
    """Offsets (multiples of `alignment`) so that requests that live at the same time never overlap.

    Greedy best fit: in a fixed order, each request takes the smallest hole between its live neighbours that it fits in.
    Three orders are tried (large first, long-lived first, as the steps go) until one reaches the lower bound
    `max_live_bytes`; the smallest layout wins. Time grows with the steps that requests live for and with what lives beside them.
    """
    if alignment < 1:
        raise PlacementError(f"a layout with alignment {alignment}: expected 1 or more")
    sizes = [round_up(request.n_bytes, alignment) for request in requests]
    bound = max_live_bytes(requests, alignment)
    best: Layout | None = None
    for order in _ORDERS:
        layout = _place_in_order(requests, sizes, sorted(range(len(requests)), key=lambda i: (*order(requests[i]), i)))
        if best is None or layout.n_bytes < best.n_bytes:
            best = layout
        if best.n_bytes == bound:
            break
    assert best is not None
    return best


def max_live_bytes(requests: Sequence[Request], alignment: int) -> int:
    """The most bytes that live at one step, each request rounded up to `alignment`: no layout can be smaller."""
    changes: dict[int, int] = {}
    for request in requests:
        n_bytes = round_up(request.n_bytes, alignment)
        changes[request.first_use] = changes.get(request.first_use, 0) + n_bytes
        changes[request.last_use + 1] = changes.get(request.last_use + 1, 0) - n_bytes
    most = live = 0
    for step in sorted(changes):
        live += changes[step]
        most = max(most, live)
    return most


_ORDERS: tuple[Callable[[Request], tuple[int, ...]], ...] = (
    lambda request: (-request.n_bytes, request.first_use),
    lambda request: (request.first_use - request.last_use, -request.n_bytes),
    lambda request: (request.first_use, -request.n_bytes),
)


def _place_in_order(requests: Sequence[Request], sizes: Sequence[int], order: Sequence[int]) -> Layout:
    """Best fit of each request, in `order`, among those placed before it; `sizes` are the aligned bytes."""
    offsets = [0] * len(requests)
    steps = {step: i for i, step in enumerate(sorted({step for r in requests for step in (r.first_use, r.last_use)}))}
    live: list[list[tuple[int, int]]] = [[] for _ in steps]  # (offset, stop) of what is placed and lives at each step
    n_bytes = 0
    for i in order:
        size = sizes[i]
        if not size:
            continue
        lived = live[steps[requests[i].first_use] : steps[requests[i].last_use] + 1]
        best_offset, best_hole = -1, 0
        end = 0
        for start, stop in sorted(set().union(*lived)):
            hole = start - end
            if hole >= size and (best_offset < 0 or hole < best_hole):
                best_offset, best_hole = end, hole
            end = max(end, stop)
        offsets[i] = best_offset if best_offset >= 0 else end
        for at_step in lived:
            at_step.append((offsets[i], offsets[i] + size))
        n_bytes = max(n_bytes, offsets[i] + size)
    return Layout(tuple(offsets), n_bytes)
