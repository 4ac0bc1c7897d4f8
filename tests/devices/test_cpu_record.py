"""Events and asynchronous copies between the streams of a step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from numba_meta.devices.cpu import CpuDevice
from numba_meta.devices.cpu_record import CpuRecorder, Rows
from numba_meta.devices.cpu_stream import CpuEvent, CpuStep, CpuStream
from numba_meta.devices.parse import DeviceSpec
from numba_meta.errors import DeviceError, NumbaMetaError
from numba_meta.kernels.cpu.kernel import Int, Ptr, cpu_kernel
from numba_meta.kernels.cpu.program import atomic_load, yield_core
from numba_meta.kernels.cpu.simd import load_i64, store_i64

Pair = tuple[CpuDevice, CpuStream, CpuStream]


@cpu_kernel
def add_words(thread, n_threads, x: Ptr, y: Ptr, n: Int):
    """y[i] += x[i]"""
    for i in range(n * thread // n_threads, n * (thread + 1) // n_threads):
        store_i64(y + 8 * i, load_i64(y + 8 * i) + load_i64(x + 8 * i))


@cpu_kernel
def look_for(thread, n_threads, place: Ptr, value: Int, seen: Ptr):
    """Looks at a word until it has a value, for some seconds at most; seen[thread] = 1 if it came."""
    for _ in range(5_000_000):
        if atomic_load(place) == value:
            store_i64(seen + 8 * thread, 1)
            return
        yield_core()


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A device with a compute stream of two threads and a transfer stream."""
    with CpuDevice(DeviceSpec("cpu", 0), "cpu:0", 2) as device:
        yield device, device.stream(caller_joins=True), device.stream("transfer", n_threads=1)


def test_a_copy_runs_while_another_stream_computes(pair: Pair) -> None:
    """The copy may begin only when the computation runs, which ends only when it has seen the last word of the copy."""
    device, compute_stream, transfer_stream = pair
    host = np.arange(1, 4097, dtype=np.int64)
    slot, seen, began = device.allocate(host.nbytes, "slot"), np.zeros(2, np.int64), CpuEvent("began")
    compute, transfer = CpuRecorder(compute_stream), CpuRecorder(transfer_stream)
    compute.record(began)
    compute.call(look_for, place=slot.address + host.nbytes - 8, value=4096, seen=seen)
    transfer.wait(began)
    transfer.copy_2d(Rows(host.view(np.uint8), 0, 1 << 12), Rows(slot.data, 0, 1 << 12), width=1 << 12, height=8)
    step = CpuStep([compute_stream, transfer_stream], [compute.program(), transfer.program()])
    for _ in range(20):
        slot.data[:] = 0
        seen[:] = 0
        step.run()
        assert seen.tolist() == [1, 1]
        np.testing.assert_array_equal(slot.data.view(np.int64), host)


def test_a_ring_of_deliveries(pair: Pair) -> None:
    """Two slots, eight deliveries: a reader waits for `ready`, an overwriting copy for `release`. Poisoned before every step."""
    device, compute_stream, transfer_stream = pair
    n_words, n_splits, n_slots = 512, 8, 2
    host = np.random.default_rng(1).integers(0, 1000, (n_splits, n_words))
    slots = [device.allocate(8 * n_words, "ring") for _ in range(n_slots)]
    ready, release = [CpuEvent(f"ready {i}") for i in range(n_slots)], [CpuEvent(f"release {i}") for i in range(n_slots)]
    compute, transfer = CpuRecorder(compute_stream), CpuRecorder(transfer_stream)
    total = np.zeros(n_words, np.int64)
    for split in range(n_splits):
        at = split % n_slots
        if split >= n_slots:
            transfer.wait(release[at])
        transfer.copy_2d(Rows(host[split].view(np.uint8), 0, 1024), Rows(slots[at].data, 0, 1024), width=1024, height=n_words // 128)
        transfer.record(ready[at])
        compute.wait(ready[at])
        compute.call(add_words, x=slots[at].address, y=total, n=n_words)
        compute.record(release[at])
    assert [event.n_records for event in ready + release] == [4] * 4
    step = CpuStep([compute_stream, transfer_stream], [compute.program(), transfer.program()])
    for n_steps in range(1, 101):
        for slot in slots:
            slot.data[:] = 0xFF
        step.run()
        np.testing.assert_array_equal(total, n_steps * host.sum(axis=0))


@given(st.data())
def test_strided_copies(data: st.DataObject) -> None:
    width, height = data.draw(st.integers(0, 200)), data.draw(st.integers(0, 9))
    pitches = [data.draw(st.integers(width, width + 70)) for _ in range(2)]
    offsets = [data.draw(st.integers(0, 40)) for _ in range(2)]
    sizes = [offset + height * pitch + data.draw(st.integers(0, 5)) for offset, pitch in zip(offsets, pitches, strict=True)]
    source, target = (np.random.default_rng(i).integers(0, 256, size, dtype=np.uint8) for i, size in enumerate(sizes))
    expected = target.copy()
    for row in range(height):
        at, to = offsets[0] + row * pitches[0], offsets[1] + row * pitches[1]
        expected[to : to + width] = source[at : at + width]
    recorder = CpuRecorder(STREAM)
    recorder.copy_2d(Rows(source, offsets[0], pitches[0]), Rows(target, offsets[1], pitches[1]), width, height)
    CpuStep([STREAM], [recorder.program()]).run()
    np.testing.assert_array_equal(target, expected)


STREAM = CpuStream("copies", 1, caller_joins=True)  # no thread of its own


@pytest.mark.parametrize(
    ("rows", "width", "height", "words"),
    [
        (Rows(np.zeros(99, np.uint8), 0, 10), 10, 10, "copies: source of 10 x 10 bytes, 10 apart, ends at 100; expected at most 99"),
        (Rows(np.zeros(99, np.uint8), 90, 10), 10, 1, "ends at 100"),
        (Rows(np.zeros(99, np.uint8), 0, 9), 10, 2, "9 apart, from 0; expected rows that do not overlap"),
        (Rows(np.zeros(99, np.uint8), -1, 10), 10, 2, "from -1"),
        (Rows(np.zeros(99, np.uint8), 0, 10), -1, 2, "2 x -1 bytes"),
        (Rows(np.zeros(99, np.int32), 0, 10), 1, 1, r"source is int32 \[99\]; expected contiguous uint8"),
        (Rows(np.zeros((9, 9), np.uint8), 0, 9), 9, 9, r"source is uint8 \[9, 9\]"),
        (Rows(np.zeros(99, np.uint8)[::2], 0, 9), 9, 1, "expected contiguous"),
    ],
)
def test_copies_out_of_bounds(rows: Rows, width: int, height: int, words: str) -> None:
    recorder = CpuRecorder(STREAM)
    with pytest.raises(DeviceError, match=words):
        recorder.copy_2d(rows, Rows(np.zeros(1000, np.uint8), 0, 10), width, height)
    with pytest.raises(DeviceError, match=words.replace("source", "destination")):
        recorder.copy_2d(Rows(np.zeros(1000, np.uint8), 0, 10), rows, width, height)
    assert len(recorder.program().calls) == 0


def test_a_wait_that_would_never_end(pair: Pair) -> None:
    _, compute_stream, transfer_stream = pair
    compute, transfer, event = CpuRecorder(compute_stream), CpuRecorder(transfer_stream), CpuEvent("late")
    with pytest.raises(DeviceError, match="cpu:0 compute would wait for event late, which is not recorded yet"):
        compute.wait(event)
    transfer.record(event)
    compute.wait(event)
    with pytest.raises(DeviceError, match="event late is recorded 0 times in this step and 1 times in all"):
        CpuStep([compute_stream], [compute.program()])
    CpuStep([compute_stream, transfer_stream], [compute.program(), transfer.program()]).run()
    assert event.word[0] == 1


def test_arguments_are_checked_when_recorded() -> None:
    with pytest.raises(NumbaMetaError, match="kernel add_words: arguments"):
        CpuRecorder(STREAM).call(add_words, x=1, y=2)


def test_barriers_stand_where_another_thread_could_be_behind() -> None:
    recorder, event = CpuRecorder(STREAM), CpuEvent("e")
    x = np.zeros(1, np.int64)
    recorder.call(add_words, barrier=False, x=x, y=x, n=0)
    recorder.record(event)
    recorder.wait(event)
    recorder.call(add_words, barrier=False, x=x, y=x, n=0)
    recorder.call(add_words, barrier=False, x=x, y=x, n=0)
    assert recorder.program().calls[:, 2].tolist() == [0, 1, 0, 1, 0]
