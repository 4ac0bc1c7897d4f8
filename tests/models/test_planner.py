"""The planner: the same decisions as a load, and times that follow from given speeds by hand."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import numba_meta as nm
from numba_meta.devices.meta import MetaDevice
from numba_meta.errors import UsageError
from numba_meta.models.architectures.description import ModelDescription, describe_model
from numba_meta.models.files.gguf import read_gguf
from numba_meta.models.loading.load_plan import LoadOptions, plan_devices, plan_load
from numba_meta.models.loading.planner import ModelForecast, default_contexts, plan_transport_of_model
from numba_meta.schedule.predict import DeviceSpeeds, Needs

LINKS = "cpu:0?link=5.3,cpu:0?link=2.7"
MIB = 1 << 20


def header(path: Path) -> ModelDescription:
    """All that the planner knows of a file."""
    file = read_gguf(path)
    try:
        return describe_model(file)
    finally:
        file.close()


def speeds_of(weights: float = 10e9, attention: float = 5e9, copies: float = 20e9, call: float = 0.0, meeting: float = 0.0):
    """Speeds that are the same for everything."""

    def speeds(needs: Sequence[Needs], n_threads: Sequence[int]) -> list[DeviceSpeeds]:
        assert len(needs) == len(n_threads)
        return [
            DeviceSpeeds(dict.fromkeys(need.weights, weights), dict.fromkeys(need.attention, attention), copies, call, meeting)
            for need in needs
        ]

    return speeds


def forecast(path: Path, contexts: Sequence[int] | None = None, speeds=None, **options) -> ModelForecast:
    free, cores = options.pop("free_bytes", None), options.pop("n_cores", None)
    return plan_transport_of_model(header(path), LoadOptions(kv=options.pop("kv", "host"), **options), contexts, speeds, free, cores)


# ---- decisions -------------------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 1 << 20))
def test_contexts_grow_to_the_whole(n_positions: int) -> None:
    contexts = default_contexts(n_positions)
    assert contexts[-1] == n_positions - 1
    assert list(contexts) == sorted(set(contexts))
    assert all(later == 4 * context for context, later in zip(contexts, contexts[1:-1], strict=False))


def agrees_with_a_load(path: Path, **options) -> nm.Model:
    """Loads what was planned; every decision must be the same. The prompt brings the window to that of the planned step."""
    told = forecast(path, [700], **options)
    model = nm.load(path, **{"kv": "host", **options})
    model.generate_ids([1 + i % 300 for i in range(700)], max_tokens=2, ignore_eos=True)  # the step after 700 tokens
    step, stats = told.steps[0], model.transport.stats
    assert told.load.cuts == model._load_plan.cuts
    assert told.load == model._load_plan
    assert model.context.collectives_per_step == told.n_meetings
    assert told.memory.weights == model.context.weight_plan.n_bytes
    assert told.memory.host == model.plan.host_cache_bytes
    cache_bytes = [told.memory.cache_placement.simple_bytes(j) for j in range(len(told.devices))]
    assert [device.cache_bytes for device in model.plan.devices] == cache_bytes
    assert told.devices == model.context.device.names
    assert step.path == stats["path"]
    if step.transport is not None:
        assert step.transport.ring_bytes == tuple(d.bytes_by_label().get("the ring", 0) for d in model.context.device)
        for name in ("ring_bytes", "shares", "slot_bytes", "n_slots", "reason"):
            assert getattr(step.transport, name) == stats[name]
        moved = tuple(a + b for a, b in zip(stats["early_bytes"], stats["late_bytes"], strict=True))
        assert step.delivered == moved
    return model


@pytest.mark.parametrize(
    "options",
    [
        {"devices": LINKS},
        {"devices": LINKS, "tensor_split": "1,2", "cache_type_k": "q8_0", "kv_pipeline_depth": 2},
        {"devices": LINKS, "kv_ring_by_share": False},
        {"devices": "cpu:0,cpu:0,cpu:0", "kv_gpu_layers": 1},
        {"devices": "cpu:0", "kv_pipeline_depth": 0},
        {"devices": "cpu:0?async=0,cpu:0"},
        {"devices": "cpu:0?pin=0"},
        {"devices": "cpu:0,cpu:0", "kv_cpu_pinned": False},
        {"devices": "cpu:0?mem=520M,cpu:0"},  # no headroom of 512 MiB beside weights
        {"devices": "cpu:0,cpu:0", "kv": "device"},
        {"devices": LINKS, "tensor_split": "2,1", "deterministic": True},
    ],
    ids=lambda options: ",".join(f"{key}={value}" for key, value in options.items()),
)
@pytest.mark.parametrize("model", ["llama", "gemma"])
@pytest.mark.filterwarnings("ignore:host memory could not be pinned")  # one of the cases
def test_what_is_planned_is_what_a_load_decides(llama_path: Path, gemma_path: Path, model: str, options: dict[str, object]) -> None:
    agrees_with_a_load(llama_path if model == "llama" else gemma_path, ctx_size=2048, ubatch_size=64, threads=2, **options).close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_what_is_planned_for_real_models_is_what_a_load_decides(smollm2_path: Path, gemma3_path: Path, name: str) -> None:
    path = smollm2_path if name == "smollm2" else gemma3_path
    agrees_with_a_load(path, devices=LINKS, tensor_split="55,45", ctx_size=2048).close()


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_headers_of_real_models(smollm2_path: Path, gemma3_path: Path, name: str) -> None:
    told = forecast(smollm2_path if name == "smollm2" else gemma3_path, devices=LINKS, speeds=speeds_of())
    layers = {"smollm2": 30, "gemma3": 18}[name]
    assert len(told.cell_bytes) == layers
    # f16; 3 KV heads of 64 over two devices, or one of 256 that both hold.
    assert set(told.cell_bytes.values()) == {"smollm2": {(512, 256)}, "gemma3": {(1024, 1024)}}[name]
    paths = [step.path for step in told.steps]
    assert paths == {"smollm2": ["pipelined"] * 3, "gemma3": ["pipelined"] * 4}[name]
    assert [step.context for step in told.steps] == {"smollm2": [512, 2048, 8191], "gemma3": [512, 2048, 8192, 32767]}[name]
    for step in told.steps:
        assert step.times is not None and step.times.pipelined <= step.times.ordered


def test_the_budget_turns_long_contexts_to_the_ordered_path(smollm2_path: Path) -> None:
    told = forecast(smollm2_path, [512, 8000], devices=LINKS, kv_pipeline_budget=4)
    assert [step.path for step in told.steps] == ["pipelined", "ordered"]
    assert told.steps[1].transport is not None and "over budget: the ring needs 12.1 MiB on cpu:0" in told.steps[1].transport.reason


@pytest.mark.parametrize("contexts", [[], [-1], [512, 2048]])
def test_contexts_that_do_not_fit(llama_path: Path, contexts: list[int]) -> None:
    with pytest.raises(UsageError, match="expected 0 to 2047"):
        forecast(llama_path, contexts, ctx_size=2048)


def test_memory_that_devices_share(llama_path: Path) -> None:
    enough = forecast(llama_path, [0], devices="cpu:0,cpu:0", free_bytes=600 * MIB, ctx_size=2048)
    scarce = forecast(llama_path, [0], devices="cpu:0,cpu:0", free_bytes=500 * MIB, ctx_size=2048)
    assert [enough.steps[0].path, scarce.steps[0].path] == ["pipelined", "ordered"]
    assert scarce.steps[0].transport is not None and "no headroom" in scarce.steps[0].transport.reason


# ---- devices of two kinds --------------------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.sampled_from(["cpu:0", "cuda:0", "cuda:3"]), min_size=1, max_size=4), min_size=1, max_size=4))
def test_devices_of_a_rank_are_of_one_kind(lists: list[list[str]]) -> None:
    mixed = [names for names in lists if len({name[:3] for name in names}) > 1]
    devices = ";".join(map(",".join, lists))
    if not mixed:
        planned = plan_devices(devices, len(lists))
        assert [[spec.name for spec in specs] for specs in planned] == lists
        return
    with pytest.raises(UsageError, match=f"^devices {','.join(mixed[0])} are of several kinds in one process; expected") as caught:
        plan_devices(devices, len(lists))
    told = re.search(r'launch -n ([0-9]+) -- \.\.\. --device "([^"]*)"$', str(caught.value))
    assert told is not None
    advised = plan_devices(told[2], int(told[1]))
    assert sorted(spec.name for specs in advised for spec in specs) == sorted(mixed[0]), "what is advised can be done"


@pytest.mark.parametrize("devices", ["cpu:0,cuda:0", "cuda:0,cpu:0", ["cpu:0", "cpu:0", "cuda:1"]])
def test_plan_and_load_refuse_two_kinds_before_devices_are_opened(llama_path: Path, devices, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MetaDevice, "open", lambda *_: pytest.fail("devices were opened"))
    told = []
    for work in (forecast, nm.load):
        with pytest.raises(UsageError, match="are of several kinds in one process") as caught:
            work(llama_path, devices=devices)
        told.append((str(caught.value), caught.value.exit_status))
    assert told[0] == told[1] and told[0][1] == 2


def test_too_many_devices_are_refused_at_once(llama_path: Path) -> None:
    for work in (forecast, nm.load):
        with pytest.raises(UsageError, match="^65 devices are too many for one model; expected at most 64$"):
            work(llama_path, devices=["cpu:0"] * 65)


def test_ranks_may_be_of_different_kinds(llama_header: ModelDescription) -> None:
    options = LoadOptions(devices="cpu:0,cpu:0;cuda:0,cuda:1", threads=6)
    plans = [plan_load(llama_header, options, rank, 2) for rank in range(2)]
    assert [[spec.name for spec in plan.specs] for plan in plans] == [["cpu:0", "cpu:0"], ["cuda:0", "cuda:1"]]
    assert [plan.n_threads for plan in plans] == [(3, 3), (1, 1)], "a GPU counts as one thread"
    assert plans[0].cuts == plans[1].cuts


@pytest.mark.parametrize(
    ("devices", "exact", "size"), [("cuda:0;cpu:0", False, 16), ("cuda:0;cpu:0", True, 64), ("cpu:0;cpu:0", False, 64)]
)
def test_ranks_take_steps_of_one_size(llama_header: ModelDescription, devices: str, exact: bool, size: int) -> None:
    """Where bits may not depend on the batch, a GPU computes a prompt a few rows at a time, and all ranks with it."""
    options = LoadOptions(devices=devices, deterministic=True, exact=exact, ubatch_size=64)
    plans = [plan_load(llama_header, options, rank, 2) for rank in range(2)]
    assert [plan.ubatch_size for plan in plans] == [size, size]
    assert [plan.few_rows_apart for plan in plans] == ["cuda" in devices] * 2, "they agree on each step's room, and so on which step it is"


def test_memory_of_a_gpu_is_its_own(llama_path: Path) -> None:
    """What the host has free says nothing of a GPU."""
    told = {devices: forecast(llama_path, [0], devices=devices, free_bytes=MIB) for devices in ("cpu:0", "cuda:0", "cuda:0?mem=400M")}
    assert [each.steps[0].path for each in told.values()] == ["ordered", "pipelined", "ordered"]
    reasons = [each.steps[0].transport.reason for each in told.values() if each.steps[0].transport]
    assert "no headroom" in reasons[0] and "no headroom" not in reasons[1] and "no headroom" in reasons[2]


# ---- times -----------------------------------------------------------------------------------------------------------------------------


def test_a_step_on_one_device_by_hand(llama_path: Path) -> None:
    # Only weights, attention and copies take time: one device of 10 GB/s, 5 GB/s, and a link of 1 GB/s.
    told = forecast(llama_path, [299], speeds_of(copies=1e30), devices="cpu:0?link=1", ctx_size=2048)
    times = told.steps[0].times
    assert times is not None
    cell = 2 * 3 * 64 * 2  # K and V, 3 heads, f16
    assert float(times.copy) == pytest.approx(2 * 512 * cell / 1e9)  # 2 layers, two buckets
    written_back = 2 * cell / 1e9
    products = told.memory.weights[0] - norms_bytes(llama_path)  # the embedding is the head too
    assert float(times.compute) == pytest.approx(products / 10e9 + 2 * 300 * cell / 5e9 + written_back, rel=1e-3)
    assert float(times.ordered) == pytest.approx(float(times.copy + times.compute))
    assert float(times.copy) < float(times.pipelined) < float(times.ordered)


def norms_bytes(path: Path) -> int:
    """Bytes of weights that no matrix product reads."""
    tensors = header(path).tensors
    assert "output.weight" not in tensors
    return sum(4 * facts.shape[0] for name, facts in tensors.items() if "norm" in name)


def test_calls_and_meetings_are_counted(llama_path: Path) -> None:
    free = {"weights": 1e30, "attention": 1e30, "copies": 1e30}
    told = [forecast(llama_path, [0], speeds_of(**free, meeting=1.0), devices=",".join(["cpu:0"] * n), ctx_size=512) for n in (1, 2)]
    steps = [each.steps[0].times for each in told]
    assert steps[0] is not None and steps[1] is not None
    assert float(steps[0].compute) == pytest.approx(0)
    assert float(steps[1].compute) == pytest.approx(2 * 2 + 2)  # two in each layer, the embedding, the logits
    calls = forecast(llama_path, [0], speeds_of(**free, call=1.0), devices="cpu:0", ctx_size=512).steps[0].times
    assert calls is not None and 20 * 2 < calls.compute < 30 * 2


@given(st.floats(0.01, 8), st.floats(0.01, 8), st.integers(0, 2046))
def test_a_slower_link_never_helps(llama_header: ModelDescription, one: float, other: float, context: int) -> None:
    steps = []
    for link in sorted((one, other)):
        options = LoadOptions(f"cpu:0?link={link:.3f},cpu:0?link=4", kv="host", ctx_size=2048)
        steps.append(plan_transport_of_model(llama_header, options, [context], speeds_of()).steps[0])
    assert steps[1].seconds <= steps[0].seconds
    (slow, fast) = (step.times for step in steps)
    assert slow is not None and fast is not None and fast.copy <= slow.copy and fast.ordered <= slow.ordered


@pytest.fixture(scope="module")
def llama_header(llama_path: Path) -> ModelDescription:
    return header(llama_path)


def test_copies_take_cores_from_computing(smollm2_path: Path) -> None:
    by_cores = {
        n: forecast(smollm2_path, [4096], speeds_of(), devices=LINKS, threads=2, n_cores=n).steps[0].times for n in (None, 4, 3, 2)
    }
    steps = {n: times.pipelined for n, times in by_cores.items() if times is not None}
    assert steps[4] == steps[None] < steps[3] < steps[2]
    assert len({times.ordered for times in by_cores.values() if times is not None}) == 1


def test_without_speeds_there_are_no_times(llama_path: Path) -> None:
    step = forecast(llama_path, [0], ctx_size=512).steps[0]
    assert step.times is None
    with pytest.raises(UsageError, match="no speeds"):
        _ = step.seconds
