"""What a command says of words that begin with `-` and are no option of its own: an option of llama.cpp, of another command, a prompt.

click alone reads `-ngl` as `-n gl` and `-fa` as `--file a`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence

import click

from numba_meta.cli.llama_options import hint

_OPTION = re.compile(r"--?[A-Za-z][\w.-]*(=.*)?", re.DOTALL)  # what could be meant as one
_WHOLE_NUMBER = re.compile(r"-?\d+")


class Group(click.Group):
    """A group of commands that knows options which they do not have, and says where others belong."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """The words up to the command's name."""
        if not ctx.resilient_parsing:
            check_words(self, ctx, args)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """The command and its words, which are checked."""
        name, command, words = super().resolve_command(ctx, args)
        if command is not None and not ctx.resilient_parsing:
            check_words(command, click.Context(command, ctx, name, **command.context_settings), words)
        return name, command, words


def check_words(command: click.Command, context: click.Context, words: Sequence[str]) -> None:
    """Raises `UsageError` for a word that begins with `-` where neither an option of `command` nor the value of one can stand."""
    options = {name: option for option in _options(command, context) for name in (*option.opts, *option.secondary_opts)}
    rest = list(words)
    while rest and rest[0] != "--":
        word = rest.pop(0)
        if word == "-" or not word.startswith("-"):
            if not context.allow_interspersed_args:
                return
            continue
        name, equals, _ = word.partition("=")
        if name in options:
            if equals and _is_short(name):
                raise click.UsageError(f"{word}: a short option and its value have a space between them: {name} {word[3:]}", context)
            needs_value = not equals and _takes_value(options[name])
        else:
            needs_value = _joined(command, context, options, word)
        if needs_value:
            rest = rest[1:]


def _joined(command: click.Command, context: click.Context, options: dict[str, click.Option], word: str) -> bool:
    """Whether the last of joined short options (`-vv`, `-vn5`) still needs a value. Raises `UsageError` for a word that is none."""
    name = word.partition("=")[0]
    if known := hint(name) or _of_others(command, context, name):
        raise click.UsageError(known, context)
    if (apart := _split_value(word, options)) and apart[0] not in options:
        raise click.UsageError(hint(apart[0]) or "", context)
    if apart:
        raise click.UsageError(f"{word}: an option and its value have a space between them: {' '.join(apart)}", context)
    has_space = any(character.isspace() for character in name)
    if not word.startswith("--") and not has_space:
        for at, letter in enumerate(word[1:], 2):
            option = options.get(f"-{letter}")
            if option is None:
                break
            if _takes_value(option):
                value = word[at:]
                if isinstance(option.type, click.types.IntParamType) and value and not _WHOLE_NUMBER.fullmatch(value):
                    break
                return not value
        else:
            return False
    if _takes_prompts(command) and (has_space or not _OPTION.fullmatch(word)):
        raise click.UsageError(f"{word[:40]!r} begins with -, as options do; a prompt that does goes behind --: MODEL -- PROMPT", context)
    near = difflib.get_close_matches(name, [each for each in options if len(each) > 2])
    may_be_text = _takes_prompts(command) and not word.startswith("--")
    message = f"No such option: {name}" + (" (a prompt that begins with - goes behind --)." if may_be_text else ".")
    raise click.NoSuchOption(name, message, possibilities=near, ctx=context)


def _split_value(word: str, options: dict[str, click.Option]) -> tuple[str, str] | None:
    """`-np4` as `-np`, `4`: options of several letters behind one dash, of which click would make one of a letter each."""
    found = re.fullmatch(r"(-[A-Za-z]{2,})([\d.:,].*)", word)
    if found and (hint(found[1]) or found[1] in options):
        return found[1], found[2]
    return None


def _of_others(command: click.Command, context: click.Context, name: str) -> str | None:
    """A line about an option that other commands have; None where none has it."""
    root = context.find_root().command
    if not isinstance(root, click.Group):
        return None
    others = [each.name or "" for each in root.commands.values() if any(name in option.opts for option in _options(each, context))]
    if not others:
        return None
    if command is root:
        return f"{name} comes after a command, as in: numba-meta {others[0]} MODEL {name}."
    return f"{name} is an option of {' and '.join(others)}, not of {command.name}."


def _options(command: click.Command, context: click.Context) -> Iterator[click.Option]:
    return (each for each in command.get_params(context) if isinstance(each, click.Option))


def _takes_value(option: click.Option) -> bool:
    return not option.is_flag and not option.count


def _takes_prompts(command: click.Command) -> bool:
    return any(isinstance(each, click.Argument) and each.name == "prompts" for each in command.params)


def _is_short(name: str) -> bool:
    return len(name) == 2
