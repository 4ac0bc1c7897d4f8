"""The errors of numba_meta: one family, each message one line that says what was wrong, what was expected, what to do."""

from __future__ import annotations


class NumbaMetaError(Exception):
    """Base of every error that numba_meta raises on purpose. `exit_status` is what the command line ends with."""

    exit_status = 1

    def __init__(self, message: str = "") -> None:
        # One line, also where a file name or a name from a damaged file holds line breaks.
        super().__init__("\\n".join(str(message).splitlines()))


class UsageError(NumbaMetaError):
    """An option, argument or combination of them that cannot be right (a negative split, an unknown device name)."""

    exit_status = 2


class ModelFileError(NumbaMetaError):
    """A model file that cannot be read: damaged, of an unknown type or architecture, or missing what the model needs."""


class ShapeError(NumbaMetaError):
    """Tensors whose shapes or types do not fit the operation that was asked for."""


class SplitError(NumbaMetaError):
    """A division of a tensor over devices that has no rule or does not fit the tensor."""


class PlacementError(NumbaMetaError):
    """A tensor that would lie outside its buffer or over another one."""


class DeviceError(NumbaMetaError):
    """A device that is missing, failed, or cannot do what was asked of it."""


class OutOfMemoryError(DeviceError):
    """A device without room: the message names the device, what was needed and what is free, in bytes."""


class ContextFullError(NumbaMetaError):
    """More tokens than the KV cache has cells for; the message names both numbers."""


class NumbaMetaWarning(UserWarning):
    """What was asked for cannot be had and something slower is done in its place, or will serve badly; said once."""


def counted(n: int, noun: str) -> str:
    """`1 token`, `2 tokens`: for messages."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
