"""What the ranks call: each says so before a call's first step, over the watchdog's connections, and begins once all have said the same.

A rank's history is a row of numbered calls, each of so many steps. As every rank waits for the others where a call begins, none is more
than one call ahead. Whoever waits inside a step for a rank that has left that call would wait for ever: its watchdog, which asks `judge`
all the time, ends the launch. A step itself costs two additions here; nothing is sent.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from numba_meta.comm.errors import RankError
from numba_meta.errors import counted

DOUBT_SECONDS = 1.0  # a rank inside a step that another has not made may still leave it with an error of its own, as the other did
_HALT_SECONDS = 10.0  # the watchdog ends the process long before
_SEED_BITS = 32
ALIKE = "all ranks must make the same calls of a model in the same order"


@dataclass(frozen=True)
class Call:
    """What is called (`generate`), and all that must be the same on every rank: a phrase of a few words each, by name, in this order."""

    kind: str
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Left:
    """A call that a rank has left: no step of it follows the `n_steps` that are done."""

    number: int
    n_steps: int


@dataclass
class _Peer:
    """What another rank has said."""

    name: str
    calls: dict[int, Call] = field(default_factory=dict)  # this rank's call, and the next
    seeds: dict[int, int] = field(default_factory=dict)
    left: _Left | None = None
    ended: bool = False  # its program
    doubt: tuple[int, int] = (0, 0)  # call and step in which this rank waits for it in vain, it seems
    doubt_since: float = 0.0


class CallLog:
    """This rank's calls beside those of the others. One thread makes them; the watchdog's hears and judges.

    `with log:` is around each step. `tell` sends a message to all other ranks; `fail` ends the launch with a reason.
    """

    def __init__(
        self, rank: int, host: str, tell: Callable[[dict[str, object]], None], fail: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.rank = rank
        self.name = f"rank {rank} ({host})"
        self.number = 0
        self.n_models = 0
        self._tell = tell
        self._fail = fail
        self._clock = clock
        self._call = Call("nothing")
        self._n_begun = self._n_done = 0  # steps of this call
        self._last = _Left(0, 0)  # the call before
        self._ended: tuple[int, int] | None = None  # the call and its begun steps when this rank's program ended
        self._broken: str | None = None  # why no further call can be agreed on
        self._peers: dict[int, _Peer] = {}
        self._changed = threading.Condition()
        self._thread: int | None = None

    def attach(self, hosts: Mapping[int, str]) -> None:
        """From now on the other ranks, by number, are waited for. All ranks are in the same call: the load in which they meet."""
        with self._changed:
            self._peers = {rank: _Peer(f"rank {rank} ({host})") for rank, host in hosts.items()}
            self.number, self._last = 1, _Left(0, 0)

    # ---- what the thread that calls does -----------------------------------------------------------------------------------------------

    def check_thread(self) -> None:
        """Ends the launch where another thread makes calls already: which comes first would differ between ranks, and MPI allows one."""
        own = threading.get_ident()
        if self._thread is None:
            self._thread = own
        elif self._thread != own:
            self._halt("a second thread would use a model; over ranks one thread of the program loads models and makes all calls of them")

    def begin(self, call: Call) -> int:
        """The next call. Returns once every rank has said the same, with a random number that is rank 0's on all.

        Where one has said something else, the launch ends.
        """
        self.check_thread()
        if self._ended is not None:
            raise RankError(f"{call.kind} was called after the ranks have parted, at the end of the program; call it before that")
        if self._broken is not None:
            self._halt(f"{self.name} {self._broken}; {ALIKE}")
        try:
            return self._agreed(call)
        except BaseException as error:  # of a signal's handler, say: the others may never hear of this call, or go on with it alone
            self._broken = f"left call {self.number} ({call.kind}) with {type(error).__name__} while it waited for the others"
            raise

    def _agreed(self, call: Call) -> int:
        seed = secrets.randbits(_SEED_BITS)
        with self._changed:
            self._last = _Left(self.number, self._n_done)
            self.number += 1
            self._call, number = call, self.number
            self._n_begun = self._n_done = 0
        if not self._peers:
            return seed
        self._tell({"call": number, "kind": call.kind, "facts": dict(call.facts), "n_steps": self._last.n_steps, "seed": seed})
        with self._changed:
            while not all(number in peer.calls for peer in self._peers.values()):
                self._changed.wait(0.5)  # in slices, so that Ctrl-C gets through
            if self.rank:
                seed = self._peers[0].seeds[number]
        if reason := self.judge():
            self._halt(reason)
        return seed

    def go_on(self, number: int) -> int:
        """Before a step of call `number`, which others may have followed: then it is called anew. Its number from here on."""
        if number != self.number:
            self.begin(Call("another token", {"of": f"of call {number}"}))
        return self.number

    def leave(self, number: int) -> None:
        """No step of this call follows, as far as this rank goes. Waits for nobody."""
        if number == self.number and self._peers and self._ended is None:
            self._tell({"left": number, "n_steps": self._n_done})

    def __enter__(self) -> None:
        """Begins a step: work in which ranks wait for each other."""
        if self._thread != threading.get_ident():
            self.check_thread()
        self._n_begun += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self._n_done += 1
        else:
            self._n_begun -= 1

    def end(self) -> dict[str, object]:
        """The program makes no further calls; what the others are told of it."""
        self._ended = (self.number, self._n_begun)
        return {"bye": self.number, "n_steps": self._n_done}

    def _halt(self, reason: str) -> None:
        """Never returns: ends the launch, whatever thread this is and whatever the program would make of an error."""
        self._fail(reason)
        time.sleep(_HALT_SECONDS)
        raise RankError(reason)

    # ---- what the watchdog's does ------------------------------------------------------------------------------------------------------

    def hear(self, rank: int, message: Mapping[str, Any]) -> None:
        """A message of another rank, if it is one of those above."""
        peer = self._peers.get(rank)
        if peer is None or "n_steps" not in message:
            return
        with self._changed:
            n_steps = int(message["n_steps"])
            if "call" in message:
                number = int(message["call"])
                peer.calls[number] = Call(str(message["kind"]), message["facts"])
                peer.seeds[number] = int(message["seed"])
                peer.left = _Left(number - 1, n_steps)
                for old in [each for each in peer.calls if each < self.number]:
                    del peer.calls[old], peer.seeds[old]
            else:
                peer.ended = "bye" in message
                peer.left = _Left(int(message["bye" if peer.ended else "left"]), n_steps)
            self._changed.notify_all()

    def judge(self) -> str | None:
        """Why the ranks' calls cannot fit each other any more; None as far as they can."""
        with self._changed:
            if self._ended is not None and self._ended != (self.number, self._n_begun):
                return f"{self.name} ended while a thread of its own uses a model; wait for the thread before the program ends"
            for rank, peer in self._peers.items():
                if reason := self._contradiction(rank, peer):
                    return f"{reason}; {ALIKE}"
        return None

    def _contradiction(self, rank: int, peer: _Peer) -> str | None:
        theirs, left = peer.calls.get(self.number), peer.left
        if theirs is not None and theirs != self._call:
            (a, call_a), (b, call_b) = ((peer.name, theirs), (self.name, self._call))[:: 1 if rank > self.rank else -1]
            said_a, said_b = describe_difference(call_a, call_b)
            return f"{a} made call {self.number}: {said_a}; {b}: {said_b}"
        if left is None:
            return None
        if left.number == self._last.number and left.n_steps != self._last.n_steps and not peer.ended:
            here = f"{self.name} went on after {counted(self._last.n_steps, 'step')} of call {left.number}"
            return f"{here}, {peer.name} after {counted(left.n_steps, 'step')}"
        if self._ended is not None and (max(peer.calls, default=0) > self.number or (peer.ended and left.number > self.number)):
            further = peer.calls.get(self.number + 1)
            made = f"made call {self.number + 1}{': ' + further.kind if further else ''}"
            return f"{self.name} ended after call {self.number}, {peer.name} {made}"
        if peer.ended and self.number > left.number:
            return f"{peer.name} ended after call {left.number}, {self.name} made call {self.number}: {self._call.kind}"
        if left.number == self.number and self._ended is not None and peer.ended and left.n_steps != self._n_done:
            here = f"{self.name} ended after {counted(self._n_done, 'step')} of call {self.number} ({self._call.kind})"
            return f"{here}, {peer.name} after {counted(left.n_steps, 'step')}"
        if left.number == self.number and self._n_begun > left.n_steps and self._lasts(peer):
            how = "ended in" if peer.ended else "left"
            steps = counted(left.n_steps, "step")
            return f"{peer.name} {how} call {self.number} ({self._call.kind}) after {steps} of it, {self.name} goes on with it"
        return None

    def _lasts(self, peer: _Peer) -> bool:
        """Whether this rank has waited for the other in this step for a while."""
        doubt, now = (self.number, self._n_begun), self._clock()
        if doubt != peer.doubt:
            peer.doubt, peer.doubt_since = doubt, now
        return now - peer.doubt_since >= DOUBT_SECONDS


def describe_difference(a: Call, b: Call) -> tuple[str, str]:
    """Two calls in a few words each: their kinds, or the first of their facts that differs."""
    if a.kind != b.kind:
        return a.kind, b.kind
    names: Sequence[str] = [name for name in dict.fromkeys([*a.facts, *b.facts]) if a.facts.get(name) != b.facts.get(name)]
    if not names:
        return a.kind, b.kind
    return f"{a.kind} {a.facts.get(names[0], '')}".strip(), f"{b.kind} {b.facts.get(names[0], '')}".strip()
