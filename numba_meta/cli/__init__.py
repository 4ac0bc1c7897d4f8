"""The `numba-meta` command: command lines come in, text goes to standard output, all else to standard error.

    app.py        the group of commands             generate.py chat.py bench.py plan.py devices.py pull.py info.py launch.py: one each
    options.py    options that commands share       session.py    the only file here that calls the Python API of a model
    plan_report.py  a forecast in words             before_load.py   what a load is refused for before weights are read
    as_rank.py    this process as one of several ranks
    terminal.py   lines, progress, tables           machine.py    what `devices` measures
    command.py    words that are no option          llama_options.py   options of llama.cpp that are not here
    text_input.py  text of files and pipes          prompt_cache.py    the state around a generation

Exit status: 0, 1 (failed), 2 (wrong use); 130 after Ctrl-C, 141 when the reader of a pipe has gone, 143 after SIGTERM. Heavy modules are
imported where a command needs them, so that `--help` answers at once.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence

import click

from numba_meta.cli.app import State, app
from numba_meta.cli.as_rank import as_rank
from numba_meta.cli.shortage import describe_shortage
from numba_meta.cli.terminal import say
from numba_meta.errors import NumbaMetaError

INTERRUPTED = 128 + 2
PIPE_CLOSED = 128 + 13


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments` (without the program's name; None: those of the process) and return its exit status.

    Whatever goes wrong ends in one line on standard error; `--debug` or NUMBA_META_DEBUG=1 adds the traceback.
    """
    state = State(debug=os.environ.get("NUMBA_META_DEBUG", "0") not in ("", "0"))
    if sys.stdout is None:
        _open_closed_streams()
        say("numba-meta: standard output is closed, and what a command prints goes there; send it to a file or to /dev/null")
        return 1
    _open_closed_streams()
    _never_fail_to_encode()
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        with as_rank() as state.launch, _warnings_in_one_line(), app.make_context("numba-meta", words, obj=state) as context:
            app.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as exit_request:
        return exit_request.exit_code
    except (KeyboardInterrupt, click.Abort) as interrupt:
        return getattr(interrupt, "status", INTERRUPTED)  # another signal's: `prompt_cache.Stopped`
    except BrokenPipeError:
        _silence_output()
        return PIPE_CLOSED
    except Exception as error:
        if state.debug:
            traceback.print_exc()
        message, status = describe_failure(error)
        say(f"numba-meta: {message}")
        return status
    return 0


def describe_failure(error: Exception) -> tuple[str, int]:
    """The line that a user reads for `error`, and the exit status."""
    if isinstance(error, click.ClickException):
        command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "numba-meta"
        return f"{_one_line(error.format_message())} (see '{command} --help')", error.exit_code
    if isinstance(error, NumbaMetaError):
        return _one_line(str(error)), error.exit_status
    if short := describe_shortage(error):
        return short, 1
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}", 1
    return f"unexpected {type(error).__name__}: {_one_line(str(error))}; this is a fault of numba-meta: --debug shows where", 1


@contextlib.contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """A warning is a line like any other message, without the place in the code that it came from."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: say(f"numba-meta: {_one_line(str(message))}")
        yield


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _open_closed_streams() -> None:
    """A standard stream that was closed before the start reads and writes nothing."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))


def _never_fail_to_encode() -> None:
    """A terminal that cannot show a character gets a replacement for it instead of an error in the middle of a text.

    Names of files that are no UTF-8 go out as the bytes that they are.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            is_utf8 = (stream.encoding or "").lower().replace("-", "") == "utf8"
            stream.reconfigure(errors="surrogateescape" if is_utf8 else "replace")


def _silence_output() -> None:
    """Let the interpreter flush into nothing at exit; a second report of a closed pipe helps nobody."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            os.dup2(nothing, stream.fileno())
        except (OSError, ValueError):  # a stream without a descriptor has nothing to flush
            continue
