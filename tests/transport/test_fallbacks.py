"""Declining is free: what keeps a device from a ring leads to the ordered path, one line that says why, and the same bits."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transport.product import Configuration, Gate
from transport.scenario import Played, Player, difference, ids, play

import numba_meta as nm
from numba_meta.devices.cpu import CpuBuffer, CpuDevice
from numba_meta.errors import NumbaMetaWarning, OutOfMemoryError
from numba_meta.models.cache import transport
from numba_meta.models.model import Model
from numba_meta.models.running.context import ROOMY_STEPS
from numba_meta.schedule.record import Binder
from numba_meta.schedule.record_cpu import CpuSteps

HOST = {"kv": "host", "kv_pipeline_headroom": 0}
TWO = Configuration(split="2")
GAVE_UP = r"no delivery can be staged: cpu:0 gave its ring up for a graph that did not fit beside it(; cpu:0#1 gave .*)?"


@pytest.fixture
def load(tiny_models: dict[str, Path]) -> Callable[..., Model]:
    """The tiny llama with a context of 1,024 in f16 on two devices."""
    options = {**TWO.options(), **HOST}
    return lambda devices="cpu:0,cpu:0", **more: nm.load(tiny_models["llama"], devices=devices, **{**options, **more})


def holds_no_ring(model: Model) -> None:
    stats = model.transport.stats
    assert stats["path"] == "ordered" and set(stats["ring_bytes"]) == {0} and set(stats["early_bytes"]) == {0} and stats["staged"] == ()
    assert set(stats["ordered"].values()) and "\n" not in stats["reason"]
    assert all("the ring" not in device.bytes_by_label() for device in model.context.device)
    assert not [thread for thread in threading.enumerate() if "transfer" in thread.name], "the transfer streams are released"


def played_in_order(model: Model, reason: str, wanted: Played, paths: Collection[str] = ("ordered",)) -> None:
    played = play(model)
    holds_no_ring(model)
    assert re.fullmatch(reason, played.stats["reason"]), played.stats["reason"]
    assert played.paths <= set(paths)
    assert difference(played, wanted) is None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kv_pipeline_depth": 0}, "depth 0 asks for the ordered path"),
        ({"devices": "cpu:0,cpu:0?async=0"}, "no delivery can be staged: cpu:0#1 has no asynchronous copies"),
        ({"kv_cpu_pinned": False}, "no delivery can be staged: its host memory is not pinned"),
        (
            {"devices": "cpu:0,cpu:0?mem=64M", "kv_pipeline_headroom": 512},
            r"no headroom: the ring needs 0\.[0-9] MiB on cpu:0#1 for this graph and 0\.4 MiB at the full context, "
            r"0\.0 MiB are free beyond the headroom of 512 MiB",
        ),
    ],
    ids=("depth 0", "no asynchronous copies", "not pinned", "no headroom"),
)
def test_what_cannot_be_staged_is_ordered(options: dict[str, Any], reason: str, load: Callable[..., Model], gate: Gate) -> None:
    with load(**options) as model:
        played_in_order(model, reason, gate.reference(TWO))


def test_a_foreign_device_is_ordered(load: Callable[..., Model], gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "DeviceFacts", partial(transport.DeviceFacts, is_foreign=True))
    with load() as model:
        reason = "no delivery can be staged: cpu:0 is of a foreign type"
        played_in_order(model, reason, gate.reference(TWO))


def test_memory_that_cannot_be_pinned_is_pageable_with_one_warning(load: Callable[..., Model], gate: Gate) -> None:
    line = "^host memory could not be pinned for cpu:0#1: the KV cache is pageable and its deliveries stay ordered$"
    with pytest.warns(NumbaMetaWarning, match=line) as told:
        model = load("cpu:0,cpu:0?pin=0")
    with model, warnings.catch_warnings():
        warnings.simplefilter("error")
        played_in_order(model, "no delivery can be staged: its host memory is not pinned", gate.reference(TWO))
    assert len(told) == 1
    with load("cpu:0,cpu:0?pin=0", kv_cpu_pinned=False), load("cpu:0?pin=0", kv="device", kv_pipeline_headroom=None, tensor_split=None):
        pass  # nobody asked for pinned memory: nothing is said


def test_over_budget_is_ordered_and_later_graphs_are_asked_again(tiny_models: dict[str, Path]) -> None:
    """At 1 MiB a device holds 3 slots of 128 B a cell up to 2,560 cells; an ordered step is recorded with room for 4,096."""
    path, options = tiny_models["llama"], {"devices": "cpu:0,cpu:0", "ctx_size": 8192, "ubatch_size": 512}
    prompt, paths = ids(7, 3100, 300), []
    with nm.load(path, **options) as model, nm.load(path, kv_pipeline_budget=1, **options, **HOST) as hosted:
        for at in (*range(0, 3072, 512), *range(3072, 3100)):
            chunk = prompt[at : at + (512 if at < 3072 else 1)]
            rows = [m.context.decode(chunk, [0] * len(chunk), [len(chunk) - 1]).tobytes() for m in (model, hosted)]
            assert rows[0] == rows[1]
            stats = hosted.transport.stats
            paths.append(stats["path"])
            assert max(stats["ring_bytes"]) <= 1 << 20
        assert paths == ["pipelined"] * 5 + ["ordered"] * 29
        assert stats["reason"] == (
            "over budget: the ring needs 1.6 MiB on cpu:0 for this graph and 3.1 MiB at the full context, the budget is 1 MiB"
        )
        holds_no_ring(hosted)
        for m in (model, hosted):
            m.context.cells.clear()
        paths.clear()
        for at in range(ROOMY_STEPS + 2):
            rows = [m.context.decode(prompt[at : at + 1], [0], [0]).tobytes() for m in (model, hosted)]
            assert rows[0] == rows[1]
            paths.append(hosted.transport.stats["path"])
        assert paths == ["ordered"] * ROOMY_STEPS + ["pipelined"] * 2


def test_steps_that_take_turns_are_not_recorded_over_and_over(tiny_models: dict[str, Path]) -> None:
    """Batches of eight long sequences are over budget; prompts and batches of two are not. Each kind of step keeps its recording."""
    options = {"ctx_size": 8 * 1024, "parallel": 8, "kv_unified": False, "ubatch_size": 64, "kv_pipeline_budget": 1}
    with nm.load(tiny_models["llama"], **options, **HOST) as model:
        player = Player(model)
        for sequence in range(8):
            player.feed(sequence, ids(sequence, 200, player.n_vocab))
        player.grow(range(8), 2)
        assert model.transport.stats["path"] == "ordered"
        for _ in range(2):
            player.feed(0, ids(9, 3, player.n_vocab))
            assert model.transport.stats["path"] == "pipelined"
            player.grow(range(8), 1)
            player.grow((0, 1), 1)
        recordings = dict(model.context._recordings)
        for _ in range(5):
            player.feed(0, ids(9, 3, player.n_vocab))
            player.grow(range(8), 3)
            player.grow((0, 1), 1)
        assert model.context._recordings == recordings


# ---- a graph that does not fit beside the ring -----------------------------------------------------------------------------------------


def peaks(model: Model) -> list[int]:
    """The most memory that each device has held."""
    return [device.peak_bytes for device in model.context.device]


def test_a_ring_is_given_up_for_a_graph_and_not_laid_out_again(load: Callable[..., Model], gate: Gate) -> None:
    """Devices with the memory that the ordered path takes: eighteen slots fit, but not beside the steps that are recorded next."""
    with load(kv_pipeline_depth=0) as model:
        played = play(model)
        limits = [f"cpu:0?mem={peak}" for peak in peaks(model)]
    with load(limits, kv_pipeline_depth=16) as model:
        played_in_order(model, GAVE_UP, gate.reference(TWO), paths={"ordered", "pipelined"})
        generation = model.transport.generation
        assert generation >= 2, "there was a ring, and it was given back"
        model.context.cells.clear()
        assert play(model).paths == {"ordered"} and model.transport.generation == generation, "although a small ring would fit"
    assert difference(played, gate.reference(TWO)) is None


def test_an_optional_ring_never_turns_a_graph_that_fits_into_a_failure(load: Callable[..., Model], gate: Gate) -> None:
    """Limits from what the ordered path takes up to what the ring takes too: whatever is missing, the bits are the same."""
    with load(kv_pipeline_depth=0) as model:
        play(model)
        least = max(peaks(model))
    with load(kv_pipeline_depth=16) as model:
        play(model)
        most = max(peaks(model))
    assert most > least
    reasons = set()
    for limit in (least, least + 1000, *range(least + 5000, most, (most - least) // 3), most):
        with load(f"cpu:0?mem={limit},cpu:0?mem={limit}", kv_pipeline_depth=16) as model:
            played = play(model)
            assert difference(played, gate.reference(TWO)) is None
            assert max(peaks(model)) <= limit
            reasons.add(played.stats["reason"].partition(":")[0].partition(" of ")[0])
    assert {"no delivery can be staged", "7"} <= reasons <= {"no delivery can be staged", "no headroom", "7"}
    with pytest.raises(OutOfMemoryError, match="^cpu:0"), load([f"cpu:0?mem={least - 2000}"] * 2, kv_pipeline_depth=0) as model:
        play(model)


@pytest.mark.parametrize("label", ("the ring", "the workspace", "inputs"))
def test_whatever_does_not_fit_beside_the_ring_is_tried_once_more(
    label: str, load: Callable[..., Model], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second device has no room for one buffer as soon as there is a ring, or for the ring itself."""
    allocate = CpuDevice.allocate

    def refuse(self: CpuDevice, n_bytes: int, what: str, sparse: bool = False) -> CpuBuffer:
        if self.name == "cpu:0#1" and what == label and (label == "the ring" or "the ring" in self.bytes_by_label()):
            raise OutOfMemoryError(f"{self.name}: {what} needs {n_bytes} bytes, 0 are free")
        return allocate(self, n_bytes, what, sparse)

    monkeypatch.setattr(CpuDevice, "allocate", refuse)
    with load() as model:
        played_in_order(model, GAVE_UP, gate.reference(TWO))


def test_memory_that_a_recording_lacks_beside_the_ring(load: Callable[..., Model], gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is taken while a step is recorded (lists of addresses, constants): the ring is given up for that, too."""
    record, freed = CpuSteps.record, []

    def refuse(self: CpuSteps, binder: Binder, *arguments: Any) -> Any:
        if "the ring" in self._device.devices[1].bytes_by_label():
            freed.append(binder)
            raise OutOfMemoryError("cpu:0#1: a list needs 64 bytes, 0 are free")
        return record(self, binder, *arguments)

    monkeypatch.setattr(CpuSteps, "record", refuse)
    with load() as model:
        played_in_order(model, GAVE_UP, gate.reference(TWO))
        assert len(freed) == 1, "the ring was given up at once, and for good"
        kept = sum("inputs" == buffer.label for buffer in model.context.device.devices[0]._buffers)
        assert kept == len(model.context._recordings), "the inputs of the recording that failed were given back"


def test_a_mixture_of_devices_is_ordered_where_one_cannot(load: Callable[..., Model], gate: Gate) -> None:
    four = replace(TWO, split="4")
    with load("cpu:0,cpu:0?async=0,cpu:0,cpu:0?async=0", tensor_split=None) as model:
        played_in_order(model, "no delivery can be staged: cpu:0#1 has no asynchronous copies", gate.reference(four))
