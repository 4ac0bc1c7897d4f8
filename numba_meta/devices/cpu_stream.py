"""Streams of a CPU device: teams of compiled threads, their programs, and steps of several streams at once.

A step is synchronous: `CpuStep.run` returns when every stream has finished. Inside a step streams go on independently of each other and are
ordered by events (`cpu_record.py`). Nothing of Python runs in the threads between the start and the end of a step.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from numba_meta.errors import DeviceError
from numba_meta.interrupts import held_back
from numba_meta.kernels.cpu import program
from numba_meta.kernels.cpu.kernel import ENTRY_TYPE

_LINE_WORDS = 8  # int64 in a cache line


def aligned_words(n_words: int) -> np.ndarray:
    """Zeroed int64 `[n_words]` that begins at a cache line."""
    raw = np.zeros(n_words + _LINE_WORDS, np.int64)
    start = (-raw.ctypes.data % (8 * _LINE_WORDS)) // 8
    return raw[start : start + n_words]


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


class _Team:
    """The control block and the threads of a stream. Apart from `CpuStream`, so that a stream that nobody closed can still end them."""

    def __init__(self, name: str, n_threads: int, caller_joins: bool) -> None:
        self.name = name
        self.first_index = 1 if caller_joins else 0
        self.n_threads = n_threads
        self.control = aligned_words(program.CONTROL_WORDS)
        self.lock = threading.RLock()  # held for a step, and to end the threads; streams that run together share one
        self.closed = False
        self._live = ENTRY_TYPE(program.worker.address)  # both compiled now, before anything waits for them
        self._end = ENTRY_TYPE(program.stop.address)
        self._threads: list[threading.Thread] = []
        self._reset()

    def _reset(self) -> None:
        self._process = os.getpid()
        self._threads.clear()
        self.control[:] = 0
        self.control[program.N_THREADS] = self.n_threads
        libc = _libc()
        for init, word in ((libc.pthread_mutex_init, program.MUTEX), (libc.pthread_cond_init, program.CONDITION)):
            init(ctypes.c_void_p(self.control[word:].ctypes.data), None)

    def start(self) -> None:
        """Makes sure that all threads are there. Raises `DeviceError` where they cannot be. The caller holds the lock."""
        if self.closed:
            raise DeviceError(f"{self.name}: the stream was closed; nothing can run on it")
        if len(self._threads) == self.n_threads - self.first_index:
            return
        with held_back():
            self._start_threads()

    def _start_threads(self) -> None:
        """All of them or none: a team with a thread missing would wait for it forever. The next step tries again."""
        for index in range(self.first_index, self.n_threads):
            thread = threading.Thread(target=_live, args=(self._live, self.control, index), name=f"{self.name}-{index}", daemon=True)
            try:
                thread.start()
            except (RuntimeError, MemoryError):  # what Python raises where the system gives no more threads, or no stack for one
                self._end_threads()
                self._reset()
                told = f"{self.name}: the system refused thread {index} of {self.n_threads}; use fewer (threads, --threads)"
                raise DeviceError(f"{told}, or allow more processes and memory (ulimit -u, -v)") from None
            self._threads.append(thread)

    def check_process(self) -> None:
        """A fork copies no threads: the child starts its own, unless a step was under way in the parent."""
        if self._process == os.getpid():
            return
        if not self.lock.acquire(blocking=False):
            self.lock, self.closed = threading.RLock(), True
            raise DeviceError(f"{self.name}: the process was forked while a step ran; load the model again in the new process")
        self._reset()
        self.lock.release()

    def stop(self) -> None:
        """Ends the threads, after the step that is running. Twice is once."""
        if self._process != os.getpid():  # a forked child: the threads are the parent's
            self.closed = True
            return
        with self.lock, held_back():
            self.closed = True
            self._end_threads()

    def _end_threads(self) -> None:
        block = program.stop.pack(control=self.control.ctypes.data)
        self._end(block.ctypes.data, 0, 1)
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join()
        self._threads.clear()


def _live(worker: Callable[[int, int, int], None], control: np.ndarray, index: int) -> None:
    """A thread's whole life is one call into compiled code; it keeps its control block alive."""
    block = program.worker.pack(control=control.ctypes.data, own_index=index)
    worker(block.ctypes.data, 0, 1)


class CpuStream:
    """A team of compiled threads that runs recorded programs in order.

    The first thread of a stream with `caller_joins` is whoever runs the step; the other threads live from the first step until `close`,
    until the stream is forgotten, or until the interpreter ends. There may be more threads than cores: who waits gives its core away.
    """

    def __init__(self, name: str, n_threads: int, caller_joins: bool) -> None:
        if n_threads < 1:
            raise DeviceError(f"{name}: a stream needs at least one thread, not {n_threads}")
        self.name = name
        self.n_threads = n_threads
        self.caller_joins = caller_joins
        self._leader: weakref.ref[CpuStream] | None = None
        self._team = _Team(name, n_threads, caller_joins)
        self._finalizer = weakref.finalize(self, self._team.stop)

    @property
    def closed(self) -> bool:
        return self._team.closed

    def close(self) -> None:
        """Ends the threads, after the step that is running; the stream runs nothing afterwards. Twice is once."""
        self._finalizer.detach()
        self._team.stop()

    def __repr__(self) -> str:
        return f"<stream {self.name}: {self.n_threads} threads{', closed' if self.closed else ''}>"


class CpuEvent:
    """A point of one stream's program that other streams of the same step can wait for; it belongs to that one step.

    `n_records` is how often the step records it, `word` int64 what the threads count up to that number in every run.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.n_records = 0
        self.word = aligned_words(_LINE_WORDS)

    @property
    def address(self) -> int:
        return int(self.word.ctypes.data)


@dataclass(frozen=True)
class CpuProgram:
    """A recorded list of calls for one stream: `calls` int64 `[n, 3]` (kernel, arguments, barrier before); `keep` is what it points into.

    `records` and `waits` say which events it records and waits for, once per time; `marks` what each call was recorded for, as the recorder
    was told.
    """

    calls: np.ndarray
    keep: tuple[object, ...]
    records: tuple[CpuEvent, ...] = ()
    waits: tuple[CpuEvent, ...] = ()
    marks: tuple[object, ...] = ()


@dataclass(frozen=True)
class StreamTimes:
    """When the first thread of a stream was at which call of one step, in ns of the monotonic clock.

    `times` int64 `[n, 2]`: begin and end of each call of its program, a wait at a barrier before it left out; `whole`: of all.
    """

    stream: str
    marks: tuple[object, ...]
    times: np.ndarray
    whole: tuple[int, int]


class CpuStep:
    """One step of several streams, ready to run again and again: binding is done once, a run is one call into compiled code.

    The caller is the first thread of the first stream, which alone has `caller_joins`; a stream that ran beside a first stream stays with
    it. Raises `DeviceError` for streams that do not fit together, and for events that are not recorded in this step alone.
    """

    def __init__(self, streams: Sequence[CpuStream], programs: Sequence[CpuProgram]) -> None:
        if not streams or len(streams) != len(programs) or len(set(streams)) != len(streams):
            raise DeviceError(f"a step of {len(streams)} streams, {len(programs)} programs: expected different streams, a program for each")
        if [stream.caller_joins for stream in streams] != [True] + [False] * (len(streams) - 1):
            names = ", ".join(stream.name for stream in streams)
            raise DeviceError(f"a step of the streams {names}: expected the caller to join the first one and no other")
        for stream in streams[1:]:
            leader = stream._leader() if stream._leader else None
            if leader is not None and leader is not streams[0]:
                raise DeviceError(f"{stream.name} runs with {leader.name}; it cannot run with {streams[0].name} too")
        events = _check_events(programs)
        for stream in streams[1:]:
            stream._leader = weakref.ref(streams[0])
            stream._team.lock = streams[0]._team.lock
        self._streams = tuple(streams)
        self._programs = tuple(programs)
        teams = [(s._team.control.ctypes.data, p.calls.ctypes.data, len(p.calls), 0) for s, p in zip(streams, programs, strict=True)]
        self._teams = np.array(teams, np.int64)
        self._events = np.array([event.address for event in events], np.int64)
        self._keep = events
        self._block = program.run_step.pack(
            teams=self._teams.ctypes.data, n_teams=len(streams), events=self._events.ctypes.data, n_events=len(events)
        )
        self._arguments = int(self._block.ctypes.data)
        self._call = ENTRY_TYPE(program.run_step.address)

    def run(self) -> None:
        """Runs every stream's program once and returns when all have finished. Calls from several Python threads take turns.

        Ctrl-C takes effect after the step, which is always whole. Raises `DeviceError` where a stream was closed.
        """
        first = self._streams[0]._team
        first.check_process()
        with first.lock:
            for stream in self._streams:
                team = stream._team
                team.check_process()
                team.start()
            self._call(self._arguments, 0, 1)
            for stream in self._streams:
                if stream._team.closed:  # by a signal handler, right before the call: the step was not run
                    raise DeviceError(f"{stream.name}: the stream was closed; nothing can run on it")

    def run_noting_times(self) -> tuple[StreamTimes, ...]:
        """As `run`; says when each stream was at which call. Two looks at the clock more per call, in this one step."""
        noted = [np.zeros((len(p.calls) + 1, program.TIME_WORDS), np.int64) for p in self._programs]
        for times in noted:
            times.fill(0)  # takes the pages now, not in the step
        first, where = self._streams[0]._team, self._teams[:, program.TEAM_WORDS - 1]
        first.check_process()
        with first.lock:
            where[:] = [times.ctypes.data for times in noted]
            try:
                self.run()
            finally:
                where[:] = 0
        return tuple(
            StreamTimes(stream.name, each.marks, times[:-1], (int(times[-1, 0]), int(times[-1, 1])))
            for stream, each, times in zip(self._streams, self._programs, noted, strict=True)
        )


def _check_events(programs: Sequence[CpuProgram]) -> list[CpuEvent]:
    """The events of a step. A wait can only name what was recorded before, so streams cannot wait for each other in a circle."""
    n_here = Counter(event for each in programs for event in each.records)
    for event in n_here.keys() | {event for each in programs for event in each.waits}:
        if n_here[event] != event.n_records:
            raise DeviceError(
                f"event {event.name} is recorded {n_here[event]} times in this step and {event.n_records} times in all; "
                "expected one step with all of them"
            )
    return list(n_here)
