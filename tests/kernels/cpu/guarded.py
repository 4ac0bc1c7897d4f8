"""Rows in memory that is filled with garbage around them: what a kernel must not read into its results, and must not overwrite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

FILL = 0xFF  # NaN in every float type, -1 in int32


class Guarded:
    """`rows` x `n` elements, a row every `stride` bytes, at an address that is a multiple of 4 alone; bytes around the rows are watched."""

    def __init__(self, rows: int, n: int, dtype: Any = np.float32, gap: int = 12) -> None:
        item = np.dtype(dtype).itemsize
        self.stride = n * item + gap
        self.memory = np.full(64 + 4 + rows * self.stride + 64, FILL, np.uint8)
        start = -self.memory.ctypes.data % 64 + 4
        self.array = np.ndarray((rows, n), dtype, self.memory.data, start, (self.stride, item))
        self.address = self.memory.ctypes.data + start
        self._outside = np.ones(self.memory.size, bool)
        for row in range(rows):
            self._outside[start + row * self.stride : start + row * self.stride + n * item] = False

    @classmethod
    def of(cls, values: np.ndarray, gap: int = 12) -> Guarded:
        """Guarded rows that hold these values, `[rows, n]`."""
        made = cls(*values.shape, dtype=values.dtype, gap=gap)
        made.array[:] = values
        return made

    def result(self) -> np.ndarray:
        """A copy of the rows; fails if a byte around them was written."""
        assert np.all(self.memory[self._outside] == FILL), "a kernel wrote outside its rows"
        return self.array.copy()


def live(n: int) -> np.ndarray:
    """The row count as kernels read it."""
    return np.array([n], np.int64)


def same_for_threads(run: Callable[[int], np.ndarray], counts: tuple[int, ...] = (1, 2, 5)) -> np.ndarray:
    """The result of `run(threads)`; fails unless it has the same bytes for every number of threads."""
    results = [run(count) for count in counts]
    for other in results[1:]:
        assert other.tobytes() == results[0].tobytes()
    return results[0]
