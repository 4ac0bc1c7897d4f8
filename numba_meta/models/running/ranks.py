"""A model over ranks: whose devices are whose, what ranks tell each other at load, and what they agree on while they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Self

from numba_meta.devices.parse import DeviceSpec, format_bytes, parse_devices
from numba_meta.errors import OutOfMemoryError, UsageError
from numba_meta.models.running.rank_calls import describe_call
from numba_meta.models.text.sampling import SamplingOptions
from numba_meta.schedule.ranks import Ranks
from numba_meta.split.state import SplitState
from numba_meta.tensor import Tensor, contiguous_strides

if TYPE_CHECKING:
    from numba_meta.comm.calls import CallLog
    from numba_meta.comm.failure import RankLaunch
    from numba_meta.comm.join import Joined


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
    model: int = 1  # its number by load order, the same on all ranks

    def leaders_first(self, work: Callable[[], None]) -> None:
        """Does `work` on one rank of each host, then on the others."""
        from numba_meta.comm.join import leaders_first

        leaders_first(self.launch.world, self.joined, work)

    def least(self, level: int, purpose: str) -> int:
        """The least of all ranks' levels, each 0 to 255. All ranks call this together."""
        return min(each[0] for each in self.launch.world.exchange(bytes([level]), purpose))

    @property
    def calls(self) -> CallLog:
        """The calls of all models of this launch; `with group.calls:` is around a step."""
        return self.launch.calls

    def begin(self, kind: str, prompts: Sequence[Sequence[int]], **facts: object) -> None:
        """Begins a call, once all ranks have said the same."""
        self.calls.begin(describe_call(kind, self.model, prompts, None, facts))

    def begin_drawing(self, kind: str, prompts: Sequence[Sequence[int]], options: SamplingOptions, **facts: object) -> SamplingOptions:
        """As `begin`. Options by which all ranks draw the same tokens: rank 0's random seed where none is given and one is needed."""
        seed = self.calls.begin(describe_call(kind, self.model, prompts, options, facts))
        return options if options.greedy or options.seed is not None else replace(options, seed=seed)


class RankCall:
    """The call that has just begun, token by token: other calls may follow in between. `with` is around all of them."""

    def __init__(self, group: RankGroup) -> None:
        self._calls = group.calls
        self._number = group.calls.number

    def go_on(self) -> None:
        """Before a token; the same one on all ranks."""
        self._number = self._calls.go_on(self._number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None or kind is GeneratorExit:  # of an error the others hear more
            self._calls.leave(self._number)


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
