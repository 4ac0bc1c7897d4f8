"""Every public call with values of wrong types, and after `close`: one line of a `NumbaMetaError`, never an error from the depths."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import numba_meta as nm
from numba_meta.errors import NumbaMetaError, NumbaMetaWarning, UsageError
from numba_meta.models.cache.sequences import Cache
from numba_meta.models.loading.load_plan import LoadOptions
from numba_meta.models.model import Model
from numba_meta.models.text.sampling import SamplingOptions

PROMPT = [11, 250, 7]
NOTHING_IS_THIS = object()
WRONG: list[Any] = [
    None, True, -1, 1 << 80, 1.5, float("nan"), 1j, "a", "", "\0", b"a", [], ["a"], [None], [[1]], (1.5,), {}, {"a": 1}, {3}, object(),
    len, int, np.zeros(3), np.zeros((2, 2), np.int64), np.float32(2.5), np.datetime64("2020"), Path("\0"), NOTHING_IS_THIS,
    np.array(1.0), np.array("a"), 10**400, Fraction(10**400), Fraction(-1, 2),
]  # fmt: skip


@pytest.fixture(scope="module")
def path(paths: dict[str, Path]) -> Path:
    return paths["llama"]


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    with nm.load(path, ctx_size=64, parallel=2) as loaded:
        yield loaded


def consume(result: Any) -> None:
    """Lazy calls fail at their first value, or where a `with` block begins."""
    if hasattr(result, "__enter__"):
        with result:
            return
    if isinstance(result, Iterator):
        next(result, None)


def outcome(call: Callable[[], Any]) -> str:
    """`done`, or the one line that the call ended in. Any other error is passed on."""
    try:
        consume(call())
    except NumbaMetaError as error:
        assert len(str(error).splitlines()) == 1 and str(error)
        return str(error)
    return "done"


CALLS: dict[str, dict[str, Any]] = {
    "tokenize": {"text": "the sea", "add_special": None, "parse_special": False},
    "detokenize": {"ids": PROMPT},
    "generate": {
        "prompt": PROMPT, "max_tokens": 1, "stop": (), "ignore_eos": True, "reuse_prefix": False, "context_shift": False, "keep": 0,
        **{name: field.default for name, field in SamplingOptions.__dataclass_fields__.items()},
    },
    "generate_ids": {"prompt": PROMPT, "max_tokens": 1, "ignore_eos": True, "reuse_prefix": False, "context_shift": False, "keep": 0},
    "generate_many": {"prompts": [PROMPT], "max_tokens": 1, "stop": (), "ignore_eos": True},
    "logits": {"ids": PROMPT, "last": True},
    "perplexity": {"text": "the sea and the rain and the sea", "ctx_size": 4},
    "record_timeline": {"n_steps": 3},
    "memory": {},
    "cache.length": {"sequence": 0},
    "cache.tokens": {"sequence": 0},
    "cache.clear": {"sequence": 1},
    "cache.remove": {"sequence": 0, "start": 0, "stop": 0},
    "cache.copy": {"source": 1, "destination": 1},
    "cache.shift": {"sequence": 1, "keep": 0, "drop": 0},
    "save_state": {"path": "states"},
    "load_state": {"path": "states"},
}  # fmt: skip


def bound(model: Model, name: str) -> Callable[..., Any]:
    owner, _, method = name.rpartition(".")
    return getattr(model.cache if owner else model, method)


def test_the_calls_are_all_that_there_are() -> None:
    public = {name for name in dir(Model) if not name.startswith("_") and inspect.isfunction(getattr(Model, name))} - {"close"}
    public |= {f"cache.{name}" for name in vars(Cache) if not name.startswith("_")}
    assert public == set(CALLS)
    for name, arguments in CALLS.items():
        owner = Cache if name.startswith("cache.") else Model
        parameters = inspect.signature(getattr(owner, name.rpartition(".")[2])).parameters
        assert set(parameters) - {"self", "sampling"} <= set(arguments), name


@pytest.mark.parametrize("name", CALLS)
def test_wrong_types_end_in_one_line(name: str, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model.save_state("states")
    assert outcome(lambda: bound(model, name)(**CALLS[name])) == "done"
    for argument in CALLS[name]:
        lines = {outcome(lambda v=value, a=argument: bound(model, name)(**{**CALLS[name], a: v})) for value in WRONG}
        assert len(lines) > 10, f"{argument}: most are refused, each with what it was"
        line = outcome(lambda a=argument: bound(model, name)(**{**CALLS[name], a: NOTHING_IS_THIS}))
        assert line != "done", argument
        with pytest.raises(UsageError):
            consume(bound(model, name)(**{**CALLS[name], argument: NOTHING_IS_THIS}))
    assert len(model.generate_ids(PROMPT, 2, ignore_eos=True)) == 2


@pytest.mark.parametrize("name", [*inspect.signature(nm.load).parameters])
def test_loads_with_wrong_types_end_in_one_line(name: str, path: Path) -> None:
    right = {"tensor_split": "(1.5,)"}  # of one device
    for value in WRONG:
        if (value is None and name != "name_or_path") or (callable(value) and name == "progress") or repr(value) == right.get(name):
            continue
        arguments = {"name_or_path": path, "ctx_size": 64, name: value}
        if name.startswith("kv_") and name != "kv_unified":
            arguments["kv"] = "host"
        line = outcome(lambda arguments=arguments: nm.load(**arguments).close())
        assert line != "done" or (value is True and "bool" in str(inspect.signature(nm.load).parameters[name].annotation)), (name, value)


def test_a_refused_call_leaves_the_cache_and_a_generation_alone(model: Model) -> None:
    begun = model._generated(PROMPT, 10, True, False, {})
    next(begun)
    tokens = model.cache.tokens()
    wrong: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
        (model.cache.shift, ("a", 0, 0)), (model.cache.clear, (5,)), (model.cache.remove, (0, -1)), (model.cache.copy, (0, None))
    ]  # fmt: skip
    for call, arguments in wrong:
        with pytest.raises(UsageError):
            call(*arguments)
    assert model.cache.tokens() == tokens
    assert next(begun) >= 0, "the generation goes on"


def test_numpys_numbers_are_numbers(model: Model) -> None:
    wanted = model.generate_ids(PROMPT, 4, ignore_eos=True)
    assert model.generate_ids(np.array(PROMPT), np.int32(4), ignore_eos=np.True_, temperature=np.float32(0)) == wanted
    assert model.cache.length(np.int64(0)) == len(PROMPT) + 3


def test_every_use_after_close_is_one_and_the_same_line(path: Path, tmp_path: Path) -> None:
    model = nm.load(path, ctx_size=64, kv="host", kv_pipeline_headroom=0)
    begun = model._generated(PROMPT, 10, True, False, {})
    next(begun)
    model.save_state(tmp_path / "states")
    cache, transport, timeline = model.cache, model.transport, model.record_timeline(3)
    model.close()
    model.close()
    uses: dict[str, Callable[[], Any]] = {name: lambda name=name: bound(model, name)(**CALLS[name]) for name in CALLS}
    properties = [name for name in dir(Model) if isinstance(inspect.getattr_static(Model, name), property)]
    assert set(properties) == {"cache", "chat_template", "plan", "tokenizer", "transport"}
    uses |= {name: lambda name=name: getattr(model, name) for name in properties}
    kept = [name.removeprefix("cache.") for name in CALLS if name.startswith("cache.")]
    uses |= {f"kept {name}": lambda name=name: getattr(cache, name)(**CALLS[f"cache.{name}"]) for name in kept}
    uses |= {"kept stats": lambda: transport.stats, "begun": lambda: next(begun), "with": model.__enter__, "timeline": lambda: timeline}
    assert {name: outcome(use) for name, use in uses.items()} == dict.fromkeys(uses, "the model was closed; load it again")
    assert "llama.gguf" in repr(model)


RING_OPTIONS = {name: value for name, value in vars(LoadOptions()).items() if name.startswith("kv_") and name != "kv_unified"}


def test_options_of_a_cache_in_the_host_are_refused_without_one(path: Path) -> None:
    assert len(RING_OPTIONS) == 6 and set(RING_OPTIONS.values()) == {None}
    for name in RING_OPTIONS:
        usual = name in ("kv_ring_by_share", "kv_cpu_pinned") or 1
        with pytest.raises(UsageError, match=f"^{name} says how a KV cache in host memory is delivered, and this one .*; add kv='host'$"):
            nm.load(path, ctx_size=64, **{name: usual})
        nm.load(path, ctx_size=64, kv="host", **{name: usual}).close()


def test_more_device_layers_than_there_are(path: Path) -> None:
    with pytest.raises(UsageError, match="^kv_gpu_layers 3 is impossible: the model has 2 layers; use 0 to 2$"):
        nm.load(path, ctx_size=64, kv="host", kv_gpu_layers=3)
    with nm.load(path, ctx_size=64, kv="host", kv_gpu_layers=2) as model:
        assert model.transport.stats["path"] == "device"


def test_a_context_longer_than_the_model_was_trained_with_is_told(path: Path) -> None:
    line = "^a context of 1025 tokens is longer than what the model was trained with .1024.: .*; at most 1024 serve well$"
    with pytest.warns(NumbaMetaWarning, match=line) as told:
        nm.load(path, ctx_size=1025).close()
    assert len(told) == 1 and told[0].filename == __file__
    nm.load(path, ctx_size=1024).close()
    for unified in (True, False):
        nm.load(path, ctx_size=2048, parallel=2, kv_unified=unified).close()
        with pytest.warns(NumbaMetaWarning, match=r"2050 tokens .*\(1024 for each of 2 sequences\): .* at most 2048 serve well$"):
            nm.load(path, ctx_size=2050, parallel=2, kv_unified=unified).close()


@pytest.mark.parametrize("link", ["0", "0.0000009", "1000001", "-1", "fast", "1e3"])
def test_a_link_out_of_range_names_the_range(link: str, path: Path) -> None:
    with pytest.raises(UsageError, match=r"link='.*' is not a speed; expected 0.000001 to 1000000 GB/s, as in link=5.3$"):
        nm.load(path, devices=f"cpu:0?link={link}")
    for edge in ("0.000001", "1000000"):
        nm.load(path, devices=f"cpu:0?link={edge}", ctx_size=64).close()
