"""`numba-meta launch`: starts ranks with the flags that mpirun needs here, for people who do not want to know them."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import click

from numba_meta.cli.session import Rehearsed
from numba_meta.cli.terminal import Progress
from numba_meta.comm.launch import ALONE, detect_launch
from numba_meta.errors import UsageError

# By Open MPI's version: 5 reads the first of a pair, 4 the second. More ranks than cores are allowed, and no rank is bound to one core:
# ranks divide the cores of a host among themselves.
_SETTINGS = {
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
}
LOADING = ("generate", "chat", "bench")  # commands whose ranks load a model together
READING = ("info", "plan")  # those that look at a file
MAX_RANKS = 64  # a slip of the finger does not fill a machine's memory with processes
_ROOT_SETTINGS = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@click.command(short_help="Start a command as several ranks.", context_settings={"allow_interspersed_args": False})
@click.option(
    "-n", "-np", "--ranks", "ranks", type=click.IntRange(1, MAX_RANKS), required=True, metavar="N",
    help=f"Processes to start on this machine, 1 to {MAX_RANKS}.",
)
@click.argument("command", metavar="-- COMMAND [ARGUMENT]...", nargs=-1, required=True, type=click.UNPROCESSED)
def launch(ranks: int, command: tuple[str, ...]) -> None:
    """Run a numba-meta COMMAND as N processes that hold one model together.

    Devices are those of one process, or of each between semicolons. For several machines use mpirun itself.

    \b
    Examples:
      numba-meta launch -n 2 -- generate smollm2 "The lighthouse keeper"
      numba-meta launch -n 2 -- generate smollm2 "A lamp" --device "cpu:0,cpu:0;cpu:0"
    """
    check_not_launched(os.environ)
    program = find_mpirun(os.environ)
    rehearse(command, ranks)
    arguments = [program, *output_options(mpirun_version(program)), "-n", str(ranks), sys.executable, "-m", "numba_meta", *command]
    sys.stdout.flush()
    # The launcher takes this process's place: signals and its exit status need nobody in between.
    os.execve(program, arguments, launch_environment(os.environ, os.geteuid() == 0))


def rehearse(words: Sequence[str], n_ranks: int) -> None:
    """Raises what every one of `n_ranks` ranks would say of a command, as far as that needs no rank and no weight; prints its help."""
    from numba_meta.models.files.pull import resolve_model

    root = click.get_current_context().find_root()
    state = replace(root.obj, rehearsed_ranks=n_ranks)
    with root.command.make_context("numba-meta", list(words), obj=state) as context, contextlib.suppress(Rehearsed):
        assert isinstance(root.command, click.Group)
        rest = list(itertools.dropwhile(lambda word: word.startswith("-"), words))  # what comes before a command takes no value
        name, command, rest = root.command.resolve_command(context, rest or [""])
        assert command is not None
        with command.make_context(name, rest, parent=context) as own:
            if name in LOADING:
                command.invoke(own)
            elif name in READING:
                resolve_model(own.params["model"], Progress())


def check_not_launched(environ: Mapping[str, str]) -> None:
    """Raises `UsageError` in a process that is a rank itself: an mpirun in its place would wait for ranks that are not its own."""
    found = detect_launch(environ)
    if found.launcher != ALONE.launcher:
        n = found.size or "several"
        raise UsageError(f"this process is one of {n} ranks already, started by {found.launcher}; give them the command without `launch`")


def mpirun_version(program: str) -> str:
    """What `mpirun --version` says. Raises `UsageError` where it cannot run."""
    try:
        return subprocess.run([program, "--version"], capture_output=True, text=True, errors="replace", check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        detail = " ".join(str(getattr(error, "stderr", "") or error).split())
        raise UsageError(f"{program} does not run ({detail}); install numba-meta[mpi], which brings one") from None


def output_options(version: str) -> list[str]:
    """What Open MPI needs to pass a text on as it grows: from 5 on it waits for whole lines."""
    found = re.search(r"Open MPI\)? v?(\d+)\.", version)
    return ["--output", ":raw"] if found and int(found[1]) >= 5 else []


def launch_environment(environ: Mapping[str, str], is_root: bool) -> dict[str, str]:
    """The environment for mpirun; what is set already stays."""
    return {**_SETTINGS, **(_ROOT_SETTINGS if is_root else {}), **environ}


def find_mpirun(environ: Mapping[str, str]) -> str:
    """mpirun beside this Python (the `mpi` extra), else on the path. Raises `UsageError` where there is none."""
    folders = os.pathsep.join([str(Path(sys.executable).parent), environ.get("PATH", "")])
    found = shutil.which("mpirun", path=folders)
    if found is None:
        raise UsageError("there is no mpirun beside this Python nor on the path; install numba-meta[mpi], which brings one")
    return found


def why_no_mpirun(environ: Mapping[str, str]) -> str | None:
    """What `launch` would say of mpirun; None where there is one that runs."""
    try:
        mpirun_version(find_mpirun(environ))
    except UsageError as error:
        return str(error)
    return None
