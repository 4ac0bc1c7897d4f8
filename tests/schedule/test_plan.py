"""When the storages of a step live, and that those which live together lie apart."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from schedule.model_graphs import ModelGraph

from numba_meta.dtypes import F32
from numba_meta.graph import Graph
from numba_meta.memory.layout import max_live_bytes
from numba_meta.ops import elementwise, matmul, unary
from numba_meta.schedule import plan as planning
from numba_meta.schedule.calls import AddressList, Call, Constant, Peer, Place, Scratch
from numba_meta.schedule.infer import infer_splits
from numba_meta.schedule.plan import StepPlan, plan_step, storage_of
from numba_meta.split.state import MIRRORED, PARTIAL, SplitState, split
from numba_meta.tensor import Role, Tensor

CASES = [
    ("llama", [1], 1),
    ("llama", [1, 1], 3),
    ("llama", [1, 0, 2], 3),
    ("gemma3", [1], 40),
    ("gemma3", [3, 1], 40),
    ("gemma3", [1] * 5, 2),
]


def model_plan(architecture: str, proportions: list[int], n_rows: int, exact: bool = False) -> StepPlan:
    model = ModelGraph(architecture, proportions, n_rows=n_rows, n_outputs=n_rows)
    result = infer_splits(model.graph, model.leaf_state, len(proportions))
    return plan_step(result, [1] * len(proportions), exact, 64)


def workspace_uses(call: Call) -> Iterator[tuple[Place, bool]]:
    """The storages of this device's workspace that a call touches, and whether it writes them."""
    for places, writes in ((call.reads, False), (call.writes, True)):
        for place in places:
            if isinstance(place, (Peer, AddressList, Constant)):
                continue
            storage = storage_of(place)
            if isinstance(storage, Scratch) or (isinstance(storage, Tensor) and storage.role is Role.NODE):
                yield storage, writes


def peer_reads(plan: StepPlan, device: int) -> list[tuple[Tensor, int, int]]:
    """(storage on this device, the meeting before others read it, the meeting after), as indices of this device's calls; -1: none."""
    found = []
    own_meetings = [i for i, call in enumerate(plan.devices[device].calls) if call.meets]
    for other in plan.devices:
        n_met = 0
        for call in other.calls:
            n_met += call.meets
            for place in call.reads:
                if isinstance(place, Peer) and place.device == device and place.tensor.n_elements:
                    storage = place.tensor.storage
                    after = own_meetings[n_met] if n_met < len(own_meetings) else -1
                    found.append((storage, own_meetings[n_met - 1], after))
    return found


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("architecture", "proportions", "n_rows"), CASES, ids=str)
def test_everything_is_written_before_it_is_read_and_kept_until_then(
    architecture: str, proportions: list[int], n_rows: int, exact: bool
) -> None:
    """The owner of every byte is followed through the step: a reader must find what was written for it."""
    plan = model_plan(architecture, proportions, n_rows, exact)
    for j, (device, layout) in enumerate(zip(plan.devices, plan.workspace.layouts, strict=True)):
        offsets = dict(zip(device.places, layout.offsets, strict=True))
        until: dict[Tensor, int] = {}  # the last call before which nobody may write over it
        for storage, _, after in peer_reads(plan, j):
            until[storage] = max(until.get(storage, 0), after if after >= 0 else len(device.calls))
        if j == 0:
            until |= {output.storage: len(device.calls) for output in device.graph.graph.outputs}
        owner: dict[int, Place] = {}  # by 64 bytes of the workspace

        def units(storage: Tensor | Scratch, offsets: dict[Tensor | Scratch, int] = offsets) -> range:
            return range(offsets[storage] // 64, (offsets[storage] + storage.n_bytes + 63) // 64)

        for i, call in enumerate(device.calls):
            uses = list(workspace_uses(call))
            for storage, writes in uses:
                if not writes:
                    assert all(owner.get(unit) is storage for unit in units(storage)), f"{call.node} on {j} reads {storage.name}"
            for storage, writes in uses:
                if writes:
                    for unit in units(storage):
                        before = owner.get(unit)
                        assert before is storage or before not in until or until[before] < i, f"{call.node} on {j} writes over {before}"
                        owner[unit] = storage
            # What one call reads and writes lies apart, too.
            assert all(owner.get(unit) is storage for storage, _ in uses for unit in units(storage))
        for storage, end in until.items():
            if end == len(device.calls):
                assert all(owner.get(unit) is storage for unit in units(storage)), f"{storage.name} is gone at the end on {j}"


@pytest.mark.parametrize(("architecture", "proportions", "n_rows"), CASES, ids=str)
def test_a_workspace_is_hardly_larger_than_what_lives_at_once(architecture: str, proportions: list[int], n_rows: int) -> None:
    plan = model_plan(architecture, proportions, n_rows)
    for device, layout in zip(plan.devices, plan.workspace.layouts, strict=True):
        lives = planning.storage_lifetimes(device.graph, device.calls)
        requests = [planning.Request(place.name, place.n_bytes, first, last) for place, (first, last) in lives.items()]
        assert layout.n_bytes <= 1.1 * max_live_bytes(requests, 64)


def test_a_device_with_less_needs_less() -> None:
    few, many = model_plan("llama", [1, 7], 40).workspace.n_bytes
    assert few < many


def sketch(n_sums: int) -> tuple[StepPlan, list[str]]:
    """A chain of `n_sums` sums over two devices, each followed by some work."""
    graph = Graph("sketch")
    x = graph.leaf("x", F32, [4, 64], Role.INPUT)
    states: dict[Tensor, SplitState] = {x: PARTIAL}
    names = []
    for i in range(n_sums):
        y = elementwise.scale(graph, x, 2.0, f"summand.{i}")
        x = unary.unary(graph, y, "silu", f"active.{i}")
        x = unary.unary(graph, x, "silu", f"more.{i}")
        weight, cut = graph.leaf(f"w.{i}", F32, [4, 4], Role.WEIGHT), graph.leaf(f"c.{i}", F32, [4, 64], Role.INPUT)
        states[weight], states[cut] = split(0, [2, 2]), split(0, [2, 2])
        x = elementwise.mul(graph, matmul.matmul(graph, weight, cut, f"product.{i}"), x, f"x.{i}")
        names.append(f"summand.{i}")
    graph.output(unary.unary(graph, x, "silu", "out"))
    return plan_step(infer_splits(graph, states.__getitem__, 2), [1, 1], True, 64), names


def test_a_summand_stays_until_the_meeting_after_the_one_where_others_read_it() -> None:
    plan, names = sketch(3)
    for device in plan.devices:
        meetings = [i for i, call in enumerate(device.calls) if call.meets]
        assert len(meetings) == 4 == plan.n_collectives
        lives = {place.name: life for place, life in planning.storage_lifetimes(device.graph, device.calls).items()}
        for n, name in enumerate(names):
            assert lives[name][1] == meetings[n + 1]
        assert lives["x.2"][1] == len(device.calls) - 1  # the last sum: nobody meets after it
        for n in range(3):  # others live until their last reader
            assert lives[f"active.{n}"][1] < meetings[n + 1]


def test_outputs_stay_on_the_device_where_the_host_reads_them() -> None:
    graph = Graph("g")
    x = graph.leaf("x", F32, [4, 8], Role.INPUT)
    early = graph.output(elementwise.scale(graph, x, 2.0, "early"))
    for i in range(6):
        x = unary.unary(graph, early if i == 0 else x, "silu", f"later.{i}")
    graph.output(x)
    plan = plan_step(infer_splits(graph, lambda _: MIRRORED, 2), [1, 1], True, 64)
    ends = [{place.name: last for place, (_, last) in planning.storage_lifetimes(d.graph, d.calls).items()} for d in plan.devices]
    assert ends[0]["early"] == 6
    assert ends[1]["early"] == 1


def test_a_step_without_calls_needs_nothing() -> None:
    graph = Graph("g")
    graph.output(graph.leaf("x", F32, [4], Role.INPUT))
    plan = plan_step(infer_splits(graph, lambda _: MIRRORED, 1), [1], True, 64)
    assert plan.devices[0].calls == ()
    assert plan.workspace.n_bytes == (0,)
    assert plan.n_collectives == 0
