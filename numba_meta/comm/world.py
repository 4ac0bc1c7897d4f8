"""All ranks of a launch as this one sees them: its rank, their number, its host, and `exchange`.

The contract of `exchange`: every rank makes the same calls in the same order with payloads of the same size. Each frame says which call it
is, so a rank that breaks the contract is named instead of everyone hanging or reading garbage.
"""

from __future__ import annotations

import abc
import hashlib
import os
import socket
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

from numba_meta.comm.errors import RankError
from numba_meta.comm.launch import check_rank

_HEADER = struct.Struct("<qq40s")  # number of the call, bytes of its payload, its purpose
FRAME_BYTES = 16384  # one frame holds header and payload; larger payloads travel in several
CAPACITY = FRAME_BYTES - _HEADER.size
Deadline = Callable[[Sequence[bytes | None]], float]  # from what was heard so far, when to stop waiting: a time of `time.monotonic`


class World(abc.ABC):
    """The ranks of one launch. Subclasses carry frames of one size (`_exchange_frames`); calls and sizes are checked here."""

    def __init__(self, rank: int, size: int, host: str | None = None, key: str | None = None, process: int | None = None) -> None:
        check_rank(rank, size, f"rank {rank}", f"world size {size}")
        self.rank = rank
        self.size = size
        self.host = host if host is not None else socket.gethostname()
        self.host_key = host_key() if key is None else key
        self.process = os.getpid() if process is None else process
        self.joined = False
        self._n_calls = 0

    @abc.abstractmethod
    def _exchange_frames(self, frame: bytes, until: Deadline | None) -> list[bytes | None]:
        """`frame` (`FRAME_BYTES`) of every rank in rank order; None for those not heard from before `until` (None: waits on)."""

    def exchange(self, payload: bytes, purpose: str = "") -> list[bytes]:
        """The payload of every rank, in rank order.

        Raises `RankError`, on all ranks, where they are not in the same call (its number or `purpose`) or their sizes differ.
        """
        frames = self._exchange_first(payload, purpose, None)
        whole = [bytearray(frame or b"") for frame in frames]
        for start in range(CAPACITY, len(payload), CAPACITY):
            part = payload[start : start + CAPACITY]
            for into, frame in zip(whole, self._exchange_frames(part.ljust(FRAME_BYTES, b"\0"), None), strict=True):
                into += (frame or b"")[: len(part)]
        return [bytes(each) for each in whole]

    def exchange_within(self, payload: bytes, until: Deadline, purpose: str = "") -> list[bytes | None]:
        """As `exchange`, for payloads of up to `CAPACITY` bytes; None for ranks that were not heard from before `until`."""
        if len(payload) > CAPACITY:
            raise RankError(f"a timed exchange of {len(payload)} bytes; expected at most {CAPACITY}")
        return self._exchange_first(payload, purpose, lambda frames: until([_payload(frame, len(payload)) for frame in frames]))

    def _exchange_first(self, payload: bytes, purpose: str, until: Deadline | None) -> list[bytes | None]:
        header = _HEADER.pack(self._n_calls, len(payload), purpose.encode()[:40])
        self._n_calls += 1
        frames = self._exchange_frames((header + payload[:CAPACITY]).ljust(FRAME_BYTES, b"\0"), until)
        check_calls(frames, self.rank)
        return [_payload(frame, min(len(payload), CAPACITY)) for frame in frames]


def _payload(frame: bytes | None, n_bytes: int) -> bytes | None:
    return None if frame is None else frame[_HEADER.size : _HEADER.size + n_bytes]


def check_calls(frames: Sequence[bytes | None], own_rank: int) -> None:
    """Raises `RankError` naming the lowest ranks whose calls differ. All ranks see the same frames, so all raise the same."""
    seen = [(rank, _HEADER.unpack_from(frame)) for rank, frame in enumerate(frames) if frame is not None]
    for rank, header in seen[1:]:
        first, expected = seen[0]
        if header != expected:
            raise RankError(
                f"rank {rank} is in {_describe(*header)} while rank {first} is in {_describe(*expected)}; "
                "all ranks must run the same program on the same inputs"
            )
    if not seen:
        raise RankError(f"rank {own_rank} heard from no rank, not even itself; this is a fault of its world")


def _describe(number: int, n_bytes: int, purpose: bytes) -> str:
    name = purpose.rstrip(b"\0").decode(errors="replace")
    return f"exchange {number}{f' ({name})' if name else ''} of {n_bytes} bytes"


class SoloWorld(World):
    """One process that works alone."""

    def __init__(self, host: str | None = None) -> None:
        super().__init__(0, 1, host)

    def _exchange_frames(self, frame: bytes, until: Deadline | None) -> list[bytes | None]:
        return [frame]


def host_key() -> str:
    """16 hex digits that processes share where loopback connects them: one boot of one machine, one network namespace."""
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(str(Path("/proc/self/ns/net").readlink()))
    except OSError:  # no /proc: the name has to do
        pass
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
