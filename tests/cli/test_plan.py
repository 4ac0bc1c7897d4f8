"""`plan`: the command on a small file, its speeds given; what it prints and what it says as JSON."""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path

import pytest

from numba_meta.cli.options import LoadOptions
from numba_meta.cli.plan import forecast_model
from numba_meta.cli.plan_report import age
from numba_meta.cli.terminal import Progress

GIVEN = ("--weights-gbps", "10", "--attention-gbps", "5")
TWO = "cpu:0?link=2,cpu:0?link=1"


@pytest.fixture
def path(llama_path: Path) -> str:
    return str(llama_path)


@pytest.fixture(autouse=True)
def own_speeds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Speeds are remembered in a folder of this test, and quickly measured."""
    monkeypatch.setattr("numba_meta.schedule.calibrate.speeds_file", lambda: tmp_path / "speeds.json")
    monkeypatch.setattr("numba_meta.schedule.calibrate._WEIGHT_BYTES", 1 << 20)


def test_json_has_every_decision(run, path):
    outcome = run("plan", path, "-nkvo", "--device", TWO, "-c", "2048", "--contexts", "100,1000", "--json", *GIVEN)
    assert outcome.status == 0
    data = json.loads(outcome.out)
    assert (data["model"], data["architecture"]) == ("llama.gguf", "llama")
    assert data["cache"] == {"place": "host", "types": ["f16", "f16"], "cells": 2048, "host_bytes": 2 * 2 * 2048 * 384}
    assert data["cuts"]["attention 0"] == [2, 1]
    assert [device["name"] for device in data["devices"]] == ["cpu:0", "cpu:0#1"]
    assert [device["bytes_per_token"] for device in data["devices"]] == [2 * 512, 2 * 256]
    assert [(step["context"], step["path"]) for step in data["steps"]] == [(100, "pipelined"), (1000, "pipelined")]
    assert [step["delivered_bytes"] for step in data["steps"]] == [[256 * 1024, 256 * 512], [1024 * 1024, 1024 * 512]]
    for step in data["steps"]:
        assert step["copy_seconds"] >= max(step["delivered_bytes"][0] / 2e9, step["delivered_bytes"][1] / 1e9) * (1 - 1e-9)
        assert step["tokens_per_second"] == pytest.approx(1 / step["pipelined_seconds"])
        assert step["ring_bytes"][0] > step["ring_bytes"][1] > 0 and step["slots"] == 3


def test_the_table_for_a_reader(run, path):
    words = "-c 2048 --kv-pipeline-budget 1 -ctk q8_0 -d 100,2047".split()
    outcome = run("plan", path, "-nkvo", "--device", TWO, *words, *GIVEN)
    assert outcome.status == 0
    assert "KV cache in the host (" in outcome.out and "2048 cells for 1 sequence, q8_0/f16" in outcome.out
    assert "attention of layers 0-1: 3 x KV head" in outcome.out
    assert "6 meetings of 2 devices per step" in outcome.out
    table = outcome.out.partition("context ")[2].splitlines()
    rows = {line.split()[0]: line.split() for line in table if line and line.split()[0].isdecimal()}
    assert list(rows) == ["100", "2047"]
    assert [row[1] for row in rows.values()] == ["pipelined", "ordered"]
    assert "from 2047: ordered: over budget" in outcome.out


def test_a_cache_on_the_devices(run, path):
    outcome = run("plan", path, "--contexts", "10", "-c", "512", *GIVEN)
    assert outcome.status == 0 and "KV cache on the device: 512 cells" in outcome.out
    assert " device " in outcome.out.splitlines()[-2]


def test_speeds_are_measured_once(run, path):
    first, second = (run("plan", path, "--contexts", "10", "-c", "512") for _ in range(2))
    again = run("plan", path, "--contexts", "10", "-c", "512", "--calibrate")
    measuring = "numba-meta: measuring how fast this machine is; --calibrate measures again, best when nothing else runs\n"
    assert [outcome.err for outcome in (first, second, again)] == [measuring, "", measuring]
    assert first.out == second.out
    assert first.out.splitlines()[-1] == "speeds of this machine: measured just now, as busy as it was then; --calibrate measures anew"


def test_how_old_measured_speeds_are(run, path, tmp_path):
    assert age(None, 0) == "measured at an unknown time"
    ages = {0: "just now", 59: "just now", -5: "just now", 60: "1 minute ago", 7199: "1 hour ago", 7200: "2 hours ago", 90000: "1 day ago"}
    assert {seconds: age(1e9 - seconds, 1e9) for seconds in ages} == {seconds: f"measured {said}" for seconds, said in ages.items()}
    words = ("plan", path, "--contexts", "10", "-c", "512")
    run(*words)
    file = tmp_path / "speeds.json"
    known = json.loads(file.read_text())
    for speeds in known.values():
        speeds["measured at"] -= 3 * 3600
    file.write_text(json.dumps(known))
    assert "measured 3 hours ago" in run(*words).out.splitlines()[-1]
    told = json.loads(run(*words, "--json").out)["speeds_measured_at"]
    assert 0 <= time.time() - 3 * 3600 - datetime.fromisoformat(told).timestamp() < 60
    assert "measured 3 hours ago" in run(*words, "-ctk", "q8_0").out.splitlines()[-1], "what was missing is new, the rest is not"
    assert "just now" in run(*words, "--calibrate").out.splitlines()[-1]


def test_a_context_longer_than_the_model_was_trained_with_is_told(run, path):
    outcome = run("plan", path, "--contexts", "10", "-c", "3000", *GIVEN)
    assert outcome.status == 0
    assert "numba-meta: a context of 3000 tokens is longer than what the model was trained with (2048)" in outcome.err
    assert "trained" not in run("plan", path, "--contexts", "10", "-c", "2048", *GIVEN).err


def test_given_speeds_are_used(path):
    steps = []
    for gbps in (10.0, 5.0):
        forecast, _ = forecast_model(path, LoadOptions(ctx_size=512), (10,), gbps, 1e6, False, Progress())
        steps.append(forecast.steps[0].seconds)
        assert set(forecast.speeds[0].weights.values()) == {gbps * 1e9}
    assert steps[1] > steps[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--contexts", "512"], "contexts [512]: expected 0 to 511"),
        (["--device", "cpu:0?link=0"], "link='0' is not a speed"),
        (["--kv-gpu-layers", "1"], "add --no-kv-offload"),
        (["-nkvo", "--kv-gpu-layers", "3"], "kv_gpu_layers 3 is impossible: the model has 2 layers; use 0 to 2"),
        (["--weights-gbps", "0"], "0"),
        (["--device", "cpu:0,cuda:0"], "devices cpu:0,cuda:0 are of several kinds in one process"),
        (["--device", "cpu:0;cpu:0"], "--device cpu:0;cpu:0 has lists of several ranks, and plan forecasts one process"),
    ],
)
def test_wrong_use_is_one_line(run, path, words, said):
    outcome = run("plan", path, "-c", "512", *GIVEN, *words)
    assert outcome.status == 2 and said in outcome.err and outcome.err.splitlines()[-1].startswith("numba-meta: ")
    assert outcome.out == ""


def test_cuda_devices_are_planned_without_one(run, path):
    """Decisions for GPUs that are not here, with their own layout of weights; no times."""
    outcome = run("plan", path, "-nkvo", "--device", "cuda:0,cuda:1", "-c", "2048", "--contexts", "100", "--json")
    data = json.loads(outcome.out)
    assert [device["name"] for device in data["devices"]] == ["cuda:0", "cuda:1"]
    assert [(device["threads"], device["memory_limit_bytes"]) for device in data["devices"]] == [(1, None)] * 2
    assert data["speeds_measured_at"] is None
    assert all(device["weight_bytes"] % 256 == 0 for device in data["devices"])
    assert data["steps"][0]["path"] == "pipelined" and "tokens_per_second" not in data["steps"][0]
    lines = run("plan", path, "--device", "cuda:0", "-c", "512").out.splitlines()
    assert lines[-1] == "how long a step takes is foreseen for CPU devices alone; `numba-meta bench` measures it"


@pytest.mark.parametrize("option", [["--weights-gbps", "30"], ["--attention-gbps", "20"], ["--calibrate"]], ids=lambda words: words[0])
def test_options_of_speeds_are_refused_with_cuda_devices(run, path, option):
    outcome = run("plan", path, "--device", "cuda:0,cuda:1", *option)
    assert (outcome.status, outcome.out) == (2, "")
    said = f"numba-meta: {option[0]} is about how fast CPU devices are, and no times are foreseen for cuda:0; leave it out\n"
    assert outcome.err == said


def test_memory_of_a_gpu_is_not_known_unless_it_is_given(run, path, monkeypatch):
    monkeypatch.setattr("numba_meta.devices.host_memory.available_bytes", lambda: 1 << 20)
    words = ("plan", path, "-nkvo", "-c", "2048", "-d", "100")
    lines = run(*words, "--device", "cuda:0,cuda:0,cuda:1?mem=2G").out.splitlines()
    assert lines[-2] == "memory of cuda:0 is not known here and nothing was checked against it; give it, as in cuda:0?mem=24G"
    assert not any("no headroom" in line for line in lines)
    assert "memory of cuda:0, cuda:1 is" in run(*words, "--device", "cuda:0,cuda:1").out
    assert "is not known here" not in run(*words, "--device", "cuda:0?mem=2G").out
    assert "no headroom" in run(*words, "--device", "cuda:0?mem=100M").out
