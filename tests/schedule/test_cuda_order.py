"""Steps of CUDA devices: what is joined, delivered and added up is ordered wherever it meets in memory, and finds what was meant for it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
from schedule.model_graphs import ModelGraph
from schedule.stream_order import faults

from numba_meta.dtypes import F16, Q8_0, DType
from numba_meta.errors import PlacementError
from numba_meta.kernels import kernel_set
from numba_meta.models.architectures.builder import BatchShape
from numba_meta.models.cache.transport import deliveries_of
from numba_meta.ops.transport import WindowShape
from numba_meta.schedule.calls import Call
from numba_meta.schedule.infer import infer_splits
from numba_meta.schedule.plan import StepPlan, plan_step
from numba_meta.schedule.ranks import Ranks
from numba_meta.schedule.record_cuda import in_order
from numba_meta.schedule.transport_plan import DeviceFacts, TransportOptions, plan_transport

CELLS = 512


@functools.cache
def cuda_plan(
    architecture: str,
    proportions: tuple[int, ...],
    n_rows: int,
    depth: int | None,
    cache_type: DType = F16,
    n_streams: int = 1,
    ranks: Ranks | None = None,
) -> StepPlan:
    """The plan of a step; `depth` None: the cache lies on the devices, 0: deliveries are ordered."""
    n_devices, is_gemma = len(proportions), architecture == "gemma3"
    own = ranks.own if ranks else range(n_devices)
    sizes = {"n_layer": 6, "n_head": 6, "n_head_kv": 3, "head_dim": 64, "n_embd": 128, "n_ff": 192}
    model = ModelGraph(architecture, proportions, n_rows=n_rows, weight_type=Q8_0, cache_type=cache_type, **sizes)
    window = WindowShape(256, n_streams, CELLS, n_streams)
    windows = {} if depth is None else {False: window} | ({True: window} if is_gemma else {})
    on_devices = None if depth is None else 1
    batch = BatchShape(n_rows, 1, 2, CELLS, CELLS, CELLS if is_gemma else 0, cache_type, cache_type, on_devices, windows)
    split = infer_splits(model.build(batch), model.leaf_state, n_devices)
    transport = None
    if depth is not None:
        facts = [DeviceFacts(f"cuda:{j}") for j in own]
        transport = plan_transport(deliveries_of(split, n_devices, True, own), facts, 64, TransportOptions(depth, 0, 0))
    return plan_step(split, [1] * len(own), False, 256, transport, ranks=ranks, kernels=kernel_set("cuda"))


def names(plan: StepPlan) -> list[str]:
    return [call.kernel.name for device in plan.devices for call in device.calls if call.kernel]


@pytest.mark.parametrize("depth", (None, 0, 1, 2))
@pytest.mark.parametrize("n_rows", (1, 16, 40))
@pytest.mark.parametrize("proportions", ((1,), (2, 1), (1, 0), (1, 1, 1)))
@pytest.mark.parametrize("architecture", ("llama", "gemma3"))
def test_all_that_meets_in_memory_is_ordered(architecture: str, proportions: tuple[int, ...], n_rows: int, depth: int | None) -> None:
    plan = cuda_plan(architecture, proportions, n_rows, depth)
    assert faults(plan) == []
    made = names(plan)
    n_joined = sum("_store_" in name for name in made)
    assert n_joined == 6 * sum(part > 0 for part in proportions), "Q, K and V of every layer are joined"
    if len(proportions) > 1:
        assert sum(name.startswith("all_reduce_add") for name in made) or architecture == "gemma3"
    if depth:
        assert any(call.records for device in plan.devices for call in device.transfer_calls)


@pytest.mark.parametrize("depth", (0, 1, 2))
@pytest.mark.parametrize("proportions", ((1,), (2, 1), (1, 1, 1)))
def test_streams_are_recorded_in_an_order_in_which_they_could_run(proportions: tuple[int, ...], depth: int) -> None:
    plan = cuda_plan("llama", proportions, 1, depth)
    programs = {(j, purpose): calls for j, device in enumerate(plan.devices) for purpose, calls in device.streams().items()}
    made = list(in_order(programs))
    for stream, calls in programs.items():
        assert [call for *key, call in made if tuple(key) == stream and not call.meets] == [call for call in calls if not call.meets]
    assert [call.meets for _, _, call in made].count(True) == [call.meets for call in plan.devices[0].calls].count(True)
    recorded = set()
    for device, _, call in made:
        assert call.waits is None or (device, call.waits) in recorded
        recorded.add((device, call.records))
    ready = [device for device, purpose, call in made if purpose == "transfer" and call.records]
    assert ready == ([device for _ in range(5) for device in range(len(proportions))] if depth else []), "windows come layer by layer"


def test_what_nothing_records_is_said() -> None:
    programs = {(0, "compute"): cuda_plan("llama", (1,), 1, 1).devices[0].calls}
    with pytest.raises(PlacementError, match="nothing records it before"):
        list(in_order(programs))


def test_block_types_and_several_streams() -> None:
    assert faults(cuda_plan("llama", (2, 1), 16, 1, Q8_0, 2)) == []


class Table:
    """What reduces over ranks, as a plan needs to know it."""

    address = 0
    all_reduce = SimpleNamespace(name="ipc_all_reduce")
    gather_columns = SimpleNamespace(name="ipc_gather_columns")

    def reduce_scratch_bytes(self, n_elements: int) -> int:
        return 4 * n_elements

    def gather_scratch_bytes(self, widths: Sequence[int], n_rows: int) -> int:
        return 4 * sum(widths) * n_rows


@pytest.mark.parametrize("depth", (None, 1))
@pytest.mark.parametrize("n_rows", (1, 40))
@pytest.mark.parametrize("rank", (0, 1))
@pytest.mark.parametrize("architecture", ("llama", "gemma3"))
def test_devices_of_ranks(architecture: str, rank: int, n_rows: int, depth: int | None) -> None:
    ranks = Ranks(rank, (range(0, 2), range(2, 3)), Table())  # type: ignore[arg-type]
    plan = cuda_plan(architecture, (1, 1, 1), n_rows, depth, ranks=ranks)
    assert len(plan.devices) == 2 - rank and "ipc_all_reduce" in names(plan)
    assert faults(plan) == []


def _without(plan: StepPlan, is_gone: object) -> StepPlan:
    return replace(plan, devices=tuple(is_gone(device) for device in plan.devices))  # type: ignore[operator]


def test_what_is_wrong_is_found() -> None:
    plan = cuda_plan("llama", (2, 1), 1, 1)
    assert plan.transport is not None and plan.transport.ring is not None

    def early(call: Call) -> bool:
        return call.waits is not None and call.waits.name.startswith("release")

    hasty = _without(plan, lambda device: replace(device, transfer_calls=tuple(c for c in device.transfer_calls if not early(c))))
    assert any("are not ordered" in each for each in faults(hasty)), "a slot is filled while it is read"
    deaf = _without(plan, lambda device: replace(device, calls=tuple(c for c in device.calls if c.waits is None)))
    assert any("are not ordered" in each for each in faults(deaf)), "a window is read while it comes"
    layouts = [replace(layout, offsets=tuple(0 for _ in layout.offsets)) for layout in plan.workspace.layouts]
    squeezed = replace(plan, workspace=replace(plan.workspace, layouts=tuple(layouts)))
    assert any(", written by " in each for each in faults(squeezed)), "tensors lie on each other"
