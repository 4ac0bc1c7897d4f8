"""GGUF model files, memory-mapped: metadata, tensor descriptions, and views of the tensors' bytes.

`read_gguf` opens one file or all parts of a split one (`-00001-of-0000N.gguf`). Nothing of the tensor data is read
until a view of it is; `GGUFFile.release` gives the pages back once a device holds its piece.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from numba_meta.errors import ModelFileError
from numba_meta.models.gguf_header import Header, TensorInfo, read_header, shown, shown_path

__all__ = ["GGUFFile", "TensorInfo", "read_gguf", "split_paths"]

_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_KIND_NAMES: dict[type, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list"}
_REQUIRED: Any = object()

Kind = TypeVar("Kind")
Default = TypeVar("Default")


class GGUFFile:
    """An open GGUF model. A context manager; `close()` unmaps it once no view from `raw` is left.

    Attributes: `paths` (the file, or the parts in order), `metadata` (key -> number, bool, text or list),
    `tensors` (name -> `TensorInfo`, in file order), `header_bytes` (where the first file's tensor data begins).
    """

    def __init__(self, paths: tuple[Path, ...], maps: list[mmap.mmap], headers: list[Header]) -> None:
        self.paths = paths
        self.metadata = headers[0].metadata
        self.header_bytes = headers[0].n_bytes
        self.version = headers[0].version
        self.tensors = {name: tensor for header in headers for name, tensor in header.tensors.items()}
        self._maps: list[mmap.mmap] | None = maps

    @property
    def path(self) -> Path:
        """The file, or the first part of a split one."""
        return self.paths[0]

    @property
    def architecture(self) -> str:
        """The key `general.architecture`, such as `llama`."""
        return self.value("general.architecture", str)

    @property
    def n_tensor_bytes(self) -> int:
        """Bytes of all tensors, without padding."""
        return sum(tensor.n_bytes for tensor in self.tensors.values())

    @overload
    def value(self, key: str, kind: type[Kind]) -> Kind: ...
    @overload
    def value(self, key: str, kind: type[Kind], default: Default) -> Kind | Default: ...
    def value(self, key: str, kind: type[Any], default: Any = _REQUIRED) -> Any:
        """The metadata under `key`, which must be of `kind`: int, float (a whole number serves too), bool, str or list.

        Raises `ModelFileError` where the kind differs, or where the key is missing and no `default` was given.
        """
        if key not in self.metadata:
            if default is _REQUIRED:
                raise ModelFileError(f"{shown_path(self.path)}: the key {key} is missing; the file is incomplete: convert it again")
            return default
        found = self.metadata[key]
        if kind is float and type(found) is int:
            return float(found)
        if type(found) is not kind:
            raise ModelFileError(f"{shown_path(self.path)}: the key {key} holds {shown(found, 40)}, expected {_KIND_NAMES[kind]}")
        return found

    def tensor(self, name: str) -> TensorInfo:
        """The description of a tensor; `ModelFileError` where the file has none of that name."""
        try:
            return self.tensors[name]
        except KeyError:
            raise ModelFileError(f"{shown_path(self.path)}: the tensor {shown(name)} is missing; the file is incomplete") from None

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The stored bytes of a tensor, [n_rows, row_bytes], read-only: a view of the mapped pages, not a copy."""
        tensor = self.tensor(name)
        mapped = self._map(tensor)
        flat = np.frombuffer(mapped, np.uint8, tensor.n_bytes, tensor.offset)
        return flat.reshape(tensor.n_rows, tensor.row_bytes)

    def release(self, name: str) -> None:
        """Tells the system that the pages wholly inside this tensor are not needed now; a later read maps them again."""
        tensor = self.tensor(name)
        mapped = self._map(tensor)
        if not hasattr(mapped, "madvise") or not hasattr(mmap, "MADV_DONTNEED"):
            return
        start = -(-tensor.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.offset + tensor.n_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            mapped.madvise(mmap.MADV_DONTNEED, start, end - start)

    def close(self) -> None:
        """Unmaps the file. Views that are still in use keep their pages until they are dropped."""
        maps, self._maps = self._maps or [], None
        for mapped in maps:
            try:
                mapped.close()
            except BufferError:
                pass  # a view is alive; the map goes with the last one

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        name = self.metadata.get("general.architecture")
        return f"GGUFFile({str(self.path)!r}, architecture={name!r}, {len(self.tensors)} tensors, {self.n_tensor_bytes} bytes)"

    def _map(self, tensor: TensorInfo) -> mmap.mmap:
        if self._maps is None:
            raise ModelFileError(f"{shown_path(self.path)}: the file was closed; open it again to read the tensor {shown(tensor.name)}")
        return self._maps[tensor.file_index]


def split_paths(path: str | os.PathLike[str]) -> tuple[Path, ...]:
    """All parts of a split model, in order, where `path` is named as one of them (`-00002-of-00003.gguf`); else `path` alone."""
    whole = Path(path)
    match = _SPLIT_NAME.fullmatch(whole.name)
    if match is None:
        return (whole,)
    number, count = int(match["number"]), int(match["count"])
    if not 1 <= number <= count:
        raise ModelFileError(f"{shown_path(whole)}: part {number} of {count} cannot be; expected a name from -00001-of-{count:05} on")
    return tuple(whole.with_name(f"{match['stem']}-{part:05}-of-{count:05}.gguf") for part in range(1, count + 1))


def _map_file(path: Path) -> mmap.mmap:
    try:
        with open(path, "rb", opener=_open_without_waiting) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ModelFileError(f"{shown_path(path)}: not a regular file; expected a GGUF model file")
            if status.st_size == 0:
                raise ModelFileError(f"{shown_path(path)}: the file is empty; expected a GGUF model: fetch it again")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelFileError(f"{shown_path(path)}: cannot be opened: {error.strerror or error}; expected a GGUF model file") from None
    except ValueError as error:  # a null byte in the path
        raise ModelFileError(f"{shown_path(path)}: not a file name: {error}") from None


def _open_without_waiting(path: str, flags: int) -> int:
    # A pipe or terminal must end in a message, not in a wait for its other end.
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _check_parts(paths: tuple[Path, ...], headers: list[Header]) -> None:
    """The parts must agree with their names, hold different tensors, and be as many tensors as the first one says."""
    seen: dict[str, Path] = {}
    for i, (path, header) in enumerate(zip(paths, headers, strict=True)):
        count = header.metadata.get("split.count", 0) or 1
        number = header.metadata.get("split.no", 0)
        if count != len(paths) or number != i:
            raise ModelFileError(
                f"{shown_path(path)}: says of itself part {shown(number)} (from 0) of {shown(count)}, its name says {i} of {len(paths)}; "
                "expected all parts beside each other under their first names (-00001-of-0000N.gguf)"
            )
        for name in header.tensors:
            if name in seen:
                raise ModelFileError(f"{shown_path(path)}: tensor {shown(name)} is also in {shown(seen[name].name)}; the parts do not fit")
            seen[name] = path
    expected = headers[0].metadata.get("split.tensors.count", len(seen))
    if expected != len(seen):
        raise ModelFileError(f"{shown_path(paths[0])}: the parts hold {len(seen)} tensors, expected {expected}: fetch the parts again")


@contextmanager
def _noted(problems: list[str] | None) -> Iterator[None]:
    """Notes what is wrong, where there is a list for that."""
    try:
        yield
    except ModelFileError as error:
        if problems is None:
            raise
        problems.append(str(error))


def read_gguf(path: str | os.PathLike[str], problems: list[str] | None = None) -> GGUFFile:
    """Opens a GGUF model (version 2 or 3, little endian), or all parts of a split one, and reads its header.

    Raises `ModelFileError`, one line that names the file, for whatever is wrong with it: missing, unreadable, damaged,
    of a type that is not supported, or without `general.architecture`. For whoever only looks: with `problems` what can be read
    past is noted there instead.
    """
    paths = split_paths(path)
    there: list[Path] = []
    maps: list[mmap.mmap] = []
    headers: list[Header] = []
    try:
        for part in paths:
            with _noted(problems if len(paths) > 1 else None):
                maps.append(_map_file(part))
                headers.append(read_header(maps[-1], shown_path(part), len(there), problems))
                there.append(part)
        if not there:
            raise ModelFileError((problems or ["no part"])[0])
        if len(there) == len(paths):
            with _noted(problems):
                _check_parts(paths, headers)
        file = GGUFFile(tuple(there), maps, headers)
        with _noted(problems):
            _ = file.architecture  # a file without one is no model
        return file
    except BaseException:
        for mapped in maps:
            mapped.close()
        raise
