"""Deliveries and rows that go back, byte by byte; and that a link and a delay hold their bytes up."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from kernels.cpu.guarded import FILL, Guarded, live, same_for_threads

from numba_meta.kernels.cpu.deliver import deliver_windows, write_back

N_STREAMS, N_CELLS = 4, 12  # in the host


@pytest.mark.parametrize("streams", [[0], [3], [2, 0], [1, 3, 2, 0], []])
@pytest.mark.parametrize("n_cells", [0, 1, 7, 12])
@pytest.mark.parametrize(("start", "width", "cell"), [(0, 136, 136), (68, 68, 136), (34, 34, 102), (0, 1, 5), (64, 128, 256)])
def test_deliver_windows(start: int, width: int, cell: int, n_cells: int, streams: list[int]) -> None:
    """The first cells of each stream, a device's heads of each, packed; whatever lies behind stays."""
    host = np.random.default_rng().integers(0, 256, (N_STREAMS, N_CELLS, cell), dtype=np.uint8)

    def run(threads: int) -> np.ndarray:
        slot = Guarded(N_STREAMS * N_CELLS, width, np.uint8, gap=0)
        deliver_windows(
            threads=threads, source=host.ctypes.data + start, stream_bytes=N_CELLS * cell, cell_bytes=cell, destination=slot.address,
            width=width, streams=np.array([*streams, -1], np.int32), n_streams=live(len(streams)), n_cells=live(n_cells),
            bytes_per_second=0, delay_ns=0,
        )  # fmt: skip
        return slot.result()

    got, n = same_for_threads(run), len(streams) * n_cells
    np.testing.assert_array_equal(got[:n], host[streams, :n_cells, start : start + width].reshape(n, width))
    assert (got[n:] == FILL).all()


@pytest.mark.parametrize("n_live", [0, 1, 5])
@pytest.mark.parametrize(("start", "width", "cell"), [(0, 136, 136), (68, 68, 136), (0, 1, 5)])
def test_write_back(start: int, width: int, cell: int, n_live: int) -> None:
    """Rows to their cells in the host, a device's heads alone; rows of no cell and those beyond the live ones are left out."""
    slot = np.random.default_rng().integers(0, 255, (N_CELLS, width), dtype=np.uint8)
    slot_cells, cells = np.array([3, 0, 11, 4, 5], np.int32), np.array([7, -1, 2, 40, 0], np.int32)

    def run(threads: int) -> np.ndarray:
        host = np.full((N_STREAMS * N_CELLS, cell), FILL, np.uint8)
        write_back(
            threads=threads, slot=slot, width=width, slot_cells=slot_cells, host=host.ctypes.data + start, cell_bytes=cell, cells=cells,
            n_rows=live(n_live), bytes_per_second=0, delay_ns=0,
        )  # fmt: skip
        return host

    wanted = np.full((N_STREAMS * N_CELLS, cell), FILL, np.uint8)
    for row in range(n_live):
        if cells[row] >= 0:
            wanted[cells[row], start : start + width] = slot[slot_cells[row]]
    np.testing.assert_array_equal(same_for_threads(run), wanted)


def test_late_bytes_come_late_and_a_link_takes_its_time() -> None:
    """Nothing is written before the delay has passed; a delivery ends after its delay and its bytes at the link's speed."""
    host, slot = np.zeros((1, 10, 100), np.uint8), np.full((10, 100), FILL, np.uint8)
    seen: list[bool] = []

    def deliver(delay_ns: int, bytes_per_second: int) -> float:
        begin = time.monotonic()
        deliver_windows(
            threads=1, source=host.ctypes.data, stream_bytes=1000, cell_bytes=100, destination=slot.ctypes.data, width=100,
            streams=np.zeros(1, np.int32), n_streams=live(1), n_cells=live(10), bytes_per_second=bytes_per_second, delay_ns=delay_ns,
        )  # fmt: skip
        return time.monotonic() - begin

    def look() -> None:
        begin = time.monotonic()
        is_clean = bool((slot == FILL).all())
        if time.monotonic() - started < 0.1 and begin >= started:  # else this thread was held up too long to tell
            seen.append(is_clean)

    deliver(0, 0)  # compiled now
    slot[:] = FILL
    started = time.monotonic()
    timer = threading.Timer(0.05, look)
    timer.start()
    assert deliver(150_000_000, 10_000) >= 0.15 + 0.1
    timer.join()
    assert all(seen) and (slot == 0).all()
    assert deliver(0, 50_000) >= 0.02
