"""GGUF model files: metadata, tensor descriptions, and copies of the tensors' bytes.

`read_gguf` opens one file or all parts of a split one (`-00001-of-0000N.gguf`) and their headers; of the tensor data only
what is asked for is read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from numba_meta.errors import ModelFileError
from numba_meta.models.files.file_bytes import FileBytes
from numba_meta.models.files.gguf_header import Header, TensorInfo, read_header, shown, shown_path

__all__ = ["GGUFFile", "TensorInfo", "read_gguf", "split_paths"]

_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_KIND_NAMES: dict[type, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list"}
_REQUIRED: Any = object()

Kind = TypeVar("Kind")
Default = TypeVar("Default")


class GGUFFile:
    """An open GGUF model. A context manager; `close()` ends reading, as does letting go of it.

    Attributes: `paths` (the file, or the parts in order), `metadata` (key -> number, bool, text or list),
    `tensors` (name -> `TensorInfo`, in file order), `header_bytes` (where the first file's tensor data begins).
    """

    def __init__(self, paths: tuple[Path, ...], files: list[FileBytes], headers: list[Header]) -> None:
        self.paths = paths
        self.metadata = headers[0].metadata
        self.header_bytes = headers[0].n_bytes
        self.version = headers[0].version
        self.tensors = {name: tensor for header in headers for name, tensor in header.tensors.items()}
        self._files: list[FileBytes] | None = files

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
        """A copy of the stored bytes of a tensor, [n_rows, row_bytes]."""
        tensor = self.tensor(name)
        out = np.empty((tensor.n_rows, tensor.row_bytes), np.uint8)
        self.read_rows(tensor, 0, out)
        return out

    def read_rows(self, tensor: TensorInfo, first: int, out: npt.NDArray[np.uint8]) -> None:
        """Fills `out`, contiguous uint8 [rows, row_bytes], with the rows of a tensor from `first` on.

        Raises `ModelFileError` where the file has become shorter than it was.
        """
        self._file_of(tensor).read_into(tensor.offset + first * tensor.row_bytes, out.reshape(-1))

    def sample(self, name: str, start: int, n_bytes: int) -> bytes:
        """Some bytes of a tensor, fewer at its end."""
        tensor = self.tensor(name)
        return self._file_of(tensor).read(tensor.offset + start, min(n_bytes, tensor.n_bytes - start))

    def close(self) -> None:
        """Closes the file. Twice is once."""
        files, self._files = self._files or [], None
        for file in files:
            file.close()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        name = self.metadata.get("general.architecture")
        return f"GGUFFile({str(self.path)!r}, architecture={name!r}, {len(self.tensors)} tensors, {self.n_tensor_bytes} bytes)"

    def _file_of(self, tensor: TensorInfo) -> FileBytes:
        if self._files is None:
            raise ModelFileError(f"{shown_path(self.path)}: the file was closed; open it again to read the tensor {shown(tensor.name)}")
        return self._files[tensor.file_index]


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
    files: list[FileBytes] = []
    headers: list[Header] = []
    try:
        for part in paths:
            with _noted(problems if len(paths) > 1 else None):
                opened = FileBytes(part)
                headers.append(read_header(opened, shown_path(part), len(there), problems))
                files.append(opened)
                there.append(part)
        if not there:
            raise ModelFileError((problems or ["no part"])[0])
        if len(there) == len(paths):
            with _noted(problems):
                _check_parts(paths, headers)
        file = GGUFFile(tuple(there), files, headers)
        with _noted(problems):
            _ = file.architecture  # a file without one is no model
        return file
    except BaseException:
        for opened in files:
            opened.close()
        raise
