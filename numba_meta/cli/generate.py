"""`numba-meta generate`: a prompt comes in, its continuation is streamed to standard output."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from numba_meta.cli.as_rank import check_alone
from numba_meta.cli.options import (
    GENERATION_OPTIONS,
    LOAD_OPTIONS,
    SEQUENCE_OPTIONS,
    TEXT,
    VERBOSE_OPTION,
    GenerationOptions,
    LoadOptions,
    gathered,
    predict_option,
)
from numba_meta.cli.prompt_cache import PromptCache, check_path
from numba_meta.cli.session import (
    CONTEXT_FULL,
    PARSE_SPECIAL_OPTION,
    after_generation,
    chat_prompt,
    decisions,
    generation_arguments,
    generation_limit,
    n_ranks,
    open_model,
    room_of_each,
    traced,
    until_full,
)
from numba_meta.cli.terminal import Progress, say
from numba_meta.cli.text_input import read_text
from numba_meta.errors import ContextFullError, UsageError

if TYPE_CHECKING:
    from numba_meta.models.model import Model

LAUNCHER_SECONDS = 0.1  # a launcher passes two streams on: the text has to be through before the summary is
TEXT_FILE = click.Path(exists=True, dir_okay=False, allow_dash=True)


@click.command(short_help="Continue a prompt.")
@click.argument("model")
@click.argument("prompts", metavar="[PROMPT]...", nargs=-1, type=TEXT)
@click.option("-p", "--prompt", "more_prompts", type=TEXT, multiple=True, metavar="TEXT", help="Another way to give a PROMPT.")
@click.option("-f", "--file", type=TEXT_FILE, metavar="PATH", help="Read the prompt from a file; - is standard input.")
@predict_option(0, 128)
@click.option(
    "--prompt-cache", type=click.Path(dir_okay=False, path_type=Path), metavar="PATH",
    help="Go on from the state in this file, if it is there, and leave the new state in it.",
)
@click.option("--chat", "as_chat", is_flag=True, help="Ask an instruct model: the prompt goes into its chat template.")
@PARSE_SPECIAL_OPTION
@gathered("generation", GenerationOptions, *GENERATION_OPTIONS)
@gathered("load", LoadOptions, *LOAD_OPTIONS, *SEQUENCE_OPTIONS)
@VERBOSE_OPTION
def generate(
    model: str,
    prompts: tuple[str, ...],
    more_prompts: tuple[str, ...],
    file: str | None,
    predict: int,
    prompt_cache: Path | None,
    as_chat: bool,
    parse_special: bool,
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
        check_alone(n_ranks(), "--file -")
    elif file is not None and not Path(file).is_file():
        check_alone(n_ranks(), f"--file {file}", "it can be read once, and each of them would")
    if prompt_cache is not None:
        check_alone(n_ranks(), "--prompt-cache", "each has a part of the state")
        check_path(prompt_cache)
    texts = read_prompts(prompts + more_prompts, file)
    if len(texts) > 1 and (prompt_cache is not None or generation.context_shift):
        raise UsageError("--prompt-cache and --context-shift are for one prompt; give one")
    arguments = generation_arguments(generation)
    max_tokens = generation_limit(predict, arguments)
    progress = Progress()
    with open_model(model, load, len(texts), progress, texts, needs_chat=as_chat) as loaded:
        progress.clear()
        if verbose:
            for line in decisions(loaded):
                say(line)
        inputs = [_prompt(loaded, text, as_chat, parse_special) for text in texts]
        notes: list[str] = []
        with traced(loaded, verbose):
            if len(inputs) == 1:
                with contextlib.nullcontext() if prompt_cache is None else PromptCache(loaded, prompt_cache) as state:
                    if state:
                        arguments["reuse_prefix"] = True
                    pieces = loaded.generate(inputs[0], max_tokens=max_tokens, **arguments)
                    for piece in until_full(state.watched(pieces) if state else pieces, predict, notes.append):
                        progress.clear()
                        sys.stdout.write(piece)
                        sys.stdout.flush()
                    sys.stdout.write("\n")
                    sys.stdout.flush()
            else:
                # They take turns where all of them do not fit; as many tokens as there are mean equal parts.
                n_sequences = loaded.plan.n_sequences
                n_parts = min(n_sequences, len(inputs)) if predict < 0 else 1 if load.kv_unified else n_sequences
                limit = min(max_tokens, room_of_each(loaded, inputs, n_parts))
                answers = loaded.generate_many(inputs, max_tokens=limit, **arguments)
                progress.clear()
                sys.stdout.write("\n---\n".join(_until(loaded.detokenize(ids), generation.stop) for ids in answers) + "\n")
                sys.stdout.flush()
                if limit < max_tokens and any(len(ids) == limit for ids in answers):
                    if predict >= 0:
                        raise ContextFullError(f"the context was full before {predict} tokens; use fewer, or a larger --ctx-size")
                    notes.append(CONTEXT_FULL)
        if n_ranks() > 1:
            time.sleep(LAUNCHER_SECONDS)
        for line in (*notes, *after_generation(loaded, verbose)):
            say(line)


def _prompt(model: Model, text: str, as_chat: bool, parse_special: bool) -> str | list[int]:
    """What `Model.generate` continues: the text, or ids where control tokens are in it."""
    if as_chat:
        return chat_prompt(model, [{"role": "user", "content": text}], parse_special)
    return model.tokenize(text, parse_special=True) if parse_special else text


def _until(text: str, stops: tuple[str, ...]) -> str:
    """A text up to the first stop text in it."""
    return text[: min((text.index(stop) for stop in stops if stop in text), default=len(text))]


def read_prompts(prompts: tuple[str, ...], file: str | None) -> list[str]:
    """The prompts of the arguments, or of `file` (`-`: standard input)."""
    if prompts and file is not None:
        raise UsageError("a prompt and --file were given; use one of them")
    if not prompts and file is None:
        raise UsageError("no prompt was given; add one in quotes, or --file PATH, or --file - to read standard input")
    return list(prompts) if file is None else [read_text(file)]
