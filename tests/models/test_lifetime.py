"""What keeps a model: itself, what computes with it, nothing else. Dropped is freed, at once, without a collection of garbage."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFValueType
from models.interrupting import n_left, n_threads
from models.rewriting import rewrite
from models.step_driver import StepDriver
from synthetic import write_model

import numba_meta as nm
from numba_meta.errors import NumbaMetaWarning
from numba_meta.kernels.cuda.kernel import CudaKernel
from numba_meta.models import load as loading
from numba_meta.models.model import Model
from numba_meta.models.running import weights

OPTIONS: dict[str, Any] = {"ctx_size": 256, "ubatch_size": 32}
PLACES: dict[str, dict[str, Any]] = {
    "one": {},
    "two": {"devices": "cpu:0,cpu:0", "threads": 4},
    "host": {"devices": "cpu:0,cpu:0?link=5", "threads": 3, "kv": "host", "kv_pipeline_headroom": 0},
    "ordered": {"kv": "host", "kv_pipeline_depth": 0},
}


@pytest.fixture(autouse=True)
def no_collections() -> Iterator[None]:
    """What is freed here is freed by reference counts."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def n_files(path: Path) -> int:
    """How often a file is open or mapped here."""
    if not os.path.isdir("/proc/self/fd"):
        return 0
    opened = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    return opened.count(str(path.resolve())) + Path("/proc/self/maps").read_text().count(str(path))


def parts(model: Model) -> list[weakref.ref[Any]]:
    """What a model's memory and threads hang on."""
    context = model.context
    found: list[Any] = [model, context, context.device, *context.device, context.cells, context.transport, model._file]
    found += [*context._weights.pieces, *context._memory._resident.pieces, *context._recordings.values()]
    found += [recording.plan for recording in context._recordings.values()]
    found += [piece.data for piece in context._weights.pieces if hasattr(piece, "data")]
    found += [context._memory.host] if context._memory.host is not None else []
    return [weakref.ref(each) for each in found]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("architecture", ("llama", "gemma3"))
def test_a_dropped_model_is_gone_at_once(architecture: str, place: str, paths: dict[str, Path]) -> None:
    nm.load(paths[architecture], **OPTIONS, **PLACES[place]).generate_many(["a b", "c d"], 3)  # what comes once: imports, kernels
    gc.collect()
    before = n_threads()
    model = nm.load(paths[architecture], **OPTIONS, **PLACES[place])
    model.generate_ids(list(range(5, 75)), 3, ignore_eos=True)
    model.generate_many(["a b", "c d"], 3, ignore_eos=True)
    held = parts(model)
    assert n_files(paths[architecture]) == 1 and (n_threads() > before or place in ("one", "ordered"))
    del model
    assert [ref() for ref in held if ref() is not None] == []
    assert n_left(before) == 0 and n_files(paths[architecture]) == 0
    assert gc.collect() == 0, "nothing lay in circles"


@pytest.mark.parametrize("options", ({}, {"kv": "host", "kv_pipeline_budget": 0, "kv_pipeline_headroom": 0}), ids=("device", "host"))
def test_a_dropped_model_gives_a_gpu_all_back(
    options: dict[str, Any], make_driver: Callable[..., StepDriver], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaKernel, "binary", lambda self, capability: (self.name, self.name.encode()))  # nothing is compiled
    path = write_model(tmp_path / "model.gguf", n_layer=2, n_embd=256, n_head=4, n_head_kv=2, n_ff=256, types="q8_0")
    driver = make_driver([(8, 0), (8, 0)], False)
    model = nm.load(path, devices="cuda:0,cuda:1", **OPTIONS, **options)
    model.generate_ids(list(range(5, 75)), 2, ignore_eos=True)
    held = parts(model)
    assert driver.held and driver.pinned and driver.live["graph"] and driver.live["stream"]
    del model
    assert [ref() for ref in held if ref() is not None] == []
    assert not driver.held and not driver.pinned and not any(driver.live.values())


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="resident pages are counted through Linux's /proc")
def test_memory_is_flat_over_loads(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", n_layer=1, n_embd=512, n_head=4, n_head_kv=2, n_ff=512, n_vocab=20000, types="f32")
    n_bytes, resident = path.stat().st_size, []
    assert n_bytes > 40 << 20
    for _ in range(8):
        model = nm.load(path, **OPTIONS)
        model.generate_ids([5, 6], 2, ignore_eos=True)
        del model
        resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE"))
    assert max(resident[2:]) - resident[1] < n_bytes / 4


def test_what_keeps_a_model(paths: dict[str, Path]) -> None:
    """A generation that goes on and its cache do; what was decided, measured or noted of it does not."""
    model = nm.load(paths["llama"], **OPTIONS, kv="host")
    with model.record_timeline() as timelines:
        pieces = model.generate([5, 6, 7], 99, ignore_eos=True, temperature=1.0, seed=1)
        first = next(pieces)
    facts = (model.plan, model.memory(), model.transport.stats, model.timings, model.config, timelines, timelines[-1])
    cache, gone = model.cache, weakref.ref(model)
    del model
    assert gone() is not None and len(first + "".join(pieces)) > 1, "the generation goes on"
    del pieces
    assert cache.length() == 101 and gone() is not None
    del cache
    assert gone() is None and len(facts) == 7


@pytest.mark.parametrize("place", ("two", "host"))
def test_a_failed_load_leaves_nothing(place: str, paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while somebody keeps the error, whose frames have seen the weights."""
    held: list[weakref.ref[Any]] = []
    before, load_piece = n_threads(), weights._load_piece

    def fail_later(*arguments: Any) -> None:
        load_piece(*arguments)
        held.append(weakref.ref(arguments[5].base))
        if len(held) == 9:
            raise OSError(5, "the disk is gone")

    monkeypatch.setattr(weights, "_load_piece", fail_later)
    with pytest.raises(OSError, match="the disk is gone") as caught:
        nm.load(paths["llama"], **OPTIONS, **PLACES[place])
    assert caught.value.__traceback__ is not None
    assert len(held) == 9 and not any(ref() for ref in held)
    assert n_left(before) == 0

    def fail_at_last(*arguments: Any) -> Any:
        held.append(weakref.ref(arguments[-1]))
        raise nm.DeviceError("no more")

    monkeypatch.setattr(weights, "_load_piece", load_piece)
    monkeypatch.setattr(loading.Context, "prepare", fail_at_last)
    with pytest.raises(nm.DeviceError, match="no more"):
        nm.load(paths["llama"], **OPTIONS, **PLACES[place])
    assert held[-1]() is None and n_left(before) == 0 and n_files(paths["llama"]) == 0


def test_the_interpreter_ends_with_live_models(paths: dict[str, Path]) -> None:
    """In a global, in a circle, in a generation that goes on, in another module: without a word, and with status 0."""
    program = f"""
import builtins, numba_meta as nm
options = dict(ctx_size=256, ubatch_size=32, devices="cpu:0,cpu:0", threads=4)
model, other, third = (nm.load({str(paths["llama"])!r}, kv=kv, **options) for kv in ("device", "host", "device"))
pieces = model.generate([5, 6, 7], 99, ignore_eos=True, temperature=1.0, seed=1)
next(pieces)
circle = [other]
circle.append(circle)
other.generate_ids([5, 6], 2)
builtins.third = third
third.generate_ids([5, 6], 2)
del other, third
"""
    done = subprocess.run([sys.executable, "-X", "dev", "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}",  # which refuses a content in parts
        "{{ raise_exception('no') }}",
        "{% for m in messages %}{% for i in range(99999) %}{% for j in range(99999) %}{{ j }}{% endfor %}{% endfor %}{% endfor %}",
        "{% for %}",
    ],
    ids=("concatenates", "refuses", "endless", "faulty"),
)
def test_a_chat_keeps_no_model(template: str, paths: dict[str, Path], tmp_path: Path) -> None:
    path = rewrite(paths["llama"], tmp_path / "chat.gguf", {"tokenizer.chat_template": (template, GGUFValueType.STRING)})

    def ask(model: Model) -> None:
        assert model.chat_template is not None
        for messages in ([{"role": "user", "content": "a"}], "x"):
            for way in (model.chat_template.render, model.chat_template.encode):
                with suppress(nm.UsageError, nm.ModelFileError):
                    way(messages)

    model = nm.load(path, **OPTIONS)
    ask(model)
    gone = weakref.ref(model)
    del model
    assert gone() is None


def test_a_tokenizer_that_cannot_be_built_keeps_no_model(paths: dict[str, Path], tmp_path: Path) -> None:
    path = rewrite(paths["llama"], tmp_path / "ids.gguf", {"tokenizer.ggml.model": ("unknown", GGUFValueType.STRING)})
    with pytest.warns(NumbaMetaWarning):
        model = nm.load(path, **OPTIONS)

    def n_frames(model: Model) -> int:
        try:
            model.tokenize("a")
        except nm.ModelFileError as error:
            return len(list(traceback.walk_tb(error.__traceback__)))
        raise AssertionError

    assert n_frames(model) == n_frames(model), "each error is a new one"
    gone = weakref.ref(model)
    del model
    assert gone() is None
