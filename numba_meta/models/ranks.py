"""A model over ranks: whose devices are whose, what ranks tell each other at load, and what they agree on while they run."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from numba_meta.devices.parse import DeviceSpec, format_bytes, parse_devices
from numba_meta.errors import OutOfMemoryError, UsageError
from numba_meta.models.sampling import SamplingOptions
from numba_meta.schedule.ranks import Ranks
from numba_meta.split.state import SplitState
from numba_meta.tensor import Tensor, contiguous_strides

if TYPE_CHECKING:
    from numba_meta.comm.failure import RankLaunch
    from numba_meta.comm.join import Joined

_SEED_BYTES = 8


def parse_rank_devices(devices: str | Sequence[str], n_ranks: int) -> tuple[tuple[DeviceSpec, ...], ...]:
    """The devices of every rank: lists between `;` in rank order; one list without `;` serves every rank. Raises `UsageError`."""
    lists = devices.split(";") if isinstance(devices, str) else [devices]
    if len(lists) == 1:
        return (parse_devices(lists[0]),) * n_ranks
    if len(lists) != n_ranks:
        started = "1 process runs (start them with mpirun -n N)" if n_ranks == 1 else f"{n_ranks} ranks run"
        raise UsageError(f"devices {devices!r} are those of {len(lists)} ranks, and {started}; expected one list for each, or one for all")
    return tuple(parse_devices(each) for each in lists)


@dataclass(frozen=True)
class RankGroup:
    """The ranks that hold a model together, as this one sees them."""

    launch: RankLaunch
    joined: Joined
    ranks: Ranks

    def leaders_first(self, work: Callable[[], None]) -> None:
        """Does `work` on one rank of each host, then on the others."""
        from numba_meta.comm.join import leaders_first

        leaders_first(self.launch.world, self.joined, work)

    def least(self, level: int, purpose: str) -> int:
        """The least of all ranks' levels, each 0 to 255. All ranks call this together."""
        return min(each[0] for each in self.launch.world.exchange(bytes([level]), purpose))

    def with_seed(self, options: SamplingOptions) -> SamplingOptions:
        """Options by which all ranks draw the same tokens: rank 0's random seed where none is given and one is needed."""
        if options.greedy or options.seed is not None:
            return options
        seeds = self.launch.world.exchange(secrets.randbits(32).to_bytes(_SEED_BYTES, "little"), "seed")
        return replace(options, seed=int.from_bytes(seeds[0], "little"))


def check_host_memory(joined: Joined) -> None:
    """Raises the same `OutOfMemoryError` on every rank where the ranks of a host need more memory, together, than it has free."""
    from numba_meta.comm.host_memory import add_up_host_memory

    for host in add_up_host_memory(joined.host_needs):
        if not host.fits and host.available_bytes is not None:
            name = joined.records[host.ranks[0]].host
            raise OutOfMemoryError(
                f"{name}: {len(host.ranks)} ranks need {format_bytes(host.needed_bytes)} together for weights and KV cache, "
                f"{format_bytes(host.available_bytes)} are free; use a smaller context, or fewer ranks on this host"
            )


def leaf_of_devices(leaf: Tensor, state: SplitState, devices: range) -> Tensor:
    """A cache tensor as a process keeps it: the heads of its own devices alone."""
    if state.axis != 0:
        return leaf
    shape = (sum(state.extents[device] for device in devices), *leaf.shape[1:])
    return replace(leaf, shape=shape, strides=contiguous_strides(leaf.dtype, shape))
