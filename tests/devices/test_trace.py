"""Times of a step's calls: all of them, in order, true to the clock; and nothing is noted in the steps around."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from numba_meta.devices.cpu_record import CpuRecorder, Rows
from numba_meta.devices.cpu_stream import CpuEvent, CpuStep, CpuStream
from numba_meta.errors import DeviceError
from numba_meta.kernels.cpu import program
from numba_meta.kernels.cpu.clock import clock_ns, wait_for_time
from numba_meta.kernels.cpu.kernel import Int, Ptr, cpu_kernel
from numba_meta.kernels.cpu.simd import load_i64, store_i64

MS = 1_000_000


@cpu_kernel
def stay(thread, n_threads, ns: Int, who: Int, counts: Ptr):
    """Thread `who` takes so long; all count."""
    if thread == who:
        wait_for_time(clock_ns() + ns)
    store_i64(counts + 64 * thread, load_i64(counts + 64 * thread) + 1)


class Staying:
    """Two streams of two threads: each stays three times, the second between an event and its end."""

    def __init__(self) -> None:
        self.streams = [CpuStream("first", 2, caller_joins=True), CpuStream("second", 2, caller_joins=False)]
        self.counts = np.zeros((2, 16), np.int64)
        self.event = CpuEvent("half")
        first, second = (CpuRecorder(stream) for stream in self.streams)
        first.call(stay, mark="a", ns=2 * MS, who=0, counts=self.counts[0])
        first.record(self.event, mark="half")
        first.call(stay, mark="b", ns=3 * MS, who=1, counts=self.counts[0])
        first.call(stay, mark="c", ns=0, who=0, counts=self.counts[0])
        second.wait(self.event, mark="waits for half")
        second.call(stay, mark="d", ns=MS, who=0, counts=self.counts[1])
        self.step = CpuStep(self.streams, [first.program(), second.program()])

    def close(self) -> None:
        for stream in self.streams:
            stream.close()


@pytest.fixture
def staying() -> Iterator[Staying]:
    one = Staying()
    one.step.run()
    yield one
    one.close()


def test_every_call_has_its_time_in_order(staying: Staying) -> None:
    before = time.monotonic_ns()
    noted = staying.step.run_noting_times()
    after = time.monotonic_ns()
    assert [each.stream for each in noted] == ["first", "second"]
    assert [each.marks for each in noted] == [("a", "half", "b", "c"), ("waits for half", "d")]
    for each in noted:
        moments = [before, each.whole[0], *each.times.ravel().tolist(), each.whole[1], after]
        assert moments == sorted(moments)
        assert each.times.shape == (len(each.marks), 2)
    assert staying.counts[:, ::8].tolist() == [[6, 6], [2, 2]]  # computed as ever


def test_a_call_takes_as_long_as_its_first_thread(staying: Staying) -> None:
    first, second = staying.step.run_noting_times()
    took = dict(zip(first.marks + second.marks, np.concatenate([first.times, second.times]) @ [-1, 1], strict=True))
    assert took["a"] >= 2 * MS and took["d"] >= MS


def test_a_wait_for_other_threads_is_a_gap(staying: Staying) -> None:
    first, _ = staying.step.run_noting_times()
    begins, ends = first.times[:, 0], first.times[:, 1]
    assert begins[3] - ends[1] >= 3 * MS  # c begins when the other thread has left b, which it may enter after `half`


def test_a_wait_for_an_event_is_seen(staying: Staying) -> None:
    first, second = staying.step.run_noting_times()
    assert second.times[0, 1] >= first.times[1, 0]  # not over before the event was recorded
    assert second.times[1, 0] >= second.times[0, 1]


def test_nothing_is_noted_in_the_steps_around(staying: Staying) -> None:
    noted = staying.step.run_noting_times()
    kept = [each.times.copy() for each in noted]
    for _ in range(3):
        staying.step.run()
    for each, times in zip(noted, kept, strict=True):
        np.testing.assert_array_equal(each.times, times)
    assert [stream._team.control[program.TIMES] for stream in staying.streams] == [0, 0]
    again = staying.step.run_noting_times()
    assert all(new.times.min() > old.times.max() for new, old in zip(again, noted, strict=True))


def test_another_step_of_the_same_streams_is_not_noted(staying: Staying) -> None:
    first, second = (CpuRecorder(stream) for stream in staying.streams)
    for _ in range(20):  # longer than the other program: it would write beyond what was noted
        first.call(stay, ns=0, who=0, counts=staying.counts[0])
        second.call(stay, ns=0, who=0, counts=staying.counts[1])
    other = CpuStep(staying.streams, [first.program(), second.program()])
    noted = staying.step.run_noting_times()
    kept = [each.times.copy() for each in noted]
    other.run()
    assert [len(each.times) for each in other.run_noting_times()] == [20, 20]
    for each, times in zip(noted, kept, strict=True):
        np.testing.assert_array_equal(each.times, times)


def test_callers_take_turns(staying: Staying) -> None:
    """Some note, some do not: each gets the times of its own step."""
    with ThreadPoolExecutor(4) as pool:
        results = [pool.submit(staying.step.run_noting_times if i % 2 else staying.step.run) for i in range(8)]
        noted = sorted((result.result() for result in results[1::2]), key=lambda streams: streams[0].whole)
    for earlier, later in zip(noted, noted[1:], strict=False):
        assert max(each.whole[1] for each in earlier) < min(each.whole[0] for each in later)


def test_a_stream_that_was_closed(staying: Staying) -> None:
    staying.streams[1].close()
    with pytest.raises(DeviceError, match="second: the stream was closed"):
        staying.step.run_noting_times()
    assert not staying.step._teams[:, program.TEAM_WORDS - 1].any()


def test_copies_and_unmarked_calls() -> None:
    stream = CpuStream("copies", 1, caller_joins=True)
    recorder = CpuRecorder(stream)
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    recorder.copy_2d(Rows(source, 0, 8), Rows(target, 0, 8), width=8, height=8, mark="copy")
    recorder.call(stay, ns=0, who=0, counts=np.zeros(8, np.int64))
    (noted,) = CpuStep([stream], [recorder.program()]).run_noting_times()
    stream.close()
    assert noted.marks == ("copy", None)
    np.testing.assert_array_equal(source, target)
