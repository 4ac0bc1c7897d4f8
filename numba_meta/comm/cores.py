"""How many threads a rank may start: the cores that it may use, divided by the ranks that share them."""

from __future__ import annotations

from collections.abc import Sequence


def threads_of_rank(rank: int, hosts: Sequence[str], cores: Sequence[frozenset[int]]) -> int:
    """Threads for `rank`, at least 1. `hosts` and `cores` in rank order: equal values for one host; the cores each rank may run on.

    A core that k ranks of a host may use counts 1/k. With `mpirun -n 2` on two cores, bound (1 core each) or not (2 shared), that is 1.
    """
    total = 0.0
    for core in cores[rank]:
        total += 1 / sum(host == hosts[rank] and core in theirs for host, theirs in zip(hosts, cores, strict=True))
    return max(1, int(total + 1e-6))
