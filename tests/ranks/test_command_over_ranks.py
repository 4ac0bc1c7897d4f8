"""The command as users start it, nothing between launcher and ranks: what ends a rank ends all, with the reason, and nothing is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from child_processes import environment
from mpirun import MARK, SOON, left_of, needs_mpi, said_in
from synthetic import write_model

pytestmark = needs_mpi


class Command:
    """A launch of `arguments` over `n` ranks, and how it goes on."""

    def __init__(self, n: int, folder: Path, *arguments: str, **variables: str) -> None:
        self.n = n
        self.folder = folder
        command = [sys.executable, "-m", "numba_meta", "launch", "-n", str(n), "--", *arguments]
        environ = environment(**{MARK: str(folder)}, PYTHONUNBUFFERED="1", **variables)
        self.process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)

    def pid(self, rank: int, seconds: float = 30) -> int:
        """The process of a rank, once it is there."""
        wanted = {f"{MARK}={self.folder}".encode(), f"OMPI_COMM_WORLD_RANK={rank}".encode()}
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for process in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    if wanted <= set((process / "environ").read_bytes().split(b"\0")):
                        return int(process.name)
            time.sleep(0.005)
        raise AssertionError(f"rank {rank} did not start: {self.process.communicate()}")

    def wait_for_text(self) -> None:
        """Until rank 0 prints what it generates."""
        assert self.process.stdout is not None and self.process.stdout.read(1), self.process.communicate()

    def check_end(self, since: float, statuses: tuple[int, ...], reason: str | None) -> None:
        """It ended soon, with one of `statuses`, `reason` once (None: silence is allowed too), no traceback, and left no process."""
        try:
            _, data = self.process.communicate(timeout=SOON)
        except subprocess.TimeoutExpired:
            left_of(self.folder)
            raise
        stderr, spent = data.decode(), time.monotonic() - since
        said = [line for line in said_in(stderr) if "compiling" not in line]
        assert len(said) == 1 or (reason is None and not said), stderr
        assert reason is None or reason in said[0], stderr
        assert "Traceback" not in stderr and "Exception ignored" not in stderr
        assert self.process.returncode in statuses
        assert left_of(self.folder) == []
        assert spent < SOON


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("model") / "model.gguf", n_layer=3))


def endless(model: str) -> list[str]:
    return ["generate", model, "the in on", "-n", "100000000", "-c", "128", "--context-shift", "--ignore-eos"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "number", "reason"),
    [
        (0, signal.SIGKILL, "has gone without a word"), (1, signal.SIGKILL, "has gone without a word"),
        (0, signal.SIGTERM, "was told to end (SIGTERM)"), (1, signal.SIGTERM, "was told to end (SIGTERM)"),
        (0, signal.SIGINT, "was interrupted (Ctrl-C)"), (1, signal.SIGINT, "was interrupted (Ctrl-C)"),
    ],
)  # fmt: skip
def test_a_signal_to_a_rank_in_the_middle_of_a_text(rank: int, number: int, reason: str, model: str, tmp_path: Path) -> None:
    command = Command(2, tmp_path, *endless(model))
    command.wait_for_text()
    since = time.monotonic()
    os.kill(command.pid(rank), number)
    command.check_end(since, (128 + number,), f"rank {rank} ({os.uname().nodename}) {reason}")


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.2, 0.5, 0.8, None])
@pytest.mark.parametrize("send", [os.kill, os.killpg], ids=["launcher", "terminal"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launch(number: int, send: Callable[[int, int], None], delay: float | None, model: str, tmp_path: Path) -> None:
    """From the first moment of a rank on, through imports, MPI's start and loading, to the middle of a text (None)."""
    command = Command(2, tmp_path, *endless(model))
    if delay is None:
        command.wait_for_text()
    else:
        command.pid(1)
        time.sleep(delay)
    since = time.monotonic()
    send(command.process.pid, number)
    command.check_end(since, (1, 128 + number, -number), None)


@pytest.mark.slow
def test_a_launcher_that_is_killed_leaves_no_rank(model: str, tmp_path: Path) -> None:
    command = Command(2, tmp_path, *endless(model))
    command.wait_for_text()
    command.process.kill()
    command.check_end(time.monotonic(), (-signal.SIGKILL,), None)
