"""Cut points: where an axis of n elements is divided for given proportions.

Everything is exact: proportions are fractions of what the user wrote, and rounding is carried from cut to cut.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from fractions import Fraction
from itertools import accumulate

from numba_meta.arguments import is_iterable
from numba_meta.errors import SplitError, UsageError

# An exponent of up to three digits: "1e999999999" would fill the memory as an exact fraction.
_DECIMAL = re.compile(r"[+-]?([0-9]{1,40}(\.[0-9]{0,40})?|\.[0-9]{1,40})([eE][+-]?[0-9]{1,3})?")
_SHOWN = 60


def parse_tensor_split(value: str | Sequence[object] | None, n_devices: int) -> tuple[Fraction, ...]:
    """The part of the model that each device gets, as exact fractions that add up to 1.

    `value` is the text of `--tensor-split` (`"55,45"`, `"0.1,0.9"`), or a sequence of numbers or texts, or None for
    equal parts. "0.1" is 1/10, and so is the float 0.1, which is read as it prints. There must be exactly one entry per
    device, none negative, not all zero: a missing entry is no zero, since it is more often a device that was forgotten.
    Raises `UsageError`, one line that names the entry.
    """
    if n_devices < 1:
        raise UsageError(f"a split over {n_devices} devices: expected at least one")
    if value is None:
        return (Fraction(1, n_devices),) * n_devices
    if not isinstance(value, str):
        if not is_iterable(value) or isinstance(value, (bytes, bytearray, Set, Mapping)):
            raise UsageError(f"tensor split {value!r}: expected numbers in order, one per device, as in '55,45' or (55, 45)")
        value = list(value)
    shown = value if isinstance(value, str) else ",".join(map(_text, value))
    shown = shown if len(shown) <= _SHOWN else shown[: _SHOWN - 3] + "..."
    entries = value.split(",") if isinstance(value, str) else list(value)
    parts = [_parse_part(entry, shown) for entry in entries]
    if len(parts) != n_devices:
        missing = "add the missing ones (0 for a device that gets nothing)" if len(parts) < n_devices else "drop some or add devices"
        raise UsageError(f"tensor split {shown!r}: {len(parts)} entries for {n_devices} devices; expected one each: {missing}")
    total = sum(parts)
    if total == 0:
        raise UsageError(f"tensor split {shown!r}: every entry is 0; expected at least one device with a part")
    return tuple(part / total for part in parts)


def cut_extents(n: int, unit: int, proportions: Sequence[Fraction | int]) -> tuple[int, ...]:
    """Elements of an axis of `n` that each device gets, cut between units of `unit` elements.

    With N units the cut after device j lies at `round(N * cumulative_j)` units, ties to even; cumulative_j are the
    proportions up to j over their sum. So the total is exact and no cut is more than half a unit from its wish. Where
    `unit` does not divide `n` the last unit is short. Raises `SplitError` for proportions that are negative or all zero.
    """
    if n < 0 or unit < 1:
        raise SplitError(f"an axis of {n} elements in units of {unit}: expected 0 or more elements in units of 1 or more")
    total = Fraction(sum(proportions))
    if total <= 0 or min(proportions) < 0:
        raise SplitError(f"proportions {', '.join(map(str, proportions))}: expected none below 0 and one above")
    n_units = -(-n // unit)
    cuts = [min(round(n_units * wish / total) * unit, n) for wish in accumulate(map(Fraction, proportions))]
    return tuple(stop - start for start, stop in zip([0, *cuts[:-1]], cuts, strict=True))


def _text(entry: object) -> str:
    try:
        return str(entry)
    except ValueError:  # Python does not print integers of thousands of digits
        return "a number of too many digits"


def _parse_part(entry: object, shown: str) -> Fraction:
    if isinstance(entry, Fraction):
        part = entry
    else:
        # bool is an int to Python, but True in a split is a mistake.
        text = "" if isinstance(entry, bool) else _text(entry).strip()
        if not _DECIMAL.fullmatch(text):
            raise UsageError(f"tensor split {shown!r}: {_text(entry)[:_SHOWN]!r} is not a number; expected numbers and commas, as in 55,45")
        part = Fraction(text)
    if part < 0:
        raise UsageError(f"tensor split {shown!r}: {_text(entry)[:_SHOWN]!r} is negative; expected 0 or more for every device")
    return part
