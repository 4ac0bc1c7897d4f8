"""What ranks do with `ipc` in a test, and what must come of it: the same on every rank, and known to whoever checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

SEED = 5150


@dataclass(frozen=True)
class Call:
    """A sum of `rows` x n (the first `live` count), or with `widths` a gather of those, one for each rank.

    gap: float32 behind each row of a gather; blocks: of the launch.
    """

    n: int = 0
    rows: int = 1
    live: int = 1
    blocks: int = 1
    gap: int = 0
    in_place: bool = False
    widths: Sequence[int] = ()

    def n_out(self, size: int) -> int:
        """Columns of the output on `size` ranks."""
        return sum(self.widths[:size]) if self.widths else self.n


@dataclass(frozen=True)
class Case:
    """Calls in a row, on buffers of two times `half_units` units. `absent_in[i]`: ranks that leave call i out."""

    calls: Sequence[Call]
    half_units: int = 64
    split_units: int = 1 << 40
    limit_seconds: float = 60.0
    aborts_after: int = 0
    absent_in: Mapping[int, Sequence[int]] = field(default_factory=dict)


# Launches of several sizes in turns, so that rounds, halves and shares of one must not touch those of the one before.
MIXED = (
    Call(37, 3, 2, blocks=3), Call(61, blocks=2, in_place=True), Call(300, blocks=3), Call(5, 4, 0), Call(9, 5, 4, blocks=2),
    Call(widths=(7, 0, 12, 5)), Call(widths=(5, 33, 1, 2), rows=3, live=2, gap=1, blocks=2), Call(64, 2, 2, blocks=4), Call(1),
    Call(widths=(0, 0, 40, 8), rows=2, live=2, blocks=3), Call(700, blocks=2, in_place=True), Call(3, 2, 1, in_place=True),
)  # fmt: skip
CASES = {
    "mixed": Case(MIXED, half_units=24),
    "split": Case(MIXED, half_units=24, split_units=8),
    "late": Case((Call(8), Call(8, blocks=2), Call(8)), limit_seconds=2.0, absent_in={1: (1,), 2: (1,)}),
    "aborted": Case((Call(8), Call(8, blocks=2), Call(8)), aborts_after=1, absent_in={1: (1,), 2: (1,)}),
}


def case_part(call: Call, rank: int, seed: int) -> np.ndarray:
    """A rank's part, float32 `[rows, n + gap]`, with NaN in gaps and dead rows: any rank can make any rank's."""
    rng = np.random.default_rng([SEED, rank, seed])
    n = call.widths[rank] if call.widths else call.n
    part = np.full((call.rows, n + call.gap), np.nan, np.float32)
    part[: call.live, :n] = rng.standard_normal((call.live, n)) * 10.0 ** rng.integers(-4, 5, (call.live, n))
    return part


def expected(call: Call, size: int, rank: int, seed: int) -> np.ndarray:
    """What a call leaves in its output on a rank: live rows; where it writes in place, the rest as it was, else NaN."""
    parts = [case_part(call, other, seed) for other in range(size)]
    out = parts[rank].copy() if call.in_place else np.full((call.rows, call.n_out(size) + call.gap), np.nan, np.float32)
    if call.widths:
        out[: call.live, : call.n_out(size)] = np.concatenate([part[: call.live, : part.shape[1] - call.gap] for part in parts], axis=1)
        return out
    total = parts[0][: call.live, : call.n]
    for part in parts[1:]:
        total = total + part[: call.live, : call.n]
    out[: call.live, : call.n] = total
    return out
