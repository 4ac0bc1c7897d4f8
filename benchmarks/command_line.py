"""What the command lines of benchmarks share: readers of their options, and failures in one line as those of `numba-meta`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from typing import NoReturn, TypeVar

from numba_meta.devices.parse import parse_devices
from numba_meta.errors import NumbaMetaError, UsageError

Item = TypeVar("Item")


def run_main(main: Callable[[], int | None]) -> NoReturn:
    """Ends the process with what `main` returns; where it raises a `NumbaMetaError`, with that in one line and its exit status."""
    try:
        sys.exit(main())
    except NumbaMetaError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_status)


def listed(read: Callable[[str], Item]) -> Callable[[str], list[Item]]:
    """A reader of lists with commas; `read` reads one item."""
    return lambda text: [read(part.strip()) for part in text.split(",")]


def count(least: int = 1) -> Callable[[str], int]:
    """A reader of whole numbers from `least` up."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and int(text) >= least):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} up")
        return int(text)

    return read


def one_of(known: Iterable[str]) -> Callable[[str], str]:
    """A reader of known names."""
    all_known = tuple(known)

    def read(text: str) -> str:
        if text not in all_known:
            raise argparse.ArgumentTypeError(f"{text!r} is unknown; use {', '.join(all_known)}")
        return text

    return read


def sizes(example: str) -> Callable[[str], str]:
    """A reader of whole numbers from 1 up with `x` between them, as many as an example like `4096x4096` has."""

    def read(text: str) -> str:
        parts = text.split("x")
        if len(parts) != len(example.split("x")) or not all(part.isascii() and part.isdecimal() and int(part) for part in parts):
            raise argparse.ArgumentTypeError(f"{text!r} is not of the form {example}, with whole numbers from 1 up")
        return text

    return read


def gpus(text: str) -> str:
    """Reads a list of CUDA devices; whether they are there is seen later."""
    try:
        specs = parse_devices(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if any(spec.kind != "cuda" for spec in specs):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of CUDA devices like cuda:0,cuda:0")
    return text
