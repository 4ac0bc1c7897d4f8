"""What a host-resident cache takes on the devices and in the host, from the devices' own accounts; and that steps take no more."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from synthetic import write_model
from transport.scenario import ids

import numba_meta as nm
from numba_meta.models.model import Model

HEAD_BYTES = 64  # of K, and of V, in a cell: 32 elements in f16
HOST = {"kv": "host", "kv_pipeline_headroom": 0, "kv_pipeline_budget": 0}
ALIGNMENT = 64


@pytest.fixture(scope="module")
def four_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven layers, 4 KV heads of 32: a cell of K is 256 bytes in f16, a head's 64."""
    sizes: dict[str, Any] = {"n_layer": 7, "n_embd": 128, "n_head": 4, "n_head_kv": 4, "n_ff": 128, "n_vocab": 300, "context_length": 16384}
    return write_model(tmp_path_factory.mktemp("memory") / "four.gguf", types="q8_0", **sizes)


@pytest.fixture
def load(four_heads: Path) -> Callable[..., Model]:
    options = {**HOST, "ctx_size": 2048, "ubatch_size": 256, "cache_type_k": "f16", "cache_type_v": "f16"}
    return lambda **more: nm.load(four_heads, **{**options, **more})


def ring_bytes(model: Model) -> list[int]:
    return [device.bytes_by_label().get("the ring", 0) for device in model.context.device]


def simple_bytes(slot: int, n_heads: int, n_cells_full: int = 2048) -> int:
    """A slot by the share of K (or V, which is as large) that so many of the 4 heads have of the full context."""
    entry = n_cells_full * 4 * HEAD_BYTES
    share = min(65536, -(-65536 * (n_cells_full * n_heads * HEAD_BYTES + ALIGNMENT) // entry))
    n_bytes = -(-slot * share // 65536)
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


@pytest.mark.parametrize(
    ("tensor_split", "heads", "depth"),
    [("1", (4,), 1), ("1", (4,), 4), ("1,1", (2, 2), 1), ("70,30", (3, 1), 2), ("1,0", (4, 0), 1), ("10,60,5,25", (0, 3, 0, 1), 1)],
)
def test_a_ring_takes_what_the_formula_says(tensor_split: str, heads: tuple[int, ...], depth: int, load: Callable[..., Model]) -> None:
    """(N + 2) slots, each a layer's K and V in the window's room (256 cells times a power of two), by the device's share or whole."""
    devices = ["cpu:0"] * len(heads)
    saved = []
    for by_share in (True, False):
        with load(devices=devices, tensor_split=tensor_split, kv_pipeline_depth=depth, kv_ring_by_share=by_share) as model:
            for n_tokens, n_cells in ((1, 256), (255, 256), (250, 512), (100, 1024)):
                model.context.decode(ids(1, n_tokens, 300), [0] * n_tokens, [0])
                slot = n_cells * 2 * 4 * HEAD_BYTES
                got, stats = ring_bytes(model), model.transport.stats
                assert got == [(depth + 2) * (simple_bytes(slot, n) if by_share else slot) for n in heads]
                assert tuple(got) == stats["ring_bytes"] and stats["slot_bytes"] == slot and stats["n_slots"] == depth + 2
            saved.append(sum(got))
    slots = (depth + 2) * slot
    assert saved[1] == len(heads) * slots and saved[0] <= slots + (depth + 2) * len(heads) * 3 * ALIGNMENT, "by share: one ring in all"


@pytest.mark.parametrize("types", (("f32", "f16"), ("q8_0", "q4_0")))
def test_types_of_k_and_v_count(types: tuple[str, str], load: Callable[..., Model]) -> None:
    row_bytes = {"f32": 128, "f16": 64, "q8_0": 34, "q4_0": 18}  # 32 elements
    with load(cache_type_k=types[0], cache_type_v=types[1]) as model:
        model.context.decode([1], [0], [0])
        need = 256 * 4 * (row_bytes[types[0]] + row_bytes[types[1]])
        slot = 1 << (need - 1).bit_length()
        assert ring_bytes(model) == [3 * slot] and model.transport.stats["need_bytes"] == (3 * need,)


@pytest.mark.parametrize("options", ({"kv_pipeline_depth": 0}, {"kv_cpu_pinned": False}, {"devices": "cpu:0?async=0"}))
def test_a_ring_that_is_declined_takes_nothing(options: dict[str, Any], load: Callable[..., Model]) -> None:
    with load(**options) as model:
        model.context.decode(ids(2, 200, 300), [0] * 200, [0])
        assert ring_bytes(model) == [0] and "the ring" not in model.context.device[0].bytes_by_label()


def test_devices_hold_no_cache_but_that_of_their_first_layers(load: Callable[..., Model]) -> None:
    """By label: the cache is in the host, whole; with `kv_gpu_layers` the devices hold so many layers of it."""
    devices, labels = "cpu:0,cpu:0", []
    layer_bytes = 2048 * 2 * 4 * HEAD_BYTES
    for n_layers in (0, 2, 7):
        with load(devices=devices, kv_gpu_layers=n_layers) as model:
            model.context.decode(ids(3, 256, 300), [0] * 256, [0])
            for device in model.context.device:
                held = device.bytes_by_label()
                assert 0 <= held.get("the KV cache", 0) - n_layers * layer_bytes / 2 <= n_layers * 2 * ALIGNMENT
                assert sum(held.values()) == device.allocated_bytes
                assert held.keys() <= {"weights", "the KV cache", "the ring", "the workspace", "inputs", "slot_table", "cell_table"}
                labels.append(held)
            host = model.context._memory.host
            assert (host.data.size if host else 0) == (7 - n_layers) * layer_bytes
    with load(devices=devices, **{**dict.fromkeys(HOST), "kv": "device"}) as model:
        assert [d.bytes_by_label()["the KV cache"] for d in model.context.device] == [labels[-1]["the KV cache"]] * 2
        assert model.context._memory.host is None


@pytest.mark.parametrize(("window", "ubatch_size", "n_cells"), [(16, 240, 256), (16, 241, 512), (300, 200, 512), (500, 13, 768)])
def test_sliding_window_layers_keep_no_more_cells_than_they_need(window: int, ubatch_size: int, n_cells: int, tmp_path: Path) -> None:
    """`round_up(window + ubatch, 256)` cells of a sequence, in the host and in deliveries; the layer that sees everything has all."""
    cell, sizes = 2 * HEAD_BYTES, {"n_embd": 64, "n_head": 2, "n_head_kv": 1, "head_dim": 32, "n_ff": 64}
    path = write_model(tmp_path / "g.gguf", "gemma3", n_layer=6, sliding_window=window, context_length=1024, **sizes)
    with nm.load(path, ctx_size=2048, ubatch_size=ubatch_size, parallel=2, **HOST) as model:
        host = model.context._memory.host
        assert host is not None and host.data.size == cell * (5 * 2 * n_cells + 2048)
        prompt = ids(4, 900, 300)
        for at in range(0, 900, ubatch_size):
            chunk = prompt[at : at + ubatch_size]
            model.context.decode(chunk, [0] * len(chunk), [0])
        model.context.decode([5], [0], [0])
        assert model.transport.stats["early_bytes"] == (cell * (5 * n_cells + 1024),)


@pytest.mark.parametrize(("tensor_split", "reader"), [("1,0", 0), ("0,1", 1)])
def test_a_device_without_heads_receives_nothing(tensor_split: str, reader: int, tiny_models: dict[str, Path]) -> None:
    """Also where K and V are mirrored, one KV head: no copies, next to no ring; the device that reads also writes back."""
    options = {"devices": "cpu:0,cpu:0", "tensor_split": tensor_split, "ctx_size": 512, "ubatch_size": 64}
    with nm.load(tiny_models["gemma3"], **options) as model, nm.load(tiny_models["gemma3"], **options, **HOST) as hosted:
        for token in range(20):
            rows = [m.context.decode([token], [0], [0]).tobytes() for m in (model, hosted)]
            assert rows[0] == rows[1]
        stats = hosted.transport.stats
        assert stats["path"] == "pipelined"
        assert stats["early_bytes"][reader] > 0 == stats["early_bytes"][1 - reader]
        assert stats["ring_bytes"][1 - reader] <= 3 * 2 * ALIGNMENT, "a share of no bytes pays for alignment"
        plan = hosted.context.plan(hosted.context.capacity_for(1, 1))
        assert not plan.devices[1 - reader].transfer_calls


def resident_bytes() -> int:
    """Memory of this process that is in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def decode_steps(model: Model, n_steps: int, n_positions: int) -> None:
    """Steps of one token; the sequence is begun anew where it has become long."""
    context = model.context
    for step in range(n_steps):
        if context.cells.length(0) == n_positions:
            context.cells.truncate(0, 0)
        context.decode([step % 300], [0], [0])


@pytest.mark.parametrize("depth", (0, 1))
def test_ten_thousand_steps_take_no_memory(depth: int, load: Callable[..., Model]) -> None:
    """Through a ring that has grown, and begun anew several times: memory, buffers, threads and recordings stay as they are."""
    with load(devices="cpu:0,cpu:0", kv_pipeline_depth=depth) as model:

        def state() -> tuple[Any, ...]:
            recordings = {capacity: id(recording) for capacity, recording in model.context._recordings.items()}
            return model.memory(), len(os.listdir("/proc/self/task")), threading.active_count(), recordings, model.transport.generation

        decode_steps(model, 1_100, 600)  # past the growth of the ring, and once from the begin again
        before, used = state(), resident_bytes()
        decode_steps(model, 10_000, 600)
        assert state() == before
        assert resident_bytes() - used < 1 << 20, "100 bytes a step"
        assert model.transport.stats["steps"] > 11_000
