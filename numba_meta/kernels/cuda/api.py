"""The one module that imports `numba.cuda` and hands its names on: a successor of numba-cuda replaces this file.

Compiling needs no GPU and no driver. Raises `DeviceError` where the package is missing or does not fit.
"""

from __future__ import annotations

import types as python_types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from numba_meta.errors import DeviceError
from numba_meta.kernels import in_simulator

try:
    import numba.cuda.dispatcher as _dispatcher
    from numba import cuda
    from numba.cuda import cgutils, types
    from numba.cuda.extending import intrinsic
except (ImportError, OSError, AttributeError, RuntimeError) as error:  # not there, or of versions that do not fit each other
    told = " ".join(str(error).split()) or type(error).__name__
    raise DeviceError(f"CUDA kernels need numba-cuda and its packages ({told}); install numba-meta[cuda13] or numba-meta[cuda12]") from None

__all__ = ["IS_SIMULATOR", "cgutils", "compile_ptx", "cuda", "device_function", "intrinsic", "types"]

IS_SIMULATOR = in_simulator()

_device_functions: list[Any] = []
_compiled_for: tuple[int, int] | None = None


def device_function(function: Callable[..., Any]) -> Any:
    """Decorator for functions that kernels call; they are inlined by the compiler."""
    dispatcher = cuda.jit(device=True)(function)
    _device_functions.append(dispatcher)
    return dispatcher


def compile_ptx(function: Callable[..., None], argument_types: list[Any], capability: tuple[int, int], max_threads: int | None) -> str:
    """PTX of a kernel `function(*arguments)` for a compute capability. `max_threads`: of a block, which bounds its registers.

    Not thread-safe: the caller holds the compiler's lock.
    """
    global _compiled_for
    if _compiled_for != capability:
        # What was compiled for a device function is found again by its types alone, whatever the capability was.
        for each in _device_functions:
            each.overloads.clear()
            each._tm_cache = {} if hasattr(each, "_tm_cache") else None
        _compiled_for = capability
    with _typing_for(capability):
        ptx, _ = cuda.compile_ptx(
            function, types.void(*argument_types), cc=capability, fastmath=False, abi="numba", launch_bounds=max_threads
        )
    return str(ptx)


@contextmanager
def _typing_for(capability: tuple[int, int]) -> Iterator[None]:
    """Typing a device function asks the current device for its capability: there may be none, or another one."""
    before = _dispatcher.get_current_device
    _dispatcher.get_current_device = lambda: python_types.SimpleNamespace(compute_capability=capability)
    try:
        yield
    finally:
        _dispatcher.get_current_device = before
