"""The header of one GGUF file: key/value metadata and tensor descriptions, read within bounds.

Layout (little endian, versions 2 and 3): `GGUF`, u32 version, u64 tensor count, u64 key count; per key a string,
a u32 value type and the value; per tensor a string, a u32 axis count, u64 extents (axis 0 fastest), u32 type, u64 offset;
then padding to `general.alignment` (32 unless given) and the tensor data, to which the offsets are relative.

Every length and count is compared with the bytes that remain before anything is allocated for it. What is wrong ends the reading, or, for
whoever only wants to look (`problems`), is noted, and what can be read goes on.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import numpy as np

from numba_meta import dtypes
from numba_meta.dtypes import DType
from numba_meta.errors import ModelFileError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_AXES = 4
MAX_NAME_BYTES = 65_535
MAX_STRING_BYTES = 1 << 24
MAX_ARRAY_ELEMENTS = 1 << 22  # 16 times today's largest vocabularies; a list of numbers takes 36 bytes an element
MAX_ARRAY_DEPTH = 3
MAX_HEADER_BYTES = 1 << 30
_READ_BYTES = 1 << 18  # first; then as many as there are, so that a long header is read in a few pieces

_STRING, _ARRAY, _BOOL = 8, 9, 7
# value type -> numpy type; a bool is a byte that is not 0
_NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "<u1", 10: "<u8", 11: "<i8", 12: "<f8"}
_MIN_VALUE_BYTES = {**{kind: np.dtype(code).itemsize for kind, code in _NUMBERS.items()}, _STRING: 8, _ARRAY: 12}
_MIN_KEY_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8

# Types that GGUF knows and numba_meta does not read, for a message that says more than a number: elements and bytes of a block.
_OTHER_TYPES = {
    each.gguf_id: each
    for each in (
        DType("q8_1", 9, 32, 36), DType("q8_k", 15, 256, 292), DType("iq2_xxs", 16, 256, 66), DType("iq2_xs", 17, 256, 74),
        DType("iq3_xxs", 18, 256, 98), DType("iq1_s", 19, 256, 50), DType("iq3_s", 21, 256, 110), DType("iq2_s", 22, 256, 82),
        DType("i8", 24, 1, 1), DType("i16", 25, 1, 2), DType("f64", 28, 1, 8), DType("iq1_m", 29, 256, 56), DType("tq1_0", 34, 256, 54),
        DType("tq2_0", 35, 256, 66), DType("mxfp4", 39, 32, 17),
    )
}  # fmt: skip

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class Bytes(Protocol):
    """What a header is read from: a file."""

    n_bytes: int

    def read(self, offset: int, n_bytes: int, /) -> bytes: ...


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies. `shape` has axis 0 (the fastest) first; `offset` counts from the start of file `file_index`."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    offset: int
    n_bytes: int
    file_index: int = 0

    @property
    def n_elements(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def n_rows(self) -> int:
        """Product of axes 1 and up."""
        return self.n_elements // self.shape[0]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row (axis 0)."""
        return self.dtype.row_bytes(self.shape[0])

    def outputs(self, name: str, first: int, n: int) -> TensorInfo:
        """`n` outputs from `first` on, as a tensor of their own: rows of a matrix, elements of a vector of plain numbers."""
        is_matrix = len(self.shape) > 1
        unit = self.row_bytes if is_matrix else self.dtype.row_bytes(1)
        shape = (self.shape[0], n) if is_matrix else (n,)
        return TensorInfo(name, self.dtype, shape, self.offset + first * unit, n * unit, self.file_index)


@dataclass(frozen=True)
class Header:
    """All that precedes the tensor data of one file; `n_bytes` is where that data begins, padding included."""

    version: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    n_bytes: int


def shown(text: object, limit: int = 120) -> str:
    """A name from a file or a command line, fit for one line of a message."""
    plain = str(text)
    if len(plain) > limit:
        plain = plain[: limit - 1] + "…"
    return plain if plain.isprintable() else repr(plain)[1:-1]


def shown_path(path: object) -> str:
    """A path, whole unless it is absurdly long, fit for one line of a message."""
    return shown(path, 1000)


class _Cursor:
    """A position in the header that never passes the end of the file. `data` is what was read of it, from its beginning.

    `problems` None: what is wrong ends the reading.
    """

    def __init__(self, file: Bytes, file_name: str, problems: list[str] | None = None) -> None:
        self._file = file
        self.data = b""
        self.file_name = file_name
        self.position = 0
        self.n_file_bytes = file.n_bytes
        self.end = min(file.n_bytes, MAX_HEADER_BYTES)
        self._problems = problems

    def read_up_to(self, position: int) -> bytes:
        """Reads on, so that `data`, which this returns, reaches to a position within the file, or beyond it."""
        if position > len(self.data):
            n_bytes = max(position - len(self.data), min(_READ_BYTES + len(self.data), self.end - len(self.data)))
            self.data += self._file.read(len(self.data), n_bytes)
        return self.data

    def fail(self, what: str) -> NoReturn:
        raise self._error(what)

    def object_to(self, what: str, error: ModelFileError | None = None) -> None:
        """Something is wrong that one can read past."""
        error = error or self._error(what)
        if self._problems is None:
            raise error
        self._problems.append(str(error))

    def _error(self, what: str) -> ModelFileError:
        return ModelFileError(f"{self.file_name}: {what}; the file is damaged or not a GGUF model: fetch it again")

    def need(self, n_bytes: int, what: str) -> int:
        """Claims the next `n_bytes` and returns where they start."""
        start = self.position
        if n_bytes > self.end - start:
            self.fail(f"{what} at byte {start} takes {n_bytes} bytes, the header has at most {self.end - start} left")
        self.position = start + n_bytes
        self.read_up_to(self.position)
        return start

    def number(self, layout: struct.Struct, what: str) -> int:
        start = self.need(layout.size, what)
        return int(layout.unpack(self.data[start : self.position])[0])

    def count(self, minimum_bytes: int, what: str) -> int:
        """A u64 count of things of which each takes at least `minimum_bytes`."""
        value = self.number(_U64, what)
        if value * minimum_bytes > self.end - self.position:
            self.fail(f"{what} is {value}, for which {self.end - self.position} bytes are too few")
        return value

    def string(self, what: str, limit: int, may_be_bytes: bool = False) -> str:
        """UTF-8 text. Bytes that are none become escapes where one may read past them, or where they `may_be_bytes`."""
        length = self.count(1, f"the length of {what}")
        if length > limit:
            self.fail(f"{what} is {length} bytes long, expected at most {limit}")
        start = self.need(length, what)
        raw = self.data[start : self.position]
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError as error:
            if not may_be_bytes:
                self.object_to(f"{what} is not UTF-8 ({error.reason} at byte {start + error.start})")
            return str(raw, "utf-8", "backslashreplace")


def _read_strings(cursor: _Cursor, count: int, what: str, may_be_bytes: bool) -> list[str]:
    # The hot loop of a large vocabulary: locals only, one bounds check a string.
    data, end, unpack = cursor.data, cursor.end, _U64.unpack
    position, n_read = cursor.position, len(data)
    strings: list[str] = []
    try:
        for _ in range(count):
            start = position + 8
            if n_read < start <= end:
                data = cursor.read_up_to(start)
                n_read = len(data)
            position = start + unpack(data[position:start])[0]
            if position > n_read or position - start > MAX_STRING_BYTES:
                if position > end or position - start > MAX_STRING_BYTES:
                    cursor.fail(f"{what}[{len(strings)}] is {position - start} bytes long, {max(0, end - start)} are left")
                data = cursor.read_up_to(position)
                n_read = len(data)
            try:
                strings.append(str(data[start:position], "utf-8"))
            except UnicodeDecodeError as error:
                if not may_be_bytes:
                    cursor.object_to(f"{what}[{len(strings)}] is not UTF-8 ({error.reason} at byte {start + error.start})")
                strings.append(str(data[start:position], "utf-8", "backslashreplace"))
    except struct.error:
        cursor.fail(f"{what} ends after {len(strings)} of {count} strings")
    cursor.position = position
    return strings


def _read_array(cursor: _Cursor, what: str, depth: int, may_be_bytes: bool) -> list[Any]:
    kind = cursor.number(_U32, f"the element type of {what}")
    if kind not in _MIN_VALUE_BYTES:
        cursor.fail(f"{what} has the unknown element type {kind}")
    count = cursor.count(_MIN_VALUE_BYTES[kind], f"the length of {what}")
    if count > MAX_ARRAY_ELEMENTS:
        cursor.fail(f"{what} has {count} elements, expected at most {MAX_ARRAY_ELEMENTS}")
    if kind == _STRING:
        return _read_strings(cursor, count, what, may_be_bytes)
    if kind == _ARRAY:
        if depth >= MAX_ARRAY_DEPTH:
            cursor.fail(f"{what} nests arrays more than {MAX_ARRAY_DEPTH} deep")
        return [_read_array(cursor, what, depth + 1, may_be_bytes) for _ in range(count)]
    number = np.dtype(_NUMBERS[kind])
    start = cursor.need(count * number.itemsize, what)
    values = np.frombuffer(cursor.data[start : cursor.position], number)
    return list((values != 0).tolist() if kind == _BOOL else values.tolist())


def _read_value(cursor: _Cursor, key: str) -> Any:
    what = f"the key {shown(key)}"
    kind = cursor.number(_U32, f"the type of {what}")
    # What people write about a model decides nothing.
    may_be_bytes = key.startswith(("general.", "quantize.", "split.")) and key != "general.architecture"
    if kind == _STRING:
        return cursor.string(what, MAX_STRING_BYTES, may_be_bytes)
    if kind == _ARRAY:
        return _read_array(cursor, what, 1, may_be_bytes)
    if kind not in _NUMBERS:
        cursor.fail(f"{what} has the unknown value type {kind}")
    number = np.dtype(_NUMBERS[kind])
    start = cursor.need(number.itemsize, what)
    value = np.frombuffer(cursor.data[start : cursor.position], number)[0].item()
    return value != 0 if kind == _BOOL else value


def _read_metadata(cursor: _Cursor, n_keys: int, metadata: dict[str, Any]) -> None:
    for i in range(n_keys):
        key = cursor.string(f"the name of key {i} of {n_keys}", MAX_NAME_BYTES)
        if key in metadata:
            cursor.object_to(f"the key {shown(key)} appears twice")
        metadata[key] = _read_value(cursor, key)


def _tensor_type(cursor: _Cursor, name: str, type_id: int) -> DType:
    dtype = dtypes.BY_GGUF_ID.get(type_id)
    if dtype is None:
        known = ", ".join(known.name for known in dtypes.WEIGHT_TYPES)
        label = f" ({_OTHER_TYPES[type_id].name})" if type_id in _OTHER_TYPES else ""
        text = (
            f"{cursor.file_name}: tensor {shown(name)} has type {type_id}{label}, which numba_meta cannot read; expected one of {known}: "
            "take a file in another quantization"
        )
        cursor.object_to("", ModelFileError(text))
        dtype = _OTHER_TYPES.get(type_id, DType(f"type {type_id}", type_id, 1, 0))  # nobody knows how many bytes
    return dtype


def _read_tensor(cursor: _Cursor, i: int, n_tensors: int) -> TensorInfo | None:
    """Reads one description; its offset is still relative to the data. None for one that cannot be, where one may read past it."""
    name = cursor.string(f"the name of tensor {i} of {n_tensors}", MAX_NAME_BYTES)
    what = f"tensor {shown(name)}"
    n_axes = cursor.number(_U32, f"the axis count of {what}")
    if not 1 <= n_axes <= MAX_AXES:
        cursor.fail(f"{what} has {n_axes} axes, expected 1 to {MAX_AXES}")
    start = cursor.need(8 * n_axes, f"the shape of {what}")
    shape = struct.unpack(f"<{n_axes}Q", cursor.data[start : cursor.position])
    dtype = _tensor_type(cursor, name, cursor.number(_U32, f"the type of {what}"))
    offset = cursor.number(_U64, f"the offset of {what}")
    n_elements = math.prod(shape)
    if n_elements == 0 or n_elements >= 1 << 63:
        cursor.object_to(f"{what} has the shape {list(shape)}, expected between 1 and 2^63 - 1 elements")
        return None
    if shape[0] % dtype.block_size:
        cursor.object_to(f"{what} has rows of {shape[0]} elements, which do not fill blocks of {dtype} ({dtype.block_size} elements)")
        return None
    return TensorInfo(name, dtype, shape, offset, n_elements // dtype.block_size * dtype.block_bytes)


def _alignment(cursor: _Cursor, metadata: dict[str, Any]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_ALIGNMENT or value & (value - 1):
        cursor.object_to(f"general.alignment is {shown(value)}, expected a power of two up to {MAX_ALIGNMENT}")
        return DEFAULT_ALIGNMENT
    return value


def _place(cursor: _Cursor, tensors: list[TensorInfo], data_start: int, alignment: int, file_index: int) -> dict[str, TensorInfo]:
    """Makes offsets absolute; every tensor must lie inside the file, aligned, on top of no other one."""
    n_file_bytes = cursor.n_file_bytes
    placed: dict[str, TensorInfo] = {}
    previous: TensorInfo | None = None
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        start, end = data_start + tensor.offset, data_start + tensor.offset + tensor.n_bytes
        what = f"tensor {shown(tensor.name)}"
        if tensor.offset % alignment:
            cursor.object_to(f"{what} lies at offset {tensor.offset}, expected a multiple of {alignment}")
        if end > n_file_bytes:
            cursor.object_to(f"{what} lies in bytes {start} to {end}, the file has {n_file_bytes}")
        if previous is not None and start < previous.offset + previous.n_bytes:
            previous_end = previous.offset + previous.n_bytes
            cursor.object_to(f"{what} at byte {start} overlaps tensor {shown(previous.name)}, which ends at {previous_end}")
        previous = TensorInfo(tensor.name, tensor.dtype, tensor.shape, start, tensor.n_bytes, file_index)
        placed[tensor.name] = previous
    return {tensor.name: placed[tensor.name] for tensor in tensors}


def _check_preamble(cursor: _Cursor) -> int:
    """Checks magic and version; returns the version."""
    if cursor.n_file_bytes < 24:
        cursor.fail(f"the file has {cursor.n_file_bytes} bytes, a GGUF header takes at least 24")
    start = cursor.need(4, "the magic")
    magic = bytes(cursor.data[start : cursor.position])
    if magic != MAGIC:
        cursor.fail(f"the file begins with {magic!r}, expected {MAGIC!r}")
    version = cursor.number(_U32, "the version")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        found = "big-endian" if swapped else f"version {version}"
        raise ModelFileError(f"{cursor.file_name}: GGUF of {found}, expected little-endian version 2 or 3: convert the file anew")
    return version


def read_header(file: Bytes, file_name: str, file_index: int = 0, problems: list[str] | None = None) -> Header:
    """Reads and checks the header at the start of a file.

    `file_name` is named in every error (`ModelFileError`, one line); `file_index` goes into the tensors. With `problems` what is wrong is
    noted there, and the header holds what could be read; only a file that is no GGUF at all is an error then.
    """
    cursor = _Cursor(file, file_name, problems)
    version = _check_preamble(cursor)
    metadata: dict[str, Any] = {}
    tensors: dict[str, TensorInfo] = {}
    alignment = DEFAULT_ALIGNMENT
    try:
        n_tensors = cursor.count(_MIN_TENSOR_BYTES, "the tensor count")
        _read_metadata(cursor, cursor.count(_MIN_KEY_BYTES, "the key count"), metadata)
        alignment = _alignment(cursor, metadata)
        for i in range(n_tensors):
            tensor = _read_tensor(cursor, i, n_tensors)
            if tensor is not None and tensor.name in tensors:
                cursor.object_to(f"the tensor {shown(tensor.name)} appears twice")
            if tensor is not None:
                tensors[tensor.name] = tensor
    except ModelFileError as error:
        if problems is None:
            raise
        problems.append(str(error))  # nobody knows where the next entry would begin
    data_start = -(-cursor.position // alignment) * alignment
    return Header(version, metadata, _place(cursor, list(tensors.values()), data_start, alignment, file_index), data_start)
