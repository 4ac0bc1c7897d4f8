"""Communicators behind one interface, and how ranks agree on one: the best that all can use, built together and probed.

`NUMBA_META_COMM` forces one by name, `none` forbids all; one rank that sets it decides for all.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from numba_meta.comm.errors import JoinError, RankError, UnsuitedError
from numba_meta.comm.join import Joined
from numba_meta.comm.world import World
from numba_meta.errors import NumbaMetaError, NumbaMetaWarning, UsageError

COMM_VARIABLE = "NUMBA_META_COMM"
NAMES = ("ipc", "nccl", "mpi", "pairwise")  # best first: 16 KiB between two GPUs take ipc 5 us and nccl 7
PROBE_SIZES = (0, 1, 61, 40_001, 262_147)  # elements: around the thresholds of wire types and of large payloads
_TEXT_BYTES = 512
_FAILED, _UNSUITED = b"!", b"-"  # before a problem's text, as ranks tell it each other


class Communicator(Protocol):
    """Sums float32 tensors over ranks, in place. All ranks call it alike, with the same sizes."""

    name: str

    def accepts(self, n_elements: int) -> bool:
        """Whether it serves tensors of this size; of the size alone, so that all ranks decide the same."""

    def all_reduce(self, x: np.ndarray) -> None:
        """x float32, contiguous: this rank's summand before, the sum over all ranks after."""

    def close(self) -> None:
        """Waits for work that uses it and gives its memory back. Twice is once."""


class CommunicatorFactory(Protocol):
    """How a rank makes one kind of communicator."""

    name: str

    def obstacle(self, world: World) -> str:
        """Why this rank cannot offer it; empty where it can. Touches no other rank."""

    def prepare(self, world: World) -> None:
        """This rank's own part of building it, which may fail; touches no other rank."""

    def build(self, world: World) -> Communicator:
        """The part that all ranks do together, after every one of them has prepared."""


@dataclass(frozen=True)
class Problem:
    """Why a communicator was dropped: `text` names the lowest rank that could not go on. Not every one is a failure (`UnsuitedError`)."""

    text: str
    is_failure: bool = True


@dataclass
class Reduction:
    """What the ranks agreed on: communicators, best first, of which the last serves every size. `notes`: what was tried in vain."""

    communicators: tuple[Communicator, ...]
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.communicators[0].name if self.communicators else "alone"

    def choose(self, n_elements: int) -> Communicator:
        """The best that accepts a tensor of this size. Raises `RankError` where none does."""
        for communicator in self.communicators:
            if communicator.accepts(n_elements):
                return communicator
        raise RankError(f"no communicator accepts {n_elements} elements (agreed: {_list([c.name for c in self.communicators])})")

    def all_reduce(self, x: np.ndarray) -> None:
        """Sums x over the ranks, in place; a tensor of no elements returns at once, and so does everything in a process alone."""
        if x.size and self.communicators:
            self.choose(x.size).all_reduce(x)

    def close(self) -> None:
        for communicator in self.communicators:
            communicator.close()
        self.communicators = ()


def forced_name() -> str:
    """`NUMBA_META_COMM`, empty where it is not set. Raises `UsageError` for a name that is none. A rank puts it into its join request."""
    name = os.environ.get(COMM_VARIABLE, "").strip().lower()
    if name and name not in (*NAMES, "none"):
        raise UsageError(f"{COMM_VARIABLE}={name!r}; expected one of {', '.join(NAMES)}, none")
    return name


def offered_names(world: World, factories: Sequence[CommunicatorFactory], forced: str = "") -> tuple[str, ...]:
    """The names that this rank can offer, for its join request. Raises `RankError` where it cannot use what it forces, with the reason."""
    obstacles = {factory.name: factory.obstacle(world) for factory in factories}
    if forced in obstacles and obstacles[forced]:
        raise RankError(f"{COMM_VARIABLE}={forced} cannot be used: {obstacles[forced]}")
    if forced not in (*obstacles, "", "none"):
        raise RankError(f"{COMM_VARIABLE}={forced} is not for the devices of rank {world.rank}; expected one of {_list(list(obstacles))}")
    return tuple(name for name, obstacle in obstacles.items() if not obstacle)


def choose_candidates(offers: Sequence[Sequence[str]], forced: Sequence[str], order: Sequence[str] = NAMES) -> tuple[str, ...]:
    """Names to try, best first: what every rank offers, or the one that a rank forces. `offers` and `forced` in rank order.

    Raises `JoinError` where ranks force different ones, where a rank cannot use what is forced, and where nothing is left.
    """
    wishes = {name: rank for rank, name in reversed(list(enumerate(forced))) if name}
    if len(wishes) > 1:
        (a, rank_a), (b, rank_b) = sorted(wishes.items(), key=lambda item: item[1])[:2]
        raise JoinError(f"{COMM_VARIABLE} is {a} on rank {rank_a} and {b} on rank {rank_b}; set it on one rank, or alike on all")
    for name, rank in wishes.items():
        if name == "none":
            raise JoinError(f"{COMM_VARIABLE}=none (rank {rank}) forbids every communicator, and {len(offers)} ranks need one; unset it")
        lacking = [other for other, names in enumerate(offers) if name not in names]
        if lacking:
            can = _list(offers[lacking[0]])
            raise JoinError(f"{COMM_VARIABLE}={name} (rank {rank}), but rank {lacking[0]} cannot use it (it offers {can})")
        return (name,)
    common = tuple(name for name in order if all(name in names for names in offers))
    if not common:
        each = "; ".join(f"rank {rank}: {_list(names)}" for rank, names in enumerate(offers))
        raise JoinError(f"no communicator that all ranks can use ({each}); install numba-meta[mpi] for every rank")
    return common


def negotiate(
    world: World, joined: Joined, factories: Sequence[CommunicatorFactory], warn: Callable[[str], None] | None = None
) -> Reduction:
    """Builds the best communicator that all ranks can use, and those behind it for calls that it declines.

    Each is prepared, built and probed by all ranks together, with an exchange in between: what fails on one rank is dropped on all, with
    one warning in all, on rank 0. One that is not for these ranks is dropped without. Raises the same `JoinError` on every rank where none
    is left.
    """
    if world.size == 1:
        return Reduction(())
    candidates = choose_candidates([r.offers for r in joined.records], [r.forced for r in joined.records])
    by_name = {factory.name: factory for factory in factories}
    built: list[Communicator] = []
    problems: dict[str, Problem] = {}
    for name in candidates:
        outcome = _build(world, by_name[name])
        if isinstance(outcome, Problem):
            problems[name] = outcome
            continue
        built.append(outcome)
        if all(outcome.accepts(size) for size in (1, 1 << 40)):
            break
    notes = tuple(f"{name}: {problem.text}" for name, problem in problems.items())
    if not built:
        raise JoinError(f"no communicator works on all ranks ({'; '.join(notes)})")
    if world.rank == 0 and any(problem.is_failure for problem in problems.values()):
        text = f"the ranks reduce with {built[0].name}, after {'; '.join(notes)}"
        warnings.warn(text, NumbaMetaWarning, stacklevel=2) if warn is None else warn(text)
    return Reduction(tuple(built), notes)


def _build(world: World, factory: CommunicatorFactory) -> Communicator | Problem:
    """The communicator, or what went wrong on the lowest rank where it did. Every rank returns alike."""
    if problem := _all_well(world, _attempt(lambda: factory.prepare(world)), f"{factory.name}: prepare"):
        return problem
    made: list[Communicator] = []
    problem = _all_well(world, _attempt(lambda: made.append(factory.build(world))), f"{factory.name}: build")
    for n in PROBE_SIZES:  # an exchange after each: a rank that fails in one must not leave the others alone in the next
        if not problem:
            problem = _all_well(world, _attempt(lambda n=n: probe(world, made[0], n)), f"{factory.name}: probe")  # type: ignore[misc]
    if problem:
        for communicator in made:
            _attempt(communicator.close)
        return problem
    return made[0]


def probe(world: World, communicator: Communicator, n: int) -> None:
    """Reduces n known values, where the communicator accepts that size. Raises `RankError` where a sum is wrong.

    Rank r gives (i + r) mod 5: whole numbers whose sums are exact in bf16 too, up to 64 ranks and in any order.
    """
    if not communicator.accepts(n):
        return
    index = np.arange(n, dtype=np.int64)
    x = ((index + world.rank) % 5).astype(np.float32)
    expected = sum(((index + rank) % 5 for rank in range(world.size)), np.zeros(n, np.int64)).astype(np.float32)
    communicator.all_reduce(x)
    if not np.array_equal(x, expected):
        at = int(np.flatnonzero(x != expected)[0])
        raise RankError(f"a probe of {n} elements gives {x[at]:g} at {at}, expected {expected[at]:g}")


def _attempt(work: Callable[[], object]) -> Problem | None:
    try:
        work()
    except NumbaMetaError as error:
        return Problem(str(error) or type(error).__name__, not isinstance(error, UnsuitedError))
    except Exception as error:
        return Problem(f"{type(error).__name__}: {' '.join(str(error).split())}")
    return None


def _all_well(world: World, problem: Problem | None, purpose: str) -> Problem | None:
    own = (_FAILED if problem.is_failure else _UNSUITED) + problem.text.encode() if problem else b""
    for rank, said in enumerate(world.exchange(own[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0"), purpose)):
        if text := said[1:].rstrip(b"\0").decode(errors="replace"):
            return Problem(f"rank {rank}: {text}", said[:1] == _FAILED)
    return None


def _list(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
