"""Device names: `cpu:0,cpu:0?mem=2G`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from numba_meta.errors import UsageError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True)
class DeviceSpec:
    """One simple device as the user named it. `memory_limit` is in bytes, None without a limit."""

    kind: str
    index: int
    memory_limit: int | None = None

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.index}"


def parse_devices(devices: str | Sequence[str]) -> tuple[DeviceSpec, ...]:
    """The simple devices of a comma-separated list (or a sequence of names), at least one. Raises `UsageError`."""
    names = devices.split(",") if isinstance(devices, str) else list(devices)
    if not names:
        raise UsageError("the list of devices is empty; expected at least one, as in cpu:0")
    return tuple(_parse_one(str(name).strip()) for name in names)


def _parse_one(text: str) -> DeviceSpec:
    name, _, options = text.partition("?")
    match = re.fullmatch(r"([a-z]+)(?::([0-9]{1,6}))?", name)
    if match is None or match[1] not in ("cpu", "cuda"):
        raise UsageError(f"unknown device {text!r}; expected cpu:N, with options as in cpu:0?mem=2G, several separated by commas")
    if match[1] == "cuda":
        raise UsageError(f"device {text!r}: CUDA devices are not supported yet; use cpu:N")
    limit = None
    for option in filter(None, options.split("&")):
        key, _, value = option.partition("=")
        if key != "mem":
            raise UsageError(f"device {text!r}: unknown option {key!r}; known is mem (as in {name}?mem=2G)")
        if limit is not None:
            raise UsageError(f"device {text!r}: mem is given twice; give one size")
        limit = parse_bytes(value, f"device {text!r}: mem")
    return DeviceSpec(match[1], int(match[2] or 0), limit)


def parse_bytes(text: str, what: str) -> int:
    """`512M`, `2G`, `1.5GiB` in bytes (units of 1024), rounded down. `what` begins the message of a `UsageError`."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE | re.ASCII)
    n_bytes = int(Fraction(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if not 1 <= n_bytes < 1 << 63:
        raise UsageError(f"{what}={text!r} is not a positive size; expected a number with K, M or G, as in 2G")
    return n_bytes


def format_bytes(n_bytes: int) -> str:
    """`1.5 GiB`: for people."""
    size = float(n_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError
