"""The watchdog and its connections, as threads of this process: what each event leads to, without MPI."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from fake_ranks import run_ranks

from numba_meta.comm import calls as calls_module
from numba_meta.comm import mesh as mesh_module
from numba_meta.comm import watchdog as watchdog_module
from numba_meta.comm.calls import Call
from numba_meta.comm.errors import RankError
from numba_meta.comm.mesh import Peer, connect_mesh
from numba_meta.comm.processes import start_of
from numba_meta.comm.watchdog import Watchdog


class Rank:
    """A watchdog of rank `rank`, with the test at the other end of its connections."""

    def __init__(self, rank: int, others: tuple[int, ...]) -> None:
        self.endings = []
        self.ended = threading.Event()
        self.dog = Watchdog(rank, f"host{rank}", end=self._end)
        self.far: dict[int, Peer] = {}
        near = []
        for other in others:
            a, b = socket.socketpair()
            for each in (a, b):
                each.settimeout(2)
            near.append(Peer(other, f"host{other}", a))
            self.far[other] = Peer(rank, f"host{rank}", b)
        self.dog._thread.start()  # not start(): signals stay those of pytest
        self.dog.attach(near)

    def _end(self, ending):
        self.endings.append(ending)
        self.ended.set()

    def ending(self):
        assert self.ended.wait(10)
        return self.endings[0]

    def close(self) -> None:
        self.dog.stop()
        for peer in self.far.values():
            peer.socket.close()

    def heard(self, other: int, key: str, seconds: float = 5):
        """The first message with `key` that rank `other` gets."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            messages, _ = self.far[other].receive()
            for message in messages:
                if key in message:
                    return message[key]
        raise AssertionError(f"rank {other} never heard {key}")


@pytest.fixture
def make():
    made = []

    def one(rank: int, others: tuple[int, ...]) -> Rank:
        made.append(Rank(rank, others))
        return made[-1]

    yield one
    for each in made:
        each.close()


def test_a_closed_connection_is_a_rank_that_has_gone(make):
    rank = make(1, (0, 2))
    rank.far[2].socket.close()
    assert rank.heard(0, "event")["rank"] == 2
    ending = rank.ending()
    assert ending.message.startswith("rank 2 (host2) has gone without a word") and not ending.speaks and ending.exit_status == 1


def test_who_ends_with_others_says_so_first(make):
    """Rank 2, which is slow to hear rank 1, does not take the end of rank 0 for the reason."""
    first, slow = make(0, (1, 2)), make(2, (0, 1))
    event = {"kind": "signal", "rank": 1, "host": "host1", "reason": "was told to end (SIGTERM)", "exit_status": 143}
    first.far[1].send({"event": event})
    assert first.ending().speaks and first.heard(2, "event") == event
    slow.far[0].send({"event": event})
    slow.far[0].socket.close()
    ending = slow.ending()
    assert (ending.event.rank, ending.exit_status, ending.speaks) == (1, 143, False)


def test_the_next_rank_speaks_for_the_one_that_has_gone(make):
    rank = make(1, (0, 2))
    rank.far[0].socket.close()
    assert rank.ending().speaks


def test_a_reason_that_comes_with_the_end_of_the_connection(make):
    rank = make(1, (0,))
    rank.far[0].send({"event": {"kind": "raised", "rank": 0, "host": "host0", "reason": "out of luck", "exit_status": 2}})
    rank.far[0].socket.close()
    ending = rank.ending()
    assert (ending.message, ending.exit_status, ending.speaks) == ("rank 0 (host0): out of luck", 2, False)


def test_what_this_rank_reports_reaches_the_others_and_comes_back(make):
    rank = make(0, (1,))
    ending = rank.dog.report("raised", "no such file", 2)
    assert ending.message == "rank 0 (host0): no such file" and ending.speaks
    assert rank.heard(1, "event") == {"kind": "raised", "rank": 0, "host": "host0", "reason": "no such file", "exit_status": 2}
    assert not rank.ending().speaks  # the main thread has it; should it hang, the process still ends


def test_a_cause_that_arrives_a_moment_later_counts(make):
    rank = make(0, (1, 2))
    rank.far[1].socket.close()
    time.sleep(watchdog_module.GATHER_SECONDS / 3)
    rank.far[2].send({"event": {"kind": "raised", "rank": 2, "host": "host2", "reason": "first", "exit_status": 1}})
    assert rank.ending().message == "rank 2 (host2): first"


def test_silence_is_noticed_and_heartbeats_keep_a_slow_rank_alive(make, monkeypatch):
    monkeypatch.setattr(watchdog_module, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(watchdog_module, "SILENCE_SECONDS", 2.0)
    rank = make(0, (1, 2))
    begin = time.monotonic()
    while time.monotonic() - begin < 2.7 and not rank.endings:
        rank.far[1].send({"beat": True})
        if time.monotonic() - begin < 1.0:
            rank.far[2].send({"beat": True})
        assert rank.heard(1, "beat")
    ending = rank.ending()
    assert ending.message.startswith("rank 2 (host2) sent no sign of life for")
    assert time.monotonic() - begin > 2.9  # 2 after its last one


def test_a_rank_that_was_stopped_is_ended_and_does_not_speak(make, monkeypatch):
    monkeypatch.setattr(watchdog_module, "SILENCE_SECONDS", 0.5)
    process = subprocess.Popen(["sleep", "60"])
    process.send_signal(signal.SIGSTOP)
    rank = make(1, (0,))
    rank.dog._peers[0].process, rank.dog._peers[0].start = process.pid, start_of(process.pid)
    ending = rank.ending()
    assert ending.speaks and ending.message.startswith("rank 0 (host0) sent no sign of life")
    assert process.poll() is None, "the reason is said before"
    monkeypatch.setattr(watchdog_module, "say", lambda _: None)
    monkeypatch.setattr(watchdog_module.os, "_exit", lambda _: None)
    watchdog_module.end_process(ending, rank.dog.before_exit)
    assert process.wait(10) == -signal.SIGKILL


def test_a_rank_of_this_host_that_is_at_work_is_waited_for(make, monkeypatch):
    """What holds Python's lock (a long regular expression) keeps the rank's own watchdog from saying that it lives."""
    monkeypatch.setattr(watchdog_module, "SILENCE_SECONDS", 0.2)
    process = subprocess.Popen(["sleep", "60"])
    try:
        rank = make(1, (0,))
        rank.dog._peers[0].process, rank.dog._peers[0].start = process.pid, start_of(process.pid)
        time.sleep(1.0)
        assert not rank.endings
        process.send_signal(signal.SIGSTOP)
        assert rank.ending().message.startswith("rank 0 (host0) sent no sign of life")
    finally:
        process.kill()
        process.wait(10)


def begin_aside(dog, monkeypatch):
    """In a thread, which in a rank would be ended with the process."""
    monkeypatch.setattr(calls_module, "_HALT_SECONDS", 0.0)

    def begin():
        with contextlib.suppress(RankError):
            dog.calls.begin(Call("generate"))

    threading.Thread(target=begin, daemon=True).start()


def test_calls_that_differ_are_an_ending(make, monkeypatch):
    rank = make(0, (1,))
    rank.far[1].send({"call": 2, "kind": "logits", "facts": {}, "n_steps": 0, "seed": 0})
    begin_aside(rank.dog, monkeypatch)
    ending = rank.ending()
    assert ending.message.startswith("rank 1 (host1) made call 2: logits; rank 0 (host0): generate; ") and ending.speaks
    assert rank.heard(1, "event")["kind"] == "calls"


def test_a_rank_that_ends_before_the_others_is_an_ending(make, monkeypatch):
    rank = make(0, (1,))
    rank.far[1].send({"bye": 1, "n_steps": 0})
    rank.far[1].socket.close()
    begin_aside(rank.dog, monkeypatch)
    assert rank.ending().message.startswith("rank 1 (host1) ended after call 1, rank 0 (host0) made call 2: generate; ")


def test_a_good_end_waits_for_all(make):
    rank = make(0, (1, 2))
    finisher = threading.Thread(target=rank.dog.finish, daemon=True)
    finisher.start()
    assert rank.heard(1, "bye") == 1
    rank.far[1].send({"bye": 1, "n_steps": 0})
    rank.far[1].socket.close()  # after a goodbye that is no failure
    finisher.join(0.7)
    assert finisher.is_alive() and not rank.endings
    rank.far[2].send({"bye": 1, "n_steps": 0})
    finisher.join(5)
    assert not finisher.is_alive() and not rank.endings


def test_a_rank_that_fails_while_another_waits_at_the_end(make):
    rank = make(0, (1,))
    finisher = threading.Thread(target=rank.dog.finish, daemon=True)
    finisher.start()
    rank.heard(1, "bye")
    rank.far[1].send({"event": {"kind": "raised", "rank": 1, "host": "host1", "reason": "late", "exit_status": 1}})
    assert rank.ending().message == "rank 1 (host1): late"
    assert finisher.is_alive()  # in a real rank the watchdog has ended the process
    rank.dog.all_ended.set()
    finisher.join(5)


def test_messages_in_pieces_and_garbage():
    a, b = socket.socketpair()
    a.settimeout(0.2)
    peer = Peer(1, "host1", a)
    b.sendall(b'{"be')
    assert peer.receive() == ([], True)
    b.sendall(b'at": true}\nnonsense\n[1]\n' + json.dumps({"bye": True}).encode())
    assert peer.receive() == ([{"beat": True}], True)
    b.sendall(b"\n")
    assert peer.receive() == ([{"bye": True}], True)
    assert peer.receive() == ([], True)
    b.close()
    assert peer.receive() == ([], False)
    a.close()


@pytest.mark.parametrize("one_host", [True, False])
def test_a_mesh_connects_every_pair(one_host, monkeypatch):
    monkeypatch.setattr(mesh_module, "own_addresses", lambda: ["127.0.0.2", "127.0.0.1"])

    def work(world):
        peers = connect_mesh(world, [f"host{rank}" for rank in range(4)], one_host)
        for peer in peers:
            assert peer.send({"from": world.rank, "to": peer.rank})
        heard = [peer.receive()[0][0] for peer in peers]
        world.exchange(b"", "all heard")
        for peer in peers:
            peer.socket.close()
        return [peer.rank for peer in peers], heard

    for rank, outcome in enumerate(run_ranks(4, work)):
        others = [other for other in range(4) if other != rank]
        assert outcome.value == (others, [{"from": other, "to": rank} for other in others]), outcome.error


def test_a_rank_that_cannot_be_reached_is_named_on_all(monkeypatch):
    monkeypatch.setattr(mesh_module, "own_addresses", lambda: [])
    monkeypatch.setattr(mesh_module, "_CONNECT_SECONDS", 0.5)
    outcomes = run_ranks(2, lambda world: connect_mesh(world, ["a", "b"], False))
    assert all(isinstance(outcome.error, RankError) for outcome in outcomes)
    messages = {str(outcome.error) for outcome in outcomes}
    assert messages == {"rank 0 (host0) cannot reach the others over TCP: rank 1 did not connect within 0.5 s"}


def test_strangers_are_turned_away():
    """Connections without the secret, or with a rank that is not expected, do not take a rank's place."""
    real_accept = mesh_module._accept

    def disturbed(listener, secret, world, peers):
        for hello in (b"", b"x" * 5, mesh_module._HELLO.pack(b"0" * 16, 1), mesh_module._HELLO.pack(secret, 0)):
            stranger = socket.create_connection(listener.getsockname())
            stranger.sendall(hello)
            stranger.close()
        real_accept(listener, secret, world, peers)

    def work(world):
        mesh_module._accept = disturbed if world.rank == 0 else mesh_module._accept
        peers = connect_mesh(world, ["a", "b"], True)
        assert peers[0].send({"hello": world.rank})
        heard = peers[0].receive()[0]
        world.exchange(b"", "heard")
        peers[0].socket.close()
        return heard

    try:
        outcomes = run_ranks(2, work)
    finally:
        mesh_module._accept = real_accept
    assert [outcome.value for outcome in outcomes] == [[{"hello": 1}], [{"hello": 0}]], outcomes


def test_a_signal_that_was_ignored_stays_ignored():
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "python"], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )  # fmt: skip
    with process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGHUP)
        time.sleep(0.6)
        assert process.poll() is None
        process.terminate()
        assert process.wait(10) == 143


PROGRAM = """
import ctypes, os, signal, sys, time
from numba_meta.comm.watchdog import Watchdog
dog = Watchdog(0, "host0")
dog.start()
print("ready", flush=True)
if sys.argv[1] == "stuck":
    ctypes.CDLL(None).sleep(20)      # a call that Python's signal handlers cannot leave: retried by hand
    ctypes.CDLL(None).sleep(20)
time.sleep(20)
"""


@pytest.mark.parametrize("where", ["stuck", "python"])
def test_sigterm_ends_a_process_wherever_it_is(where):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, where], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    begin = time.monotonic()
    process.terminate()
    _, stderr = process.communicate(timeout=10)
    assert process.returncode == 143 and time.monotonic() - begin < 5
    process.stdout.close()
    assert stderr == ""  # nobody else is there: who sent the signal knows


def test_a_rank_that_was_told_to_end_lets_the_speaker_go_first(make, monkeypatch):
    """The speaker decides without gathering, and the launcher, which ends all once one has ended, sees the speaker's end."""
    monkeypatch.setattr(watchdog_module, "GATHER_SECONDS", 60.0)
    monkeypatch.setattr(watchdog_module, "SPEAKER_SECONDS", 60.0)
    events = {"kind": "signal", "rank": 1, "host": "host1", "reason": "was told to end (SIGTERM)", "exit_status": 143}
    first, second = make(0, (1,)), make(1, (0,))
    first.far[1].send({"event": events})
    second.far[0].send({"event": events})
    assert first.ending().speaks
    assert not second.ended.is_set()
    second.far[0].socket.close()
    assert not second.ending().speaks


def test_a_silent_rank_waits_until_the_speaker_has_ended(make, monkeypatch):
    monkeypatch.setattr(watchdog_module, "SPEAKER_SECONDS", 60.0)
    rank = make(1, (0,))
    rank.far[0].send({"event": {"kind": "raised", "rank": 0, "host": "host0", "reason": "x", "exit_status": 1}})
    assert not rank.ended.wait(watchdog_module.GATHER_SECONDS + 0.6)
    rank.far[0].socket.close()
    assert not rank.ending().speaks
