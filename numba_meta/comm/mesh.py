"""A TCP connection from every rank to every other, beside MPI: over it ranks say why they end, and a rank that is gone is noticed at once.

The system closes a killed process's connections; heartbeats (watchdog.py) find hosts and links that went silent.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from numba_meta.comm.errors import RankError
from numba_meta.comm.world import World

_HELLO = struct.Struct("<16sI")  # secret of the launch, rank
_ADDRESS_BYTES = 1024
_TRY_SECONDS = 2.0  # for one address of a host
_CONNECT_SECONDS = 10.0  # for all connections
_MAX_LINE = 65536


@dataclass
class Peer:
    """The connection to one rank."""

    rank: int
    host: str
    socket: socket.socket
    unread: bytes = b""
    process: int = 0  # where it runs on this host: its number, and when it started (`processes.start_of`)
    start: int = 0
    sending: threading.Lock = field(default_factory=threading.Lock)

    def send(self, message: dict[str, object]) -> bool:
        """Sends one line; False where the other end is gone or reads nothing."""
        try:
            with self.sending:  # lines of two threads do not mix
                self.socket.sendall(json.dumps(message).encode() + b"\n")
            return True
        except OSError:
            return False

    def receive(self) -> tuple[list[dict[str, object]], bool]:
        """The messages that have come, and whether the connection still stands."""
        alive = True
        try:
            data = self.socket.recv(65536)
            alive = bool(data)
        except (BlockingIOError, InterruptedError, TimeoutError):
            data = b""
        except OSError:
            data, alive = b"", False
        *lines, self.unread = (self.unread + data).split(b"\n")
        messages = []
        for line in lines:
            with contextlib.suppress(ValueError):
                message = json.loads(line)
                if isinstance(message, dict):
                    messages.append(message)
        return messages, alive and len(self.unread) <= _MAX_LINE


def connect_mesh(world: World, hosts: list[str], one_host: bool) -> list[Peer]:
    """Connects this rank to all others; every rank calls it at the same time. `hosts` in rank order.

    On one host only loopback is listened on; elsewhere a stranger without the launch's secret is turned away. Raises the same `RankError`
    on every rank where one could not reach another.
    """
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1" if one_host else "", 0), backlog=world.size + 8))
        secret = world.exchange(secrets.token_bytes(16), "mesh: secret")[0]
        own = json.dumps({"port": listener.getsockname()[1], "at": ["127.0.0.1"] if one_host else own_addresses()}).encode()
        places = [json.loads(each) for each in world.exchange(own.ljust(_ADDRESS_BYTES), "mesh: addresses")]
        peers: dict[int, socket.socket] = {}
        problem = ""
        try:
            for rank in range(world.rank):
                peers[rank] = _connect(places[rank]["at"], places[rank]["port"], _HELLO.pack(secret, world.rank))
            _accept(listener, secret, world, peers)
        except OSError as error:
            problem = f"rank {world.rank} ({world.host}) cannot reach the others over TCP: {error.strerror or error}"
        said = world.exchange(problem.encode()[:400].ljust(400, b"\0"), "mesh: built")
        problems = [each.rstrip(b"\0").decode(errors="replace") for each in said]
        if any(problems):
            for connection in peers.values():
                connection.close()
            raise RankError(next(filter(None, problems)))
        for connection in peers.values():
            connection.settimeout(_TRY_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return [Peer(rank, hosts[rank], peers[rank]) for rank in sorted(peers)]


def own_addresses() -> list[str]:
    """Addresses at which other hosts may reach this one, at most 8: those of its name, and the one it would leave by."""
    return list(dict.fromkeys(_addresses()))[:8]


def _addresses() -> Iterator[str]:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # of a range kept for documentation; a datagram socket sends nothing here
        yield probe.getsockname()[0]
    with contextlib.suppress(OSError):
        for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET):
            if not str(info[4][0]).startswith("127."):
                yield str(info[4][0])


def _connect(addresses: list[str], port: int, hello: bytes) -> socket.socket:
    last = OSError("the host names no address")
    for address in addresses:
        try:
            connection = socket.create_connection((address, port), timeout=_TRY_SECONDS)
            connection.sendall(hello)
            return connection
        except OSError as error:
            last = error
    raise last


def _accept(listener: socket.socket, secret: bytes, world: World, peers: dict[int, socket.socket]) -> None:
    end = time.monotonic() + _CONNECT_SECONDS
    expected = set(range(world.rank + 1, world.size))
    while expected:
        listener.settimeout(max(0.01, end - time.monotonic()))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            raise OSError(f"rank {min(expected)} did not connect within {_CONNECT_SECONDS:g} s") from None
        connection.settimeout(_TRY_SECONDS)
        rank = -1
        with contextlib.suppress(OSError):
            said, rank = _HELLO.unpack(connection.recv(_HELLO.size, socket.MSG_WAITALL).ljust(_HELLO.size, b"\0"))
            if not secrets.compare_digest(said, secret):
                rank = -1
        if rank in expected:
            peers[rank] = connection
            expected.remove(rank)
        else:
            connection.close()
