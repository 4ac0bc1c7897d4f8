"""`numba-meta chat`: a conversation in the terminal; answers go to standard output, the prompt sign to standard error."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from numba_meta.cli.as_rank import check_alone
from numba_meta.cli.options import (
    GENERATION_OPTIONS,
    LOAD_OPTIONS,
    TEXT,
    VERBOSE_OPTION,
    GenerationOptions,
    LoadOptions,
    gathered,
    predict_option,
)
from numba_meta.cli.session import (
    PARSE_SPECIAL_OPTION,
    Message,
    after_generation,
    chat_prompt,
    decisions,
    generation_arguments,
    generation_limit,
    n_ranks,
    open_model,
    traced,
    until_full,
)
from numba_meta.cli.terminal import Progress, say
from numba_meta.cli.text_input import typed_lines
from numba_meta.errors import ContextFullError

if TYPE_CHECKING:
    from numba_meta.models.model import Model

COMMANDS = "/reset forgets the conversation, /exit ends it"


@click.command(short_help="Talk with an instruct model.")
@click.argument("model")
@predict_option(1, 512)
@click.option(
    "-sys", "--system", "--system-prompt", "system", type=TEXT, metavar="TEXT", help="What the model is told before the conversation."
)
@PARSE_SPECIAL_OPTION
@gathered("generation", GenerationOptions, *GENERATION_OPTIONS)
@gathered("load", LoadOptions, *LOAD_OPTIONS)
@VERBOSE_OPTION
def chat(
    model: str, predict: int, system: str | None, parse_special: bool, generation: GenerationOptions, load: LoadOptions, verbose: int
) -> None:
    """Talk with MODEL, which must have a chat template.

    /reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer.

    \b
    Examples:
      numba-meta chat smollm2
      numba-meta chat smollm2 --system "Answer in one sentence." --temp 0.7 --top-p 0.9
      printf 'Hello\\nAnd in French?\\n' | numba-meta chat smollm2
    """
    check_alone(n_ranks(), "chat")
    arguments = generation_arguments(generation)
    arguments["max_tokens"] = generation_limit(predict, arguments)
    progress = Progress()
    with open_model(model, load, 1, progress, needs_chat=True) as loaded:
        progress.clear()
        if verbose:
            for line in decisions(loaded):
                say(line)
        opening: list[Message] = [{"role": "system", "content": system}] if system else []
        say(COMMANDS)
        with traced(loaded, verbose):
            _converse(loaded, opening, predict, parse_special, arguments, progress, verbose)


def _converse(
    model: Model,
    opening: list[Message],
    predict: int,
    parse_special: bool,
    arguments: dict[str, Any],
    progress: Progress,
    verbosity: int,
) -> None:
    messages = list(opening)
    said: set[str] = set()
    for line in typed_lines():
        text = line.strip()
        if text == "/exit":
            return
        if text == "/reset":
            messages = list(opening)
            say("the conversation is forgotten")
        elif text.startswith("/"):
            say(f"{text.split()[0]} is no command: {COMMANDS}")
        elif text:
            question: Message = {"role": "user", "content": text}
            try:
                answer, is_whole = _answer(model, [*messages, question], predict, parse_special, arguments, progress)
            except ContextFullError as error:
                say(f"numba-meta: {error}; /reset makes room")
                continue
            if is_whole:
                _report(model, verbosity, said)
            messages += [question, {"role": "assistant", "content": answer}]


def _report(model: Model, verbosity: int, said: set[str]) -> None:
    """The lines after an answer; what would only be said again (why deliveries are ordered) is left out."""
    for line in after_generation(model, verbosity):
        if line not in said:
            say(line)
        if line.startswith("numba-meta:"):
            said.add(line)


def _answer(
    model: Model, messages: list[Message], predict: int, parse_special: bool, arguments: dict[str, Any], progress: Progress
) -> tuple[str, bool]:
    """What the model said, and whether it was allowed to finish."""
    pieces: list[str] = []
    notes: list[str] = []
    try:
        answer = model.generate(chat_prompt(model, messages, parse_special), reuse_prefix=True, **arguments)
        for piece in until_full(answer, predict, notes.append):
            progress.clear()
            pieces.append(piece)
            sys.stdout.write(piece)
            sys.stdout.flush()
    except KeyboardInterrupt:
        say("")
        return "".join(pieces), False
    except ContextFullError:
        if pieces:
            sys.stdout.write("\n")
            sys.stdout.flush()
        raise
    sys.stdout.write("\n")
    sys.stdout.flush()
    for line in notes:
        say(line)
    return "".join(pieces), True
