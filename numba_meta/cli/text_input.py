"""Text that users write into files and pipes: UTF-8, with or without a byte-order mark; the first byte that is none is named."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Iterator
from pathlib import Path

from numba_meta.cli.terminal import say
from numba_meta.errors import UsageError


def read_text(file: str) -> str:
    """The text of a file (`-`: standard input), less a byte-order mark and one line break at its end. Raises `UsageError`."""
    name = "standard input" if file == "-" else file
    data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UsageError(f"{name} is UTF-16 text, expected UTF-8; convert it first")
    try:
        text = data.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as error:
        at = error.start + len(data) - len(error.object)
        raise UsageError(f"{name} is not UTF-8 text: byte {data[at]:#04x} at {at}; convert it first") from None
    return text.removesuffix("\n").removesuffix("\r")


def typed_lines() -> Iterator[str]:
    """The lines of standard input. One that is no UTF-8 is left out, and said so."""
    number = 0
    while (line := _next_line()) is not None:
        number += 1
        if number == 1 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise UsageError("standard input is UTF-16 text, expected UTF-8; convert it first")
        data = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        try:
            yield data.decode("utf-8")
        except UnicodeDecodeError as error:
            at = error.start + len(line) - len(data)
            say(f"numba-meta: line {number} of standard input is not UTF-8 text: byte {line[at]:#04x} at {at}; it is left out")


def _next_line() -> bytes | None:
    """The bytes of the next line, None at the end."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        import readline  # noqa: F401  its import gives input() editing and history

        try:
            return _as_typed(input("> "))
        except EOFError:
            return None
        except UnicodeDecodeError as error:
            return bytes(error.object)
    if sys.stdin.isatty():
        sys.stderr.write("> ")
        sys.stderr.flush()
    stream = getattr(sys.stdin, "buffer", None)
    return (stream.readline() if stream is not None else _as_typed(sys.stdin.readline())) or None


def _as_typed(line: str) -> bytes:
    """The bytes of a line that Python read for a terminal: in a locale without UTF-8, surrogates stand in for what it cannot read."""
    return line.encode("utf-8", "surrogateescape")
