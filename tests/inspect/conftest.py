"""A small model over two uneven devices, and the same over other splits: planned and loaded, never run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from synthetic import write_model

import numba_meta
from numba_meta import Model

Load = Callable[..., Model]


@pytest.fixture(scope="session")
def llama_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, 384 wide, 6 heads over 3 KV heads of 64, 512 neurons, 397 tokens."""
    path = tmp_path_factory.mktemp("inspect") / "llama.gguf"
    return write_model(path, n_embd=384, n_head=6, n_head_kv=3, n_ff=512, types={"default": "q4_0", "attn_v": "q8_0"})


@pytest.fixture(scope="session")
def gemma_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, 256 wide, 4 heads over one KV head of 64, with norms of Q and K and a sliding window."""
    path = tmp_path_factory.mktemp("inspect") / "gemma.gguf"
    return write_model(path, "gemma3", n_embd=256, n_head=4, n_head_kv=1, head_dim=64, n_ff=512)


@pytest.fixture(scope="session")
def load(llama_path: Path, gemma_path: Path) -> Iterator[Load]:
    """Load `llama` or `gemma` over `split`, one CPU device per entry; each split is loaded once."""
    paths = {"llama": llama_path, "gemma": gemma_path}
    loaded: dict[tuple[str, tuple[int, ...]], Model] = {}

    def get(name: str, split: tuple[int, ...]) -> Model:
        if (name, split) not in loaded:
            devices = ["cpu:0"] * len(split)
            loaded[name, split] = numba_meta.load(paths[name], devices=devices, tensor_split=split, ubatch_size=64, threads=len(split))
        return loaded[name, split]

    yield get
    for model in loaded.values():
        model.close()


@pytest.fixture(scope="session")
def model(load: Load) -> Model:
    """The Llama over 70,30: two of three KV heads, 352 of 512 neurons and 278 of 397 rows on the first device."""
    return load("llama", (70, 30))
