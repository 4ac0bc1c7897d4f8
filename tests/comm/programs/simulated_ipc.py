"""Ranks as processes whose GPUs are simulated and whose device memory is a file that all of them map: the kernels of `ipc`, block by block.

`simulated_ipc.py FOLDER SIZE CASE RANK`: leaves what it computed in `result.RANK.npz`. A simulated thread takes about a millisecond.
"""

from __future__ import annotations

import mmap
import sys
import time
from pathlib import Path

import numpy as np
from ipc_cases import CASES, Case, case_part
from numba import cuda

from numba_meta.kernels.cuda import ipc as words

THREADS = 8
folder, size, name, rank = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])


def map_shared(other: int, n_bytes: int) -> np.ndarray:
    """The memory of a rank, made by whoever comes first."""
    with (folder / f"memory.{other}").open("a+b") as file:
        file.truncate(n_bytes)
        return np.frombuffer(mmap.mmap(file.fileno(), n_bytes), np.int64)


class Rank:
    """The memory of one rank, and its table."""

    def __init__(self, case: Case) -> None:
        half = words.UNIT_BYTES * case.half_units
        n_bytes = 2 * half + words.flag_bytes(size)
        self.shared = [map_shared(other, n_bytes) for other in range(size)]
        self.host = np.zeros(2, np.int64)  # abort, error
        self.table = np.zeros(words.table_bytes(size) // 8, np.int64)
        for word, value in {
            words.RANK: rank, words.SIZE: size, words.HALF_UNITS: case.half_units, words.SPLIT_UNITS: case.split_units,
            words.LIMIT_NS: int(case.limit_seconds * 1e9), words.ABORT: self.host.ctypes.data, words.ERROR: self.host.ctypes.data + 8,
        }.items():  # fmt: skip
            self.table[word // 8] = value
        self.table[words.PEERS // 8 :: 2] = [each.ctypes.data for each in self.shared]
        self.table[words.PEERS // 8 + 1 :: 2] = [each.ctypes.data + 2 * half for each in self.shared]


def main() -> None:
    case = CASES[name]
    own = Rank(case)
    results, seconds = [], []
    for index, call in enumerate(case.calls):
        part = case_part(call, rank, index)
        live = np.array([call.live], np.int64)
        out = part if call.in_place else np.full((call.rows, call.n_out(size) + call.gap), np.nan, np.float32)
        arguments = {
            "table": own.table.ctypes.data, "part": part.ctypes.data, "part_stride": part.strides[0], "out": out.ctypes.data,
            "out_stride": out.strides[0], "scratch": 0, "n_rows": live.ctypes.data,
        }  # fmt: skip
        widths = np.array(call.widths[:size], np.int64)
        kernel = words.ipc_gather_columns if call.widths else words.ipc_all_reduce
        arguments |= {"widths": widths.ctypes.data} if call.widths else {"n": call.n}
        kernel.pack(**arguments)  # that they fit
        if case.aborts_after and index == case.aborts_after:
            own.host[0] = 1
        if rank in case.absent_in.get(index, ()):
            continue
        begin = time.monotonic()
        cuda.jit(kernel.function)[(call.blocks, 1, 1), (THREADS, 1, 1)](*(arguments[each] for each in kernel.parameters))
        seconds.append(time.monotonic() - begin)
        results.append(out.copy())
    rounds = own.table[words.ROUNDS // 8 : words.PEERS // 8]
    np.savez(folder / f"result.{rank}.npz", *results, seconds=seconds, error=own.host[1], rounds=rounds)


main()
