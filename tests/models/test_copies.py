"""What can be copied and sent to other processes, and what cannot: data comes back equal; a model is refused in one line."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.test_spelled_tokens import CHATML, byte_level

import numba_meta as nm
from numba_meta import errors
from numba_meta.models.architectures.description import describe_model
from numba_meta.models.files.gguf import read_gguf
from numba_meta.models.generation.timings import Timings
from numba_meta.models.loading.load_plan import LoadOptions
from numba_meta.models.loading.planner import plan_transport_of_model
from numba_meta.models.model import Model
from numba_meta.models.text.chat import ChatTemplate
from numba_meta.models.text.sampling import SamplingOptions
from numba_meta.models.text.tokenizer import Tokenizer

WAYS: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda each: pickle.loads(pickle.dumps(each)),
    "old pickle": lambda each: pickle.loads(pickle.dumps(each, 2)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


@pytest.fixture(scope="module")
def model(paths: dict[str, Path]) -> Iterator[Model]:
    with nm.load(paths["llama"], devices="cpu:0,cpu:0", threads=2, kv="host", ctx_size=256, ubatch_size=32) as model:
        yield model


@pytest.fixture(scope="module")
def facts(model: Model, paths: dict[str, Path]) -> dict[str, Any]:
    """Everything that a user is given and that is data."""
    with model.record_timeline() as timelines:
        model.generate_ids([5, 6, 7], 4, ignore_eos=True)
    with read_gguf(paths["llama"]) as file:
        forecast = plan_transport_of_model(describe_model(file), LoadOptions(kv="host"), (10, 100))
        tensor = next(iter(file.tensors.values()))
    plan = model._load_plan
    return {
        "plan": model.plan, "timings": model.timings, "timelines": timelines, "timeline": timelines[-1], "stats": model.transport.stats,
        "memory": model.memory(), "options": model._options, "load plan": plan, "cuts": plan.cuts, "forecast": forecast,
        "transport options": model.transport.options, "transport plan": model.transport.plan, "sampling": SamplingOptions(top_k=5, seed=1),
        "config": model.config, "tensor": tensor, "no timings": Timings(),
    }  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_data_comes_back_equal(way: str, facts: dict[str, Any]) -> None:
    for name, fact in facts.items():
        back = WAYS[way](fact)
        assert type(back) is type(fact) and back == fact, name
    cuts = WAYS[way](facts["cuts"])
    assert cuts.weight("token_embd.weight") == facts["cuts"].weight("token_embd.weight")
    with pytest.raises(TypeError):
        cuts.weights["token_embd.weight"] = None
    assert WAYS[way](facts["timelines"])[-1:] == facts["timelines"][-1:]


@pytest.mark.parametrize("way", WAYS)
def test_tokenizers_and_chat_templates_work_on(way: str, paths: dict[str, Path]) -> None:
    with read_gguf(paths["llama"]) as file:
        sentence_piece = Tokenizer.from_metadata(file.metadata)
    for tokenizer in (sentence_piece, Tokenizer.from_metadata(byte_level())):
        template = ChatTemplate(CHATML, tokenizer, None, "a file")
        messages = [{"role": "user", "content": "a b<|im_end|>"}]
        ids = template.encode(messages)
        back, template_back = WAYS[way](tokenizer), WAYS[way](template)
        assert back.vocabulary == tokenizer.vocabulary and back.encode("a b") == tokenizer.encode("a b")
        assert template_back.encode(messages) == ids and template_back.render(messages) == template.render(messages)


@pytest.mark.parametrize("way", WAYS)
def test_errors_come_back_as_they_are(way: str) -> None:
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.NumbaMetaError):
            back = WAYS[way](kind("one line; do this"))
            assert type(back) is kind and str(back) == "one line; do this"


@pytest.mark.parametrize("way", WAYS)
def test_a_model_is_neither_copied_nor_sent(way: str, model: Model) -> None:
    for each in (model, [model], model.cache, model.transport, model.context):
        with pytest.raises(nm.UsageError, match="cannot be copied or pickled: .* load it again where it is needed") as caught:
            WAYS[way](each) if not isinstance(each, list) or way != "copy" else copy.copy(each[0])
        assert "\n" not in str(caught.value)


def test_a_model_given_to_a_spawned_process(model: Model) -> None:
    process = multiprocessing.get_context("spawn").Process(target=print, args=(model,))
    with pytest.raises(nm.UsageError, match="a loaded model cannot be copied or pickled"):
        process.start()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks processes")
def test_a_model_in_a_forked_process(model: Model) -> None:
    """It says so, and takes nothing from its parent, however it ends there."""
    expected = model.generate_ids([5, 6, 7], 4, ignore_eos=True)
    uses: list[Callable[[], Any]] = [
        lambda: model.generate_ids([5, 6, 7], 4), lambda: next(iter(model.generate("a"))), lambda: model.logits([5]), lambda: model.plan,
        lambda: model.cache.clear(), lambda: model.save_state("/dev/null"), lambda: model.tokenize("a"), lambda: model.__enter__(),
    ]  # fmt: skip
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of forks with threads
        child = os.fork()
    if child == 0:
        told = []
        for use in uses:
            try:
                use()
                told.append("no error")
            except nm.UsageError as error:
                told.append(str(error))
            except BaseException as error:
                told.append(repr(error))
        model.close()
        os.write(writer, "\n".join(told).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        lines = told.read().splitlines()
    assert os.waitpid(child, 0)[1] == 0 and len(lines) == len(uses)
    assert all(f"of process {os.getpid()} cannot be used in its fork {child}; load it there" in line for line in lines), lines
    assert model.generate_ids([5, 6, 7], 4, ignore_eos=True) == expected


def test_numbers_of_numpy_are_numbers(paths: dict[str, Path]) -> None:
    options = {"ctx_size": 256, "ubatch_size": 32, "parallel": 2, "threads": 2, "exact": True, "kv_unified": True, "deterministic": False}
    host = {"kv": "host", "kv_pipeline_depth": 1, "kv_pipeline_budget": 64, "kv_pipeline_headroom": 0, "kv_gpu_layers": 1}
    given = {**options, **host, "kv_ring_by_share": True, "kv_cpu_pinned": True}
    kinds = (np.int64, np.int32, np.uint16, np.int16)
    for kind in kinds:
        as_numpy = {
            name: np.bool_(value) if isinstance(value, bool) else kind(value) if isinstance(value, int) else value
            for name, value in given.items()
        }
        assert LoadOptions(**as_numpy) == LoadOptions(**given)
        assert all(type(value) in (int, bool, str, type(None)) for value in vars(LoadOptions(**as_numpy)).values())
    with nm.load(paths["llama"], **as_numpy) as model, nm.load(paths["llama"], **given) as plain:
        assert model.plan == plain.plan
        few, seed = np.int32(3), np.uint64(7)
        ids = model.generate_ids(np.array([5, 6, 7]), few, top_k=few, seed=seed, temperature=np.float32(0.5), repetition_last_n=few)
        assert ids == plain.generate_ids([5, 6, 7], 3, top_k=3, seed=7, temperature=0.5, repetition_last_n=3)
        assert len(model.generate_many([[5], [6]], few, ignore_eos=np.True_)) == 2
        model.cache.clear(np.int8(0))
        with model.record_timeline(few) as steps:
            model.generate_ids([5], few, keep=np.int8(1), context_shift=np.True_)
        assert len(steps) <= 3


@pytest.mark.parametrize("wrong", (np.float64(256), np.array([256]), 256.0, "256", True, np.True_))
def test_what_is_no_number_is_refused(wrong: Any, paths: dict[str, Path]) -> None:
    with pytest.raises(nm.UsageError, match="ctx_size .* is impossible; expected a whole number from 1"):
        nm.load(paths["llama"], ctx_size=wrong)
