"""Processes that are ended by number and start."""

from __future__ import annotations

import os
import signal
import subprocess

from numba_meta.comm.processes import is_at_work, kill_process, start_of


def test_a_stopped_process_is_ended_and_another_one_is_not() -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        start = start_of(process.pid)
        assert start > start_of(os.getpid()) > 0
        assert is_at_work(process.pid, start) and not is_at_work(process.pid, start + 1) and not is_at_work(process.pid, 0)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert not is_at_work(process.pid, start)
        for wrong in (start - 1, 0):
            kill_process(process.pid, wrong)
        assert process.poll() is None
        kill_process(process.pid, start)
        assert process.wait(10) == -signal.SIGKILL
    finally:
        process.kill()
    assert start_of(process.pid) == 0
    kill_process(process.pid, start)
