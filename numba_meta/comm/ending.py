"""Why a launch ends: which of the things that happened to the ranks is the reason that the user reads (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["raised", "vanished", "silent", "calls", "signal", "mpi"]
_ORDER: tuple[Kind, ...] = ("raised", "vanished", "silent", "calls", "signal", "mpi")  # a cause before what follows from it


@dataclass(frozen=True)
class Event:
    """Something that ends a launch. `rank` is where it happened, which may be heard of through another rank."""

    kind: Kind
    rank: int
    host: str
    reason: str
    exit_status: int = 1

    @property
    def message(self) -> str:
        """The reason behind the rank's name: as what it said or did. The reason names the ranks itself where their calls differ."""
        if self.kind == "calls":
            return self.reason
        colon = ":" if self.kind in ("raised", "mpi") else ""
        return f"rank {self.rank} ({self.host}){colon} {self.reason}"


@dataclass(frozen=True)
class Ending:
    """What this rank does: end with `exit_status`; rank `speaker` says `message`, which this one is if it `speaks`."""

    event: Event
    message: str
    exit_status: int
    speaks: bool
    speaker: int = 0


def choose_ending(events: Sequence[Event], own_rank: int, gone: frozenset[int]) -> Ending:
    """The ending from all events so far, earliest first. The lowest rank that is not `gone` speaks.

    Where several ranks raised the same, the message names none: the user reads what one process would have said.
    """
    event = min(events, key=lambda each: _ORDER.index(each.kind))
    same = {each.rank for each in events if each.kind == event.kind == "raised" and each.reason == event.reason}
    message = event.reason if len(same) > 1 else event.message
    speaker = min(rank for rank in range(own_rank + 1) if rank not in gone or rank == own_rank)
    return Ending(event, message, event.exit_status or 1, speaks=speaker == own_rank, speaker=speaker)


def killed(rank: int, host: str) -> Event:
    """A connection that ended without a word."""
    reason = "has gone without a word: killed, out of memory, crashed, or ended by os._exit; see its host's log"
    return Event("vanished", rank, host, reason)


def silent(rank: int, host: str, seconds: float) -> Event:
    """No heartbeat for too long."""
    reason = f"sent no sign of life for {seconds:.0f} s: its host or the network is down, or its process was stopped"
    return Event("silent", rank, host, reason)
