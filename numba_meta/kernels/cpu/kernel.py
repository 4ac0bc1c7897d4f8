"""CPU kernels: functions over raw addresses, compiled once by Numba and kept on disk.

A kernel is a Python function `f(thread, n_threads, ...)` whose further parameters are annotated `Ptr`, `Int` or `Float`. It is compiled to
`void(arguments, thread, n_threads)`, where `arguments` is the address of a block with one 8-byte word per parameter: what a recorded step
stores and what compiled threads call without Python. All threads of a device call it at the same time; a kernel shares its work among
`n_threads` by `thread` and needs no barrier inside.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import inspect
import itertools
import operator
import os
import pickle
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
from numba import cfunc, njit, types
from numba.core.bytecode import FunctionIdentity
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.core.runtime import rtsys

from numba_meta.errors import NumbaMetaError
from numba_meta.kernels.cpu import isa
from numba_meta.kernels.cpu.simd import load_f32, load_i64


class Ptr:
    """A parameter that is an address in bytes (int64 in the kernel)."""


class Int:
    """An int64 parameter."""


class Float:
    """A float32 parameter."""


# Numba numbers functions per process and puts the number in symbols. Code that different processes left on disk meets in one symbol
# table, where the first of equal names wins: so each process counts from a random start, a forked one too.
def _count_from_random() -> None:
    FunctionIdentity._unique_ids = itertools.count(int.from_bytes(os.urandom(7), "little"))


_count_from_random()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_from_random)

_KINDS = {"Ptr": Ptr, "Int": Int, "Float": Float}
_ENTRY_SIGNATURE = types.void(types.int64, types.int64, types.int64)
ENTRY_TYPE = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)  # calls without the interpreter lock
_CHECKSUM_BYTES = hashlib.sha256().digest_size
on_compile: list[Callable[[str], None]] = []  # told the name of each kernel that is compiled anew: progress lines, tests


class CpuKernel:
    """One kernel: its parameters, its machine code (compiled or read from disk at first use), its argument blocks."""

    def __init__(self, function: Callable[..., None], name: str) -> None:
        self.name = name
        self.function = function
        parameters = list(inspect.signature(function).parameters.values())
        if [p.name for p in parameters[:2]] != ["thread", "n_threads"]:
            raise TypeError(f"kernel {name}: the first parameters must be thread, n_threads")
        self.parameters: dict[str, type] = {p.name: _kind(name, p) for p in parameters[2:]}
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


def _kind(kernel: str, parameter: inspect.Parameter) -> type:
    annotation = parameter.annotation
    kind = _KINDS.get(annotation) if isinstance(annotation, str) else annotation
    if kind not in (Ptr, Int, Float):
        raise TypeError(f"kernel {kernel}: annotate parameter {parameter.name} as Ptr, Int or Float")
    return kind


def _make_entry(function: Callable[..., None], kinds: list[type]) -> Callable[[int, int, int], None]:
    """The function that unpacks the argument block. Its source is made here, since Numba needs the arguments spelled out."""
    inner = njit(nogil=True, error_model="numpy", inline="always")(function)
    loads = [f"{'load_f32' if kind is Float else 'load_i64'}(arguments + {8 * i})" for i, kind in enumerate(kinds)]
    source = f"def entry(arguments, thread, n_threads):\n    inner({', '.join(['thread', 'n_threads', *loads])})\n"
    scope: dict[str, Any] = {"__name__": __name__, "inner": inner, "load_f32": load_f32, "load_i64": load_i64}
    exec(compile(source, f"<entry of {function.__name__}>", "exec"), scope)
    return scope["entry"]  # type: ignore[no-any-return]


# ---- machine code on disk --------------------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where compiled kernels are kept: `$NUMBA_META_CACHE/kernels`, else under the user's cache folder."""
    root = os.environ.get("NUMBA_META_CACHE")
    if root:
        return Path(root) / "kernels"
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "numba_meta" / "kernels"


def _source_digest() -> bytes:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.digest()


_SOURCES = _source_digest()  # now: a file that is edited later is not what this process runs


@functools.cache
def _code_digest() -> str:
    """What the machine code of all kernels depends on: their sources, versions, the CPU, the level of instructions."""
    import llvmlite
    import numba
    codegen = cpu_target.target_context.codegen()
    digest = hashlib.sha256(_SOURCES)
    versions = (sys.version.split()[0], numba.__version__, llvmlite.__version__)
    for part in (*versions, *map(str, codegen.magic_tuple()), isa.detect().name):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:20]


def _function_digest(function: Callable[..., None]) -> str:
    """What tells kernels of one name apart: the code of a function and of what it calls, with the constants that they see.

    Covers kernels that are written outside this package (notebooks, tests) up to Numba intrinsics, which count by name.
    """
    digest = hashlib.sha256()
    todo: list[Any] = [function]
    seen: set[int] = set()
    while todo:
        current = todo.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        closure = inspect.getclosurevars(current)
        digest.update(repr((_plain_code(current.__code__), _annotations(current))).encode())
        for name, value in sorted({**closure.globals, **closure.nonlocals}.items()):
            value = getattr(value, "py_func", value)
            if inspect.isfunction(value):
                todo.append(value)
            digest.update(f"{name}={_constant(value)};".encode())
    return digest.hexdigest()[:12]


def _constant(value: Any) -> str:
    if isinstance(value, tuple):
        return str([_constant(item) for item in value])
    if isinstance(value, (bool, int, float, str, bytes, np.generic)):
        return repr(value)
    return str(getattr(value, "__name__", type(value).__name__))


def _plain_code(code: CodeType) -> tuple[object, ...]:
    constants: list[object] = []
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            constants.append(_plain_code(constant))
        else:
            constants.append(sorted(map(repr, constant)) if isinstance(constant, frozenset) else repr(constant))
    return code.co_code, code.co_names, code.co_varnames, constants


def _annotations(function: Callable[..., Any]) -> str:
    return str({name: getattr(kind, "__name__", kind) for name, kind in sorted(function.__annotations__.items())})


@global_compiler_lock
def _load_or_compile(kernel: CpuKernel) -> int:
    if known := kernel.__dict__.get("address"):  # another thread was first
        return int(known)
    path = cache_folder() / _code_digest() / f"{kernel.name}-{_function_digest(kernel.function)}.bin"
    address = _load(kernel, path)
    if not address:
        for listener in on_compile:
            listener(kernel.name)
        entry = cfunc(_ENTRY_SIGNATURE, nopython=True, error_model="numpy")(_make_entry(kernel.function, list(kernel.parameters.values())))
        kernel._library = entry._library  # keeps the code alive
        address = int(entry._library.get_pointer_to_function(entry.native_name))
        _write(path, pickle.dumps((entry.native_name, entry._library.serialize_using_object_code())))
    return address


def _load(kernel: CpuKernel, path: Path) -> int:
    """The address of a kernel's code from disk; 0 where there is none. A damaged or foreign file is compiled again and replaced."""
    try:
        data = path.read_bytes()
        if hashlib.sha256(data[_CHECKSUM_BYTES:]).digest() != data[:_CHECKSUM_BYTES]:
            return 0
        name, serialized = pickle.loads(data[_CHECKSUM_BYTES:])
    except Exception:  # whatever stands there, compiling is the answer
        return 0
    rtsys.initialize(cpu_target.target_context)  # code from disk may name symbols of Numba's runtime
    kernel._library = cpu_target.target_context.codegen().unserialize_library(serialized)
    return int(kernel._library.get_pointer_to_function(name))


def _write(path: Path, payload: bytes) -> None:
    """Writes whole or not at all, behind a checksum; a cache that cannot be written only costs time."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            try:
                file.write(hashlib.sha256(payload).digest() + payload)
                file.flush()
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
