"""The group of commands, and what they share: `--debug`, `--version`, the examples in the help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from numba_meta import __version__
from numba_meta.cli.bench import bench
from numba_meta.cli.chat import chat
from numba_meta.cli.command import Group
from numba_meta.cli.devices import devices
from numba_meta.cli.generate import generate
from numba_meta.cli.info import info
from numba_meta.cli.launch import launch
from numba_meta.cli.plan import plan
from numba_meta.cli.pull import pull

if TYPE_CHECKING:
    from numba_meta.comm.failure import RankLaunch


@dataclass
class State:
    """What one run of the command line knows outside its commands."""

    debug: bool = False
    launch: RankLaunch | None = None  # None: this process works alone
    rehearsed_ranks: int | None = None  # `launch` tries a command for so many ranks, before it starts them


def _set_debug(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value:
        context.find_object(State).debug = True  # type: ignore[union-attr]


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="numba-meta", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, expose_value=False, is_eager=True, callback=_set_debug, help="Show tracebacks.")
def app() -> None:
    """Run a GGUF transformer over one or several devices.

    \b
    Examples:
      numba-meta generate smollm2 "The lighthouse keeper"
      numba-meta chat smollm2
      numba-meta bench smollm2 --device "cpu:0,cpu:0"
      numba-meta plan smollm2 --no-kv-offload --device "cpu:0?link=5.3,cpu:0?link=2.7"
      numba-meta devices
      numba-meta info gemma3
      numba-meta launch -n 2 -- generate smollm2 "The lighthouse keeper"
    """


for command in (generate, chat, bench, plan, devices, pull, info, launch):
    command.params.append(
        click.Option(["--debug"], is_flag=True, expose_value=False, is_eager=True, callback=_set_debug, help="Show tracebacks.")
    )
    app.add_command(command)
