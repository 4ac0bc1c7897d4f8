"""Compiled threads that walk recorded programs: a step runs here, without Python.

A program is an int64 array `[n_calls, 3]`: address of a kernel, address of its arguments, 1 where the team must wait for each other
before it. A team is the threads of one stream; its control block is an int64 array of `CONTROL_WORDS` words, one cache line per word that
changes. Threads spin for a moment, then yield the core, then sleep on a condition variable until the next step.

Between two steps every counter is at rest: GENERATION steps were begun, FINISHED is GENERATION times N_THREADS, ARRIVED a multiple of
N_THREADS.
"""

from __future__ import annotations

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from numba_meta.kernels.cpu.clock import clock_ns
from numba_meta.kernels.cpu.kernel import Int, Ptr, cpu_kernel
from numba_meta.kernels.cpu.libc import condition_broadcast, condition_wait, mutex_lock, mutex_unlock, yield_core
from numba_meta.kernels.cpu.simd import load_i64, pointer_ir, store_i64

CALL_WORDS = 3  # kernel, arguments, barrier before
TEAM_WORDS = 4  # control block, program, number of calls, where times are noted (0: nowhere)
TIME_WORDS = 2  # begin and end of a call
CONTROL_WORDS = 128
GENERATION, PROGRAM, N_CALLS, N_THREADS, ARRIVED, FINISHED, STOP, SLEEPING, MUTEX, CONDITION, TIMES = (8 * i for i in range(11))
_SPINS = 2000  # about 20 us: a barrier inside a step is shorter than that when every thread has a core
_YIELDS = 4000  # then milliseconds: the pause between two steps
_i64 = ir.IntType(64)


@intrinsic
def atomic_add(typingctx, address, value):  # type: ignore[no-untyped-def]
    """Adds to the int64 at an address; the old value."""

    def codegen(c, b, s, a):  # type: ignore[no-untyped-def]
        return b.atomic_rmw("add", pointer_ir(b, a[0], _i64), a[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_load(typingctx, address):  # type: ignore[no-untyped-def]
    """The int64 at an address, ordered before what follows."""
    return types.int64(types.int64), lambda c, b, s, a: b.load_atomic(pointer_ir(b, a[0], _i64), "seq_cst", 8)


@intrinsic
def atomic_store(typingctx, address, value):  # type: ignore[no-untyped-def]
    """Writes an int64, ordered after what came before."""

    def codegen(c, b, s, a):  # type: ignore[no-untyped-def]
        b.store_atomic(a[1], pointer_ir(b, a[0], _i64), "seq_cst", 8)
        return c.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def call_kernel(typingctx, address, arguments, thread, n_threads):  # type: ignore[no-untyped-def]
    """Calls a kernel at an address."""

    def codegen(c, b, s, a):  # type: ignore[no-untyped-def]
        kind = ir.FunctionType(ir.VoidType(), [_i64] * 3)
        b.call(b.inttoptr(a[0], kind.as_pointer()), a[1:])
        return c.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), codegen


@njit(nogil=True)
def wait_until(address, target):  # type: ignore[no-untyped-def]
    """Until the counter at an address has reached a value: spins, then yields."""
    spins = 0
    while atomic_load(address) < target:
        spins += 1
        if spins > _SPINS:
            yield_core()


@njit(nogil=True)
def barrier(counter, n_threads):  # type: ignore[no-untyped-def]
    """Until all `n_threads` threads have come here. The counter only grows."""
    before = atomic_add(counter, 1)
    wait_until(counter, before - before % n_threads + n_threads)


@njit(nogil=True)
def walk(control, thread):  # type: ignore[no-untyped-def]
    """Runs this thread's share of every call of the team's program. Whether times are noted is asked once a step."""
    times = load_i64(control + 8 * TIMES)
    if times != 0 and thread == 0:
        walk_noting_times(control, times)
        return
    program = load_i64(control + 8 * PROGRAM)
    n_threads = load_i64(control + 8 * N_THREADS)
    for i in range(load_i64(control + 8 * N_CALLS)):
        call = program + 8 * CALL_WORDS * i
        if n_threads > 1 and load_i64(call + 16) != 0:
            barrier(control + 8 * ARRIVED, n_threads)
        call_kernel(load_i64(call), load_i64(call + 8), thread, n_threads)


@njit(nogil=True)
def walk_noting_times(control, times):  # type: ignore[no-untyped-def]
    """As `walk`, for thread 0: notes when each call began and ended, at `times` int64 `[n_calls + 1, TIME_WORDS]`, ns of `clock_ns`.

    A call begins behind its barrier: a wait there is a gap. The last row is the whole walk.
    """
    program = load_i64(control + 8 * PROGRAM)
    n_threads = load_i64(control + 8 * N_THREADS)
    n_calls = load_i64(control + 8 * N_CALLS)
    whole = times + 8 * TIME_WORDS * n_calls
    store_i64(whole, clock_ns())
    for i in range(n_calls):
        call = program + 8 * CALL_WORDS * i
        if n_threads > 1 and load_i64(call + 16) != 0:
            barrier(control + 8 * ARRIVED, n_threads)
        store_i64(times + 8 * TIME_WORDS * i, clock_ns())
        call_kernel(load_i64(call), load_i64(call + 8), 0, n_threads)
        store_i64(times + 8 * TIME_WORDS * i + 8, clock_ns())
    store_i64(whole + 8, clock_ns())


@njit(nogil=True)
def wait_for_step(control, seen):  # type: ignore[no-untyped-def]
    """Until the generation has moved on from `seen`, or the team must stop; the generation."""
    for i in range(_SPINS + _YIELDS):
        now = atomic_load(control + 8 * GENERATION)
        if now != seen or atomic_load(control + 8 * STOP) != 0:
            return now
        if i > _SPINS:
            yield_core()
    mutex_lock(control + 8 * MUTEX)
    atomic_add(control + 8 * SLEEPING, 1)
    now = atomic_load(control + 8 * GENERATION)
    while now == seen and atomic_load(control + 8 * STOP) == 0:
        condition_wait(control + 8 * CONDITION, control + 8 * MUTEX)
        now = atomic_load(control + 8 * GENERATION)
    atomic_add(control + 8 * SLEEPING, -1)
    mutex_unlock(control + 8 * MUTEX)
    return now


@njit(nogil=True)
def rouse(control):  # type: ignore[no-untyped-def]
    """Wakes the sleepers of a team after GENERATION or STOP was changed.

    A thread says that it sleeps before it looks at those words for the last time, and holds the mutex until it waits: none is missed.
    """
    if atomic_load(control + 8 * SLEEPING) != 0:
        mutex_lock(control + 8 * MUTEX)
        condition_broadcast(control + 8 * CONDITION)
        mutex_unlock(control + 8 * MUTEX)


@cpu_kernel
def worker(thread, n_threads, control: Ptr, own_index: Int):  # type: ignore[no-untyped-def]
    """The life of one thread of a team: a step at each new generation, until it is told to stop. It must begin before the first step."""
    seen = 0
    while True:
        now = wait_for_step(control, seen)
        if now == seen:
            break
        seen = now
        walk(control, own_index)
        atomic_add(control + 8 * FINISHED, 1)


@cpu_kernel
def stop(thread, n_threads, control: Ptr):  # type: ignore[no-untyped-def]
    """Tells a team's threads to end; call it between two steps."""
    atomic_store(control + 8 * STOP, 1)
    rouse(control)


@cpu_kernel
def run_step(thread, n_threads, teams: Ptr, n_teams: Int, events: Ptr, n_events: Int):  # type: ignore[no-untyped-def]
    """One step of several teams. The caller is thread 0 of the first team; returns when every thread of every team has finished.

    `teams` int64 `[n_teams, TEAM_WORDS]`; `events` is the addresses of the events that the programs record: they begin at 0. Does nothing
    where a team was told to stop.
    """
    for i in range(n_teams):
        if atomic_load(load_i64(teams + 8 * TEAM_WORDS * i) + 8 * STOP) != 0:
            return
    for i in range(n_events):
        atomic_store(load_i64(events + 8 * i), 0)
    for i in range(n_teams):
        team = teams + 8 * TEAM_WORDS * i
        control = load_i64(team)
        store_i64(control + 8 * PROGRAM, load_i64(team + 8))
        store_i64(control + 8 * N_CALLS, load_i64(team + 16))
        store_i64(control + 8 * TIMES, load_i64(team + 24))
        atomic_add(control + 8 * GENERATION, 1)
        rouse(control)
    first = load_i64(teams)
    walk(first, 0)
    atomic_add(first + 8 * FINISHED, 1)
    for i in range(n_teams):
        control = load_i64(teams + 8 * TEAM_WORDS * i)
        wait_until(control + 8 * FINISHED, atomic_load(control + 8 * GENERATION) * load_i64(control + 8 * N_THREADS))


@cpu_kernel
def meet(thread, n_threads, counter: Ptr, total: Int):  # type: ignore[no-untyped-def]
    """All threads of all devices wait for each other: before a reduction reads what the others wrote."""
    barrier(counter, total)


@cpu_kernel
def record_event(thread, n_threads, event: Ptr):  # type: ignore[no-untyped-def]
    """Counts an event up. With a barrier before it, all that the stream's threads did before is seen by whoever waits for it."""
    if thread == 0:
        atomic_add(event, 1)


@cpu_kernel
def wait_event(thread, n_threads, event: Ptr, n_records: Int):  # type: ignore[no-untyped-def]
    """Waits until an event has been recorded `n_records` times in this step.

    The first thread waits for all: the call after this one must have a barrier before it.
    """
    if thread == 0:
        wait_until(event, n_records)
