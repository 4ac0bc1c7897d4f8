"""The cache of a model: its types and their sizes, windows, steps of any size, one context full, memory flat and given back."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.feeding import append
from models.numpy_reference import ReferenceModel

import numba_meta as nm
from numba_meta.errors import ContextFullError, NumbaMetaError, OutOfMemoryError

N_VOCAB = 397
# bytes of a row of 128 elements: K and V of 2 heads of 64 in one cell
ROW_BYTES = {"f32": 512, "f16": 256, "bf16": 256, "q8_0": 136, "q4_0": 72}
# How far from f32 logits may lie, of a standard deviation of 2: half precision, 8 mantissa bits, 8 bits, 4 bits.
BOUNDS = {"f32": 0.0, "f16": 0.01, "bf16": 0.1, "q8_0": 0.15, "q4_0": 2.5}


def ids(seed: int, n: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, N_VOCAB, n)]


@pytest.fixture
def llama(paths: dict[str, Path]) -> Path:
    return paths["llama"]


@pytest.fixture
def gemma3(paths: dict[str, Path]) -> Path:
    """Five layers with a window of 16, a global one."""
    return paths["gemma3"]


@pytest.mark.parametrize("which", ("k", "v"))
@pytest.mark.parametrize("cache_type", ROW_BYTES)
def test_each_cache_type_is_near_f32_and_as_small_as_it_says(cache_type: str, which: str, llama: Path) -> None:
    types = {"cache_type_k": "f32", "cache_type_v": "f32"}
    tokens = ids(1, 60)
    with nm.load(llama, exact=True, ctx_size=100, **types) as model:
        wanted, f32_bytes = model.logits(tokens), model.plan.devices[0].cache_bytes
    types[f"cache_type_{which}"] = cache_type
    with nm.load(llama, exact=True, ctx_size=100, **types) as model:
        got, n_bytes = model.logits(tokens), model.plan.devices[0].cache_bytes
    error = np.abs(got - wanted).max()
    assert error <= BOUNDS[cache_type]
    assert cache_type == "f32" or error > 0, "the type is used"
    tensor_bytes = 100 * ROW_BYTES["f32"], 100 * ROW_BYTES[cache_type]
    assert f32_bytes == 2 * 2 * tensor_bytes[0], "2 layers, K and V"
    assert 0 <= n_bytes - 2 * sum(tensor_bytes) < 4 * 64, "each tensor begins at a multiple of 64"


def test_the_default_types_follow_the_mode(llama: Path) -> None:
    with nm.load(llama) as fast, nm.load(llama, exact=True) as exact:
        assert fast.plan.cache_types == ("f16", "f16") and exact.plan.cache_types == ("f32", "f32")


def test_devices_hold_what_the_plan_says(gemma3: Path, llama: Path) -> None:
    """Also after steps of every kind, and nothing beside it but inputs and cell tables."""
    for path in (gemma3, llama):
        with nm.load(path, devices="cpu:0,cpu:0,cpu:0", tensor_split="3,1,0", parallel=2) as model:
            model.logits(ids(2, 100), last=True)
            model.generate_many([ids(3, 5), ids(4, 7)], 4, ignore_eos=True)
            for facts, held in zip(model.plan.devices, model.memory().values(), strict=True):
                planned = facts.weight_bytes + facts.cache_bytes + sum(facts.workspace_bytes.values())
                assert planned <= held <= planned + 64 * 1024


@pytest.mark.parametrize("n_devices", (1, 3))
def test_windows_much_shorter_than_the_text(n_devices: int, gemma3: Path) -> None:
    """900 tokens through windows of 16 in rings of 256 cells (ubatch 100), against float64."""
    tokens = ids(5, 900)
    wanted = ReferenceModel.read(gemma3).logits(tokens)
    with nm.load(gemma3, exact=True, ubatch_size=100, devices=["cpu:0"] * n_devices) as model:
        assert model.plan.n_window_cells == 256
        assert np.abs(model.logits(tokens) - wanted).max() < 2e-4
        last = model.logits(tokens[:-30], last=True)
        one_by_one = append(model, tokens[-30:], step=1)
        assert np.abs(np.concatenate([last[None], one_by_one]) - wanted[-31:]).max() < 2e-4


@pytest.mark.parametrize("exact", (True, False), ids=("exact", "fast"))
@pytest.mark.parametrize("which", ("llama", "gemma3"))
def test_every_ubatch_size_gives_the_same_bits(which: str, exact: bool, request: pytest.FixtureRequest) -> None:
    path, tokens = request.getfixturevalue(which), ids(6, 400)
    results = []
    for ubatch_size in (512, 1, 7, 16, 17):
        with nm.load(path, exact=exact, ctx_size=420, ubatch_size=ubatch_size) as model:
            results.append((model.logits(tokens, last=True), model.generate_ids(tokens, 5, ignore_eos=True)))
    for logits, generated in results[1:]:
        np.testing.assert_array_equal(logits, results[0][0])
        assert generated == results[0][1]


def test_unified_and_own_cells_give_the_same_bits(llama: Path, gemma3: Path) -> None:
    prompts = [ids(i, n) for i, n in enumerate((30, 3, 50, 17, 9))]
    for path in (llama, gemma3):
        results = []
        for unified in (True, False):
            with nm.load(path, ctx_size=400, parallel=4, kv_unified=unified) as model:
                assert model.context.shape.n_positions == (400 if unified else 100)
                results.append(model.generate_many(prompts, 10, ignore_eos=True))
        assert results[0] == results[1]


def test_a_context_that_fills_up_gives_what_fits_and_then_one_line(llama: Path) -> None:
    """16 cells, 10 of the prompt: tokens 1 to 6 are fed back, the seventh is known from the logits of the sixth."""
    with nm.load(llama, ctx_size=16) as model:
        prompt, got = ids(7, 10), []
        with pytest.raises(ContextFullError, match=r"^1 more token does not fit the context: 16 are in sequence 0, .*--ctx-size.$"):
            for piece in model._generated(prompt, 20, True, False, {}):
                got.append(piece)
        assert len(got) == 7
        assert model.generate_ids(prompt, 7, ignore_eos=True) == got, "as many as fit are no error, and the model goes on"
        with pytest.raises(ContextFullError):
            model.generate_ids(prompt, 8, ignore_eos=True)
        assert "".join(model.generate(prompt, 7, ignore_eos=True, reuse_prefix=True)) == model.detokenize(got)


def test_a_prompt_longer_than_the_context_names_both_lengths(llama: Path) -> None:
    line = r"^the prompt has 11 tokens, a sequence's part of the context .kv_unified=False, -no-kvu: divided by 2. has room for 10; .*$"
    with nm.load(llama, ctx_size=20, parallel=2, kv_unified=False) as model:
        for call in (model.generate_ids, model.logits, lambda p: list(model.generate(p)), lambda p: model.generate_many([[1], p])):
            with pytest.raises(ContextFullError, match=line):
                call(ids(8, 11))
        assert len(model.generate_ids(ids(8, 10), 1, ignore_eos=True)) == 1


def test_memory_and_threads_stay_flat_over_many_requests(llama: Path) -> None:
    with nm.load(llama, devices="cpu:0,cpu:0", ctx_size=128, parallel=2) as model:

        def requests() -> Any:
            for seed in range(8):
                model.generate_ids(ids(seed, 3 + 7 * seed), 6, seed=seed, temperature=1.0, ignore_eos=True)
                model.generate_many([ids(seed, 20), ids(seed, 5)], 6, ignore_eos=True)
                model.logits(ids(seed, 20 + seed))
            return model.memory(), threading.active_count()

        first = requests()
        for _ in range(5):
            assert requests() == first


def test_memory_of_the_process_is_flat_over_ten_thousand_steps(llama: Path) -> None:
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("no /proc/self/statm: only Linux says there how much memory a process has")

    def resident_bytes() -> int:
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    with nm.load(llama, ctx_size=256, parallel=2) as model:

        def steps(n: int) -> None:
            for _ in range(n // 100):
                model.generate_many([[1, 2], [3]], 20, ignore_eos=True)
                model.generate_ids([5, 6], 80, ignore_eos=True)

        steps(2000)
        before = resident_bytes()
        steps(10_000)
        assert resident_bytes() - before < 2 << 20


def test_close_gives_everything_back(llama: Path, gemma3: Path) -> None:
    before = threading.active_count()
    for path in (llama, gemma3):
        model = nm.load(path, devices="cpu:0,cpu:0", tensor_split="1,0", ctx_size=64, threads=4)
        model.generate_ids(ids(9, 30), 5, ignore_eos=True)
        devices = model.context.device
        assert threading.active_count() > before and all(d.allocated_bytes for d in devices)
        model.close()
        model.close()
        assert threading.active_count() == before
        assert [d.allocated_bytes for d in devices] == [0, 0]


def test_use_after_close_is_one_line(llama: Path) -> None:
    model = nm.load(llama, ctx_size=64)
    begun, not_begun = model.generate([1, 2], 8, ignore_eos=True), model.generate([1, 2], 8)
    next(begun)
    model.close()
    calls = [
        lambda: model.generate_ids([1], 1),
        lambda: model.generate("the"),
        lambda: model.generate_many([[1]], 1),
        lambda: model.logits([1]),
        lambda: model.perplexity("the sea and the sky", 4),
        lambda: model.context.decode([1], [0], [0]),
        lambda: list(begun),
        lambda: list(not_begun),
    ]
    for call in calls:
        with pytest.raises(NumbaMetaError, match=r"^the (model|context) was closed; load .*$"):
            call()


def test_two_models_at_once(llama: Path, gemma3: Path) -> None:
    def alone(path: Path) -> list[int]:
        with nm.load(path, ctx_size=64) as model:
            return model.generate_ids(ids(10, 12), 12, ignore_eos=True)

    wanted = alone(llama), alone(gemma3)
    split = {"devices": "cpu:0,cpu:0", "exact": True}
    with nm.load(llama, ctx_size=64) as one, nm.load(gemma3, ctx_size=64, **split), nm.load(gemma3, ctx_size=64) as two:
        assert (one.generate_ids(ids(10, 12), 12, ignore_eos=True), two.generate_ids(ids(10, 12), 12, ignore_eos=True)) == wanted
        pieces = zip(one._generated(ids(10, 12), 12, True, False, {}), two._generated(ids(10, 12), 12, True, False, {}), strict=True)
        assert [list(ids) for ids in zip(*pieces, strict=True)] == list(wanted), "in turns"


def test_memory_limits_name_device_need_and_free(llama: Path) -> None:
    before = threading.active_count()
    with nm.load(llama, devices="cpu:0,cpu:0", ctx_size=100) as model:
        model.generate_ids(ids(1, 20), 2, ignore_eos=True)
        peak = max(d.peak_bytes for d in model.context.device)
        weights, cache = model.plan.devices[1].weight_bytes, model.plan.devices[1].cache_bytes
    line = r"^cpu:0#1: .+ needs? \d+ bytes \(.+\), \d+ of \d+ are free; use .*$"
    for limit in (1024, weights - 1, weights + 5000, weights + cache + 1000, peak - 1000):
        with pytest.raises(OutOfMemoryError, match=line), nm.load(llama, devices=f"cpu:0,cpu:0?mem={limit}", ctx_size=100) as model:
            model.generate_ids(ids(1, 20), 2, ignore_eos=True)
        assert threading.active_count() == before
    assert [device.allocated_bytes for device in model.context.device] == [0, 0]
    with nm.load(llama, devices=f"cpu:0,cpu:0?mem={peak}", ctx_size=100) as model:
        assert len(model.generate_ids(ids(1, 20), 2, ignore_eos=True)) == 2


def test_out_of_memory_in_a_step_leaves_the_model_usable(llama: Path) -> None:
    devices = "cpu:0,cpu:0"
    with nm.load(llama, devices=devices, ctx_size=100) as model:
        step = ([1] * 5, [0] * 5, range(5))  # several rows with logits: a recording that is made at its first use
        model.context.decode(*step)
        enough = model.context.device[1].peak_bytes
        wanted = model.generate_ids(ids(1, 1), 5, ignore_eos=True)
    for missing in (100, 2000, 20_000):
        with nm.load(llama, devices=f"{devices}?mem={enough - missing}", ctx_size=100) as model:
            held = []
            for _ in range(3):
                with pytest.raises(OutOfMemoryError, match="^cpu:0#1: .* needs? .* are free"):
                    model.context.decode(*step)
                held.append(model.memory())
            assert held[0] == held[1] == held[2]
            assert model.generate_ids(ids(1, 1), 5, ignore_eos=True) == wanted
