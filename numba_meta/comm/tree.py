"""The generic reduction of any number of participants: fold the excess over a power of two, butterfly, copy back.

A schedule is data: rounds of steps, of which those in one round touch different participants and may run at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np


@dataclass(frozen=True)
class TreeStep:
    """`add`: target += source. `swap`: both become lower + higher. `copy`: target = source. Participants by index."""

    kind: Literal["add", "swap", "copy"]
    source: int
    target: int


def plan_tree(n: int) -> tuple[tuple[TreeStep, ...], ...]:
    """The rounds after which all of `n` participants hold the sum of all: log2 rounded down, and two more where n is no power of two.

    Raises `ValueError` for n below 1.
    """
    if n < 1:
        raise ValueError(f"a reduction of {n} participants; expected at least 1")
    core = 1 << (n.bit_length() - 1)
    excess = range(core, n)
    rounds: list[tuple[TreeStep, ...]] = []
    if core < n:
        rounds.append(tuple(TreeStep("add", i, i - core) for i in excess))
    distance = 1
    while distance < core:
        rounds.append(tuple(TreeStep("swap", i, i | distance) for i in range(core) if not i & distance))
        distance *= 2
    if core < n:
        rounds.append(tuple(TreeStep("copy", i - core, i) for i in excess))
    return tuple(rounds)


def run_tree(parts: Sequence[np.ndarray]) -> None:
    """Carries the schedule out in place: afterwards every part holds the sum, with the same bits in all. Parts of one shape and type."""
    for steps in plan_tree(len(parts)):
        for step in steps:
            source, target = parts[step.source], parts[step.target]
            if step.kind == "copy":
                target[...] = source
                continue
            target += source
            if step.kind == "swap":
                source[...] = target
