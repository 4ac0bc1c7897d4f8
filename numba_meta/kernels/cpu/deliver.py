"""Deliveries of a host-resident KV cache: cells to a device's slot, new rows back to the host. They pace themselves to a simulated link."""

from __future__ import annotations

from numba_meta.kernels.cpu.clock import clock_ns, wait_for_time
from numba_meta.kernels.cpu.copy import copy_bytes
from numba_meta.kernels.cpu.kernel import Int, Ptr, cpu_kernel
from numba_meta.kernels.cpu.simd import load_i32, load_i64
from numba_meta.kernels.cpu.simd_math import device_function, share


@device_function
def _link_time(n_bytes, bytes_per_second):  # type: ignore[no-untyped-def]
    """Nanoseconds that a link takes; 0 where none is simulated."""
    return n_bytes * 1_000_000_000 // bytes_per_second if bytes_per_second > 0 else 0


@cpu_kernel
def deliver_windows(  # type: ignore[no-untyped-def]
    thread, n_threads, source: Ptr, stream_bytes: Int, cell_bytes: Int, destination: Ptr, width: Int, streams: Ptr, n_streams: Ptr,
    n_cells: Ptr, bytes_per_second: Int, delay_ns: Int,
):  # fmt: skip
    """Copies the first `*n_cells` cells of `*n_streams` streams (their numbers: int32 at `streams`), packed one after the other.

    In the host a stream steps `stream_bytes`, a cell `cell_bytes`, of which a device takes `width` bytes from `source` on; at `destination`
    cells lie `width` bytes apart. Threads share the cells. Reads and writes width * cells * streams bytes, none of them before `delay_ns`
    have passed: who does not wait for a late copy must not find its bytes.
    """
    begin = clock_ns()
    wait_for_time(begin + delay_ns)
    cells, count = load_i64(n_cells), load_i64(n_streams)
    total = cells * count
    item, end = share(total, thread, n_threads), share(total, thread + 1, n_threads)
    while item < end:
        rank = item // cells
        first = item - rank * cells
        n = min(cells - first, end - item)
        start = source + load_i32(streams + 4 * rank) * stream_bytes + first * cell_bytes
        target = destination + item * width
        if width == cell_bytes:
            copy_bytes(start, target, n * width)
        else:
            for i in range(n):
                copy_bytes(start + i * cell_bytes, target + i * width, width)
        item += n
    wait_for_time(begin + delay_ns + _link_time(total * width, bytes_per_second))


@cpu_kernel
def write_back(  # type: ignore[no-untyped-def]
    thread, n_threads, slot: Ptr, width: Int, slot_cells: Ptr, host: Ptr, cell_bytes: Int, cells: Ptr, n_rows: Ptr, bytes_per_second: Int,
    delay_ns: Int,
):  # fmt: skip
    """Copies this step's rows from their cells in the slot to their cells in the host cache: `width` bytes each. -1: not stored.

    Nothing is read before `delay_ns` have passed: a slot that is filled again too early must not still hold the rows.
    """
    begin = clock_ns()
    wait_for_time(begin + delay_ns)
    n = load_i64(n_rows)
    for r in range(share(n, thread, n_threads), share(n, thread + 1, n_threads)):
        cell = load_i32(cells + 4 * r)
        if cell >= 0:
            copy_bytes(slot + load_i32(slot_cells + 4 * r) * width, host + cell * cell_bytes, width)
    wait_for_time(begin + delay_ns + _link_time(n * width, bytes_per_second))
