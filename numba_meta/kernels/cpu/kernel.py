"""CPU kernels: functions over raw addresses, compiled once by Numba and kept on disk.

A kernel is a Python function `f(thread, n_threads, ...)` whose further parameters are annotated `Ptr`, `Int` or `Float`. It is compiled to
`void(arguments, thread, n_threads)`, where `arguments` is the address of a block with one 8-byte word per parameter: what a recorded step
stores and what compiled threads call without Python. All threads of a device call it at the same time; a kernel shares its work among
`n_threads` by `thread` and needs no barrier inside.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import itertools
import operator
import os
import pickle
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numba import cfunc, njit, types
from numba.core.bytecode import FunctionIdentity
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.core.runtime import rtsys

from numba_meta.errors import NumbaMetaError
from numba_meta.interrupts import let_through
from numba_meta.kernels import code_cache
from numba_meta.kernels.code_cache import Float, Int, Ptr, cache_folder, digest_of, function_digest, kind_of, on_compile, source_digest
from numba_meta.kernels.cpu import isa
from numba_meta.kernels.cpu.simd import load_f32, load_i64


# Numba numbers functions per process and puts the number in symbols. Code that different processes left on disk meets in one symbol
# table, where the first of equal names wins: so each process counts from a random start, a forked one too.
def _count_from_random() -> None:
    FunctionIdentity._unique_ids = itertools.count(int.from_bytes(os.urandom(7), "little"))


_count_from_random()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_from_random)

__all__ = ["ENTRY_TYPE", "CpuKernel", "Float", "Int", "Ptr", "cache_folder", "cpu_kernel", "on_compile"]

_ENTRY_SIGNATURE = types.void(types.int64, types.int64, types.int64)
ENTRY_TYPE = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)  # calls without the interpreter lock


class CpuKernel:
    """One kernel: its parameters, its machine code (compiled or read from disk at first use), its argument blocks."""

    def __init__(self, function: Callable[..., None], name: str) -> None:
        self.name = name
        self.function = function
        parameters = list(inspect.signature(function).parameters.values())
        if [p.name for p in parameters[:2]] != ["thread", "n_threads"]:
            raise TypeError(f"kernel {name}: the first parameters must be thread, n_threads")
        self.parameters: dict[str, type] = {p.name: kind_of(name, p) for p in parameters[2:]}
        self._library: Any = None  # machine code, alive as long as the kernel

    def __repr__(self) -> str:
        return f"CpuKernel({self.name})"

    @functools.cached_property
    def address(self) -> int:
        """The machine code's address: `void(int64 arguments, int64 thread, int64 n_threads)`."""
        address: int = _load_or_compile(self)
        return address

    def pack(self, **values: Any) -> np.ndarray:
        """The argument block, int64 `[len(parameters)]`; every parameter must be given. Addresses and integers must be integers."""
        if values.keys() != self.parameters.keys():
            wrong = sorted(values.keys() ^ self.parameters.keys())
            raise NumbaMetaError(f"kernel {self.name}: arguments {wrong} do not fit its parameters {list(self.parameters)}")
        block = np.zeros(max(1, len(self.parameters)), np.int64)
        for i, (name, kind) in enumerate(self.parameters.items()):
            try:
                block[i] = struct.unpack("<q", struct.pack("<f4x", values[name]))[0] if kind is Float else operator.index(values[name])
            except (TypeError, OverflowError, struct.error):
                expected = "a number within float32" if kind is Float else "an integer within int64"
                raise NumbaMetaError(f"kernel {self.name}: argument {name}={values[name]!r} does not fit; expected {expected}") from None
        return block

    def __call__(self, *, threads: int = 1, **values: Any) -> None:
        """Runs the kernel here and now, one share after the other (for packing, tests and exploring). Arrays stand for their addresses."""
        plain = {k: v.ctypes.data if isinstance(v, np.ndarray) else v for k, v in values.items()}
        block = self.pack(**plain)
        call = ENTRY_TYPE(self.address)
        for thread in range(threads):
            call(block.ctypes.data, thread, threads)


def cpu_kernel(function: Callable[..., None] | None = None, *, name: str | None = None) -> Any:
    """Makes a `CpuKernel` of a function. `name` tells variants that a factory makes apart; it must be unique."""
    if function is None:
        return lambda f: CpuKernel(f, name or f.__name__)
    return CpuKernel(function, name or function.__name__)


def _make_entry(function: Callable[..., None], kinds: list[type]) -> Callable[[int, int, int], None]:
    """The function that unpacks the argument block. Its source is made here, since Numba needs the arguments spelled out."""
    inner = njit(nogil=True, error_model="numpy", inline="always")(function)
    loads = [f"{'load_f32' if kind is Float else 'load_i64'}(arguments + {8 * i})" for i, kind in enumerate(kinds)]
    source = f"def entry(arguments, thread, n_threads):\n    inner({', '.join(['thread', 'n_threads', *loads])})\n"
    scope: dict[str, Any] = {"__name__": __name__, "inner": inner, "load_f32": load_f32, "load_i64": load_i64}
    exec(compile(source, f"<entry of {function.__name__}>", "exec"), scope)
    return scope["entry"]  # type: ignore[no-any-return]


# ---- machine code on disk --------------------------------------------------------------------------------------------------------------


_SOURCES = source_digest(Path(__file__).parent)  # now: a file that is edited later is not what this process runs


@functools.cache
def _code_digest() -> str:
    """What the machine code of all kernels depends on: their sources, versions, the CPU, the level of instructions."""
    import llvmlite
    import numba

    codegen = cpu_target.target_context.codegen()
    versions = (sys.version.split()[0], numba.__version__, llvmlite.__version__)
    return digest_of((_SOURCES, *versions, *map(str, codegen.magic_tuple()), isa.detect().name))


@global_compiler_lock
def _load_or_compile(kernel: CpuKernel) -> int:
    if known := kernel.__dict__.get("address"):  # another thread was first
        return int(known)
    path = cache_folder() / _code_digest() / f"{kernel.name}-{function_digest(kernel.function)}.bin"
    address = _load(kernel, path)
    if not address:
        let_through()  # compiling takes seconds
        for listener in on_compile:
            listener(kernel.name)
        entry = cfunc(_ENTRY_SIGNATURE, nopython=True, error_model="numpy")(_make_entry(kernel.function, list(kernel.parameters.values())))
        kernel._library = entry._library  # keeps the code alive
        address = int(entry._library.get_pointer_to_function(entry.native_name))
        code_cache.write(path, pickle.dumps((entry.native_name, entry._library.serialize_using_object_code())))
    return address


def _load(kernel: CpuKernel, path: Path) -> int:
    """The address of a kernel's code from disk; 0 where there is none. A damaged or foreign file is compiled again and replaced."""
    payload = code_cache.read(path)
    if payload is None:
        return 0
    try:
        name, serialized = pickle.loads(payload)
    except Exception:  # whatever stands there, compiling is the answer
        return 0
    rtsys.initialize(cpu_target.target_context)  # code from disk may name symbols of Numba's runtime
    kernel._library = cpu_target.target_context.codegen().unserialize_library(serialized)
    return int(kernel._library.get_pointer_to_function(name))
