"""Rows in memory that is filled with garbage around them, in the host's memory (simulator) or a GPU's, at multiples of 16 bytes or of 4."""

from __future__ import annotations

from typing import Any

import numpy as np

FILL = 0xFF  # NaN in every float type, -1 in int32
EDGE = 64  # bytes that are watched before and behind the rows


class Placed:
    """Values `[rows, n]`, a row every `stride` bytes from `address` on. Not aligned: both are multiples of 4 alone."""

    def __init__(self, values: np.ndarray, aligned: bool = True, gpu: Any = None) -> None:
        n_rows, n = values.shape
        width = n * values.itemsize
        self.stride = -(-width // 16) * 16 + 16 if aligned else -(-width // 16) * 16 + 4
        start = EDGE if aligned else EDGE + 4
        raw = np.full(EDGE + start + n_rows * self.stride + EDGE, FILL, np.uint8)
        first = -raw.ctypes.data % EDGE
        self._memory = raw[first : first + start + n_rows * self.stride + EDGE]
        self._places = np.zeros((n_rows, n), values.dtype), start
        self._rows(self._memory)[:] = values
        self._outside = np.ones(self._memory.size, bool)
        for row in range(n_rows):
            self._outside[start + row * self.stride : start + row * self.stride + width] = False
        self._buffer = gpu.upload(self._memory) if gpu else None
        self.address = (self._buffer.address if gpu else self._memory.ctypes.data) + start

    @classmethod
    def poisoned(cls, shape: tuple[int, int], aligned: bool = True, gpu: Any = None, dtype: Any = np.float32) -> Placed:
        """Rows of NaN (or -1)."""
        return cls(np.full(shape[0] * shape[1] * np.dtype(dtype).itemsize, FILL, np.uint8).view(dtype).reshape(shape), aligned, gpu)

    def _rows(self, memory: np.ndarray) -> np.ndarray:
        like, start = self._places
        return np.ndarray(like.shape, like.dtype, memory.data, start, (self.stride, like.itemsize))

    def result(self) -> np.ndarray:
        """A copy of the rows; fails if a byte around them was written."""
        memory = self._buffer.download(np.uint8, self._memory.shape) if self._buffer else self._memory
        assert np.all(memory[self._outside] == FILL), "a kernel wrote outside its rows"
        return self._rows(memory).copy()
