"""Models that several test files share: opened once, closed at the end of the run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import numba_meta as nm
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
def references(data_folder: Path) -> Callable[[str], dict[str, dict[str, Any]]]:
    """`references(model)[prompt]`: ids; `exact` from numpy; `llama_cpp` per configuration of llama.cpp."""

    @cache
    def read(name: str) -> dict[str, dict[str, Any]]:
        theirs = json.loads((data_folder / f"{name}.json").read_text(encoding="utf-8"))
        exact = json.loads((data_folder / f"numpy_f32_{name}.json").read_text(encoding="utf-8"))
        by_name = {prompt["name"]: prompt for prompt in exact["prompts"]}
        return {p["name"]: {"ids": p["ids"], "llama_cpp": p["results"], "exact": by_name[p["name"]]} for p in theirs["prompts"]}

    return read
