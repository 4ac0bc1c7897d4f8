"""Deliveries of a host-resident KV cache by kernels: windows that are packed on the way, new rows back to the host.

The host's memory must be pinned and mapped. The copy engine moves plain ranges faster and needs no multiprocessor; these serve what it
cannot: many short runs in one launch, cells that the device itself looks up. A real link needs no simulated speed or delay, so the CPU
twins' `bytes_per_second` and `delay_ns` are missing here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from numba_meta.kernels.cuda.copy import copy_bytes
from numba_meta.kernels.cuda.device import (
    cuda,
    device_function,
    load_i32,
    load_i64,
    load_u8,
    load_v2,
    load_v4,
    start_next_kernel,
    store_i32,
    store_u8,
    store_v4,
    wait_for_previous_kernel,
)
from numba_meta.kernels.cuda.kernel import CudaKernel, Gpu, Int, Launch, Ptr, cuda_kernel

THREADS = 256
BLOCKS_PER_MULTIPROCESSOR = 2  # enough to fill a link, and it leaves room for kernels that compute meanwhile


def _blocks_that_stay(arguments: Mapping[str, Any], n_rows: int, gpu: Gpu) -> Launch:
    return Launch((BLOCKS_PER_MULTIPROCESSOR * gpu.n_multiprocessors, 1, 1), (THREADS, 1, 1))


@device_function
def _place_of(unit, unit_bytes, run_units, cells, source, stream_bytes, cell_bytes, streams):  # type: ignore[no-untyped-def]
    """The source of a unit of the packed window. A run: one cell's bytes for this device."""
    run = unit // run_units
    rank = run // cells
    start = source + load_i32(streams + 4 * rank) * stream_bytes + (run - rank * cells) * cell_bytes
    return start + (unit - run * run_units) * unit_bytes


@cuda_kernel(launch=_blocks_that_stay, max_threads=THREADS)
def deliver_windows(  # type: ignore[no-untyped-def]
    source: Ptr, stream_bytes: Int, cell_bytes: Int, destination: Ptr, width: Int, streams: Ptr, n_streams: Ptr, n_cells: Ptr
):
    """Copies the first `*n_cells` cells of `*n_streams` streams (their numbers: int32 at `streams`), packed one after the other.

    In the source a stream steps `stream_bytes`, a cell `cell_bytes`, of which this device takes `width` bytes from `source` on; at
    `destination` cells lie `width` bytes apart. All threads share the packed window: 16, 8, 4 or 1 bytes at a time, as everything is a
    multiple of them. Reads and writes width * cells * streams bytes.
    """
    start_next_kernel()
    wait_for_previous_kernel()
    cells, count = load_i64(n_cells), load_i64(n_streams)
    total = cells * count * width
    places = source | stream_bytes | cell_bytes | destination | width
    unit, step = np.int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x, np.int64(cuda.gridDim.x) * cuda.blockDim.x
    if places & 15 == 0:
        while unit + step < total >> 4:  # two on their way at once
            a = load_v4(_place_of(unit, 16, width >> 4, cells, source, stream_bytes, cell_bytes, streams))
            b = load_v4(_place_of(unit + step, 16, width >> 4, cells, source, stream_bytes, cell_bytes, streams))
            store_v4(destination + 16 * unit, a[0], a[1], a[2], a[3])
            store_v4(destination + 16 * (unit + step), b[0], b[1], b[2], b[3])
            unit += 2 * step
        if unit < total >> 4:
            a = load_v4(_place_of(unit, 16, width >> 4, cells, source, stream_bytes, cell_bytes, streams))
            store_v4(destination + 16 * unit, a[0], a[1], a[2], a[3])
    elif places & 7 == 0:
        while unit < total >> 3:
            v = load_v2(_place_of(unit, 8, width >> 3, cells, source, stream_bytes, cell_bytes, streams))
            store_i32(destination + 8 * unit, v[0])
            store_i32(destination + 8 * unit + 4, v[1])
            unit += step
    elif places & 3 == 0:
        while unit < total >> 2:
            place = _place_of(unit, 4, width >> 2, cells, source, stream_bytes, cell_bytes, streams)
            store_i32(destination + 4 * unit, load_i32(place))
            unit += step
    else:
        while unit < total:
            store_u8(destination + unit, load_u8(_place_of(unit, 1, width, cells, source, stream_bytes, cell_bytes, streams)))
            unit += step


def _block_per_row(arguments: Mapping[str, Any], n_rows: int, gpu: Gpu) -> Launch:
    return Launch((n_rows, 1, 1), (max(32, min(THREADS, -(-arguments["width"] // 512) * 32)), 1, 1))


@cuda_kernel(launch=_block_per_row, max_threads=THREADS)
def write_back(slot: Ptr, width: Int, slot_cells: Ptr, host: Ptr, cell_bytes: Int, cells: Ptr, n_rows: Ptr):  # type: ignore[no-untyped-def]
    """Copies this step's rows from their cells in the slot to their cells in the host cache: `width` bytes each. -1: not stored.

    A block copies a row.
    """
    start_next_kernel()
    wait_for_previous_kernel()
    row = np.int64(cuda.blockIdx.x)
    if row < load_i64(n_rows):
        cell = load_i32(cells + 4 * row)
        if cell >= 0:
            source, target = slot + load_i32(slot_cells + 4 * row) * width, host + cell * cell_bytes
            copy_bytes(source, target, width, slot | width | host | cell_bytes, np.int64(cuda.threadIdx.x), np.int64(cuda.blockDim.x))


def all_kernels() -> list[CudaKernel]:
    """Every kernel of this module."""
    return [deliver_windows, write_back]
