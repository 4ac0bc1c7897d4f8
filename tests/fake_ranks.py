"""Ranks as threads of one process, and communicators that do what a test tells them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from numba_meta.comm.errors import RankError, UnsuitedError
from numba_meta.comm.world import Deadline, World

PATIENCE = 20.0  # seconds after which a fake exchange that nobody completes fails


class FakeHub:
    """Where fake ranks leave their frames."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.frames: dict[int, dict[int, bytes]] = {}
        self.changed = threading.Condition()
        self.ranks: set[int] = set()


class FakeWorld(World):
    """One rank of a hub. Each has a host and a process of its own unless told; hosts of one `key` share a clock."""

    def __init__(self, hub: FakeHub, rank: int, host: str | None = None, key: str | None = None, process: int | None = None) -> None:
        super().__init__(
            rank, hub.size, host or f"host{rank}", key if key is not None else f"key{rank}", 100 + rank if process is None else process
        )  # fmt: skip
        if rank in hub.ranks:
            raise RankError(f"rank {rank} is there already")
        hub.ranks.add(rank)
        self.hub = hub
        self._n_frames = 0

    def _exchange_frames(self, frame: bytes, until: Deadline | None) -> list[bytes | None]:
        number, hub = self._n_frames, self.hub
        self._n_frames += 1
        patience = time.monotonic() + PATIENCE
        with hub.changed:
            here = hub.frames.setdefault(number, {})
            here[self.rank] = frame
            hub.changed.notify_all()
            while len(here) < hub.size:
                heard: list[bytes | None] = [here.get(rank) for rank in range(hub.size)]
                left = (patience if until is None else until(heard)) - time.monotonic()
                if left <= 0:
                    if until is None:
                        raise TimeoutError(f"rank {self.rank}: exchange {number} was never complete")
                    return heard
                hub.changed.wait(min(left, 0.05))
            return [here[rank] for rank in range(hub.size)]


@dataclass
class Outcome:
    """What a fake rank returned or raised."""

    value: Any = None
    error: BaseException | None = None


def run_ranks(size: int, work: Callable[[FakeWorld], Any], absent: tuple[int, ...] = (), **world: Any) -> list[Outcome]:
    """`work` on every rank but the absent ones, all at the same time; what came of it, in rank order."""
    hub = FakeHub(size)
    outcomes = [Outcome() for _ in range(size)]

    def live(rank: int) -> None:
        try:
            outcomes[rank].value = work(FakeWorld(hub, rank, **world))
        except BaseException as error:
            outcomes[rank].error = error

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(size) if rank not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a fake rank hangs"
    return outcomes


class FakeCommunicator:
    """Reduces through the world's exchange; `spoil` changes a result."""

    def __init__(self, name: str, world: World, largest: int | None, spoil: Callable[[int, np.ndarray], None]) -> None:
        self.name = name
        self.world = world
        self.largest = largest
        self.spoil = spoil
        self.n_calls = 0
        self.closed = False

    def accepts(self, n_elements: int) -> bool:
        return self.largest is None or n_elements <= self.largest

    def all_reduce(self, x: np.ndarray) -> None:
        self.n_calls += 1
        parts = self.world.exchange(x.tobytes(), self.name)
        x[...] = sum(np.frombuffer(part, np.float32) for part in parts).reshape(x.shape)
        self.spoil(self.world.rank, x)

    def close(self) -> None:
        self.closed = True


class FakeFactory:
    """Offers a communicator except on the ranks `lacking`; fails where it is told to."""

    def __init__(
        self, name: str, lacking: tuple[int, ...] = (), prepare_fails: tuple[int, ...] = (), build_fails: tuple[int, ...] = (),
        largest: int | None = None, spoil: Callable[[int, np.ndarray], None] = lambda rank, x: None, unsuited: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self.name = name
        self.unsuited = unsuited
        self.lacking, self.prepare_fails, self.build_fails = lacking, prepare_fails, build_fails
        self.largest, self.spoil = largest, spoil
        self.made: list[FakeCommunicator] = []
        self.prepared: list[int] = []

    def obstacle(self, world: World) -> str:
        return "not here" if world.rank in self.lacking else ""

    def prepare(self, world: World) -> None:
        if world.rank in self.prepare_fails:
            raise RankError("no memory left")
        self.prepared.append(world.rank)

    def build(self, world: World) -> FakeCommunicator:
        if world.rank in self.build_fails:
            raise OSError("device is busy")
        if world.rank in self.unsuited:
            raise UnsuitedError("another host")
        made = FakeCommunicator(self.name, world, self.largest, self.spoil)
        self.made.append(made)
        return made
