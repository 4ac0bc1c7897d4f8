"""Ranks on one node add up their host memory before they promise it: each alone would promise what all of them share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class HostNeed:
    """What one rank wants of its host's memory, and how much it saw free there (None: the system does not tell). Bytes."""

    host: str  # of equal value for ranks that share memory
    needed_bytes: int
    available_bytes: int | None


@dataclass(frozen=True)
class HostMemory:
    """One host: the ranks on it, what they need together, what is free for them. Bytes."""

    host: str
    ranks: tuple[int, ...]
    needed_bytes: int
    available_bytes: int | None

    @property
    def fits(self) -> bool:
        return self.available_bytes is None or self.needed_bytes <= self.available_bytes


def add_up_host_memory(needs: Sequence[HostNeed]) -> tuple[HostMemory, ...]:
    """The hosts of a launch in the order of their lowest rank, from the needs of all ranks in rank order.

    Of what the ranks of one host saw free, the least counts: they looked at different moments.
    """
    ranks: dict[str, list[int]] = {}
    for rank, need in enumerate(needs):
        ranks.setdefault(need.host, []).append(rank)
    hosts = []
    for host, here in ranks.items():
        seen = [free for rank in here if (free := needs[rank].available_bytes) is not None]
        total = sum(needs[rank].needed_bytes for rank in here)
        hosts.append(HostMemory(host, tuple(here), total, min(seen) if seen else None))
    return tuple(hosts)


def grant_host_memory(needs: Sequence[HostNeed]) -> tuple[int, ...]:
    """Bytes that each rank may promise, in rank order: its need where its host has room for all, else its share in proportion to the needs.

    Shares are rounded down, so that those of a host never exceed what is free there.
    """
    granted = [need.needed_bytes for need in needs]
    for host in add_up_host_memory(needs):
        if not host.fits and host.available_bytes is not None:
            for rank in host.ranks:
                granted[rank] = needs[rank].needed_bytes * max(0, host.available_bytes) // host.needed_bytes
    return tuple(granted)
