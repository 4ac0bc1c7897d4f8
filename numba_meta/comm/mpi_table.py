"""What compiled code needs of MPI: addresses of its C functions and its handles, as a table of int64 words (`kernels/cpu/mpi.py`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from numba_meta.comm.errors import MpiError, RankError
from numba_meta.comm.mpi_world import MpiWorld
from numba_meta.kernels.cpu import mpi as words

LARGE_BYTES = 32 << 10  # of one summand, three ranks and more: from here each rank sums its own slice. Both ways give the same bits
_STATUS_BYTES = 256  # more than an MPI_Status of any MPI
_MAX_COUNT = (1 << 31) - 1  # MPI counts in C ints
_FUNCTIONS = {
    words.SEND_RECV: "MPI_Sendrecv",
    words.ALL_GATHER: "MPI_Allgather",
    words.ALL_TO_ALL_V: "MPI_Alltoallv",
    words.ALL_GATHER_V: "MPI_Allgatherv",
    words.ALL_REDUCE: "MPI_Allreduce",
}


class MpiTable:
    """The table of one MPI communicator. Keep it alive as long as recordings use `address`; `check` it after every step.

    Steps that use it run one at a time on one thread (MPI is initialized as SERIALIZED).
    """

    all_reduce = words.mpi_all_reduce
    gather_columns = words.mpi_gather_columns

    def __init__(self, world: MpiWorld, *, pairwise: bool = False, large_bytes: int = LARGE_BYTES) -> None:
        if pairwise and world.size != 2:
            raise RankError(f"pairwise reductions need 2 ranks, not {world.size}")
        self.rank, self.size = world.rank, world.size
        self._mpi = mpi = world.mpi
        self._communicator = world.communicator  # alive as long as the handle is used
        self._status = np.zeros(_STATUS_BYTES // 8, np.int64)
        self._counts = np.zeros((4, world.size), np.int32)
        self.large_bytes = large_bytes
        self.words = np.zeros(words.N_WORDS // 8, np.int64)
        library = ctypes.CDLL(mpi.__file__)
        for word, name in _FUNCTIONS.items():
            self._set(word, ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0)
        for word, handle in ((words.COMMUNICATOR, self._communicator), (words.FLOAT, mpi.FLOAT), (words.SUM, mpi.SUM)):
            self._set(word, _as_int64(mpi._handleof(handle)))
        self._set(words.IN_PLACE, _as_int64(int(mpi.IN_PLACE)))
        self._set(words.STATUS, self._status.ctypes.data)
        self._set(words.COUNTS, self._counts.ctypes.data)
        self._set(words.RANK, world.rank)
        self._set(words.SIZE, world.size)
        self._set(words.PAIRWISE, int(pairwise))
        self._set(words.LARGE_BYTES, large_bytes)

    def _set(self, word: int, value: int) -> None:
        self.words[word // 8] = value

    @property
    def address(self) -> int:
        return int(self.words.ctypes.data)

    def check(self) -> None:
        """Raises `MpiError` where an MPI function failed in compiled code since the table was made. One look at one word."""
        code = int(self.words[words.ERROR // 8])
        if code:
            raise mpi_error(self._mpi, _FUNCTIONS[int(self.words[words.ERROR_CALL // 8])], code)

    def reduce_scratch_bytes(self, n_elements: int) -> int:
        """Scratch for `mpi_all_reduce` of up to `n_elements` (columns times rows). Raises `RankError` for more than MPI counts."""
        _check_count("a reduction", n_elements)
        gathered = min(n_elements, self.large_bytes // 4) * self.size  # small: all summands
        return 4 * (n_elements + max(gathered, n_elements + self.size))

    def gather_scratch_bytes(self, widths: Sequence[int], n_rows: int) -> int:
        """Scratch for `mpi_gather_columns` of up to `n_rows`. Raises `RankError` for more elements than MPI counts."""
        _check_count("a gather", n_rows * sum(widths))
        return 4 * n_rows * (sum(widths) + widths[self.rank])


def mpi_error(mpi: Any, function: str, code: int) -> MpiError:
    """The error of an MPI function that returned `code`."""
    return MpiError(f"{function} failed: {' '.join(str(mpi.Get_error_string(code)).split())}")


def _check_count(what: str, n_elements: int) -> None:
    if n_elements > _MAX_COUNT:
        raise RankError(f"{what} of {n_elements} elements over ranks; expected at most {_MAX_COUNT}: use a smaller ubatch size")


def _as_int64(value: int) -> int:
    """A handle as a signed word: pointers keep their bits."""
    return value - (1 << 64) if value >= 1 << 63 else value
