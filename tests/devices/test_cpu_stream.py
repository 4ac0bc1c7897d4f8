"""The life of streams: several callers, interrupts, forks, ends in every order. Nothing hangs, no step is run by half."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from numba_meta.devices.cpu_record import CpuRecorder
from numba_meta.devices.cpu_stream import CpuStep, CpuStream
from numba_meta.errors import DeviceError
from numba_meta.kernels.cpu.kernel import Ptr, cpu_kernel
from numba_meta.kernels.cpu.program import wait_event
from numba_meta.kernels.cpu.simd import load_i64, store_i64


@cpu_kernel
def count_step(thread, n_threads, counts: Ptr):
    """counts[8 * thread] += 1, in small parts that a second caller would tear."""
    value = load_i64(counts + 64 * thread)
    for _ in range(200):
        store_i64(counts + 64 * thread, load_i64(counts + 64 * thread) + 1)
    store_i64(counts + 64 * thread, value + 1)


class Counted:
    """A step of two streams, two threads each, that counts its runs; with a gate it waits until the test opens it."""

    def __init__(self, gate: bool = False) -> None:
        self.streams = [CpuStream("first", 2, caller_joins=True), CpuStream("second", 2, caller_joins=False)]
        self.counts = np.zeros((2, 16), np.int64)
        self.gate = np.zeros(8, np.int64)
        programs = []
        for stream, counts in zip(self.streams, self.counts, strict=True):
            recorder = CpuRecorder(stream)
            recorder.call(count_step, counts=counts)
            if gate:
                recorder.call(wait_event, event=self.gate, n_records=1)
            recorder.call(count_step, counts=counts)
            programs.append(recorder.program())
        self.step = CpuStep(self.streams, programs)

    def n_runs(self) -> list[float]:
        """Runs that each of the four threads has counted; a half is a step by half."""
        return [float(n) / 2 for n in self.counts[:, ::8].ravel()]

    def close(self) -> None:
        for stream in self.streams:
            stream.close()


@pytest.fixture
def counted() -> Iterator[Counted]:
    one = Counted()
    yield one
    one.close()


@pytest.fixture
def gated() -> Iterator[Counted]:
    one = Counted(gate=True)
    yield one
    one.gate[0] = 1
    one.close()


def wait_until_begun(gated: Counted) -> None:
    deadline = time.monotonic() + 60
    while gated.n_runs() != [0.5] * 4:
        assert time.monotonic() < deadline, "the step does not begin"
        time.sleep(0.001)


def test_callers_of_one_step_take_turns(counted: Counted) -> None:
    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(lambda: [counted.step.run() for _ in range(100)]) for _ in range(3)]:
            done.result(timeout=60)
    assert counted.n_runs() == [300] * 4


def test_two_models_run_from_two_threads(counted: Counted) -> None:
    other = Counted()
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(lambda one=one: [one.step.run() for _ in range(200)]) for one in (counted, other)]:
            done.result(timeout=60)
    assert counted.n_runs() == other.n_runs() == [200] * 4
    other.close()


@pytest.mark.parametrize("which", [0, 1])
def test_close_waits_for_the_step_that_runs(gated: Counted, which: int) -> None:
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(gated.step.run)
        wait_until_begun(gated)
        closing = pool.submit(gated.streams[which].close)
        time.sleep(0.05)
        assert not closing.done() and not running.done()
        gated.gate[0] = 1
        closing.result(timeout=60)
        running.result(timeout=60)
    assert gated.n_runs() == [1] * 4
    with pytest.raises(DeviceError, match="the stream was closed; nothing can run on it"):
        gated.step.run()
    assert gated.n_runs() == [1] * 4


def test_close_twice_and_before_any_step() -> None:
    before = threading.enumerate()
    one = Counted()
    assert threading.enumerate() == before  # threads come with the first step
    one.close()
    one.close()
    assert repr(one.streams[0]) == "<stream first: 2 threads, closed>"
    with pytest.raises(DeviceError, match="first: the stream was closed"):
        one.step.run()
    assert threading.enumerate() == before


def test_a_forgotten_stream_ends_its_threads() -> None:
    before = set(threading.enumerate())  # of which others may end meanwhile
    one = Counted()
    one.step.run()
    own = set(threading.enumerate()) - before
    assert len(own) == 3
    del one
    gc.collect()
    assert not own & set(threading.enumerate())


def test_ctrl_c_waits_for_the_end_of_the_step(gated: Counted) -> None:
    def interrupt() -> None:
        wait_until_begun(gated)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        gated.gate[0] = 1

    helper = threading.Thread(target=interrupt)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        gated.step.run()
    helper.join()
    assert gated.n_runs() == [1] * 4
    gated.step.run()
    assert gated.n_runs() == [2] * 4


def test_a_handler_that_closes_during_a_step(gated: Counted) -> None:
    """The step ends whole, then the call says that the stream is closed."""
    previous = signal.signal(signal.SIGUSR1, lambda *_: gated.close())

    def send() -> None:
        wait_until_begun(gated)
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.05)
        gated.gate[0] = 1

    helper = threading.Thread(target=send)
    helper.start()
    try:
        with pytest.raises(DeviceError, match="was closed"):
            gated.step.run()
    finally:
        signal.signal(signal.SIGUSR1, previous)
        helper.join()
    assert gated.n_runs() == [1] * 4


def test_a_system_without_more_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    before, start = threading.enumerate(), threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "many-2":
            raise RuntimeError("can't start new thread")
        start(thread)

    stream = CpuStream("many", 4, caller_joins=True)
    step = CpuStep([stream], [CpuRecorder(stream).program()])
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(DeviceError, match="many: the system refused thread 2 of 4; use fewer .threads, --threads."):
        step.run()
    assert threading.enumerate() == before
    monkeypatch.undo()
    step.run()  # the next step starts them again
    assert [thread.name for thread in threading.enumerate() if thread not in before] == ["many-1", "many-2", "many-3"]
    stream.close()
    assert threading.enumerate() == before
    with pytest.raises(DeviceError, match="many: the stream was closed"):
        step.run()


def test_streams_that_do_not_fit_together(counted: Counted) -> None:
    first, second = counted.streams
    empty = CpuRecorder(first).program()
    other = CpuStream("other", 1, caller_joins=True)
    for streams in ([], [first, first], [first, second, CpuStream("third", 1, False)]):
        with pytest.raises(DeviceError, match="expected different streams, a program for each"):
            CpuStep(streams, [empty] * 2)
    for streams in ([second, first], [first, other]):
        with pytest.raises(DeviceError, match="expected the caller to join the first one and no other"):
            CpuStep(streams, [empty] * 2)
    with pytest.raises(DeviceError, match="second runs with first; it cannot run with other too"):
        CpuStep([other, second], [empty] * 2)


# ---- processes -------------------------------------------------------------------------------------------------------------------------

PROGRAM = """
import os, sys, threading, time
sys.path[:0] = [{folder!r}]
from test_cpu_stream import Counted, wait_until_begun
from numba_meta.errors import DeviceError
"""


def run_alone(code: str) -> str:
    """What a fresh interpreter prints; it must end by itself, with status 0."""
    code = PROGRAM.format(folder=os.path.dirname(__file__)) + code
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("pause", [0, 0.3])
def test_the_interpreter_ends_with_open_streams(pause: float) -> None:
    """With threads that look for work, and with threads that sleep."""
    assert run_alone(f"one = Counted(); one.step.run(); time.sleep({pause}); print(one.n_runs())") == "[1.0, 1.0, 1.0, 1.0]\n"


FORK = """
import warnings
warnings.simplefilter("ignore")  # newer versions of Python warn of any fork with threads
one = Counted()
one.step.run()
child = os.fork()
for _ in range(20):
    one.step.run()
os.write(1, f"{'child' if child == 0 else 'parent'} {one.n_runs()}\\n".encode())  # at once: both write to one pipe
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    one.step.run()
one.close()
os.write(1, f"{threading.active_count()}\\n".encode())
"""


def test_a_forked_process_has_threads_of_its_own() -> None:
    lines = run_alone(FORK).splitlines()
    assert sorted(lines) == ["1", "1", "child [21.0, 21.0, 21.0, 21.0]", "parent [21.0, 21.0, 21.0, 21.0]"]


FORK_IN_STEP = """
import warnings
warnings.simplefilter("ignore")
one = Counted(gate=True)
running = threading.Thread(target=one.step.run)
running.start()
wait_until_begun(one)
child = os.fork()
if child == 0:
    try:
        one.step.run()
    except DeviceError as error:
        print(error, flush=True)
    one.close()
else:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    one.gate[0] = 1
    running.join()
    print(one.n_runs())
"""


def test_a_fork_within_a_step() -> None:
    lines = run_alone(FORK_IN_STEP).splitlines()
    assert lines == [
        "first: the process was forked while a step ran; load the model again in the new process",
        "[1.0, 1.0, 1.0, 1.0]",
    ]
