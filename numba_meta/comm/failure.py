"""From the start of a launch to its end, for the command line and for programs: all ranks end together, with one reason.

    with ranks() as launch:
        joined = launch.join(prepare)
        reduction = launch.negotiate(...)
        ...                              # whatever is raised here ends every rank; the user reads it once

A process that works alone passes through: no MPI, no threads, no signal handlers.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import NoReturn

from numba_meta.comm.calls import CallLog
from numba_meta.comm.communicators import CommunicatorFactory, Reduction, negotiate
from numba_meta.comm.ending import Ending, Event, Kind
from numba_meta.comm.errors import JoinError, MpiError, RankError
from numba_meta.comm.join import TIMEOUT_VARIABLE, Joined, JoinRequest, agree, join, join_timeout
from numba_meta.comm.launch import detect_launch
from numba_meta.comm.mesh import connect_mesh
from numba_meta.comm.mpi_world import MpiWorld, open_world
from numba_meta.comm.watchdog import SPEAKER_SECONDS, Watchdog, end_process, flush, say
from numba_meta.comm.world import World
from numba_meta.errors import NumbaMetaError

_PATIENCE_SECONDS = 2.0
_FINALIZE_SECONDS = 10.0  # all ranks are done by then; MPI has only to tidy up


class RankLaunch:
    """The ranks of this launch while they run: `world`, and after `join` the records of all."""

    def __init__(self, world: World, watchdog: Watchdog | None) -> None:
        self.world = world
        self.watchdog = watchdog
        self.calls = watchdog.calls if watchdog is not None else CallLog(world.rank, world.host, lambda _: None, lambda _: None)
        self.joined: Joined | None = None
        self.reduction: Reduction | None = None  # the one that was agreed on last
        self._reductions: dict[str, Reduction] = {}

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def size(self) -> int:
        return self.world.size

    def join(self, prepare: Callable[[], JoinRequest], *, release: Callable[[], None] = lambda: None) -> Joined:
        """Joins all ranks (`join.join`) the first time; later calls agree on what comes next (`join.agree`). Raises `JoinError`."""
        if self.joined is not None:
            return agree(self.world, prepare, release=release)
        joined = join(self.world, prepare, release=release)
        if self.watchdog is not None:
            with self._limited("connect to each other over TCP"):
                peers = connect_mesh(self.world, [record.host for record in joined.records], joined.one_host)
            for peer in peers:
                record = joined.records[peer.rank]
                if record.host_key == self.world.host_key:
                    peer.process, peer.start = record.process, record.start
            self.watchdog.attach(peers)
        self.joined = joined
        return joined

    def negotiate(self, factories: Sequence[CommunicatorFactory], devices: str | None = None) -> Reduction:
        """One way to reduce that all ranks can use (`communicators.negotiate`), closed when the launch ends. `devices`: of all ranks."""
        if self.joined is None:
            raise RankError("the ranks would agree on a communicator before they joined; call `join` first")
        with self._limited("build and probe a communicator"):
            self.reduction = negotiate(self.world, self.joined, factories)
        self._reductions[f"{len(self._reductions)}" if devices is None else devices] = self.reduction
        if self.watchdog is not None:
            aborts = [getattr(communicator, "abort", None) for communicator in self.reduction.communicators]
            self.watchdog.before_exit += [abort for abort in aborts if abort is not None]
        return self.reduction

    def reduction_for(self, devices: str, factories: Sequence[CommunicatorFactory]) -> Reduction:
        """As `negotiate`, once for the same devices of all ranks: models share it."""
        return self._reductions.get(devices) or self.negotiate(factories, devices)

    def close(self) -> None:
        """Closes what it agreed on."""
        for reduction in self._reductions.values():
            reduction.close()

    @contextlib.contextmanager
    def _limited(self, what: str) -> Iterator[None]:
        """Ends the launch where its body takes longer than ranks wait for each other: it may hang in a call that nothing interrupts."""
        seconds = join_timeout()
        reason = f"did not {what} within {seconds:g} s; see NUMBA_META_COMM to choose another way, {TIMEOUT_VARIABLE} for more time"
        if self.watchdog is None:
            yield
            return
        timer = threading.Timer(seconds, self.watchdog.give_up, (reason,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


@contextlib.contextmanager
def ranks() -> Iterator[RankLaunch]:
    """Runs its body as one rank of the launch. Ends the process where another rank failed, where a signal says so, or where a rank is gone.

    What the body raises is told to the others. It goes on from here on one rank, the lowest that lives; the others end without a word.
    """
    launch = detect_launch()
    if launch.alone:
        alone = RankLaunch(open_world(), None)
        try:
            yield alone
        finally:
            alone.close()
        return
    watchdog, process = Watchdog(launch.rank, os.uname().nodename), os.getpid()
    watchdog.start()
    running: RankLaunch | None = None
    try:
        running = RankLaunch(open_world(lambda reason, speaks: _never_started(watchdog, reason, speaks)), watchdog)
        watchdog.take_signals_again()
        yield running
    except BaseException as error:
        if os.getpid() != process:  # a forked child ends as it likes: it is no rank
            raise
        if not _is_normal_exit(error):
            _fail(running, watchdog, error)
        _end_well(running, watchdog)
        raise
    if os.getpid() == process:
        _end_well(running, watchdog)


def enter_ranks() -> RankLaunch:
    """`ranks()` for a program that has no `with` around its work: the launch ends with the program, or with what it does not catch."""
    if _entered:
        return _entered[0]
    context = ranks()
    launch = context.__enter__()
    _entered.append(launch)
    plain_hook = sys.excepthook

    def leave() -> None:
        context.__exit__(None, None, None)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        atexit.unregister(leave)
        try:
            context.__exit__(kind, error, trace)
        except BaseException as told:
            kind, error, trace = type(told), told, told.__traceback__
        plain_hook(kind, error, trace)

    atexit.register(leave)
    sys.excepthook = hook
    return launch


_entered: list[RankLaunch] = []


def _end_well(running: RankLaunch | None, watchdog: Watchdog) -> None:
    """Waits for the other ranks, then ends MPI."""
    if running is not None:
        if running.joined is not None:
            watchdog.finish()
        else:
            _end_unjoined(running.world, watchdog)
        running.close()
        if isinstance(running.world, MpiWorld):
            guard = threading.Timer(_FINALIZE_SECONDS, os._exit, (1,))
            guard.daemon = True
            guard.start()
            running.world.finalize()
            guard.cancel()
    watchdog.stop()


def _end_unjoined(world: World, watchdog: Watchdog) -> None:
    """Waits for the other ranks, which should end too. Ends the process, with the reason, where one of them would join this one."""
    try:
        join(world, lambda: JoinRequest(ended=True), timeout=float("inf"))
    except JoinError as error:
        if error.speaker == watchdog.rank:
            say(str(error))
            flush()
        else:
            time.sleep(SPEAKER_SECONDS)
        os._exit(error.exit_status)


def _fail(running: RankLaunch | None, watchdog: Watchdog, error: BaseException) -> NoReturn:
    """Ends this process, or raises what the user should read."""
    if os.environ.get("NUMBA_META_DEBUG", "0") not in ("", "0"):
        traceback.print_exception(error)
    if isinstance(error, JoinError) and (running is None or running.joined is None):  # the same on all ranks, which are not connected yet
        if error.speaker != watchdog.rank:
            time.sleep(SPEAKER_SECONDS)  # less, where the speaker's end makes the launcher end this rank
            os._exit(error.exit_status)
        raise error
    kind, reason, exit_status = describe_error(error)
    if running is None:  # MPI could not start, mostly on all ranks alike: the first one's end takes the others along
        time.sleep(_PATIENCE_SECONDS if watchdog.rank else 0)
        raise error
    if running.joined is None:  # there is no other way yet to tell the others
        try:
            join(running.world, lambda: _refuse(reason, exit_status))
        except JoinError as refusal:
            if refusal.speaker == watchdog.rank and str(refusal) == reason:
                raise error from None
            _fail(running, watchdog, refusal)
        except RankError:  # it fails after its join, or in it
            pass
    ending = watchdog.report(kind, reason, exit_status)
    if not ending.speaks:
        watchdog.end_silently(ending)
    # Whoever interrupted this rank may not be who reads: an interrupt says nothing by itself, nor does an exit on one rank alone.
    if kind == "signal" or (isinstance(error, SystemExit) and isinstance(error.code, int) and ending.message != reason):
        say(ending.message)
    if ending.event.rank == watchdog.rank or reason == ending.event.reason:
        raise error
    raise _Told(ending.message, ending.exit_status) from None


def _refuse(reason: str, exit_status: int) -> JoinRequest:
    raise _Told(reason, exit_status)


class _Told(RankError):
    """What another rank raised, here."""

    def __init__(self, message: str, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


def describe_error(error: BaseException) -> tuple[Kind, str, int]:
    """What the other ranks are told of an error: its kind, one line, the exit status."""
    if isinstance(error, MpiError):
        return "mpi", str(error), error.exit_status
    if isinstance(error, NumbaMetaError):
        return "raised", str(error), error.exit_status
    if isinstance(error, KeyboardInterrupt):
        return "signal", "was interrupted (Ctrl-C)", 130
    if isinstance(error, BrokenPipeError):
        return "raised", "the reader of the output has gone", 141
    if isinstance(error, MemoryError):
        return "raised", "out of memory", 1
    status = getattr(error, "exit_code", getattr(error, "code", 1))
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return "raised", f"ended with status {error.code}", error.code or 1
    name, text = type(error).__name__, " ".join(str(error).split())
    return "raised", f"{name}: {text}" if text else name, status if isinstance(status, int) and status else 1


def _is_normal_exit(error: BaseException) -> bool:
    """`sys.exit(0)`, and click's way to say the same."""
    if isinstance(error, SystemExit):
        return error.code in (None, 0)
    return type(error).__name__ == "Exit" and getattr(error, "exit_code", 1) == 0


def _never_started(watchdog: Watchdog, reason: str, speaks: bool) -> None:
    event = Event("raised", watchdog.rank, watchdog.host, reason)
    end_process(Ending(event, reason, 1, speaks))
