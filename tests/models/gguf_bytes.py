"""GGUF files made by hand, byte by byte, and the one line in which reading a bad one ends."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from numba_meta.errors import ModelFileError
from numba_meta.models.files.gguf import read_gguf

U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10


def text(value: str | bytes) -> bytes:
    encoded = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(encoded)) + encoded


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str | bytes, shape: tuple[int, ...], type_id: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, type_id, offset)


ARCHITECTURE = key("general.architecture", STRING, text("llama"))


def build(
    keys: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    n_data: int = 4096,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_keys: int | None = None,
    n_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A GGUF file made by hand, so that any part of it can be wrong."""
    keys = [ARCHITECTURE] if keys is None else keys
    tensors = [tensor("a", (8, 4), 0, 0)] if tensors is None else tensors
    head = magic + struct.pack("<IQQ", version, len(tensors) if n_tensors is None else n_tensors, len(keys) if n_keys is None else n_keys)
    head += b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + bytes(range(256)) * (n_data // 256) + bytes(n_data % 256)


def failure(path: Path) -> str:
    """The one line in which reading `path` ends."""
    with pytest.raises(ModelFileError) as error:
        read_gguf(path)
    message = str(error.value)
    assert "\n" not in message and path.name in message
    return message


def failure_of_any(path: Path) -> str:
    with pytest.raises(ModelFileError) as error:
        read_gguf(path)
    assert "\n" not in str(error.value)
    return str(error.value)
