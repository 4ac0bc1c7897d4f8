"""A small model over two uneven devices, and the same over other splits: planned and loaded, never run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import numba_meta
from numba_meta import Model

Load = Callable[..., Model]


@pytest.fixture(scope="session")
def load(llama_path: Path, gemma_path: Path) -> Iterator[Load]:
    """Load `llama` or `gemma` over `split`, one CPU device per entry; each split is loaded once."""
    paths = {"llama": llama_path, "gemma": gemma_path}
    loaded: dict[tuple[str, tuple[int, ...]], Model] = {}

    def get(name: str, split: tuple[int, ...]) -> Model:
        if (name, split) not in loaded:
            devices = ["cpu:0"] * len(split)
            options = {"ctx_size": 512, "ubatch_size": 64, "threads": len(split)}
            loaded[name, split] = numba_meta.load(paths[name], devices=devices, tensor_split=split, **options)
        return loaded[name, split]

    yield get
    for model in loaded.values():
        model.close()


@pytest.fixture(scope="session")
def model(load: Load) -> Model:
    """The Llama over 70,30: two of three KV heads, 352 of 512 neurons and 278 of 397 rows on the first device."""
    return load("llama", (70, 30))
