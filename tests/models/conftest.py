"""Models that several test files share: opened once, closed at the end of the run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from models.step_driver import StepDriver
from synthetic import write_model

import numba_meta as nm
from numba_meta.devices import cuda_driver, cuda_graph
from numba_meta.models.model import Model

MODEL_NAMES = ("smollm2", "gemma3")
OpenModel = Callable[[str, bool], Model]


@pytest.fixture(scope="session")
def real_paths(request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """The file of a real model by name."""
    return lambda name: request.getfixturevalue(f"{name}_path")


@pytest.fixture(scope="session")
def open_model(real_paths: Callable[[str], Path]) -> Iterator[OpenModel]:
    """`open_model(name, exact)`: a real model on one device with 2,048 cells and 4 sequences."""
    opened: dict[tuple[str, bool], Model] = {}

    def get(name: str, exact: bool) -> Model:
        if (name, exact) not in opened:
            opened[name, exact] = nm.load(real_paths(name), exact=exact, ctx_size=2048, parallel=4)
        return opened[name, exact]

    yield get
    for model in opened.values():
        model.close()


@pytest.fixture(scope="session")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A Llama of 2 layers and 2 KV heads; a Gemma whose layers 0 to 4 have a window of 16, and one KV head. A context of 1,024 each."""
    folder, sizes = tmp_path_factory.mktemp("models"), {"types": "q8_0", "context_length": 1024}
    return {
        "llama": write_model(folder / "llama.gguf", seed=41, **sizes),
        "gemma3": write_model(folder / "gemma3.gguf", "gemma3", n_layer=6, n_head_kv=1, seed=42, **sizes),
    }


@pytest.fixture(scope="session")
def references(data_folder: Path) -> Callable[[str], dict[str, dict[str, Any]]]:
    """`references(model)[prompt]`: ids; `exact` from numpy; `llama_cpp` per configuration of llama.cpp."""

    @cache
    def read(name: str) -> dict[str, dict[str, Any]]:
        theirs = json.loads((data_folder / f"{name}.json").read_text(encoding="utf-8"))
        exact = json.loads((data_folder / f"numpy_f32_{name}.json").read_text(encoding="utf-8"))
        by_name = {prompt["name"]: prompt for prompt in exact["prompts"]}
        return {p["name"]: {"ids": p["ids"], "llama_cpp": p["results"], "exact": by_name[p["name"]]} for p in theirs["prompts"]}

    return read


@pytest.fixture
def make_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., StepDriver]]:
    """`make_driver(capabilities, reach_each_other)`: a driver with GPUs of these."""

    def make(*facts: Any) -> StepDriver:
        fake = StepDriver(*facts)
        monkeypatch.setattr(cuda_driver, "_bindings", lambda: fake)
        monkeypatch.setattr(cuda_graph, "bindings", lambda: fake)
        cuda_driver.open_gpu.cache_clear()
        return fake

    yield make
    cuda_driver.open_gpu.cache_clear()
