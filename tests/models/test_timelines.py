"""Timelines of a model's real steps: complete, true to the step's bytes, and off again afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from synthetic import write_model

import numba_meta
from numba_meta import Model
from numba_meta.errors import UsageError
from numba_meta.schedule.trace import kind_of, label_of

PROMPT = list(range(20, 60))
N_LAYER, HEAD_BYTES = 3, 2 * 64
DEVICES = "cpu:0?link=0.5&delay=100us,cpu:0?link=0.2"


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("timelines") / "llama.gguf", n_layer=N_LAYER, n_embd=192, n_head=3, n_head_kv=3, n_ff=256)


def open_model(path: Path, **how: object) -> Model:
    defaults = {"devices": DEVICES, "tensor_split": (2, 1), "kv": "host", "threads": 2, "kv_pipeline_headroom": 0, "ubatch_size": 32}
    return numba_meta.load(path, **(defaults | how))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def pipelined(model_path: Path) -> Iterator[Model]:
    with open_model(model_path) as model:
        yield model


@pytest.fixture(scope="module")
def ordered(model_path: Path) -> Iterator[Model]:
    with open_model(model_path, kv_pipeline_depth=0) as model:
        yield model


def test_the_timeline_of_a_real_step(pipelined: Model) -> None:
    with pipelined.record_timeline() as steps:
        pipelined.generate_ids(PROMPT, max_tokens=5)
    assert len(steps) == 2 + 4  # a prompt of two parts, then steps; the last token is not fed back
    for timeline in steps:
        assert timeline.streams == ("cpu:0 compute", "cpu:0 transfer", "cpu:0#1 compute", "cpu:0#1 transfer")
        for stream in timeline.streams:
            spans = timeline.of(stream)
            assert all(first.stop <= second.start for first, second in zip(spans, spans[1:], strict=False))
    trace = steps.traces[-1]
    for stream in trace.streams:  # nothing of the plan is missing in the program
        own = next(own for own, name in zip(trace_plan(pipelined), ("cpu:0 ", "cpu:0#1 "), strict=True) if stream.stream.startswith(name))
        calls = own.streams()[stream.stream.split()[-1]]
        marked = [mark.call for mark in stream.marks]
        assert [(label_of(c), kind_of(c)) for c in marked if c.node != "inputs"] == [(label_of(c), kind_of(c)) for c in calls]


def trace_plan(model: Model):
    from numba_meta.models.running.recordings import Capacity

    return model.context.plan(Capacity(1, 1)).devices


@pytest.mark.parametrize("n_heads", [2, 1])
def test_copies_say_what_they_moved(pipelined: Model, n_heads: int) -> None:
    with pipelined.record_timeline(n_steps=1) as steps:
        pipelined.generate_ids(PROMPT, max_tokens=3)
    assert len(steps) == 1
    name = "cpu:0 transfer" if n_heads == 2 else "cpu:0#1 transfer"
    copies = {span.label: span.n_bytes for span in steps[0].of(name) if span.kind == "copy"}
    assert copies == {
        f"cache_{part}.{layer}.{way}": n_heads * HEAD_BYTES * n_cells
        for part in "kv"
        for layer in range(N_LAYER)
        for way, n_cells in (("window", 256), ("written_back", 1))
    }
    early = pipelined.transport.stats["early_bytes"][2 - n_heads]
    assert early == sum(n for label, n in copies.items() if label.endswith("window"))


def test_a_simulated_link_is_as_slow_as_it_says(pipelined: Model) -> None:
    with pipelined.record_timeline() as steps:
        pipelined.generate_ids(PROMPT, max_tokens=4)
    for span in (span for timeline in steps for span in timeline.spans if span.kind == "copy" and span.label.endswith("window")):
        bytes_per_second, delay = (5e8, 1e-4) if span.stream.startswith("cpu:0 ") else (2e8, 0)
        assert float(span.seconds) >= span.n_bytes / bytes_per_second + delay - 1e-6


def test_attention_begins_when_its_window_has_come_and_the_slot_is_filled_again_after_it(pipelined: Model, ordered: Model) -> None:
    for model in (pipelined, ordered):
        with model.record_timeline() as steps:
            model.generate_ids(PROMPT, max_tokens=4)
        for timeline in list(steps)[2:]:
            for device in ("cpu:0", "cpu:0#1"):
                of_device = [span for span in timeline.spans if span.stream.split()[0] == device]
                for layer in range(N_LAYER):
                    arrived = max(span.stop for span in of_device if span.label in (f"cache_k.{layer}.window", f"cache_v.{layer}.window"))
                    (read,) = (span for span in of_device if span.label == f"attention.{layer}" and span.kind == "attention")
                    back = min(span.start for span in of_device if span.label == f"cache_k.{layer}.written_back")
                    assert arrived <= read.start
                    assert model is ordered or read.stop <= back


def test_stats_of_traced_steps(pipelined: Model, ordered: Model) -> None:
    names = ("ordered_copy_seconds", "consumer_wait_seconds", "recycle_wait_seconds")
    for model in (pipelined, ordered):
        with model.record_timeline(n_steps=1):
            model.generate_ids(PROMPT, max_tokens=140)
        stats = model.transport.stats
        assert stats["traced_steps"] == 128
        means = {name: stats[name] for name in names}
        assert all(len(value) == 2 and min(value) >= 0 for value in means.values())
        layer_bytes = 2 * HEAD_BYTES * 256
        one_by_one = [N_LAYER * (2 * layer_bytes / 5e8 + 4e-4), N_LAYER * layer_bytes / 2e8]  # both copies and both ways have a delay
        if model is ordered:
            assert all(took >= 0.99 * least for took, least in zip(means["ordered_copy_seconds"], one_by_one, strict=True))
            assert means["consumer_wait_seconds"] == means["recycle_wait_seconds"] == (0.0, 0.0)
        else:
            assert means["ordered_copy_seconds"] == (0.0, 0.0)
            assert min(means["consumer_wait_seconds"]) > 0  # the links are slower than this model


def test_prompts_are_not_among_the_means_and_untraced_steps_have_none(model_path: Path) -> None:
    with open_model(model_path) as model:
        model.generate_ids(PROMPT, max_tokens=3)
        assert model.transport.stats["traced_steps"] == 0
        assert model.transport.stats["consumer_wait_seconds"] is None
        with model.record_timeline() as steps:
            model.generate_ids(PROMPT[:36], max_tokens=3)  # parts of 32 and 4 tokens
        assert len(steps) == 4
        assert model.transport.stats["traced_steps"] == 2


def test_tracing_changes_no_token_and_is_off_afterwards(pipelined: Model) -> None:
    plain = pipelined.generate_ids(PROMPT, max_tokens=8)
    with pipelined.record_timeline() as outer:
        traced = pipelined.generate_ids(PROMPT, max_tokens=8)
        with pytest.raises(UsageError, match="being recorded already"), pipelined.record_timeline():
            pass
    assert traced == plain
    assert len(outer) == 2 + 7
    assert pipelined.context.traces is None
    assert pipelined.generate_ids(PROMPT, max_tokens=8) == plain
    assert len(outer) == 9
    with pytest.raises(ZeroDivisionError), pipelined.record_timeline():
        _ = 1 / 0
    assert pipelined.context.traces is None


def test_a_device_resident_cache_has_a_timeline_too(model_path: Path) -> None:
    with open_model(model_path, devices="cpu:0", tensor_split=None, kv="device", kv_pipeline_headroom=None) as model:
        with model.record_timeline() as steps:
            model.generate_ids(PROMPT, max_tokens=2)
        assert "traced_steps" not in model.transport.stats
    assert steps[-1].streams == ("cpu:0 compute",)
    assert [span.label for span in steps[-1].spans if span.kind == "attention"] == [f"attention.{layer}" for layer in range(N_LAYER)]
    assert {span.label for span in steps[-1].spans if span.kind == "copy"} == {"inputs"}


def test_less_than_a_step(pipelined: Model) -> None:
    with pytest.raises(UsageError, match="^n_steps 0 is impossible; expected a whole number"), pipelined.record_timeline(n_steps=0):
        pass
