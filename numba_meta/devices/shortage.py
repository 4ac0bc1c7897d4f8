"""What is said of a device without room: what needs how much, what there is, and what helps, on one device or on several."""

from __future__ import annotations

from numba_meta.devices.parse import format_bytes
from numba_meta.errors import OutOfMemoryError

_PLURAL = ("weights", "inputs", "constants")


def out_of_memory(device: str, label: str, n_bytes: int, have: str, is_one_of_several: bool) -> OutOfMemoryError:
    """The error of an allocation; `have` says what there is, as in `400 of 1000 are free`."""
    need = "need" if label in _PLURAL else "needs"
    return OutOfMemoryError(
        f"{device}: {label} {need} {n_bytes} bytes ({format_bytes(n_bytes)}), {have}; {what_helps(label, is_one_of_several)}"
    )


def what_helps(label: str, is_one_of_several: bool) -> str:
    """A smaller context does nothing for weights, and another division nothing where there is one device."""
    what = "a smaller model or one of fewer bits" if label == "weights" else "a smaller context or batch"
    return f"use {what}, another split, or more devices" if is_one_of_several else f"use {what}, or more devices"
