"""Launches of two ranks with random faults: each ends soon, with one reason, and nothing is left running.

TEST_FAULTS=100 makes as many launches (12 without), TEST_SEED=7 repeats those of a seed; each is printed before it starts.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from mpirun import SOON, Launch, left_of, needs_mpi, said_in
from synthetic import write_model

pytestmark = [needs_mpi, pytest.mark.slow]
PROGRAM = str(Path(__file__).parent / "programs" / "random_faults.py")
N_LAUNCHES = int(os.environ.get("TEST_FAULTS", "12"))
STOPPED = 35.0  # seconds: 30 of silence come first
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP)
KINDS = ("exit", "os_exit", "raise", "prompt", "options", "call", "leave", "signal")
LONGEST = ("signal", signal.SIGSTOP)


@dataclass(frozen=True)
class Fault:
    """What happens on `rank` in its call number `call` (from 0): at its beginning, or after `token` tokens of it."""

    kind: str
    rank: int
    call: int
    token: int
    value: int  # an exit status, a signal's number, which option; by kind
    delay: float  # seconds after all are under way, of a signal

    @property
    def seconds(self) -> float:
        return STOPPED if (self.kind, self.value) == LONGEST else SOON


def draw_fault(rng: random.Random, may_stop: bool) -> Fault:
    kind = rng.choice(KINDS)
    values: dict[str, tuple[int, ...]] = {
        "exit": (0, 0, 3), "os_exit": (0, 7), "signal": tuple(number for number in SIGNALS if may_stop or number != signal.SIGSTOP),
    }  # fmt: skip
    value = rng.choice(values.get(kind, tuple(range(8))))
    return Fault(kind, rng.randrange(2), rng.randrange(4), rng.randrange(6), int(value), rng.random())


def draw_faults(seed: int, n: int) -> list[Fault]:
    """One in 20 stops a rank at most: that takes half a minute."""
    rng, faults = random.Random(seed), list[Fault]()
    for _ in range(n):
        n_stopped = sum(fault.seconds == STOPPED for fault in faults)
        faults.append(draw_fault(rng, may_stop=n_stopped < n // 20))
    return faults


def run_fault(fault: Fault, model: str, folder: Path) -> str:
    """One launch; what was said. Raises where it did not end as it should."""
    (folder / "fault.json").write_text(json.dumps(asdict(fault)))
    launch: Any = Launch(2, folder, str(folder), model, program=PROGRAM)
    launch.wait_for("ready")
    if fault.kind == "signal":
        time.sleep(fault.delay)
        launch.signal_rank(fault.rank, fault.value)
    ended = launch.end(STOPPED + 10)
    end = time.time()
    said = said_in(ended.stderr)
    own_end = fault.kind == "os_exit" and fault.value == 0
    struck = folder / "struck"
    assert struck.exists() == (fault.kind != "signal"), "the fault did not happen"
    assert ended.left == [] and left_of(folder) == [], "processes are left"
    assert ended.status != 0 and sorted(ended.ranks) == [0, 1], (ended.status, ended.ranks)
    assert all(status for rank, status in ended.ranks.items() if not (own_end and rank == fault.rank)), ended.ranks
    seconds = end - (struck.stat().st_mtime if struck.exists() else launch.since)
    assert seconds < fault.seconds, f"{seconds:.1f} s"
    if fault.kind == "os_exit" and fault.value and not said:  # Open MPI passes on nothing more, and names rank and status itself
        said = [line for line in ended.stderr.splitlines() if line.split() == ["Exit", "code:", str(fault.value)]]
        assert f"@1,{fault.rank}]" in ended.stderr, ended.stderr
    assert len(said) == 1 and "Traceback" not in ended.stderr, ended.stderr
    return f"{seconds:.1f} s: {said[0]}"


def test_every_fault_ends_all_ranks_with_one_reason(tmp_path: Path) -> None:
    seed = int(os.environ.get("TEST_SEED", secrets.randbits(32)))
    model = str(write_model(tmp_path / "model.gguf", n_layer=1))
    failures = []
    for index, fault in enumerate(draw_faults(seed, N_LAUNCHES)):
        folder = tmp_path / str(index)
        folder.mkdir()
        print(f"{index} of seed {seed}: {fault}", flush=True)
        try:
            print(f"  {run_fault(fault, model, folder)}", flush=True)
        except AssertionError as error:
            failures.append(f"{index} of seed {seed}: {fault}: {error}")
            print(f"  failed: {error}", flush=True)
    assert not failures, f"{len(failures)} of {N_LAUNCHES}\n" + "\n".join(failures)
