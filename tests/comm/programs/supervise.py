"""Starts one rank and writes down how it ended: `supervise.py FOLDER PROGRAM ARGUMENT...`. Ends as the rank did."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

folder, command = Path(sys.argv[1]), [sys.executable, *sys.argv[2:]]
rank = os.environ["OMPI_COMM_WORLD_RANK"]
child = subprocess.Popen(command)
signal.signal(signal.SIGTERM, lambda number, frame: child.send_signal(number))  # the launcher tells this process alone
(folder / f"supervisor.{rank}").write_text(str(os.getpid()))
(folder / f"pid.{rank}").write_text(str(child.pid))
status = child.wait()
(folder / f"status.{rank}").write_text(str(status))
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if status != -signal.SIGKILL else None
    os.kill(os.getpid(), -status)
sys.exit(status)
