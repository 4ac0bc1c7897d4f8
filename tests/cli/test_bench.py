"""`bench`: which configurations and tests it plans, that they take turns, and what its figures say."""

from __future__ import annotations

import json

from cli.fake_model import ON_THE_DEVICE

from numba_meta.cli.bench import Result, Workload, as_table, plan_configurations, plan_workloads, take_turns
from numba_meta.cli.options import LoadOptions
from numba_meta.cli.terminal import Progress


def test_tests_are_prompts_then_generations_each_once():
    assert plan_workloads([512, 128, 512, 0], 64, [0, 1024]) == [
        Workload(n_prompt=512),
        Workload(n_prompt=128),
        Workload(n_generated=64, depth=0),
        Workload(n_generated=64, depth=1024),
    ]
    assert plan_workloads([0], 0, [0]) == []


def test_cells_suffice_for_what_is_measured():
    assert Workload(n_prompt=512).n_cells >= 512 + 1
    assert Workload(n_generated=64, depth=0).n_cells >= 1 + 64
    assert Workload(n_generated=64, depth=1024).n_cells >= 1024 + 64


def test_every_combination_is_a_configuration():
    planned = plan_configurations(LoadOptions(exact=True), ["cpu:0", "cpu:0,cpu:0"], ["55,45"], [1, 2], ["f16", "q8_0"], None)
    assert len(planned) == 8
    load = planned["cpu:0,cpu:0  split 55,45  2 threads  cache q8_0/q8_0"]
    assert load == LoadOptions("cpu:0,cpu:0", "55,45", "q8_0", "q8_0", threads=2, exact=True)


def test_plain_configurations_are_named_by_their_devices():
    assert list(plan_configurations(LoadOptions(), ["cpu:0"], [], None, None, None)) == ["cpu:0"]


def test_configurations_take_turns(monkeypatch):
    order = []

    def measure(model, test):
        order.append((model, test.label))
        return float(len(order))

    monkeypatch.setattr("numba_meta.cli.bench.measure", measure)
    tests = [Workload(n_prompt=8), Workload(n_generated=4)]
    monkeypatch.setattr("numba_meta.cli.bench.transport_of", lambda model: ON_THE_DEVICE)
    results = take_turns({"a": "A", "b": "B"}, tests, 2, Progress())
    assert order == [("A", "prompt 8"), ("B", "prompt 8")] * 3 + [("A", "generate 4 at 0"), ("B", "generate 4 at 0")] * 3
    assert [(r.configuration, r.workload, r.speeds) for r in (results[0], results[3])] == [
        ("a", tests[0], (3.0, 5.0)),  # the first turn is not counted
        ("b", tests[1], (10.0, 12.0)),
    ]


def test_a_result_is_the_median_with_its_spread():
    result = Result("cpu:0", Workload(n_prompt=8), (30.0, 10.0, 20.0))
    assert (result.median, result.spread) == (20.0, (10.0, 30.0))
    assert as_table([result], markdown=True).splitlines() == [
        "| configuration | workload |  t/s | slowest to fastest |",
        "| ------------- | -------: | ---: | -----------------: |",
        "| cpu:0         | prompt 8 | 20.0 |       10.0 to 30.0 |",
    ]


def test_the_whole_command(run, models):
    outcome = run("bench", "m", "-dev", "cpu:0", "-dev", "cpu:0,cpu:0", "-p", "8", "-n", "4", "-d", "0,16", "-r", "2", "-o", "json")
    assert outcome.status == 0
    assert outcome.err.splitlines() == [
        "numba-meta: prompt 8: 16.0 / 16.0 t/s (1 of 3 workloads done)",
        "numba-meta: generate 4 at 0: 16.0 / 16.0 t/s (2 of 3 workloads done)",
        "numba-meta: generate 4 at 16: 16.0 / 16.0 t/s (3 of 3 workloads done)",
    ], "a pipe hears of every context as soon as it is done"
    data = json.loads(outcome.out)
    assert [(r["configuration"], r["n_prompt"], r["n_generated"], r["depth"]) for r in data["results"]] == [
        (configuration, *workload) for workload in ((8, 0, 0), (0, 4, 0), (0, 4, 16)) for configuration in ("cpu:0", "cpu:0,cpu:0")
    ]
    assert [r["turns"] for r in data["results"]] == [[16.0, 16.0]] * 6
    assert [len(prompt) for prompt, _ in models[0].calls] == [8] * 3 + [1] * 3 + [16] * 3
    assert all(model.closed and model.load_arguments["ctx_size"] >= 20 for model in models)


def test_devices_that_are_not_there_are_told_before_anything_is_loaded(run, models):
    missing = run("bench", "m", "-dev", "cpu:0", "-dev", "cuda:999")
    assert (missing.status, missing.out, models) == (1, "", [])
    assert len(missing.err.splitlines()) == 1 and ("cuda:999" in missing.err or "CUDA" in missing.err)
    mixed = run("bench", "m", "-dev", "cpu:0", "-dev", "cuda:0,cpu:0")
    assert (mixed.status, mixed.out, models) == (2, "", [])
    assert "devices cuda:0,cpu:0 are of several kinds in one process" in mixed.err
