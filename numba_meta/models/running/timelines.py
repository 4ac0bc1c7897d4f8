"""Timelines of real steps, made when they are looked at: between two steps there is no time for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numba_meta.schedule.timeline import Timeline
from numba_meta.schedule.trace import StepTrace

MOST_STEPS = 1 << 20


@dataclass(frozen=True)
class _Made:
    """A timeline that stands for what its step noted."""

    made: Timeline

    def timeline(self) -> Timeline:
        return self.made


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

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Timelines) else NotImplemented

    def __reduce__(self) -> tuple[Any, ...]:
        """As `pickle` and `copy` take them: what steps noted names kernels, which belong to this process; timelines are data."""
        return _restored, (self.traces.maxlen, list(self))

    def __repr__(self) -> str:
        return f"<timelines of {len(self)} steps>"


def _restored(n_steps: int, timelines: Sequence[Timeline]) -> Timelines:
    restored = Timelines(n_steps)
    restored.traces.extend(map(_Made, timelines))  # type: ignore[arg-type]  # of a trace only its timeline is asked for
    return restored
