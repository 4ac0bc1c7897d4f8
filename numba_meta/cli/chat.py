"""`numba-meta chat`: a conversation in the terminal; answers go to standard output, the prompt sign to standard error."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from numba_meta.cli.as_rank import check_alone
from numba_meta.cli.options import GENERATION_OPTIONS, LOAD_OPTIONS, VERBOSE_OPTION, GenerationOptions, LoadOptions, gathered
from numba_meta.cli.session import (
    Message,
    after_generation,
    chat_prompt,
    current_launch,
    decisions,
    generation_arguments,
    open_model,
    traced,
)
from numba_meta.cli.terminal import Progress, say
from numba_meta.errors import ContextFullError

if TYPE_CHECKING:
    from numba_meta.models.model import Model

COMMANDS = "/reset forgets the conversation, /exit ends it"


@click.command(short_help="Talk with an instruct model.")
@click.argument("model")
@click.option("-n", "--predict", type=click.IntRange(min=1), default=512, show_default=True, metavar="N", help="Tokens at most.")
@click.option("-sys", "--system", metavar="TEXT", help="What the model is told before the conversation.")
@gathered("generation", GenerationOptions, *GENERATION_OPTIONS)
@gathered("load", LoadOptions, *LOAD_OPTIONS)
@VERBOSE_OPTION
def chat(model: str, predict: int, system: str | None, generation: GenerationOptions, load: LoadOptions, verbose: int) -> None:
    """Talk with MODEL, which must have a chat template.

    /reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer.

    \b
    Examples:
      numba-meta chat smollm2
      numba-meta chat smollm2 --system "Answer in one sentence." --temp 0.7 --top-p 0.9
      printf 'Hello\\nAnd in French?\\n' | numba-meta chat smollm2
    """
    check_alone(current_launch(), "chat")
    progress = Progress()
    with open_model(model, load, 1, progress) as loaded:
        progress.clear()
        if verbose:
            for line in decisions(loaded):
                say(line)
        opening: list[Message] = [{"role": "system", "content": system}] if system else []
        chat_prompt(loaded, [*opening, {"role": "user", "content": ""}])  # a model without a template says so before the first question
        say(COMMANDS)
        with traced(loaded, verbose):
            _converse(loaded, opening, predict, generation, progress, verbose)


def _converse(
    model: Model, opening: list[Message], predict: int, generation: GenerationOptions, progress: Progress, verbosity: int
) -> None:
    messages = list(opening)
    said: set[str] = set()
    while (line := _read_line()) is not None:
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
                answer, is_whole = _answer(model, [*messages, question], predict, generation, progress)
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


def _answer(model: Model, messages: list[Message], predict: int, generation: GenerationOptions, progress: Progress) -> tuple[str, bool]:
    """What the model said, and whether it was allowed to finish."""
    pieces: list[str] = []
    try:
        arguments = generation_arguments(generation)
        for piece in model.generate(chat_prompt(model, messages), max_tokens=predict, reuse_prefix=True, **arguments):
            progress.clear()
            pieces.append(piece)
            sys.stdout.write(piece)
            sys.stdout.flush()
    except KeyboardInterrupt:
        say("")
        return "".join(pieces), False
    sys.stdout.write("\n")
    sys.stdout.flush()
    return "".join(pieces), True


def _read_line() -> str | None:
    """The next line of standard input, None at its end."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        import readline  # noqa: F401  its import gives input() editing and history

        try:
            return input("> ")
        except EOFError:
            return None
    if sys.stdin.isatty():
        sys.stderr.write("> ")
        sys.stderr.flush()
    return sys.stdin.readline() or None
