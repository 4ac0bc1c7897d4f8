"""numba_meta: one GGUF transformer over several unequal devices at once, in Python with Numba kernels.

    import numba_meta as nm

    with nm.load("smollm2", devices="cpu:0,cpu:0", tensor_split=(55, 45)) as model:
        for piece in model.generate("The ring is", max_tokens=64):
            print(piece, end="")

In comes a GGUF file and a list of devices, out comes text. One folder per stage, each using those named after it:

    models/    GGUF, architectures, tokenizer, KV cache, sampling, generation
    schedule/  the plan of a graph over devices, recorded and replayed
    devices/   memory, streams, events and copies     memory/  placement, buffers     split/  how tensors are divided
    ops/       one operation per file: shape rule, split rule, what it binds to
    kernels/   the arithmetic

Importing this package loads none of that: `load` and `Model` are fetched on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from numba_meta.errors import (
    ContextFullError,
    DeviceError,
    ModelFileError,
    NumbaMetaError,
    OutOfMemoryError,
    PlacementError,
    ShapeError,
    SplitError,
    UsageError,
)
from numba_meta.interrupts import held_back

if TYPE_CHECKING:
    from numba_meta.models.load import load
    from numba_meta.models.model import Model

__version__ = "0.1.0"

__all__ = [
    "ContextFullError",
    "DeviceError",
    "Model",
    "ModelFileError",
    "NumbaMetaError",
    "OutOfMemoryError",
    "PlacementError",
    "ShapeError",
    "SplitError",
    "UsageError",
    "__version__",
    "load",
]

_LAZY = {"Model": "numba_meta.models.model", "load": "numba_meta.models.load"}


def __getattr__(name: str) -> Any:
    """Fetch a name of `_LAZY` from its module, so that `import numba_meta` stays light."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with held_back():  # some modules cannot be imported again once their import was interrupted
        return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
