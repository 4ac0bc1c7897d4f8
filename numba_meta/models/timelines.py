"""Timelines of real steps, made when they are looked at: between two steps there is no time for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from numba_meta.schedule.timeline import Timeline
from numba_meta.schedule.trace import StepTrace

MOST_STEPS = 1 << 20


class Timelines(Sequence[Timeline]):
    """The timelines of the latest steps, the last one at index -1."""

    def __init__(self, n_steps: int) -> None:
        self.traces: deque[StepTrace] = deque(maxlen=n_steps)

    def __len__(self) -> int:
        return len(self.traces)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if isinstance(index, slice):
            return [trace.timeline() for trace in list(self.traces)[index]]
        return self.traces[index].timeline()

    def __repr__(self) -> str:
        return f"<timelines of {len(self)} steps>"
