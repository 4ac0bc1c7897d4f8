"""What callers give: numbers, switches, paths, prompts; checked, in one line where they are wrong."""

from __future__ import annotations

import numbers
import operator
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from numba_meta.errors import UsageError


def whole_number(name: str, value: Any, least: int, most: int | None = None) -> int:
    """A plain integer from `least` to `most`; numpy's are welcome, True and fractions are not."""
    number = integer(name, value)
    if least <= number and (most is None or number <= most):
        return number
    expected = f"from {least} to {most}" if most is not None else f"of {least} or more"
    raise UsageError(f"{name} {value!r:.60} is impossible; expected a whole number {expected}")


def integer(name: str, value: Any) -> int:
    """A plain integer, whatever it is; numpy's are welcome, True and fractions are not."""
    if not isinstance(value, numbers.Integral) or value is True or value is False:
        raise UsageError(f"{name} {value!r:.60} is impossible; expected a whole number")
    return int(value)


def switch(name: str, value: object) -> bool:
    """True or False, numpy's too."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise UsageError(f"{name} {value!r:.60} is impossible; expected True or False")


def is_iterable(value: object) -> TypeGuard[Iterable[Any]]:
    """Whether a value has entries; an array of numpy's without axes looks as if it had."""
    return isinstance(value, Iterable) and not (isinstance(value, np.ndarray) and value.ndim == 0)


def file_path(what: str, value: object) -> Path:
    """The path of a file; `what` says what for, as in `a state is saved to`."""
    if not isinstance(value, (str, os.PathLike)) or not isinstance(os.fspath(value), str):
        raise UsageError(f"{what} {value!r:.60}; expected the path of a file")
    if not os.fspath(value) or "\0" in os.fspath(value):
        raise UsageError(f"{what} {os.fspath(value)!r:.60}, which is no path; expected the path of a file")
    return Path(value)


def token_ids(ids: object, what: str = "the prompt") -> list[int]:
    """Token ids as plain integers; numpy's are welcome, text as bytes, fractions and True are not."""
    try:
        if isinstance(ids, (bytes, bytearray)) or not isinstance(ids, Iterable):
            raise TypeError
        found = list(ids)
        if any(isinstance(i, (bool, np.bool_)) for i in found):
            raise TypeError
        return [operator.index(i) for i in found]
    except TypeError:
        raise UsageError(f"{what} is {type(ids).__name__} {str(ids)[:40]!r}; expected text or a sequence of token ids") from None


def listed_prompts(prompts: object) -> list[Any]:
    """The prompts of a list, each still to be read."""
    if isinstance(prompts, (str, bytes, bytearray, Mapping)) or not is_iterable(prompts):
        raise UsageError(f"the prompts are {type(prompts).__name__} {str(prompts)[:40]!r}; expected a list of texts or of token ids")
    return list(prompts)
