"""Reductions and gathers over the ranks of one host: every rank's GPU reads the others' buffers, which the driver has mapped here.

A launch goes in rounds. In each a block copies its share of the rank's summand into the rank's buffer, tells the same block of every other
rank that it has, waits for theirs, and reads all shares. Blocks wait for nobody but their namesakes, so there is no barrier over a grid;
how many there are depends on nothing that differs between ranks. Sums go in rank order at every size: all ranks get the same bits.

Rounds are counted in the table, by the kernels themselves: a recorded step may run again and again. A buffer has two halves, used in turns:
who is told that a rank has begun round k + 1 knows that it has read all of round k - 1, so that half is free for round k + 1.

A table of int64 words in device memory (made by `comm/ipc.py`) says where everything lies. Who waits looks at an abort word of the host and
at a clock; after either, the first reason is kept and nobody waits any more: the step runs to its end with garbage, and Python raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from numba_meta.errors import DeviceError
from numba_meta.kernels.cuda.device import (
    cuda,
    device_function,
    load_acquire_system,
    load_i64,
    load_v4_f32,
    nanoseconds,
    start_next_kernel,
    store_i64,
    store_release_system,
    store_v4_f32,
    types,
    wait_for_previous_kernel,
)
from numba_meta.kernels.cuda.kernel import CudaKernel, Gpu, Int, Launch, Ptr, cuda_kernel
from numba_meta.kernels.cuda.lanes import load_4, store_4
from numba_meta.kernels.cuda.norm import sum_4

THREADS = 256
MAX_BLOCKS = 64
UNIT_BYTES = 16  # 4 float32: what a thread takes at a time; a row begins with a new unit
MAX_RANKS = 64

(
    RANK, SIZE,
    HALF_UNITS,  # units of one half of a buffer
    SPLIT_UNITS,  # three ranks and more: from here each adds its own part of a share, and parts travel once more
    LIMIT_NS,  # how long a thread waits
    ABORT, ERROR,  # addresses of words in the host's memory: not 0: nobody waits; why somebody did not wait longer
    FAILED,  # as the word at ERROR, here
    ROUNDS,  # int64 [MAX_BLOCKS]: how many rounds were begun; the same everywhere between launches
) = (8 * i for i in range(9))  # fmt: skip
PEERS = ROUNDS + 8 * MAX_BLOCKS  # int64 [size, 2]: addresses of every rank's buffer and flags
ABORTED, LATE = 1, 2  # the low byte of an error; above it the rank that was waited for


def table_bytes(size: int) -> int:
    """Bytes of the table of a world of `size` ranks."""
    return PEERS + 16 * size


def flag_bytes(size: int) -> int:
    """Bytes of a rank's flags, int64 `[block, rank]`: how far each rank's blocks have come."""
    return 8 * MAX_BLOCKS * size


@device_function
def _buffer_of(table, rank):  # type: ignore[no-untyped-def]
    return load_i64(table + PEERS + 16 * rank)


@device_function
def _wait_for(table, flag, step, rank):  # type: ignore[no-untyped-def]
    """Until `rank` has come to a step, or for as long as this makes sense."""
    begin, looks = nanoseconds(), np.int64(0)
    while load_acquire_system(flag) < step:
        looks += 1
        if looks & 127 == 0:  # the abort word lies behind the bus
            if load_acquire_system(table + FAILED) != 0:
                return
            reason = np.int64(0)
            if load_acquire_system(load_i64(table + ABORT)) != 0:
                reason = np.int64(ABORTED)
            elif nanoseconds() - begin > load_i64(table + LIMIT_NS):
                reason = np.int64(LATE)
            if reason != 0:
                store_release_system(table + FAILED, reason | rank << 8)
                store_release_system(load_i64(table + ERROR), reason | rank << 8)
                return


@device_function
def _meet(table, step):  # type: ignore[no-untyped-def]
    """This block and those of its number on all ranks come to a step: what they wrote before is visible to all of them afterwards."""
    cuda.syncthreads()
    size, own, rank = load_i64(table + SIZE), load_i64(table + RANK), np.int64(cuda.threadIdx.x)
    if rank < size and rank != own:
        row = 8 * size * np.int64(cuda.blockIdx.x)
        store_release_system(load_i64(table + PEERS + 16 * rank + 8) + row + 8 * own, step)
        _wait_for(table, load_i64(table + PEERS + 16 * own + 8) + row + 8 * rank, step, rank)
    cuda.syncthreads()


@device_function
def _count_rounds(table, n):  # type: ignore[no-untyped-def]
    """Every word is kept by one block of this launch, which alone reads it in this launch if it reads it at all."""
    i = np.int64(cuda.blockIdx.x) + np.int64(cuda.gridDim.x) * cuda.threadIdx.x
    while i < MAX_BLOCKS:
        store_i64(table + ROUNDS + 8 * i, n)
        i += np.int64(cuda.gridDim.x) * cuda.blockDim.x


@device_function
def _quotient(a, b):  # type: ignore[no-untyped-def]
    """a // b of counts below 2**32 (units of 16 bytes): a division of 64 bits is a call."""
    return np.int64(np.uint32(a) // np.uint32(b))


@device_function
def _row_of(unit, per_row, rows):  # type: ignore[no-untyped-def]
    """In which of several rows a unit lies."""
    row = np.int64(0)
    if rows > 1:  # a division takes as long as a load
        row = _quotient(unit, per_row)
    return row


@device_function
def _sum_unit(buffers, size, at):  # type: ignore[no-untyped-def]
    """((rank 0's + rank 1's) + rank 2's) ... of the unit at a place of all buffers."""
    a = load_v4_f32(buffers[0] + at)
    for rank in range(1, size):
        a = sum_4(a, load_v4_f32(buffers[rank] + at))
    return a


def _launch_for(units: int) -> Launch:
    return Launch((max(1, min(MAX_BLOCKS, -(-units // THREADS))), 1, 1), (THREADS, 1, 1))


def _blocks_of_sums(arguments: Mapping[str, Any], n_rows: int, gpu: Gpu) -> Launch:
    n, strides = arguments["n"], {arguments["part_stride"], arguments["out_stride"]}
    if n_rows > 1 and strides != {4 * n}:
        raise DeviceError(f"ipc_all_reduce: rows of {n} float32 that are {sorted(strides)} bytes apart; expected rows without gaps")
    return _launch_for(-(-n * n_rows // 4))


@cuda_kernel(launch=_blocks_of_sums, max_threads=THREADS)
def ipc_all_reduce(  # type: ignore[no-untyped-def]
    table: Ptr, part: Ptr, part_stride: Int, out: Ptr, out_stride: Int, scratch: Ptr, n: Int, n_rows: Ptr
):
    """out = the sum of all ranks' parts in rank order: float32 rows of n without gaps (strides are 4 n bytes); out may be part.

    n and the row count (int64 at `n_rows`) are the same on all ranks. `scratch` is not used: the ranks' buffers are.
    """
    start_next_kernel()
    wait_for_previous_kernel()
    block, n_blocks = np.int64(cuda.blockIdx.x), np.int64(cuda.gridDim.x)
    thread, n_threads = np.int64(cuda.threadIdx.x), np.int64(cuda.blockDim.x)
    size, rank, half = load_i64(table + SIZE), load_i64(table + RANK), load_i64(table + HALF_UNITS)
    n_elements = n * load_i64(n_rows)
    total = n_elements + 3 >> 2
    share = min(_quotient(half, n_blocks), _quotient(total + n_blocks - 1, n_blocks))
    part_of_share = _quotient(share + size - 1, size)
    is_split = size > 2 and total >= load_i64(table + SPLIT_UNITS)
    buffers = cuda.shared.array(MAX_RANKS, types.int64)  # there before the first sum: blocks meet in between
    if thread < size:
        buffers[thread] = _buffer_of(table, thread)
    own = _buffer_of(table, rank)
    round_, begin = load_i64(table + ROUNDS + 8 * block), np.int64(0)
    while begin < total:
        place = 16 * ((round_ & 1) * half + block * share)
        first = begin + block * share
        count = max(np.int64(0), min(share, total - first))
        unit = thread
        while unit < count:
            i = 4 * (first + unit)
            a = load_4(part + 4 * i, n_elements - i, part & 15 == 0)
            store_v4_f32(own + place + 16 * unit, a[0], a[1], a[2], a[3])
            unit += n_threads
        _meet(table, 2 * round_ + 1)
        if is_split:
            unit, last = rank * part_of_share + thread, min(count, (rank + 1) * part_of_share)
            while unit < last:
                a = _sum_unit(buffers, size, place + 16 * unit)
                store_v4_f32(own + place + 16 * unit, a[0], a[1], a[2], a[3])
                unit += n_threads
            _meet(table, 2 * round_ + 2)
        unit = thread
        while unit < count:
            i = 4 * (first + unit)
            if is_split:
                a = load_v4_f32(buffers[_quotient(unit, part_of_share)] + place + 16 * unit)
            else:
                a = _sum_unit(buffers, size, place + 16 * unit)
            store_4(out + 4 * i, a, n_elements - i, out & 15 == 0)
            unit += n_threads
        round_ += 1
        begin += share * n_blocks
    if total > 0:
        _count_rounds(table, round_)


def _blocks_of_gathers(arguments: Mapping[str, Any], n_rows: int, gpu: Gpu) -> Launch:
    # The widths lie in device memory; a row of the output is the same on all ranks.
    return _launch_for(-(-arguments["out_stride"] // UNIT_BYTES) * n_rows)


@cuda_kernel(launch=_blocks_of_gathers, max_threads=THREADS)
def ipc_gather_columns(  # type: ignore[no-untyped-def]
    table: Ptr, part: Ptr, part_stride: Int, widths: Ptr, out: Ptr, out_stride: Int, scratch: Ptr, n_rows: Ptr
):
    """Rows of all ranks' parts side by side in rank order. `widths` int64 `[size]`: float32 elements of each rank's rows (0: nothing).

    Part and out must not overlap. `scratch` is not used: the ranks' buffers are.
    """
    start_next_kernel()
    wait_for_previous_kernel()
    block, n_blocks = np.int64(cuda.blockIdx.x), np.int64(cuda.gridDim.x)
    thread, n_threads = np.int64(cuda.threadIdx.x), np.int64(cuda.blockDim.x)
    size, rank, half, rows = load_i64(table + SIZE), load_i64(table + RANK), load_i64(table + HALF_UNITS), load_i64(n_rows)
    total = np.int64(0)  # units of the largest part
    for other in range(size):
        total = max(total, (load_i64(widths + 8 * other) + 3 >> 2) * rows)
    share = min(_quotient(half, n_blocks), _quotient(total + n_blocks - 1, n_blocks))
    is_aligned = (part | part_stride) & 15 == 0
    own, own_width = _buffer_of(table, rank), load_i64(widths + 8 * rank)
    round_, begin = load_i64(table + ROUNDS + 8 * block), np.int64(0)
    while begin < total:
        place = 16 * ((round_ & 1) * half + block * share)
        first = begin + block * share
        per_row = own_width + 3 >> 2
        count = min(share, per_row * rows - first)
        unit = thread
        while unit < count:
            row = _row_of(first + unit, per_row, rows)
            i = 4 * (first + unit - row * per_row)
            a = load_4(part + row * part_stride + 4 * i, own_width - i, is_aligned)
            store_v4_f32(own + place + 16 * unit, a[0], a[1], a[2], a[3])
            unit += n_threads
        _meet(table, 2 * round_ + 1)
        column = out
        for other in range(size):
            width, source = load_i64(widths + 8 * other), _buffer_of(table, other) + place
            per_row = width + 3 >> 2
            count = min(share, per_row * rows - first)
            is_out_aligned = (column | out_stride) & 15 == 0
            unit = thread
            while unit < count:
                row = _row_of(first + unit, per_row, rows)
                i = 4 * (first + unit - row * per_row)
                store_4(column + row * out_stride + 4 * i, load_v4_f32(source + 16 * unit), width - i, is_out_aligned)
                unit += n_threads
            column += 4 * width
        round_ += 1
        begin += share * n_blocks
    if total > 0:
        _count_rounds(table, round_)


def all_kernels() -> list[CudaKernel]:
    """Every kernel of this module."""
    return [ipc_all_reduce, ipc_gather_columns]
