"""`numba-meta info`: what a GGUF file holds, read from its header without loading a weight."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from numba_meta.cli.terminal import Progress, table
from numba_meta.devices.parse import format_bytes

if TYPE_CHECKING:
    from numba_meta.models.files.gguf import GGUFFile

# key after the architecture's name -> what it says
FACTS = {
    "block_count": "layers",
    "embedding_length": "width",
    "feed_forward_length": "feed-forward width",
    "attention.head_count": "heads",
    "attention.head_count_kv": "KV heads",
    "attention.key_length": "head width",
    "attention.sliding_window": "sliding window",
    "context_length": "context",
}
SHOWN_ITEMS = 4
SHOWN_CHARACTERS = 80
SHOWN_PROBLEMS = 5


@click.command(short_help="Say what a GGUF file holds.")
@click.argument("model")
@click.option("--tensors", "show_tensors", is_flag=True, help="List every tensor: name, type, shape, bytes.")
@click.option("--metadata", "show_metadata", is_flag=True, help="List every key of the metadata.")
@click.option("--json", "as_json", is_flag=True, help="Print all of it as JSON.")
def info(model: str, show_tensors: bool, show_metadata: bool, as_json: bool) -> None:
    """Say what MODEL, a GGUF file or a name that `pull` knows, holds, and whether it would load.

    Of a damaged file, or of one of a kind that is not known here, it says what can be read.

    \b
    Examples:
      numba-meta info smollm2
      numba-meta info model.gguf --tensors
      numba-meta info model.gguf --json
    """
    from numba_meta.models.files.gguf import read_gguf
    from numba_meta.models.files.pull import resolve_model

    progress = Progress()
    path = resolve_model(model, progress=progress)
    progress.clear()
    problems: list[str] = []
    with read_gguf(path, problems) as file:
        is_damaged = bool(problems)
        if not problems:
            problems += why_not_loaded(file)
        if as_json:
            click.echo(json.dumps({**as_data(file), "problems": problems}, ensure_ascii=False, allow_nan=False, default=str))
            click.get_current_context().exit(int(is_damaged))
        for line in overview(file):
            click.echo(line)
        for problem in problems[:SHOWN_PROBLEMS]:
            click.echo(f"{'does not load':<20}{problem}")
        if len(problems) > SHOWN_PROBLEMS:
            click.echo(f"{'':<20}… and {len(problems) - SHOWN_PROBLEMS} problems more (--json has all)")
        if show_metadata:
            click.echo()
            for key, value in file.metadata.items():
                click.echo(f"{_shown(key)} = {value_text(value)}")
        if show_tensors:
            rows = [(_shown(t.name), t.dtype.name, " x ".join(map(str, t.shape)), f"{t.n_bytes:,}") for t in file.tensors.values()]
            click.echo("\n" + table(("tensor", "type", "shape", "bytes"), rows))
    click.get_current_context().exit(int(is_damaged))


def why_not_loaded(file: GGUFFile) -> list[str]:
    """What a load of this file would be refused for; nothing is read but the header."""
    from numba_meta.errors import ModelFileError
    from numba_meta.models.architectures.description import describe_model
    from numba_meta.models.text.template_check import template_problem
    from numba_meta.models.text.tokenizer_check import tokenizer_problem

    try:
        described = describe_model(file)
    except ModelFileError as error:
        return [str(error)]
    problem = tokenizer_problem(file.metadata, described.config.shape.n_vocab)
    found = [f"{file.path.name}: with prompts of text, which need a tokenizer (ids need none): {problem}"] if problem else []
    chat = template_problem(file.metadata, file.path.name)
    return [*found, f"{chat}; prompts that are no chat need none"] if chat else found


def overview(file: GGUFFile) -> Iterator[str]:
    """The file in a few lines: where it lies, its sizes, and how many tensors of which types it holds."""
    yield from map(str, file.paths)
    facts: dict[str, Any] = {"name": file.metadata.get("general.name"), "architecture": file.metadata.get("general.architecture")}
    facts |= {label: file.metadata.get(f"{facts['architecture']}.{key}") for key, label in FACTS.items()}
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    facts["vocabulary"] = len(tokens) if isinstance(tokens, list) else None
    facts["chat template"] = "yes" if "tokenizer.chat_template" in file.metadata else "no"
    for label, value in facts.items():
        if value is not None:
            yield f"{label:<20}{value_text(value)}"
    counts: dict[str, tuple[int, int]] = {}
    for tensor in file.tensors.values():
        n, n_bytes = counts.get(tensor.dtype.name, (0, 0))
        counts[tensor.dtype.name] = (n + 1, n_bytes + tensor.n_bytes)
    types = ", ".join(f"{n} {name} ({format_bytes(n_bytes)})" for name, (n, n_bytes) in sorted(counts.items(), key=lambda e: -e[1][1]))
    yield f"{'tensors':<20}{len(file.tensors)}: {types}"


def as_data(file: GGUFFile) -> dict[str, Any]:
    """All of the header as JSON-able data."""
    tensors = [
        {"name": t.name, "type": t.dtype.name, "shape": list(t.shape), "offset": t.offset, "n_bytes": t.n_bytes, "file": t.file_index}
        for t in file.tensors.values()
    ]
    return {"files": [str(path) for path in file.paths], "metadata": _finite(file.metadata), "tensors": tensors}


def value_text(value: Any) -> str:
    """A value of the metadata on one line, long lists and texts cut short."""
    if isinstance(value, list):
        head = ", ".join(value_text(item) for item in value[:SHOWN_ITEMS])
        return f"[{head}{f', … {len(value):,} in all' if len(value) > SHOWN_ITEMS else ''}]"
    return _shown(value)


def _shown(value: object) -> str:
    from numba_meta.models.files.gguf_header import shown

    return shown(value, SHOWN_CHARACTERS)


def _finite(value: Any) -> Any:
    """JSON knows no infinity and no `nan`: they become text."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value
