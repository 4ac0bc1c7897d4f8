"""Processes of this host, told apart by number and start: a number alone may have gone to another one."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

_START_FIELD = 19  # of /proc/PID/stat, behind the name in brackets: clock ticks from the host's boot


def start_of(pid: int) -> int:
    """When a process started, in clock ticks since its host did; 0 where there is none, or no /proc."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[_START_FIELD])
    except (OSError, ValueError, IndexError):
        return 0


def kill_process(pid: int, start: int) -> None:
    """Ends a process at once, a stopped one too, if it is still the one that started then. Nothing where it is not, or may not be."""
    with contextlib.suppress(OSError):
        handle = os.pidfd_open(pid)
        try:
            if start and start_of(pid) == start:  # after the handle was taken: the number cannot go to another one any more
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)
