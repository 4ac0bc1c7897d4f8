"""The watchdog of a rank: a thread that hears what happens to the other ranks and to this one, and ends the process with the reason.

The main thread may be inside MPI or a compiled step, which nothing can interrupt; so the watchdog ends the process itself. It never judges
how long something takes: only heartbeats, closed connections, words of other ranks, and signals.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NoReturn

from numba_meta.comm.calls import CallLog
from numba_meta.comm.ending import Ending, Event, Kind, choose_ending, killed, silent
from numba_meta.comm.mesh import Peer
from numba_meta.comm.processes import is_at_work, kill_process

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 30.0  # 30 heartbeats missed
GATHER_SECONDS = 0.2  # after the first event: others that happened with it, one of which may be the cause
SIGNAL_SECONDS = 0.05  # the same after SIGTERM: Open MPI's launcher sends SIGKILL a quarter of a second later
PRINT_SECONDS = 0.1
SPEAKER_SECONDS = 2.0  # for the speaker to end first: a launcher that sees a rank end kills the others, whatever they had to say
UNWIND_SECONDS = 1.0  # for the main thread to end by itself after Ctrl-C or its own error
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Watchdog:
    """Begins with signals alone; `attach` adds the connections to the other ranks once they joined."""

    def __init__(self, rank: int, host: str, *, end: Callable[[Ending], None] | None = None) -> None:
        self.rank = rank
        self.host = host
        self.ending: Ending | None = None
        self.decided = threading.Event()
        self.all_ended = threading.Event()
        self.before_exit: list[Callable[[], None]] = []  # what ends work that may wait for other ranks for ever: kernels on a GPU
        self.calls = CallLog(rank, host, self._tell, lambda reason: self.give_up(reason, "calls"))
        self._end = (lambda ending: end_process(ending, self.before_exit)) if end is None else end
        self._peers: dict[int, Peer] = {}
        self._last_heard: dict[int, float] = {}
        self._closed: set[int] = set()
        self._vanished: set[int] = set()  # closed without a word
        self._silent: set[int] = set()  # without a sign of life
        self._told: set[int] = set()  # said why they end: those speak for themselves
        self._finished: set[int] = set()  # said goodbye
        self._speaker_left = threading.Event()
        self._terminated = False  # by SIGTERM: others' ends are under way
        self._handed_over = False  # the main thread has the ending, and raises it
        self._saying_goodbye = False
        self._stopping = False
        self._events: list[Event] = []
        self._decide_at = float("inf")
        self._unwind_until = 0.0
        self._lock = threading.Lock()
        self._wake, self._woken = socket.socketpair()
        for each in (self._wake, self._woken):
            each.setblocking(False)
        self._old_handlers: dict[int, object] = {}
        self._old_wakeup = -1
        self._launcher = os.getppid()
        self._thread = threading.Thread(target=self._run, name="numba_meta-watchdog", daemon=True)

    # ---- what the main thread calls ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Takes over SIGTERM, SIGINT and SIGHUP where this is the main thread, and begins to watch."""
        _watch_forks(weakref.ref(self))
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) == signal.SIG_IGN:  # by nohup, or a shell's background job: it stays so
                    continue
                handler = signal.default_int_handler if number == signal.SIGINT else _ignore
                self._old_handlers[number] = signal.signal(number, handler)
            # The number of a signal is written here by the C handler, also while the main thread is inside MPI.
            self._old_wakeup = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        self._thread.start()

    def take_signals_again(self) -> None:
        """After MPI has started, whose libraries set handlers of their own (UCX: SIGHUP) behind Python's back."""
        if threading.current_thread() is threading.main_thread():
            for number in self._old_handlers:
                signal.signal(number, signal.getsignal(number))

    def forget(self) -> None:
        """In a forked child, which is no rank: signals are its own, and the connections its parent's."""
        with contextlib.suppress(ValueError):  # not the main thread
            signal.set_wakeup_fd(-1)
            for number, handler in self._old_handlers.items():
                if handler is not None:
                    signal.signal(number, handler)  # type: ignore[arg-type]
        self._old_handlers.clear()
        for each in (*(peer.socket for peer in self._peers.values()), self._wake, self._woken):
            each.close()  # a killed parent's connections would stay open as long as the child lives

    def attach(self, peers: list[Peer]) -> None:
        """From now on the other ranks are watched too."""
        with self._lock:
            self._peers = {peer.rank: peer for peer in peers}
            self._last_heard = dict.fromkeys(self._peers, time.monotonic())
            self.calls.attach({peer.rank: peer.host for peer in peers})
        self._poke()

    def report(self, kind: Kind, reason: str, exit_status: int = 1) -> Ending:
        """This rank fails: tells the others, and returns what the caller has to do: raise the reason, or end in silence.

        Should the caller not end the process soon, the watchdog does.
        """
        self._handed_over = True
        self._unwind_until = time.monotonic() + GATHER_SECONDS + UNWIND_SECONDS + SPEAKER_SECONDS
        self._add(Event(kind, self.rank, self.host, reason, exit_status))
        self._poke()
        self.decided.wait(GATHER_SECONDS + UNWIND_SECONDS / 2)
        return self.ending or choose_ending(self._events, self.rank, frozenset(self._vanished | self._silent))

    def end_silently(self, ending: Ending) -> NoReturn:
        """Ends this process once the rank that speaks has ended."""
        if ending.event.kind != "signal" and ending.speaker in self._peers:
            self._speaker_left.wait(SPEAKER_SECONDS)
        os._exit(ending.exit_status)

    def give_up(self, reason: str, kind: Kind = "raised") -> None:
        """This rank fails while its main thread cannot be reached: the watchdog tells the others and ends the process."""
        self._add(Event(kind, self.rank, self.host, reason))
        self._poke()

    def finish(self) -> None:
        """This rank is done: waits until all others are, however long it takes them. The watch goes on until then."""
        self._tell(self.calls.end())
        self._saying_goodbye = True
        self._poke()
        while not self.all_ended.wait(0.5):  # in slices, so that Ctrl-C gets through
            pass

    def stop(self) -> None:
        """Ends the watch without a word (after `finish`, or where the caller ends the process) and restores signal handlers."""
        self._stopping = True
        self._poke()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(2)
        if self._old_handlers and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._old_wakeup)
            for number, handler in self._old_handlers.items():
                if handler is not None:  # None: one that was not set from Python
                    signal.signal(number, handler)  # type: ignore[arg-type]
            self._old_handlers.clear()
        for each in (*(peer.socket for peer in self._peers.values()), self._wake, self._woken):
            each.close()

    # ---- the thread --------------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            self._watch(selector)

    def _watch(self, selector: selectors.BaseSelector) -> None:
        selector.register(self._woken, selectors.EVENT_READ, None)
        watched: set[int] = set()
        last_beat = last_turn = time.monotonic()
        while not self._stopping:
            with self._lock:
                fresh = [peer for rank, peer in self._peers.items() if rank not in watched]
            for peer in fresh:
                watched.add(peer.rank)
                selector.register(peer.socket, selectors.EVENT_READ, peer)
            for key, _ in selector.select(min(BEAT_SECONDS / 4, max(0.0, self._decide_at - time.monotonic()))):
                if key.data is None:
                    self._read_signals()
                elif not self._hear(key.data):
                    selector.unregister(key.data.socket)
            now = time.monotonic()
            if now - last_turn > 3 * BEAT_SECONDS:  # this process stood still: what came meanwhile was not read yet
                self._last_heard = dict.fromkeys(self._last_heard, now)
            last_turn = now
            if now - last_beat >= BEAT_SECONDS:
                last_beat = now
                self._tell({"beat": True})
            self._look_for_silence(now)
            if os.getppid() != self._launcher:  # killed itself: nobody is left who would end the ranks
                self._add(Event("vanished", self.rank, self.host, "was left alone: its launcher has gone"))
            if not self._events and (reason := self.calls.judge()):
                self._add(Event("calls", self.rank, self.host, reason))
            if self._saying_goodbye and self._peers.keys() <= self._finished and not self._events:
                self.all_ended.set()
            if now >= self._decide_at and self.ending is None:
                self.ending = choose_ending(self._events, self.rank, frozenset(self._vanished | self._silent))
                self.decided.set()
            waits = self._must_wait(now)
            if self.ending is not None and now >= self._unwind_until and not waits:
                # Before the ranks are connected, a launcher's SIGTERM mostly follows from a reason that another rank has said.
                known_elsewhere = self._handed_over or (self.ending.event.kind == "signal" and not self._peers)
                self._tell({"event": vars(self.ending.event)})  # who has not decided yet would take this rank's end for the reason
                if self._silent:
                    self.before_exit.append(self._kill_silent)
                self._end(replace(self.ending, speaks=self.ending.speaks and not known_elsewhere))
                return

    def _must_wait(self, now: float) -> bool:
        """Whether the rank that speaks is still there to do so."""
        ending = self.ending
        if ending is None or ending.speaks or ending.speaker not in self._peers:
            return False
        if ending.speaker in self._closed:
            self._speaker_left.set()
        # After a signal the launcher may not leave more time than it takes to print.
        limit = PRINT_SECONDS if self._terminated or ending.event.kind == "signal" else SPEAKER_SECONDS
        return not self._speaker_left.is_set() and now < self._decide_at + limit

    def _read_signals(self) -> None:
        with contextlib.suppress(OSError):
            for number in self._woken.recv(4096):
                if number == 0 or number not in _SIGNALS:
                    continue
                name = signal.Signals(number).name
                reason = "was interrupted (Ctrl-C)" if number == signal.SIGINT else f"was told to end ({name})"
                if number == signal.SIGINT:
                    self._unwind_until = time.monotonic() + GATHER_SECONDS + UNWIND_SECONDS
                self._add(Event("signal", self.rank, self.host, reason, 128 + number))
                if number != signal.SIGINT:
                    # A main thread that was handed the reason gets the time to print it.
                    self._unwind_until = time.monotonic() + SIGNAL_SECONDS + (PRINT_SECONDS if self._handed_over else 0.0)
                    self._terminated = True

    def _hear(self, peer: Peer) -> bool:
        messages, alive = peer.receive()
        self._last_heard[peer.rank] = time.monotonic()
        told = False
        for message in messages:
            self.calls.hear(peer.rank, message)
            if "bye" in message:
                self._finished.add(peer.rank)
            if "event" in message and isinstance(message["event"], dict):
                told = True
                with contextlib.suppress(TypeError):
                    self._add(Event(**message["event"]), tell=False)
        if told:
            self._told.add(peer.rank)
        if not alive:
            self._closed.add(peer.rank)
            if peer.rank not in self._told | self._finished:
                self._vanished.add(peer.rank)
                self._add(killed(peer.rank, peer.host))
        return alive

    def _look_for_silence(self, now: float) -> None:
        for rank, heard in self._last_heard.items():
            if now - heard <= SILENCE_SECONDS or rank in self._closed | self._finished or self._events:
                continue
            peer = self._peers[rank]
            if not is_at_work(peer.process, peer.start):  # of another host nothing else is known
                self._silent.add(rank)
                self._add(silent(rank, peer.host, now - heard))

    def _kill_silent(self) -> None:
        """Ends ranks of this host that were stopped: a launcher's signals may reach no more than a process between."""
        for rank in self._silent:
            kill_process(self._peers[rank].process, self._peers[rank].start)

    def _add(self, event: Event, tell: bool = True) -> None:
        with self._lock:
            if event in self._events:
                return
            self._events.append(event)
            # A rank that was told to end has little time: the others decide as soon as it does.
            told_to_end = event.kind == "signal" and event.exit_status != 128 + signal.SIGINT
            self._decide_at = min(self._decide_at, time.monotonic() + (SIGNAL_SECONDS if told_to_end else GATHER_SECONDS))
        if tell:
            self._tell({"event": vars(event)})

    def _tell(self, message: dict[str, object]) -> None:
        for rank, peer in list(self._peers.items()):
            if rank not in self._closed:
                peer.send(message)

    def _poke(self) -> None:
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")


def end_process(ending: Ending, before_exit: Sequence[Callable[[], None]] = ()) -> None:
    """Ends this process at once, wherever its main thread is."""
    if ending.speaks:
        say(ending.message)
        flush()
    _do_briefly(before_exit)
    os._exit(ending.exit_status)


def say(message: str) -> None:
    """One line on standard error, without the locks that another thread may hold."""
    with contextlib.suppress(OSError):
        os.write(2, f"numba-meta: {' '.join(message.split())}\n".encode())


def flush() -> None:
    """Gives out what was printed so far, unless a thread that hangs holds the output."""

    def work() -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()

    _do_briefly([work])


def _do_briefly(works: Sequence[Callable[[], None]]) -> None:
    """Does what may hang, for a moment."""

    def all_of_them() -> None:
        for work in works:
            with contextlib.suppress(Exception):
                work()

    if works:
        thread = threading.Thread(target=all_of_them, daemon=True)
        thread.start()
        thread.join(PRINT_SECONDS * 2)


def _watch_forks(watchdog: weakref.ref[Watchdog]) -> None:
    """Forked children forget `watchdog`. A signal to a child waits until it has: the handler that it begins with is its parent's."""
    masks: list[set[int]] = []

    def before() -> None:
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS))

    def after() -> None:
        if masks:
            signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop())

    def after_in_child() -> None:
        if (own := watchdog()) is not None:
            own.forget()
        after()

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=after_in_child)


def _ignore(number: int, frame: object) -> None:
    """SIGTERM and SIGHUP: the watchdog ends the process."""
