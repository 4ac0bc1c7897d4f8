"""Plans of a rank's part of a step: which collectives it makes, with whom, and how long what others read stays."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from schedule.model_graphs import ModelGraph

from numba_meta.errors import PlacementError
from numba_meta.kernels.cpu.mpi import mpi_all_reduce, mpi_gather_columns
from numba_meta.schedule.calls import Call, Peer
from numba_meta.schedule.infer import infer_splits
from numba_meta.schedule.plan import StepPlan, plan_step, storage_lifetimes
from numba_meta.schedule.ranks import Ranks, device_ranges

N_ROWS = 3
CUTS = [([1, 1], [1, 1]), ([2, 1, 1], [2, 1]), ([1, 0, 2], [1, 2]), ([0, 0, 1], [2, 1]), ([1, 1, 1, 1], [1, 1, 2])]


class Table:
    """A table of reductions that only says how much scratch it wants: enough to tell the sizes apart."""

    address = 4096
    all_reduce = mpi_all_reduce
    gather_columns = mpi_gather_columns

    def reduce_scratch_bytes(self, n_elements: int) -> int:
        return 8 * n_elements + 64

    def gather_scratch_bytes(self, widths: Sequence[int], n_rows: int) -> int:
        return 4 * n_rows * sum(widths) + 64

    def check(self) -> None:
        raise AssertionError("no step is run here")


def plans_of(architecture: str, proportions: list[int], counts: list[int]) -> list[StepPlan]:
    """The plan of every rank."""
    model = ModelGraph(architecture, proportions, n_rows=N_ROWS, n_outputs=N_ROWS)
    split = infer_splits(model.graph, model.leaf_state, len(proportions))
    devices = device_ranges(counts)
    return [plan_step(split, [1] * n, False, 64, ranks=Ranks(rank, devices, Table())) for rank, n in enumerate(counts)]


def over_ranks(call: Call) -> bool:
    return call.kernel is not None and call.kernel.name.startswith("mpi_")


def test_devices_are_counted_over_all_ranks() -> None:
    assert device_ranges([2, 1, 3]) == (range(0, 2), range(2, 3), range(3, 6))
    ranks = Ranks(1, device_ranges([2, 1, 3]), Table())
    assert ranks.own == range(2, 3) and ranks.n_devices == 6


@pytest.mark.parametrize(("proportions", "counts"), CUTS, ids=str)
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_every_rank_makes_the_same_exchanges_in_the_same_order(architecture: str, proportions: list[int], counts: list[int]) -> None:
    plans = plans_of(architecture, proportions, counts)
    wanted = [node.name for node in plans[0].split.collectives]
    assert wanted
    for plan in plans:
        first, *others = plan.devices
        made = [call for call in first.calls if over_ranks(call)]
        assert [call.node for call in made] == wanted
        assert not any(over_ranks(call) for device in others for call in device.calls)
    for same in zip(*([call for call in plan.devices[0].calls if over_ranks(call)] for plan in plans), strict=True):
        assert len({call.kernel.name for call in same}) == 1
        assert len({call.arguments.get("n") for call in same}) == 1
        widths = [tuple(call.arguments["widths"].data) for call in same if "widths" in call.arguments]
        assert len(set(widths)) <= 1
        for call, rank_width in zip(same, widths[0] if widths else (), strict=False):
            assert call.arguments["part_stride"] == 4 * rank_width


@pytest.mark.parametrize(("proportions", "counts"), CUTS, ids=str)
def test_devices_meet_twice_where_a_rank_has_several_and_never_where_it_has_one(proportions: list[int], counts: list[int]) -> None:
    for plan, n in zip(plans_of("llama", proportions, counts), counts, strict=True):
        wanted = [node.name for node in plan.split.collectives for _ in range(2)] if n > 1 else []
        for device in plan.devices:
            assert [call.node for call in device.calls if call.meets] == wanted
            assert n > 1 or not any(isinstance(place, Peer) for call in device.calls for place in call.reads)


@pytest.mark.parametrize(("proportions", "counts"), CUTS, ids=str)
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_what_other_devices_read_stays_until_they_have_met_again(architecture: str, proportions: list[int], counts: list[int]) -> None:
    for plan in plans_of(architecture, proportions, counts):
        lives = [storage_lifetimes(device.graph, device.calls) for device in plan.devices]
        meetings = [[i for i, call in enumerate(device.calls) if call.meets] for device in plan.devices]
        for reader in plan.devices:
            n_met = 0
            for call in reader.calls:
                n_met += call.meets
                for place in call.reads:
                    if not isinstance(place, Peer) or not place.tensor.n_elements:
                        continue
                    own = meetings[place.device]
                    first, last = lives[place.device][place.tensor.storage]
                    assert first <= own[n_met - 1]
                    assert last >= (own[n_met] if n_met < len(own) else len(plan.devices[place.device].calls) - 1)


def test_a_rank_needs_the_threads_of_its_own_devices() -> None:
    model = ModelGraph("llama", [1, 1], n_rows=1, n_outputs=1)
    split = infer_splits(model.graph, model.leaf_state, 2)
    with pytest.raises(PlacementError, match="1 devices of this rank with 2 numbers of threads"):
        plan_step(split, [1, 1], False, 64, ranks=Ranks(0, device_ranges([1, 1]), Table()))
