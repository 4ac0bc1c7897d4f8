"""Device names: `cpu:0,cpu:0?link=5.3&mem=2G`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from numba_meta.errors import UsageError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True)
class DeviceSpec:
    """One simple device as the user named it, with what it should be like.

    `memory_limit`: bytes, None without a limit. `link_bytes_per_second`: how fast deliveries reach it, 0: as fast as memory. `delay_ns`:
    how much later each arrives. Without `has_async_copies` nothing is copied while it computes; without `can_pin` host memory for it cannot
    be pinned.
    """

    kind: str
    index: int
    memory_limit: int | None = None
    link_bytes_per_second: int = 0
    delay_ns: int = 0
    has_async_copies: bool = True
    can_pin: bool = True

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
        raise UsageError(f"unknown device {text!r}; expected cpu:N or cuda:N, with options as in cpu:0?mem=2G, several separated by commas")
    given: dict[str, Any] = {}
    for option in filter(None, options.split("&")):
        key, _, value = option.partition("=")
        if key not in _OPTIONS:
            raise UsageError(f"device {text!r}: unknown option {key!r}; known are {', '.join(_OPTIONS)} (as in {name}?link=5.3&mem=2G)")
        if match[1] == "cuda" and key not in _CUDA_OPTIONS:
            raise UsageError(f"device {text!r}: {key} is for simulated CPU devices; a CUDA device takes {' and '.join(_CUDA_OPTIONS)}")
        field, parse = _OPTIONS[key]
        if field in given:
            raise UsageError(f"device {text!r}: {key} is given twice; give one value")
        given[field] = parse(value, f"device {text!r}: {key}")
    return DeviceSpec(match[1], int(match[2] or 0), **given)


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


def parse_link(text: str, what: str) -> int:
    """GB/s (units of 1000) as bytes per second."""
    match = re.fullmatch(r"[0-9]{1,9}(?:\.[0-9]{1,9})?", text.strip(), re.ASCII)
    speed = int(Fraction(text.strip()) * 10**9) if match else 0
    if not 10**3 <= speed <= 10**15:
        raise UsageError(f"{what}={text!r} is not a speed; expected 0.000001 to 1000000 GB/s, as in link=5.3")
    return speed


def parse_delay(text: str, what: str) -> int:
    """`2ms`, `50us`, `0.1s` in nanoseconds, up to 10 s."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(us|ms|s)", text.strip(), re.ASCII)
    delay = int(Fraction(match[1]) * {"us": 10**3, "ms": 10**6, "s": 10**9}[match[2]]) if match else -1
    if not 0 <= delay <= 10**10:
        raise UsageError(f"{what}={text!r} is not a time; expected up to 10s with us, ms or s, as in delay=2ms")
    return delay


def parse_switch(text: str, what: str) -> bool:
    """`0` or `1`."""
    if text not in ("0", "1"):
        raise UsageError(f"{what}={text!r}; expected 0 or 1")
    return text == "1"


_OPTIONS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "mem": ("memory_limit", parse_bytes),
    "link": ("link_bytes_per_second", parse_link),
    "delay": ("delay_ns", parse_delay),
    "async": ("has_async_copies", parse_switch),
    "pin": ("can_pin", parse_switch),
}
_CUDA_OPTIONS = ("mem", "pin")  # what a GPU may be told to do without, to see what happens then
