"""Joining: all ranks or none. Records are exchanged, then what each rank makes of them, and nobody goes on alone."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from numba_meta.comm.cores import threads_of_rank
from numba_meta.comm.errors import JoinError, RankError
from numba_meta.comm.host_memory import HostNeed
from numba_meta.comm.processes import start_of
from numba_meta.comm.record import (
    JoinRecord,
    decode_record,
    earliest_deadline,
    encode_record,
    first_refusal,
    format_cores,
    judge,
    parse_cores,
)
from numba_meta.comm.world import Deadline, World
from numba_meta.errors import NumbaMetaError, UsageError

TIMEOUT_VARIABLE = "NUMBA_META_JOIN_TIMEOUT"
DEFAULT_TIMEOUT = 60.0  # seconds
_VERDICT_BYTES = 4096
_LAST_WORDS_SECONDS = 2.0  # how long a rank that gives up listens to what the others say
_DELIVERY_SECONDS = 0.25  # once those have spoken that can be heard: for this rank's own words to reach them


@dataclass(frozen=True)
class JoinRequest:
    """What a rank brings: facts that must agree (`record.facts_of`), names of communicators it could use, one it forces, host memory."""

    facts: dict[str, str] = field(default_factory=dict)
    offers: tuple[str, ...] = ()
    forced: str = ""
    needed_host_bytes: int = 0
    available_host_bytes: int | None = None
    ended: bool = False  # nothing: its program is over, and the other ranks' should be too


@dataclass(frozen=True)
class Joined:
    """All ranks, after they agreed. `records` in rank order."""

    rank: int
    records: tuple[JoinRecord, ...]

    @property
    def size(self) -> int:
        return len(self.records)

    @property
    def host_needs(self) -> tuple[HostNeed, ...]:
        """What each rank wants of its host's memory, for `host_memory.add_up_host_memory`."""
        return tuple(HostNeed(r.host_key, r.needed_host_bytes, r.available_host_bytes) for r in self.records)

    @property
    def one_host(self) -> bool:
        return len({record.host_key for record in self.records}) == 1

    @property
    def leads_host(self) -> bool:
        """Whether this rank is the lowest of its host: it compiles, the others load its cache."""
        return self.rank == min(r.rank for r in self.records if r.host_key == self.records[self.rank].host_key)

    def threads(self) -> int:
        """Threads for this rank: the cores that it may use, divided by the ranks that share them."""
        return threads_of_rank(self.rank, [r.host_key for r in self.records], [parse_cores(r.cores) for r in self.records])


def join_timeout() -> float:
    """Seconds that ranks wait for each other: `NUMBA_META_JOIN_TIMEOUT`, else 60. Raises `UsageError` where that is no time."""
    text = os.environ.get(TIMEOUT_VARIABLE, "")
    try:
        seconds = float(text) if text else DEFAULT_TIMEOUT
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(f"{TIMEOUT_VARIABLE}={text!r}; expected seconds above 0, such as 60")
    return seconds


def join(
    world: World, prepare: Callable[[], JoinRequest], *, timeout: float | None = None, release: Callable[[], None] = lambda: None
) -> Joined:
    """Joins all ranks of `world`. Every rank calls it once; `prepare` finishes and checks this rank's part and says what it brings.

    Raises the same `JoinError` on every rank where `prepare` raised on one of them, where versions or facts differ, or where a rank was
    not heard from within `timeout` seconds (None: `join_timeout`); `release` then frees device memory first.
    """
    if world.joined:  # this rank's own fault: the others do not know of it, so it is no JoinError
        raise RankError(f"rank {world.rank} ({world.host}) joins twice; expected one join for each launch (later ones: `agree`)")
    return _meet(world, prepare, "join", join_timeout() if timeout is None else timeout, release)


def agree(
    world: World, prepare: Callable[[], JoinRequest], *, timeout: float | None = None, release: Callable[[], None] = lambda: None
) -> Joined:
    """As `join`, for ranks that joined already: before another model is loaded, say. Waits as long as the ranks live unless told."""
    if not world.joined:
        raise RankError(f"rank {world.rank} ({world.host}) would agree before it joined; call `join` first")
    return _meet(world, prepare, "agree", timeout, release)


def leaders_first(world: World, joined: Joined, work: Callable[[], None]) -> None:
    """Does `work` on the lowest rank of each host, then on the others: they find what the first left in a cache."""
    if joined.leads_host:
        work()
    world.exchange(b"", "leaders are done")
    if not joined.leads_host:
        work()


def own_record(world: World, prepare: Callable[[], JoinRequest], seconds: float | None) -> JoinRecord:
    """This rank's record; what `prepare` raises becomes its refusal."""
    import numba_meta

    reason, exit_status, request = "", 1, JoinRequest()
    try:
        request = prepare()
    except NumbaMetaError as error:
        reason, exit_status = str(error) or type(error).__name__, error.exit_status
    except Exception as error:
        reason = f"unexpected {type(error).__name__}: {' '.join(str(error).split())}"
    return JoinRecord(
        rank=world.rank, host=world.host, host_key=world.host_key, process=world.process, version=numba_meta.__version__,
        ok=not reason, reason=reason, exit_status=exit_status, facts=dict(request.facts), offers=tuple(request.offers),
        forced=request.forced, cores=format_cores(os.sched_getaffinity(0)), needed_host_bytes=request.needed_host_bytes,
        available_host_bytes=request.available_host_bytes, start=start_of(world.process), ended=request.ended,
        give_up_at=0.0 if seconds is None else time.time() + seconds,
    )  # fmt: skip


def _meet(
    world: World, prepare: Callable[[], JoinRequest], purpose: str, seconds: float | None, release: Callable[[], None]
) -> Joined:
    record = own_record(world, prepare, seconds)
    try:
        joined = _exchange_records(world, record, purpose, seconds)
    except BaseException:
        with contextlib.suppress(Exception):  # the reason is what counts now
            release()
        raise
    world.joined = True
    return joined


def _exchange_records(world: World, record: JoinRecord, purpose: str, seconds: float | None) -> Joined:
    data = encode_record(record)
    if seconds is None:
        heard: Sequence[bytes | None] = world.exchange(data, purpose)
    else:
        give_up = earliest_deadline(time.monotonic() + seconds, record.host_key, time.monotonic, time.time)
        heard = world.exchange_within(data, give_up, purpose)
    records = [None if each is None else decode_record(each, rank) for rank, each in enumerate(heard)]
    present = [each for each in records if each is not None]
    missing = [rank for rank, each in enumerate(records) if each is None]
    verdict = judge(present) if not missing else first_refusal(present) or (missing_text(missing, world.size, seconds), 1)
    text = b"" if verdict is None else f"{verdict[1]} {verdict[0]}".encode()[:_VERDICT_BYTES]
    # A rank that heard all may stand beside one that gave up: nobody goes on before all said that they do.
    end = time.monotonic() + (_LAST_WORDS_SECONDS if missing or seconds is None else max(_LAST_WORDS_SECONDS, seconds))
    until = last_words(end, [each.rank for each in present], time.monotonic)
    ends = world.exchange_within(text.ljust(_VERDICT_BYTES, b"\0"), until, f"{purpose}: verdict")
    speaker = min((each.rank for each in present), default=world.rank)
    if verdict is not None:
        raise JoinError(verdict[0], exit_status=verdict[1], speaker=speaker)
    for rank, end_text in enumerate(ends):
        if end_text is None:
            raise JoinError(missing_text([rank], world.size, seconds), speaker=speaker)
        if theirs := end_text.rstrip(b"\0").decode(errors="replace"):
            status, _, reason = theirs.partition(" ")
            raise JoinError(f"{present[rank].name}: {reason}", exit_status=int(status), speaker=speaker)
    return Joined(world.rank, tuple(present))


def last_words(end: float, speaking: Sequence[int], clock: Callable[[], float]) -> Deadline:
    """When to stop listening (time of `clock`): at `end`, or soon after all of the ranks `speaking` were heard."""
    until = end

    def deadline(heard: Sequence[bytes | None]) -> float:
        nonlocal until
        if until == end and all(heard[rank] is not None for rank in speaking):
            until = min(end, clock() + _DELIVERY_SECONDS)
        return until

    return deadline


def missing_text(missing: Sequence[int], size: int, seconds: float | None) -> str:
    """The line about ranks that did not come."""
    names = ", ".join(map(str, missing))
    within = "" if seconds is None else f" within {seconds:g} s"
    return (
        f"never heard from rank{'s' if len(missing) > 1 else ''} {names} of {size}{within}; "
        f"see what holds {'them' if len(missing) > 1 else 'it'} up, or raise {TIMEOUT_VARIABLE}"
    )
