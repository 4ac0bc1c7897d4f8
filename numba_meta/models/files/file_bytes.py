"""Bytes of a model file, read into memory of our own: a mapping would end the process where the file shrinks, without a word."""

from __future__ import annotations

import os
import stat
import weakref
from pathlib import Path

import numpy as np
import numpy.typing as npt

from numba_meta.errors import ModelFileError
from numba_meta.interrupts import held_back
from numba_meta.models.files.gguf_header import shown_path


class FileBytes:
    """An open file of `n_bytes`; its descriptor goes with it. Raises `ModelFileError` for what is no regular file, or empty."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with held_back():
                self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe ends in a message, not in a wait
                self._close = weakref.finalize(self, os.close, self._descriptor)
        except OSError as error:
            raise ModelFileError(f"{shown_path(path)}: cannot be opened: {error.strerror or error}; expected a GGUF model file") from None
        except ValueError as error:  # a null byte in the path
            raise ModelFileError(f"{shown_path(path)}: not a file name: {error}") from None
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ModelFileError(f"{shown_path(path)}: not a regular file; expected a GGUF model file")
        if status.st_size == 0:
            raise ModelFileError(f"{shown_path(path)}: the file is empty; expected a GGUF model: fetch it again")
        self.n_bytes = status.st_size

    def read(self, offset: int, n_bytes: int) -> bytes:
        """A copy of some bytes."""
        out = bytearray(n_bytes)
        self.read_into(offset, out)
        return bytes(out)

    def read_into(self, offset: int, out: bytearray | npt.NDArray[np.uint8]) -> None:
        """Fills `out`, contiguous, with the bytes from `offset` on. Raises `ModelFileError` where they are not there any more."""
        left = memoryview(out)  # type: ignore[arg-type]
        while left.nbytes:
            try:
                n_read = os.preadv(self._descriptor, [left], offset)
            except OSError as error:
                raise ModelFileError(f"{shown_path(self.path)}: cannot be read at byte {offset}: {error.strerror or error}") from None
            if n_read == 0:
                raise ModelFileError(
                    f"{shown_path(self.path)}: ends before byte {offset + left.nbytes}, it had {self.n_bytes} bytes when it was opened: "
                    "something changes it; load it again when it is complete"
                )
            left, offset = left[n_read:], offset + n_read

    def close(self) -> None:
        """Twice is once."""
        self._close()
