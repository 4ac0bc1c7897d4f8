"""A KV cache in host memory on the command line: which options reach the model, and what is said of its transport."""

from __future__ import annotations

from typing import Any

import pytest
from cli.fake_model import FakeModel

PIPELINED: dict[str, Any] = {
    "path": "pipelined", "reason": "2 of 3 deliveries go through 3 slots", "staged": ("layer 0", "layer 1"),
    "ordered": {"layer 2": "it is not marked"}, "n_slots": 3, "slot_bytes": 2 << 20, "shares": (43691, 21846),
    "ring_bytes": (4 << 20, 2 << 20), "early_bytes": (3 << 20, 1 << 20), "late_bytes": (1024, 512), "traced_steps": 0,
}  # fmt: skip
ORDERED = PIPELINED | {
    "path": "ordered", "reason": "over budget: 9 MiB", "staged": (), "shares": (), "n_slots": 0, "slot_bytes": 0, "ring_bytes": (0, 0),
    "ordered": {"layer 0": "over budget: 9 MiB", "layer 1": "over budget: 9 MiB"},
}  # fmt: skip


def with_transport(model: FakeModel, stats: dict[str, Any], depth: int = 1) -> None:
    model.transport.stats, model.transport.options.depth = stats, depth
    model.memory = lambda: {"cpu:0": 1 << 20, "cpu:0#1": 1 << 20}  # type: ignore[method-assign]


def test_options_reach_the_model(run, models):
    words = "--kv-pipeline-depth 2 --kv-pipeline-budget 0 --kv-pipeline-headroom 64 --kv-ring whole --kv-gpu-layers 3 --kv-cpu-pinned off"
    assert run("generate", "m", "p", "-nkvo", *words.split()).status == 0
    arguments = models[0].load_arguments
    assert {name: value for name, value in arguments.items() if name.startswith("kv") and name != "kv_unified"} == {
        "kv": "host", "kv_pipeline_depth": 2, "kv_pipeline_budget": 0, "kv_pipeline_headroom": 64, "kv_ring_by_share": False,
        "kv_gpu_layers": 3, "kv_cpu_pinned": False,
    }  # fmt: skip


def test_the_words_of_the_other_way(run, models):
    assert run("generate", "m", "p", "--no-kv-offload", "--kv-ring", "share", "--kv-cpu-pinned", "on").status == 0
    assert models[0].load_arguments["kv_ring_by_share"] is True and models[0].load_arguments["kv_cpu_pinned"] is True


@pytest.mark.parametrize("words", [["--kv-pipeline-depth", "-1"], ["--kv-ring", "half"], ["--kv-cpu-pinned", "maybe"]])
def test_values_that_cannot_be(run, models, words):
    outcome = run("generate", "m", "p", "-nkvo", *words)
    assert outcome.status == 2 and words[0] in outcome.err and models == []


def test_the_summary_says_the_path(run, next_model):
    with_transport(next_model("x"), PIPELINED)
    outcome = run("generate", "m", "p", "-nkvo")
    assert "; KV cache in the host, pipelined; memory" in outcome.err
    assert outcome.err.count("\n") == 1


def test_one_line_says_why_nothing_is_pipelined(run, next_model):
    with_transport(next_model("x"), ORDERED)
    lines = run("generate", "m", "p", "-nkvo").err.splitlines()
    assert len(lines) == 2 and "KV cache in the host, ordered" in lines[0]
    assert lines[1] == "numba-meta: the KV cache is delivered in order, not pipelined: over budget: 9 MiB"


def test_nothing_is_explained_where_order_was_asked_for(run, next_model):
    with_transport(next_model("x"), ORDERED, depth=0)
    assert run("generate", "m", "p", "-nkvo", "--kv-pipeline-depth", "0").err.count("\n") == 1


def test_chat_explains_once(run, next_model, monkeypatch):
    import io
    import sys

    with_transport(next_model("x"), ORDERED)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\ntwo\n")))
    outcome = run("chat", "m", "-nkvo")
    assert outcome.out == "x\nx\n"
    assert outcome.err.count("delivered in order") == 1 and outcome.err.count("KV cache in the host, ordered") == 2


def test_verbose_prints_the_transport_plan(run, next_model):
    with_transport(next_model("x"), PIPELINED)
    outcome = run("generate", "m", "p", "-nkvo", "-v")
    assert outcome.err.splitlines()[2:-1] == [
        "transport: pipelined: 2 of 3 deliveries go through 3 slots",
        "  2 of 3 deliveries staged, 3 slots of 2.0 MiB",
        "  cpu:0: share 0.667, ring 4.0 MiB, early 3.0 MiB and late 1.0 KiB a step",
        "  cpu:0#1: share 0.333, ring 2.0 MiB, early 1.0 MiB and late 512 B a step",
        "  1 ordered: it is not marked",
    ]


def test_twice_verbose_adds_times(run, next_model):
    model = next_model("x")
    seconds = {"ordered_copy_seconds": (0.001, 0.002), "consumer_wait_seconds": (0.0, 0.003), "recycle_wait_seconds": (0.0005, 0.0)}
    with_transport(model, PIPELINED | seconds | {"traced_steps": 128})
    once, twice = run("generate", "m", "p", "-nkvo", "-v").err, run("generate", "m", "p", "-nkvo", "-vv").err
    assert model.traced == [128]
    assert set(twice.splitlines()) - set(once.splitlines()) == {
        "  cpu:0: mean over 128 steps: 1.000 ms in ordered copies, 0.000 ms waiting for deliveries, 0.500 ms waiting for slots",
        "  cpu:0#1: mean over 128 steps: 2.000 ms in ordered copies, 3.000 ms waiting for deliveries, 0.000 ms waiting for slots",
    }


def test_thrice_verbose_names_what_stayed_ordered(run, next_model):
    with_transport(next_model("x"), PIPELINED)
    outcome = run("generate", "m", "p", "-nkvo", "-vvv")
    assert "  ordered: layer 2: it is not marked\n" in outcome.err


def test_bench_takes_ordered_and_pipelined_in_turns(run, models):
    outcome = run("bench", "m", "-nkvo", "0,1", "-p", "0", "-n", "2", "-r", "1", "--kv-pipeline-budget", "7")
    assert outcome.status == 0
    names = ("kv", "kv_pipeline_depth", "kv_pipeline_budget")
    asked = [tuple(model.load_arguments.get(name) for name in names) for model in models]
    assert asked == [("device", None, None), ("host", 0, 7), ("host", 1, 7)]


def test_bench_refuses_what_would_do_nothing(run, models):
    for words in (["--kv-pipeline-depth", "1"], ["--kv-pipeline-budget", "7"]):
        outcome = run("bench", "m", *words)
        assert outcome.status == 2 and words[0] in outcome.err
    assert models == []
