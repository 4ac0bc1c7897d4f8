"""Compiled threads walk programs: every call by every thread, in order where there are barriers, over one team or several."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from numba_meta.devices.cpu_record import CpuRecorder
from numba_meta.devices.cpu_stream import CpuStep, CpuStream
from numba_meta.kernels.cpu import program
from numba_meta.kernels.cpu.kernel import Int, Ptr, cpu_kernel
from numba_meta.kernels.cpu.simd import load_i64, store_i64

N = 24  # words of the data that threads share


@cpu_kernel
def count_call(thread, n_threads, counts: Ptr):
    """Each thread counts in a word of its own."""
    store_i64(counts + 8 * thread, load_i64(counts + 8 * thread) + 1)


@cpu_kernel
def pass_on(thread, n_threads, source: Ptr, target: Ptr, n: Int):
    """target[i] = 3 * source[i + 1] + i, cyclic: a thread reads what another one wrote."""
    for i in range(n * thread // n_threads, n * (thread + 1) // n_threads):
        store_i64(target + 8 * i, 3 * load_i64(source + 8 * ((i + 1) % n)) + i)


@cpu_kernel
def sum_parts(thread, n_threads, parts: Ptr, n_parts: Int, out: Ptr, n: Int):
    """out[i] = the sum over all parts, plus 1."""
    for i in range(n * thread // n_threads, n * (thread + 1) // n_threads):
        total = 1
        for part in range(n_parts):
            total += load_i64(load_i64(parts + 8 * part) + 8 * i)
        store_i64(out + 8 * i, total)


Streams = Callable[..., list[CpuStream]]


@pytest.fixture
def streams() -> Iterator[Streams]:
    """Makes streams of the given numbers of threads; the caller joins the first."""
    made: list[CpuStream] = []

    def make(*n_threads: int) -> list[CpuStream]:
        made.extend(CpuStream(f"team {i}", n, caller_joins=i == 0) for i, n in enumerate(n_threads))
        return made

    yield make
    for stream in made:
        stream.close()


def passed_on(values: np.ndarray, times: int) -> np.ndarray:
    for _ in range(times):
        values = 3 * np.roll(values, -1) + np.arange(N)
    return values


@pytest.mark.parametrize("n_threads", [1, 2, 3, 4])
def test_every_thread_makes_every_call(streams: Streams, n_threads: int) -> None:
    (stream,) = streams(n_threads)
    counts = np.zeros(8, np.int64)
    recorder = CpuRecorder(stream)
    for i in range(5):
        recorder.call(count_call, barrier=i % 2 == 0, counts=counts)
    step = CpuStep([stream], [recorder.program()])
    for _ in range(7):
        step.run()
    assert counts.tolist() == [35] * n_threads + [0] * (8 - n_threads)


@pytest.mark.parametrize("n_threads", [1, 2, 3, 7])
def test_barriers_order_dependent_calls(streams: Streams, n_threads: int) -> None:
    """Also with more threads than cores, and more than this machine may have."""
    (stream,) = streams(n_threads)
    some, others = np.arange(N, dtype=np.int64), np.full(N, -99, np.int64)
    recorder = CpuRecorder(stream)
    for _ in range(10):
        recorder.call(pass_on, source=some, target=others, n=N)
        recorder.call(pass_on, source=others, target=some, n=N)
    step = CpuStep([stream], [recorder.program()])
    for _ in range(150):
        expected = passed_on(some, 20)
        step.run()
        np.testing.assert_array_equal(some, expected)


@pytest.mark.parametrize("n_threads", [(1, 1), (2, 1, 1), (2, 2, 3)])
def test_teams_meet(streams: Streams, n_threads: tuple[int, ...]) -> None:
    """Each team writes its part, all meet, each reads all parts, all meet, and again: a reduction."""
    teams = streams(*n_threads)
    parts = [np.full(N, i, np.int64) for i in range(len(teams))]
    sums = [np.full(N, -1, np.int64) for _ in teams]
    addresses = np.array([part.ctypes.data for part in parts], np.int64)
    counter = np.zeros(8, np.int64)
    programs = []
    for team, part, total in zip(teams, parts, sums, strict=True):
        recorder = CpuRecorder(team)
        for _ in range(4):
            recorder.call(pass_on, source=total, target=part, n=N)
            recorder.call(program.meet, barrier=False, counter=counter, total=sum(n_threads))
            recorder.call(sum_parts, barrier=False, parts=addresses, n_parts=len(parts), out=total, n=N)
            recorder.call(program.meet, barrier=False, counter=counter, total=sum(n_threads))
        programs.append(recorder.program())
    step = CpuStep(teams, programs)
    expected = np.full(N, -1, np.int64)
    for _ in range(100):
        step.run()
        for _ in range(4):
            expected = len(teams) * passed_on(expected, 1) + 1
        for total in sums:
            np.testing.assert_array_equal(total, expected)
    assert counter[0] == 100 * 8 * sum(n_threads)


def test_programs_of_different_length_take_turns(streams: Streams) -> None:
    """A stream runs whichever program its step gives it; a team that a step leaves out stays as it was."""
    first, second = streams(2, 2)
    counts = np.zeros((2, 8), np.int64)
    recorders = [CpuRecorder(stream) for stream in (first, second)]
    for recorder, row in zip(recorders, counts, strict=True):
        recorder.call(count_call, counts=row)
    alone = CpuStep([first], [recorders[0].program()])
    recorders[0].call(count_call, counts=counts[0])
    both = CpuStep([first, second], [recorder.program() for recorder in recorders])
    nothing = CpuStep([first, second], [CpuRecorder(first).program(), CpuRecorder(second).program()])
    for _ in range(50):
        for step in (alone, both, alone, nothing):
            step.run()
    assert counts[:, :2].tolist() == [[200, 200], [50, 50]]
    for stream, n_steps in ((first, 200), (second, 100)):
        control = stream._team.control
        assert [int(control[word]) for word in (program.GENERATION, program.FINISHED)] == [n_steps, 2 * n_steps]
        assert control[program.ARRIVED] % 2 == 0


def test_sleepers_wake_up(streams: Streams) -> None:
    teams = streams(2, 2)
    counts = np.zeros((2, 8), np.int64)
    programs = []
    for team, row in zip(teams, counts, strict=True):
        recorder = CpuRecorder(team)
        recorder.call(count_call, counts=row)
        programs.append(recorder.program())
    step = CpuStep(teams, programs)
    for n_steps in range(1, 4):
        step.run()
        assert counts[:, :2].tolist() == [[n_steps] * 2] * 2
        wait_until_asleep(teams, [1, 2])


def wait_until_asleep(teams: list[CpuStream], n_sleepers: list[int]) -> None:
    deadline = time.monotonic() + 60
    while [int(team._team.control[program.SLEEPING]) for team in teams] != n_sleepers:
        assert time.monotonic() < deadline, "threads do not go to sleep"
        time.sleep(0.01)


def test_ten_thousand_steps_take_no_memory(streams: Streams) -> None:
    teams = streams(2, 1)
    counts = np.zeros((2, 8), np.int64)
    programs = []
    for team, row in zip(teams, counts, strict=True):
        recorder = CpuRecorder(team)
        recorder.call(count_call, counts=row)
        programs.append(recorder.program())
    step = CpuStep(teams, programs)
    for _ in range(100):
        step.run()
    threads, blocks, resident = threading.active_count(), sys.getallocatedblocks(), resident_bytes()
    for _ in range(10_000):
        step.run()
    assert counts[0, 0] == counts[1, 0] == 10_100
    assert threading.active_count() == threads
    assert sys.getallocatedblocks() - blocks < 100
    assert resident_bytes() - resident < 1 << 20


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
