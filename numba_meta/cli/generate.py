"""`numba-meta generate`: a prompt comes in, its continuation is streamed to standard output."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from numba_meta.cli.as_rank import check_alone
from numba_meta.cli.options import (
    GENERATION_OPTIONS,
    LOAD_OPTIONS,
    SEQUENCE_OPTIONS,
    VERBOSE_OPTION,
    GenerationOptions,
    LoadOptions,
    gathered,
)
from numba_meta.cli.session import after_generation, chat_prompt, current_launch, decisions, generation_arguments, open_model, traced
from numba_meta.cli.terminal import Progress, say
from numba_meta.errors import UsageError

TEXT_FILE = click.Path(exists=True, dir_okay=False, allow_dash=True)


@click.command(short_help="Continue a prompt.")
@click.argument("model")
@click.argument("prompts", metavar="[PROMPT]...", nargs=-1)
@click.option("-f", "--file", type=TEXT_FILE, metavar="PATH", help="Read the prompt from a file; - is standard input.")
@click.option("-n", "--predict", type=click.IntRange(min=0), default=128, show_default=True, metavar="N", help="Tokens at most.")
@click.option(
    "--prompt-cache", type=click.Path(dir_okay=False, path_type=Path), metavar="PATH",
    help="Go on from the state in this file, if it is there, and leave the new state in it.",
)
@click.option("--chat", "as_chat", is_flag=True, help="Ask an instruct model: the prompt goes into its chat template.")
@gathered("generation", GenerationOptions, *GENERATION_OPTIONS)
@gathered("load", LoadOptions, *LOAD_OPTIONS, *SEQUENCE_OPTIONS)
@VERBOSE_OPTION
def generate(
    model: str,
    prompts: tuple[str, ...],
    file: str | None,
    predict: int,
    prompt_cache: Path | None,
    as_chat: bool,
    generation: GenerationOptions,
    load: LoadOptions,
    verbose: int,
) -> None:
    """Continue a PROMPT with MODEL, a GGUF file or a name that `pull` knows.

    Several prompts are decoded together and printed one after the other, with a line --- between them.

    \b
    Examples:
      numba-meta generate smollm2 "The lighthouse keeper" -n 64
      numba-meta generate smollm2 --chat "Why is the sky blue?" --temp 0.7 --seed 1
      numba-meta generate gemma3 --file story.txt --device cpu:0,cpu:0 --tensor-split 55,45
      numba-meta generate smollm2 "A lamp" --no-kv-offload --device "cpu:0?link=5.3,cpu:0?link=2.7" -v
      echo "Once upon a time" | numba-meta generate model.gguf --file - --exact
    """
    if file == "-":
        check_alone(current_launch(), "--file -")
    if prompt_cache is not None:
        check_alone(current_launch(), "--prompt-cache", "each has a part of the state")
    texts = read_prompts(prompts, file)
    if len(texts) > 1 and (prompt_cache is not None or generation.context_shift):
        raise UsageError("--prompt-cache and --context-shift are for one prompt; give one")
    if prompt_cache is not None and not os.access(prompt_cache.absolute().parent, os.W_OK):
        raise UsageError(f"{prompt_cache}: no file can be written there; give --prompt-cache a path in a folder of yours")
    progress = Progress()
    with open_model(model, load, len(texts), progress) as loaded:
        progress.clear()
        if verbose:
            for line in decisions(loaded):
                say(line)
        inputs = [chat_prompt(loaded, [{"role": "user", "content": text}]) if as_chat else text for text in texts]
        arguments = generation_arguments(generation)
        if prompt_cache is not None:
            arguments["reuse_prefix"] = True
            if prompt_cache.exists():
                loaded.load_state(prompt_cache)
        with traced(loaded, verbose):
            if len(inputs) == 1:
                for piece in loaded.generate(inputs[0], max_tokens=predict, **arguments):
                    progress.clear()
                    sys.stdout.write(piece)
                    sys.stdout.flush()
            else:
                answers = loaded.generate_many(inputs, max_tokens=predict, **arguments)
                progress.clear()
                sys.stdout.write("\n---\n".join(_until(loaded.detokenize(ids), generation.stop) for ids in answers))
        sys.stdout.write("\n")
        sys.stdout.flush()
        if prompt_cache is not None:
            loaded.save_state(prompt_cache)
        for line in after_generation(loaded, verbose):
            say(line)


def _until(text: str, stops: tuple[str, ...]) -> str:
    """A text up to the first stop text in it."""
    return text[: min((text.index(stop) for stop in stops if stop in text), default=len(text))]


def read_prompts(prompts: tuple[str, ...], file: str | None) -> list[str]:
    """The prompts of the arguments or of `file` (`-`: standard input), which loses one newline at its end."""
    if prompts and file is not None:
        raise UsageError("a prompt and --file were given; use one of them")
    if file is None:
        if not prompts:
            raise UsageError("no prompt was given; add one in quotes, or --file PATH, or --file - to read standard input")
        for prompt in prompts:
            if any("\ud800" <= character <= "\udfff" for character in prompt):
                raise UsageError("the prompt is not valid UTF-8; write it to a UTF-8 file and use --file")
        return list(prompts)
    data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    try:
        return [data.decode("utf-8").removesuffix("\n")]
    except UnicodeDecodeError as error:
        name = "standard input" if file == "-" else file
        raise UsageError(f"{name} is not UTF-8 text: byte {data[error.start]:#04x} at {error.start}; convert it first") from None
