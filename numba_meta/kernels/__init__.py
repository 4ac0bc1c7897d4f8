"""The arithmetic of operations, for each kind of device.

`cpu` and `cuda` hold modules of the same names with kernels of the same names and arguments, so that an operation is lowered once for all
kinds of devices: `kernel_set("cpu").norm.rms_norm`. What differs is how weights and activations lie in memory (`packed`), and how a kernel
is run.
"""

from __future__ import annotations

import functools
import gc
import importlib
import os
import sys
from typing import Any

from numba_meta.errors import DeviceError

KINDS = ("cpu", "cuda")
_NUMBA_CUDA = "numba.cuda"


class KernelSet:
    """The kernels of one kind of device; an attribute is a module of them, imported at its first use."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __getattr__(self, module: str) -> Any:
        if module.startswith("_"):
            raise AttributeError(module)
        had_cuda = _NUMBA_CUDA in sys.modules
        found = importlib.import_module(f"{__name__}.{self.kind}.{module}")
        if not had_cuda and _NUMBA_CUDA in sys.modules:
            gc.collect()  # its import leaves errors that it caught in circles, with the frames of whoever loads a model now
        setattr(self, module, found)
        return found

    def __repr__(self) -> str:
        return f"<kernels of {self.kind} devices>"


def in_simulator() -> bool:
    """Whether Numba runs CUDA kernels in its simulator (NUMBA_ENABLE_CUDASIM)."""
    return os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")


@functools.cache
def kernel_set(kind: str) -> KernelSet:
    """The kernels of `cpu` or `cuda` devices. Raises `DeviceError` for another kind, and for `cuda` in Numba's simulator."""
    if kind not in KINDS:
        raise DeviceError(f"there are no kernels for devices of kind {kind!r}; expected {' or '.join(KINDS)}")
    if kind == "cuda" and in_simulator():
        raise DeviceError("NUMBA_ENABLE_CUDASIM is set, and Numba's simulator runs no models, only single kernels; unset it")
    return KernelSet(kind)
