"""The gate on both real models: texts of different lengths, on one to four devices, the tokens of a cache on the devices to the bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from models.conftest import real_paths as real_paths
from models.conftest import references as references
from transport.hazards import poisoned
from transport.product import Way
from transport.scenario import Played, Player, difference

import numba_meta as nm
from numba_meta.models.model import Model


@dataclass(frozen=True)
class Case:
    """A model, how it is split, how many sequences at once, types of K and V."""

    name: str
    tensor_split: str
    n_sequences: int
    unified: bool
    types: tuple[str, str]
    n_steps: int = 4

    @property
    def n_devices(self) -> int:
        return self.tensor_split.count(",") + 1

    def options(self) -> dict[str, Any]:
        return {
            "tensor_split": self.tensor_split,
            "parallel": self.n_sequences,
            "kv_unified": self.unified,
            "cache_type_k": self.types[0],
            "cache_type_v": self.types[1],
            "ctx_size": 1280 * (1 if self.unified else self.n_sequences),
            "ubatch_size": 192,
        }


# SmolLM2 has 3 KV heads, Gemma 3 one, and windows of 512.
QUICK = [
    (Case("smollm2", "70,30", 1, True, ("q8_0", "q8_0")), Way(depth=1, link="slow")),
    (Case("gemma3", "2,1", 1, False, ("f16", "f16"), 2), Way(depth=2, link="late")),
]
MORE = [
    (Case("gemma3", "1,1", 8, False, ("f16", "f16"), 16), Way(depth=2, link="late")),
    (Case("smollm2", "1", 8, True, ("f16", "f16"), 16), Way(depth=1, link="late")),
    (Case("smollm2", "1,1", 8, False, ("q8_0", "q8_0"), 16), Way(depth=4, budget=0, by_share=False)),
    (Case("smollm2", "1,0", 1, True, ("f16", "q8_0"), 16), Way(depth=2, device_layers=4)),
    (Case("smollm2", "1,2,1,1", 8, True, ("q8_0", "q8_0"), 16), Way(depth=0, link="slow")),
    (Case("gemma3", "1", 1, True, ("q8_0", "q8_0"), 16), Way(depth=1, link="slow")),
    (Case("gemma3", "70,30", 8, True, ("q8_0", "q8_0"), 16), Way(depth=4, budget=1)),
    (Case("gemma3", "1,0,2", 1, True, ("f16", "f16"), 16), Way(depth=1, by_share=False, link="late")),
    (Case("gemma3", "1,1,1,1", 8, False, ("q8_0", "f16"), 16), Way(depth=1, budget=0, pinned=False)),
]


def plays(model: Model, prompts: list[list[int]], n_steps: int) -> Played:
    """Prompts one after the other, then all grow; the first is cleared and the second is fed in its place."""
    player, sequences = Player(model), list(range(len(prompts)))
    for sequence, prompt in enumerate(prompts):
        player.feed(sequence, prompt)
    player.grow(sequences, n_steps)
    player.clear(0)
    player.feed(0, prompts[-1][:40])
    player.grow(sequences[::-1], n_steps // 2)
    return player.finish()


def check(case: Case, way: Way, path: Path, texts: dict[str, dict[str, Any]]) -> None:
    ids = [i for text in texts.values() for i in text["ids"]]
    long = (ids * 10)[: 540 if case.name == "gemma3" else 260]  # past Gemma's window, past a bucket
    lengths = (len(long), 5, 60, 17, 33, 9, 120, 80)[: case.n_sequences]
    prompts = [long[7 * i : 7 * i + n] for i, n in enumerate(lengths)]
    with nm.load(path, devices=["cpu:0"] * case.n_devices, **case.options()) as model:
        wanted = plays(model, prompts, case.n_steps)
    with poisoned(), nm.load(path, devices=way.devices(case.n_devices), **case.options(), **way.options()) as model:
        got = plays(model, prompts, case.n_steps)
    assert difference(got, wanted) is None
    assert got.paths <= way.expected_paths


@pytest.mark.parametrize(("case", "way"), QUICK, ids=lambda value: getattr(value, "name", ""))
def test_a_real_model_generates_the_same_bits(case: Case, way: Way, real_paths: Callable[[str], Path], references: Any) -> None:
    check(case, way, real_paths(case.name), references(case.name))


@pytest.mark.slow
@pytest.mark.parametrize(("case", "way"), MORE, ids=str)
def test_real_models_generate_the_same_bits_every_way(case: Case, way: Way, real_paths: Callable[[str], Path], references: Any) -> None:
    check(case, way, real_paths(case.name), references(case.name))
