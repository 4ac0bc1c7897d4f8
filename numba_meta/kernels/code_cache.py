"""Compiled kernels on disk, and what CPU and CUDA kernels share: how parameters are annotated, what tells two kernels apart."""

from __future__ import annotations

import functools
import gc
import hashlib
import inspect
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np

from numba_meta.errors import NumbaMetaWarning

_CHECKSUM_BYTES = hashlib.sha256().digest_size
on_compile: list[Callable[[str], None]] = []  # told the name of each kernel that is compiled anew: progress lines, tests


@contextmanager
def tidy_after_compiling() -> Iterator[None]:
    """Collects garbage where the block compiled kernels: Numba leaves errors that it caught in circles, with the frames of its callers.

    Their locals (a model's memory) would stay until the next collection.
    """
    compiled: list[str] = []
    listener = compiled.append
    on_compile.append(listener)
    try:
        yield
    finally:
        on_compile.remove(listener)
        if compiled:
            gc.collect()


class Ptr:
    """A parameter that is an address in bytes (int64 in the kernel)."""


class Int:
    """An int64 parameter."""


class Float:
    """A float32 parameter."""


_KINDS = {"Ptr": Ptr, "Int": Int, "Float": Float}


def kind_of(kernel: str, parameter: inspect.Parameter) -> type:
    """Ptr, Int or Float, as a parameter is annotated."""
    annotation = parameter.annotation
    kind = _KINDS.get(annotation) if isinstance(annotation, str) else annotation
    if kind not in (Ptr, Int, Float):
        raise TypeError(f"kernel {kernel}: annotate parameter {parameter.name} as Ptr, Int or Float")
    return kind


def shown_cap(softcap: float) -> str:
    """The part of the name of a kernel of attention that tells its softcap."""
    return f"_cap{softcap:g}" if softcap else ""


def cache_folder() -> Path:
    """Where compiled kernels are kept: `$NUMBA_META_CACHE/kernels`, else under the user's cache folder."""
    root = os.environ.get("NUMBA_META_CACHE")
    if root:
        return Path(os.path.expanduser(root)) / "kernels"
    base = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache"))
    return Path(base) / "numba_meta" / "kernels"


def read(path: Path) -> bytes | None:
    """What `write` left; None where there is nothing, or something damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    payload = data[_CHECKSUM_BYTES:]
    return payload if hashlib.sha256(payload).digest() == data[:_CHECKSUM_BYTES] else None


def write(path: Path, payload: bytes) -> None:
    """Writes whole or not at all, behind a checksum. A cache that cannot be written only costs time, of which a warning tells once."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            try:
                file.write(hashlib.sha256(payload).digest() + payload)
                file.flush()
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        _tell_of(str(cache_folder()), error.strerror or type(error).__name__)


@functools.cache
def _tell_of(folder: str, reason: str) -> None:
    warnings.warn(
        f"compiled kernels cannot be kept in {folder} ({reason}), so each start compiles them again; set NUMBA_META_CACHE to a folder "
        "that can be written",
        NumbaMetaWarning,
        stacklevel=2,
    )


# ---- what tells kernels apart ----------------------------------------------------------------------------------------------------------


def source_digest(folder: Path) -> str:
    """Of all Python files of a folder, and of the one above it: what kinds of devices share."""
    digest = hashlib.sha256()
    for path in (*sorted(folder.glob("*.py")), *sorted(folder.parent.glob("*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def digest_of(parts: Iterable[str]) -> str:
    """A short name for some texts."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:20]


def function_digest(function: Callable[..., None]) -> str:
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
