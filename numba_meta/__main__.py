"""`python -m numba_meta` is the `numba-meta` command."""

from __future__ import annotations

import signal
import sys


def run() -> None:
    """Run the command line and end the process; Ctrl-C ends it quietly also while it starts and while it ends."""
    try:
        from numba_meta.cli import main

        status = main()
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # all is done: nothing is left that could be told of it
    sys.exit(status)


if __name__ == "__main__":
    run()
