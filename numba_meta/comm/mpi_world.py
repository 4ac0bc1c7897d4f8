"""The ranks of an MPI launch. mpi4py is imported here alone, and only where a launcher started several ranks.

MPI is initialized through its C function, which leaves Python's other threads running while ranks wait for each other in it: a rank that
never starts cannot hang the others. The level is SERIALIZED: one thread at a time calls MPI, mostly the one that runs a step.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from numba_meta.comm.attendance import Attendance
from numba_meta.comm.errors import RankError
from numba_meta.comm.join import join_timeout
from numba_meta.comm.launch import Launch, detect_launch, mark_joined
from numba_meta.comm.world import FRAME_BYTES, Deadline, SoloWorld, World

_TAG = 0x6E6D
_EAGER_POLLS = 2000  # then sleeps between looks: who waits for minutes does not hold a core
_POLL_SECONDS = 0.0005
# Over TCP, Open MPI ends a process whose peer is gone. It waits a little, so that the watchdog can say which rank that was, and is not
# wordy about it. What the user set stays.
_OPEN_MPI_SETTINGS = {"OMPI_MCA_mpi_abort_delay": "2", "OMPI_MCA_btl_base_warn_peer_error": "0"}


class MpiWorld(World):
    """The ranks of `MPI.COMM_WORLD`, each with a frame to each: so that a rank which does not answer is known by its number."""

    def __init__(self, mpi: Any, launch: Launch, owns_mpi: bool) -> None:
        super().__init__(mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size(), mpi.Get_processor_name())
        self.mpi = mpi
        self.launch = launch
        self._owns_mpi = owns_mpi
        self._pending: list[Any] = []  # sends, and receives from ranks that were given up: buffers stay alive with them
        self._duplicate: Any = None

    @property
    def communicator(self) -> Any:
        """The MPI communicator for reductions, made at first use by all ranks together. Its functions return their errors."""
        if self._duplicate is None:
            self._duplicate = self.mpi.COMM_WORLD.Dup()
            self._duplicate.Set_errhandler(self.mpi.ERRORS_RETURN)
        return self._duplicate

    def _exchange_frames(self, frame: bytes, until: Deadline | None) -> list[bytes | None]:
        comm = self.mpi.COMM_WORLD
        buffers = [bytearray(FRAME_BYTES) for _ in range(self.size)]
        peers = [rank for rank in range(self.size) if rank != self.rank]
        receives = {rank: comm.Irecv([buffers[rank], self.mpi.BYTE], rank, _TAG) for rank in peers}
        sends = [comm.Isend([frame, self.mpi.BYTE], rank, _TAG) for rank in peers]
        heard: list[bytes | None] = [None] * self.size
        heard[self.rank] = frame
        polls = 0
        while receives or sends:
            for rank in [rank for rank, request in receives.items() if request.Test()]:
                heard[rank] = bytes(buffers[rank])
                del receives[rank]
            sends = [request for request in sends if not request.Test()]
            if until is not None and (receives or sends) and time.monotonic() >= until(heard):
                break
            polls += 1
            if polls > _EAGER_POLLS:
                time.sleep(_POLL_SECONDS)
        self._pending += [(request, frame) for request in sends] + [(receives[rank], buffers[rank]) for rank in receives]
        return heard

    def finalize(self) -> None:
        """Gives back what it took of MPI, together with all other ranks; ends MPI too unless the program began it before."""
        if self.mpi.Is_finalized():
            return
        if self._duplicate is not None:
            self._duplicate.Free()
            self._duplicate = None
        if self._owns_mpi:
            _library(self.mpi).MPI_Finalize()


def open_world(on_missing: Callable[[str, bool], None] | None = None) -> World:
    """The world of this process: `SoloWorld` where it is alone, else `MpiWorld`.

    Ranks wait for each other here, at most `join_timeout` seconds; then `on_missing(reason, speaker)` is called from another thread: this
    one is still inside MPI, so it must end the process. Raises `RankError` where MPI cannot be used, `UsageError` for a wrong time limit.
    """
    launch = detect_launch()
    if launch.alone:
        return SoloWorld()
    mpi = import_mpi(launch)
    if mpi.Is_finalized():
        raise RankError("MPI has ended in this process, and cannot start again; load all models before `ranks()` ends")
    arrived = threading.Event()
    attendance = None
    owns_mpi = not mpi.Is_initialized()  # else by the program that uses numba_meta
    if owns_mpi:
        attendance = Attendance(launch, join_timeout())
        threading.Thread(target=attendance.watch, args=(arrived, on_missing), name="numba_meta-start", daemon=True).start()
    try:
        _initialize(mpi)
    finally:
        arrived.set()
        if attendance is not None:
            attendance.leave()
    world = MpiWorld(mpi, launch, owns_mpi)
    if launch.size is not None and world.size != launch.size:
        vendor, numbers = mpi.get_vendor()
        raise RankError(
            f"{launch.launcher} started {launch.size} ranks, but MPI sees {world.size}: the launcher belongs to another MPI than "
            f"mpi4py's, {vendor} {'.'.join(map(str, numbers))}; start with that one's mpirun"
        )
    if world.size == 1:
        world.finalize()
        return SoloWorld(world.host)
    mark_joined(launch)
    return world


def import_mpi(launch: Launch) -> Any:
    """mpi4py's module `MPI`, not initialized. Raises `RankError` where there is none, or no MPI behind it."""
    started = f"{launch.launcher} started {launch.size or 'several'} ranks"
    try:
        package = importlib.import_module("mpi4py")
    except ImportError:
        raise RankError(f"{started}, but mpi4py is not installed; install numba-meta[mpi]") from None
    package.rc.initialize = False
    package.rc.finalize = False
    try:
        return importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        detail = " ".join(str(error).split())
        raise RankError(f"{started}, but mpi4py finds no MPI ({detail}); install numba-meta[mpi], which brings one") from None


def _initialize(mpi: Any) -> None:
    if not mpi.Is_initialized():
        for name, value in _OPEN_MPI_SETTINGS.items():
            os.environ.setdefault(name, value)
        provided = ctypes.c_int(-1)
        code = _library(mpi).MPI_Init_thread(None, None, ctypes.c_int(mpi.THREAD_SERIALIZED), ctypes.byref(provided))
        if code != 0:
            raise RankError(f"MPI could not start (MPI_Init_thread returned {code}); see what mpirun says above")
    mpi.COMM_WORLD.Set_errhandler(mpi.ERRORS_RETURN)
    if mpi.Query_thread() < mpi.THREAD_FUNNELED:
        raise RankError("this MPI allows no other threads in a process that uses it; expected MPI_THREAD_FUNNELED or more")


def _library(mpi: Any) -> ctypes.CDLL:
    """MPI's C functions, found through mpi4py's extension: the library that it was loaded with, whatever its name."""
    return ctypes.CDLL(mpi.__file__)
