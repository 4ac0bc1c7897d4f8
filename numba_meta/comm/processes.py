"""Processes of this host, told apart by number and start: a number alone may have gone to another one."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

_STATE_FIELD, _START_FIELD = 0, 19  # of /proc/PID/stat, behind the name in brackets: a letter; clock ticks from the host's boot
_AT_WORK = ("R", "S", "D", "I")  # computes, or waits for something


def start_of(pid: int) -> int:
    """When a process started, in clock ticks since its host did; 0 where there is none, or no /proc."""
    try:
        return int(_fields_of(pid)[_START_FIELD])
    except (OSError, ValueError, IndexError):
        return 0


def is_at_work(pid: int, start: int) -> bool:
    """Whether the process that started then is there and was not stopped: what it does may keep its own threads from saying so."""
    try:
        fields = _fields_of(pid)
        return start != 0 and int(fields[_START_FIELD]) == start and fields[_STATE_FIELD] in _AT_WORK
    except (OSError, ValueError, IndexError):
        return False


def _fields_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def kill_process(pid: int, start: int) -> None:
    """Ends a process at once, a stopped one too, if it is still the one that started then. Nothing where it is not, or may not be."""
    with contextlib.suppress(OSError):
        handle = os.pidfd_open(pid)
        try:
            if start and start_of(pid) == start:  # after the handle was taken: the number cannot go to another one any more
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)
