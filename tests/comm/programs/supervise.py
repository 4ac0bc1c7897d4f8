"""Starts one rank and writes down how it ended: `supervise.py FOLDER PROGRAM ARGUMENT...`. Ends as the rank did.

Two processes: the first is what the launcher started, and passes its signals on. The second is out of the launcher's reach, so that a rank
which the launcher kills leaves a status too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

_SET_PARENT_DEATH_SIGNAL = 1  # of prctl
folder, command = Path(sys.argv[1]), [sys.executable, *sys.argv[2:]]
rank = os.environ["OMPI_COMM_WORLD_RANK"]


def write(name: str, value: int) -> None:
    """Whole, or not there."""
    (folder / f".{name}.{rank}").write_text(str(value))
    os.replace(folder / f".{name}.{rank}", folder / f"{name}.{rank}")


def end_as(status: int) -> None:
    if status < 0:
        if status != -signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def pass_on(number: int, frame: object) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.kill(second, number)


signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR1])
second = os.fork()
if second:
    signal.signal(signal.SIGTERM, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM, signal.SIGUSR1])
    end_as(os.waitstatus_to_exitcode(os.waitpid(second, 0)[1]))
os.setsid()
child = subprocess.Popen(command, preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, []))
signal.signal(signal.SIGTERM, lambda number, frame: child.send_signal(number))
signal.signal(signal.SIGUSR1, lambda number, frame: child.kill())  # the first process was killed
ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGUSR1)
write("supervisor", os.getpid())
write("pid", child.pid)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM, signal.SIGUSR1])
status = child.wait()
write("status", status)
end_as(status)
