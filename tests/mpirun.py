"""Starts ranks under the real `mpirun` and says how each of them ended. Importable from any test."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from child_processes import environment

PROGRAMS = Path(__file__).parent / "comm" / "programs"
MPIRUN = shutil.which("mpirun", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
needs_mpi = pytest.mark.skipif(
    MPIRUN is None or importlib.util.find_spec("mpi4py") is None, reason="needs mpi4py and an mpirun: install numba-meta[mpi]"
)
# Tests may run as root, and with more ranks than cores.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}  # fmt: skip


SOON = 10.0  # seconds from what goes wrong, or from when the ranks are there, to the end of the launch
MARK = "TEST_LAUNCH"  # in the environment of every process of a launch
NO_SERVER = 213  # mpirun's status where its own server (PMIx) did not start: seen once in thousands of launches, on a busy machine


@dataclass
class Ended:
    """A launch that is over: mpirun's status, each rank's (minus a signal's number where one ended it), what they said, seconds."""

    status: int
    ranks: dict[int, int]
    stdout: str
    stderr: str
    seconds: float  # from the last thing that the test did to it, or from when the last rank was there if that was later
    left: list[int]  # processes that still live


class Launch:
    """`mpirun -n N` of a program under tests/comm/programs; the ranks' supervisors write into `folder`."""

    def __init__(self, n: int, folder: Path, *arguments: str, program: str = "rank.py", **variables: str) -> None:
        self.n = n
        self.folder = folder
        self._environ = environment(**OPEN_MPI, **{MARK: str(folder)}, **variables)
        supervised = [sys.executable, str(PROGRAMS / "supervise.py"), str(folder), str(PROGRAMS / program), *arguments]
        self._command = [str(MPIRUN), "-n", str(n), *supervised]
        self._n_starts = 0
        self._start()

    def _start(self) -> None:
        self._n_starts += 1
        self.process = subprocess.Popen(
            self._command, env=self._environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )  # fmt: skip
        self.since = time.time()

    def _starts_again(self) -> bool:
        """Where Open MPI itself did not start, before any rank was there, it is tried once more."""
        again = self.process.poll() == NO_SERVER and self._n_starts == 1 and not any(self.folder.glob("supervisor.*"))
        if again:
            self._start()
        return again

    def wait_for(self, name: str, seconds: float = 60) -> None:
        """Until every rank has left a file of this name."""
        end = time.monotonic() + seconds
        while not all((self.folder / f"{name}.{rank}").exists() for rank in range(self.n)):
            if not self._starts_again():
                assert time.monotonic() < end and self.process.poll() is None, f"{name} was not reached: {self.end(1).stderr}"
            time.sleep(0.02)

    def signal_rank(self, rank: int, number: int) -> None:
        self.since = time.time()
        os.kill(self._pid("pid", rank), number)

    def signal_launcher(self, number: int, whole_group: bool = False) -> None:
        """`whole_group`: as a terminal does for Ctrl-C."""
        self.since = time.time()
        if whole_group:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)

    def end(self, seconds: float = 60) -> Ended:
        """Waits for the end; kills what is still there after `seconds`, which `left` then shows."""
        try:
            stdout, stderr = self.process.communicate(timeout=seconds)
            if self._starts_again():
                stdout, stderr = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            stdout, stderr = self.process.communicate()
        began = [file.stat().st_mtime for file in self.folder.glob("started.*")]
        spent = time.time() - max(self.since, *began, 0.0)
        left = left_of(self.folder)  # first: supervisors outlive mpirun by a moment, in which they write
        statuses = {rank: int(file.read_text()) for rank in range(self.n) if (file := self.folder / f"status.{rank}").exists()}
        return Ended(self.process.returncode, statuses, stdout, stderr, spent, left)

    def _pid(self, kind: str, rank: int) -> int:
        return int((self.folder / f"{kind}.{rank}").read_text())


def left_of(folder: Path) -> list[int]:
    """Processes of a launch that live on, after a moment in which the system takes them away; they are killed."""
    end = time.monotonic() + 3
    while (alive := _marked(f"{MARK}={folder}".encode())) and time.monotonic() < end:
        time.sleep(0.05)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    return alive


def _marked(mark: bytes) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's; one that ended and was not waited for has no environment
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return found


def said_in(stderr: str) -> list[str]:
    """What numba_meta says in one line each. The last line of MPI's own may end in a NUL, without a line break."""
    return [line for line in stderr.replace("\0", "\n").splitlines() if line.startswith("numba-meta: ")]


def check_failed(ended: Ended, n: int, reason: str, soon: float = SOON) -> None:
    """The reason was said once, and the launch ended as `check_ended` wants it."""
    said = said_in(ended.stderr)
    assert len(said) == 1 and reason in said[0], ended.stderr
    check_ended(ended, n, soon)


def check_ended(ended: Ended, n: int, soon: float = SOON) -> None:
    """All ranks ended soon with a status other than 0 and without a traceback, nothing is left."""
    assert "Traceback" not in ended.stderr
    assert ended.seconds < soon, f"{ended.seconds:.1f} s: {ended.stderr}"
    assert ended.status != 0
    assert sorted(ended.ranks) == list(range(n)) and all(ended.ranks.values()), ended.ranks
    assert ended.left == []
