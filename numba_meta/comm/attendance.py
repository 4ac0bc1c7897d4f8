"""Who has come, before MPI can tell: a file for each rank of this host, in the launcher's own temporary folder where it has one."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from numba_meta.comm.launch import Launch

_LOOK_SECONDS = 0.05
_LAST_WORDS_SECONDS = 1.0  # a rank that ends first takes the others with it: the one that speaks goes first


class Attendance:
    """This rank's file, and a look at the others'. A file holds when its rank gives up, in seconds of the host's clock."""

    def __init__(self, launch: Launch, seconds: float) -> None:
        self.launch = launch
        self.seconds = seconds
        self.give_up_at = time.time() + seconds
        base = os.environ.get("PMIX_SERVER_TMPDIR", "")
        name = f"numba_meta-{os.getuid()}-{hashlib.sha256(launch.job.encode()).hexdigest()[:12]}"
        self.folder = Path(base if os.path.isdir(base) else tempfile.gettempdir()) / name
        with contextlib.suppress(OSError):  # without a folder the limit still holds, only nobody is named
            self.folder.mkdir(mode=0o700, exist_ok=True)
            own = self.folder / f".{launch.rank}"
            own.write_text(str(self.give_up_at))
            os.replace(own, self.folder / str(launch.rank))  # whole, or not there

    def deadlines(self) -> dict[int, float]:
        """The ranks of this host that came, and when each gives up."""
        found = {self.launch.rank: self.give_up_at}
        with contextlib.suppress(OSError):
            for path in self.folder.iterdir():
                with contextlib.suppress(OSError, ValueError):
                    found[int(path.name)] = float(path.read_text())
        return found

    def missing(self, present: set[int]) -> str:
        """Who did not come, as far as this host can tell."""
        size, here = self.launch.size, self.launch.local_size
        limit = f"within {self.seconds:g} s; see what holds them up, or raise NUMBA_META_JOIN_TIMEOUT"
        if size is not None and here == size:
            absent = [rank for rank in range(size) if rank not in present]
            return f"never heard from rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent)) or 'none'} of {size} {limit}"
        came = f"{len(present)} of {here if here is not None else 'its'} ranks of this host came"
        return f"not all ranks started ({came}, {size if size is not None else 'more'} in all) {limit}"

    def watch(self, arrived: threading.Event, on_missing: Callable[[str, bool], None] | None) -> None:
        """Returns when `arrived` is set; calls `on_missing(reason, speaker)` if the first rank of this host gives up before."""
        deadlines: dict[int, float] = {}  # of all that were ever seen: one that gives up takes its file away
        while not arrived.wait(_LOOK_SECONDS):
            deadlines.update(self.deadlines())
            if time.time() >= min(deadlines.values()):
                speaker = self.launch.rank == min(deadlines)
                if not speaker and arrived.wait(_LAST_WORDS_SECONDS):
                    return
                self.leave()
                if on_missing is not None:
                    on_missing(self.missing(set(deadlines)), speaker)
                return

    def leave(self) -> None:
        """Takes this rank's file away; the last one takes the folder."""
        with contextlib.suppress(OSError):
            (self.folder / str(self.launch.rank)).unlink(missing_ok=True)
            self.folder.rmdir()
