"""What a rank says of itself when it joins: a record of fixed size, and the judgement of all records together (pure)."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields

from numba_meta.comm.calls import ALIKE

WIRE_VERSION = 2  # of everything that ranks send each other; a change of any message counts it up
RECORD_BYTES = 8192  # of every version, so that ranks of different versions can still read each other's names
_MAGIC = struct.Struct("<16sI")
_NAME = b"numba_meta rank\0"
_MAX_TEXT = 240  # characters of a fact; a longer one travels as its digest
_MAX_REASON = 1000
_AFTER_REFUSAL_SECONDS = 2.0


@dataclass(frozen=True)
class JoinRecord:
    """One rank: who it is, whether it can join, and what must be the same on all (`facts`: a name and a short text each)."""

    rank: int
    host: str
    host_key: str
    process: int
    version: str
    wire_version: int = WIRE_VERSION
    ok: bool = True
    reason: str = ""
    exit_status: int = 1
    facts: dict[str, str] = field(default_factory=dict)
    offers: tuple[str, ...] = ()
    forced: str = ""
    cores: str = ""  # ranges such as 0-3,8
    needed_host_bytes: int = 0
    available_host_bytes: int | None = None
    start: int = 0  # of the process (`processes.start_of`)
    ended: bool = False  # has nothing to join for: its program is over
    give_up_at: float = 0.0  # seconds of the host's clock, when it stops waiting for the others

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.host})"


def encode_record(record: JoinRecord) -> bytes:
    """`RECORD_BYTES` bytes. What is too long is cut (a reason) or replaced by its digest (facts)."""
    values = asdict(record)
    values["reason"] = record.reason[:_MAX_REASON]
    values["facts"] = {name: _short(text) for name, text in record.facts.items()}
    room = RECORD_BYTES - _MAGIC.size
    data = json.dumps(values).encode()
    if len(data) > room:
        values["facts"] = {"model, cuts and options": _digest(json.dumps(sorted(record.facts.items())))}
        data = json.dumps(values).encode()
    if len(data) > room:
        values.update(host=record.host[:100], reason=record.reason[:200], cores="", offers=[])
        data = json.dumps(values).encode()
    return (_MAGIC.pack(_NAME, record.wire_version) + data).ljust(RECORD_BYTES, b" ")


def decode_record(data: bytes, rank: int) -> JoinRecord:
    """The record that `rank` sent. One of another wire format keeps what both formats know; garbage is a record that says no."""
    name, wire_version = _MAGIC.unpack_from(data)
    try:
        values = json.loads(data[_MAGIC.size :])
        known = {f.name: values[f.name] for f in fields(JoinRecord) if f.name in values}
        known["offers"] = tuple(known.get("offers", ()))
        record = JoinRecord(**{**known, "wire_version": wire_version})
        if name == _NAME:
            return record
    except (ValueError, TypeError, AttributeError):
        pass
    reason = "sent a join record that cannot be read; expected numba_meta of the same version on every rank"
    return JoinRecord(rank, "unknown host", "", 0, "unknown", wire_version, ok=False, reason=reason)


def facts_of(model_header: bytes, cuts: object, options: Mapping[str, object]) -> dict[str, str]:
    """The facts that ranks compare: a digest of the model file's header, the cuts, and every option by its name."""
    return {"model header": _digest_bytes(model_header), "cuts": str(cuts), **{name: str(value) for name, value in options.items()}}


def judge(records: Sequence[JoinRecord]) -> tuple[str, int] | None:
    """Why these ranks cannot join, and the exit status; None where they can. Records in rank order; every rank judges the same."""
    first = records[0]
    for other in records[1:]:
        if (other.version, other.wire_version) != (first.version, first.wire_version):
            text = f"{_versions(other)}, {_versions(first)}; install the same version for every rank"
            return text, 1
    seen: dict[tuple[str, int], JoinRecord] = {}
    for rank, record in enumerate(records):
        twin = seen.setdefault((record.host_key, record.process), record)
        if record.rank != rank or (twin is not record and record.ok):
            return f"rank {rank} (process {record.process} on {record.host}) joined twice, also as rank {twin.rank}; expected once", 1
    if refusal := first_refusal(records):
        return refusal
    if ended := [record for record in records if record.ended]:
        if len(ended) == len(records):
            return None
        return f"{ended[0].name} ended before it loaded a model, which the others do; {ALIKE}", 1
    for other in records[1:]:
        for name in dict.fromkeys([*first.facts, *other.facts]):
            here, there = other.facts.get(name, "nothing"), first.facts.get(name, "nothing")
            if here != there:
                return f"{other.name} has {name} {here}, {first.name} has {there}; start every rank with the same model and options", 1
    return None


def first_refusal(records: Sequence[JoinRecord]) -> tuple[str, int] | None:
    """The reason of the lowest rank that says no, and its exit status; without its name where all say the same, as one process would."""
    refused = [record for record in records if not record.ok]
    if not refused:
        return None
    first = refused[0]
    if len(refused) == len(records) and len({record.reason for record in refused}) == 1:
        return first.reason, first.exit_status
    others = f" (and {len(refused) - 1} more of {len(records)} ranks)" if len(refused) > 1 else ""
    return f"{first.name}: {first.reason}{others}", first.exit_status


def format_cores(cores: Iterable[int]) -> str:
    """`{0, 1, 2, 8}` as `0-2,8`."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and runs[-1][1] == core - 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def parse_cores(text: str) -> frozenset[int]:
    """The inverse of `format_cores`."""
    cores: set[int] = set()
    for run in filter(None, text.split(",")):
        low, _, high = run.partition("-")
        cores.update(range(int(low), int(high or low) + 1))
    return frozenset(cores)


def earliest_deadline(
    own: float, own_key: str, clock: Callable[[], float], wall: Callable[[], float]
) -> Callable[[Sequence[bytes | None]], float]:
    """When to stop waiting (time of `clock`), from the records heard so far: when the first rank of this host does.

    Ranks that give up together tell each other; other hosts' clocks may be off, so theirs do not count. A rank that says no ends the
    waiting for those who have not come: there is nothing to join.
    """
    until = own
    known: set[int] = set()

    def deadline(heard: Sequence[bytes | None]) -> float:
        nonlocal until
        for rank, data in enumerate(heard):
            if data is None or rank in known:
                continue
            known.add(rank)
            record = decode_record(data, rank)
            if not record.ok:
                until = min(until, clock() + _AFTER_REFUSAL_SECONDS)
            elif record.host_key == own_key and record.give_up_at > 0:
                until = min(until, clock() + record.give_up_at - wall())
        return until

    return deadline


def _versions(record: JoinRecord) -> str:
    return f"{record.name} runs numba_meta {record.version} (wire format {record.wire_version})"


def _short(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else _digest(text)


def _digest(text: str) -> str:
    return _digest_bytes(text.encode())


def _digest_bytes(data: bytes) -> str:
    return f"sha256 {hashlib.sha256(data).hexdigest()[:16]}"
