"""What the exactness gate runs over: configurations, which may differ in bits, and ways to deliver, which may not.

A configuration says what is computed; its reference is a cache on the devices. A way says how a host-resident cache reaches them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from synthetic import write_model
from transport.hazards import late_copies, poisoned
from transport.pairwise import every_value, pairwise
from transport.scenario import Played, play

import numba_meta as nm

# Devices and their proportions (None: equal); the synthetic models have 2 KV heads (llama) and 1 (gemma3).
SPLITS = {
    "1": None, "2": None, "2: 70,30": "70,30", "2: 1,0": "1,0", "3": None, "3: 0,1,2": "0,1,2", "4": None, "4: 10,60,5,25": "10,60,5,25",
}  # fmt: skip
CONFIGURATION: dict[str, tuple[Any, ...]] = {
    "split": tuple(SPLITS),
    "types": (("f16", "f16"), ("q8_0", "q8_0"), ("q4_0", "bf16"), ("f32", "f16")),  # of K and V
    "model": ("llama", "gemma3"),
    "n_sequences": (1, 8),
    "unified": (True, False),
    "ubatch_size": (64, 33),
    "exact": (False, True),
}
WAY: dict[str, tuple[Any, ...]] = {
    "depth": (0, 1, 2, 4),
    "budget": (0, 1, 128),
    "by_share": (True, False),
    "link": ("fast", "slow", "late"),
    "poison": (False, True),
    "device_layers": (0, 1, 4),
    "async_copies": (True, False),
    "pinned": (True, False),
}
# Values that force the ordered path, which would hide what the others do to the ring.
ORDERED: tuple[tuple[str, Any], ...] = (("depth", 0), ("async_copies", False), ("pinned", False))


@dataclass(frozen=True)
class Configuration:
    """What is computed."""

    split: str = "2"
    types: tuple[str, str] = ("f16", "f16")
    model: str = "llama"
    n_sequences: int = 1
    unified: bool = True
    ubatch_size: int = 64
    exact: bool = False
    kind: str = "cpu"  # of the devices; "cuda": all on one GPU, "gpus": each on its own

    @property
    def n_devices(self) -> int:
        return int(self.split[0])

    def options(self) -> dict[str, Any]:
        per_sequence = 1024
        return {
            "tensor_split": SPLITS[self.split],
            "cache_type_k": self.types[0],
            "cache_type_v": self.types[1],
            "ctx_size": per_sequence * (1 if self.unified else self.n_sequences),
            "parallel": self.n_sequences,
            "kv_unified": self.unified,
            "ubatch_size": self.ubatch_size,
            "exact": self.exact,
        }


@dataclass(frozen=True)
class Way:
    """How deliveries travel."""

    depth: int = 1
    budget: int = 128
    by_share: bool = True
    link: str = "fast"
    poison: bool = False
    device_layers: int = 0
    async_copies: bool = True
    pinned: bool = True

    def devices(self, n: int, kind: str = "cpu") -> str:
        """Device names that behave so: links are of another speed, or copies come later by another time, on each of them."""
        if kind != "cpu":
            return ",".join(plain_devices(kind, n))
        slow, late = [f"&link={speed}" for speed in (1, 0.3, 2, 0.5)], [f"&delay={t}us" for t in (120, 0, 80, 40)]
        links = {"fast": [""] * 4, "slow": slow, "late": late}
        return ",".join(f"cpu:0?async={int(self.async_copies)}{link}" for link in links[self.link][:n])

    def options(self) -> dict[str, Any]:
        return {
            "kv": "host",
            "kv_pipeline_depth": self.depth,
            "kv_pipeline_budget": self.budget,
            "kv_pipeline_headroom": 0,
            "kv_ring_by_share": self.by_share,
            "kv_gpu_layers": self.device_layers,
            "kv_cpu_pinned": self.pinned,
        }

    @property
    def expected_paths(self) -> set[str]:
        """The paths that its steps may take."""
        if self.depth == 0 or not self.async_copies or not self.pinned:
            return {"ordered"}
        return {"ordered", "pipelined"} if self.budget == 1 else {"pipelined"}


def plain_devices(kind: str, n: int) -> list[str]:
    """Names of n devices of a kind (`Configuration.kind`)."""
    return [f"cuda:{j}" for j in range(n)] if kind == "gpus" else [f"{kind}:0"] * n


def synthetic_models(folder: Path) -> dict[str, Path]:
    """Seven layers each, so that also the ring of depth 4 comes around; a window of 16, and Gemma's sixth layer sees everything."""
    sizes: dict[str, Any] = {"n_layer": 7, "n_embd": 128, "n_head": 4, "head_dim": 32, "n_ff": 128, "types": "q8_0", "context_length": 8192}
    return {
        "llama": write_model(folder / "llama.gguf", n_head_kv=2, n_vocab=300, seed=21, **sizes),
        "gemma3": write_model(folder / "gemma3.gguf", "gemma3", n_head_kv=1, n_vocab=320, seed=22, **sizes),
    }


class Gate:
    """Runs configurations on their devices and by every way; keeps the references."""

    def __init__(self, models: Mapping[str, Path]) -> None:
        self._models = models
        self.reference = cache(self._reference)

    def _reference(self, configuration: Configuration) -> Played:
        devices = plain_devices(configuration.kind, configuration.n_devices)
        with nm.load(self._models[configuration.model], devices=devices, **configuration.options()) as model:
            return play(model)

    def deliver(self, configuration: Configuration, way: Way) -> Played:
        """The same run with a cache in host memory."""
        with ExitStack() as stack:
            if way.poison:
                stack.enter_context(poisoned())
            if way.link == "late":
                stack.enter_context(late_copies())
            options = {"devices": way.devices(configuration.n_devices, configuration.kind), **configuration.options(), **way.options()}
            return play(stack.enter_context(nm.load(self._models[configuration.model], **options)))


def split_row(row: Mapping[str, Any]) -> tuple[Configuration, Way]:
    """A row of the product as what is computed and how it travels."""
    return Configuration(**{name: row[name] for name in CONFIGURATION}), Way(**{name: row[name] for name in WAY})


def sample() -> list[tuple[Configuration, Way]]:
    """Rows with every pair of values. Pairs without a value that forces the ordered path are in rows without one: they meet a ring."""
    factors: dict[str, Sequence[Any]] = {**CONFIGURATION, **WAY}
    with_ring = {**factors, **{name: [v for v in factors[name] if (name, v) not in ORDERED] for name, _ in ORDERED}}
    rows = pairwise(with_ring)
    for name, value in ORDERED:
        rows += every_value({**factors, name: [value]})
    return [split_row(row) for row in rows]


def whole_product() -> Iterator[tuple[Configuration, Way]]:
    """Every configuration by every way."""
    for values in product(*CONFIGURATION.values()):
        configuration = Configuration(*values)
        for ways in product(*WAY.values()):
            yield configuration, Way(*ways)
