"""How much text an operation of a template reads or makes, found before it is done. Pure.

Sizes are in characters, or in entries of lists; a size that would pass `limit` is given as more than it, without being counted out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

MOST_BITS = 1 << 14  # of whole numbers
_PER_CONTAINER, _PER_ENTRY = 32, 16  # more than their brackets and commas, for the look at each
_NUMBERS = re.compile(r"\d+")
_WIDTHS = re.compile(r"[-+ #0]*(\*|\d*)(?:\.(\*|\d*))?")
_SLOW_ON_LONG_TEXT = ("striptags", "urlize", "xmlattr", "pprint")  # their work grows faster than their text
_MOST_FOR_SLOW = 1 << 14


def is_container(value: object) -> bool:
    return isinstance(value, (list, tuple, dict, set, frozenset))


def extent(value: object, limit: int) -> int:
    """Characters that `value` has written out, about; for containers of what lies in them, each time it does. Stops beyond `limit`."""
    if isinstance(value, (str, bytes)):
        return len(value)
    if not is_container(value):
        return 8
    total, stack = 0, [value]
    while stack and total <= limit:
        one = stack.pop()
        if isinstance(one, dict):
            total += _PER_CONTAINER + 2 * _PER_ENTRY * len(one)
            stack.extend(one.keys())
            stack.extend(one.values())
        elif isinstance(one, (list, tuple, set, frozenset)):
            total += _PER_CONTAINER + _PER_ENTRY * len(one)
            stack.extend(one)
        elif isinstance(one, (str, bytes)):
            total += len(one) + 2
        else:
            total += 8
    return total


def filter_growth(name: str, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any], limit: int) -> int:
    """What a filter of Jinja's makes beyond the length of its value."""
    given = [*args, *kwargs.values()]
    numbers = [abs(int(number)) for number in given if isinstance(number, (int, float)) and abs(number) < 1e300]
    texts = [len(text) for text in given if isinstance(text, str)]
    n_value: int = len(value) if hasattr(value, "__len__") else 1
    if name in _SLOW_ON_LONG_TEXT and extent(value, _MOST_FOR_SLOW) + max(numbers, default=0) > _MOST_FOR_SLOW:
        return limit + 1
    if name in ("center", "batch", "slice", "truncate"):
        return max(numbers, default=0)
    if name == "round":
        return 10 * max(numbers, default=0) ** 2  # 10**precision is a number of so many digits
    if name in ("indent", "wordwrap"):
        return (n_value + 1) * max([0, *numbers, *texts]) if name == "wordwrap" and texts else _n_lines(value) * max([4, *numbers, *texts])
    if name == "replace" and len(given) >= 2:
        return _replaced(str(value), str(given[0]), str(given[1]))
    if name == "join":
        return (n_value + 1) * max(texts, default=0) + extent(value if is_container(value) else "", limit)
    if name == "format":
        return printf_growth(str(value), given, limit)
    if name == "sum" and any(not isinstance(number, (int, float, str)) for number in given if number is not None):
        return limit + 1  # lists that are added up one by one
    if name in ("string", "tojson", "urlencode"):
        spaces = extent(value, limit) * max([0, *numbers, *texts]) if name == "tojson" else 0  # of `indent`
        return 3 * extent(value, limit) + spaces
    return 0


def method_growth(name: str, owner: Any, args: Sequence[Any], kwargs: Mapping[str, Any], limit: int) -> int:
    """What a method of a text or a number makes."""
    given = [*args, *kwargs.values()]
    numbers = [abs(number) for number in given if isinstance(number, int)]
    if name in ("center", "ljust", "rjust", "zfill", "to_bytes"):
        return max(numbers, default=0)
    if name == "expandtabs":
        return int(owner.count("\t" if isinstance(owner, str) else b"\t")) * max(numbers, default=8)
    if name == "replace" and len(given) >= 2 and type(given[0]) is type(given[1]) is type(owner):
        return _replaced(owner, given[0], given[1])
    if name == "join" and given and is_container(given[0]):
        return len(owner) * len(given[0]) + extent(given[0], limit)
    if name == "translate" and given:
        values = given[0].values() if isinstance(given[0], dict) else given[0] if is_container(given[0]) else [given[0]]
        return len(owner) * max((len(text) for text in values if isinstance(text, (str, bytes))), default=1)
    return 0


def format_growth(spec: str, limit: int) -> int:
    """Characters that the widths of a format specification (`>20`) ask for."""
    return min(limit + 1, sum(_width(part) for part in _NUMBERS.findall(spec)))


def printf_growth(text: str, values: object, limit: int) -> int:
    """What `text % values` writes, at most; beyond `limit` where a width is among the values (`%*d`)."""
    starts = _specifications(text)
    widths = [part for start in starts if (match := _WIDTHS.match(text, start)) for part in match.groups() if part]
    if "*" in widths:
        return limit + 1
    n_times = len(starts) if isinstance(values, dict) else 1  # a name can be written again and again
    return len(text) + sum(_width(part) for part in widths) + n_times * extent(values, limit)


def _specifications(text: str) -> list[int]:
    """Where flags and widths begin behind each `%`, or behind the name in brackets (which may hold brackets) that follows it."""
    starts, at = [], text.find("%")
    while at >= 0:
        at += 1
        if text.startswith("(", at):
            depth = 0
            for i in range(at, len(text)):
                depth += (text[i] == "(") - (text[i] == ")")
                if depth == 0:
                    break
            else:
                break  # unfinished: no format text
            at = i + 1
        starts.append(at)
        at = text.find("%", at + 1 if text.startswith("%", at) else at)
    return starts


def _width(digits: str) -> int:
    return int(digits) if len(digits) < 20 else 1 << 62


def _replaced(text: Any, old: Any, new: Any) -> int:
    n_text: int = len(text)
    n_times: int = text.count(old) if len(old) else n_text + 1
    return n_text + n_times * max(0, len(new) - len(old))


def _n_lines(value: object) -> int:
    return str(value).count("\n") + 2 if isinstance(value, str) else 2
