"""Metadata of a model file as an architecture reads it: numbers within bounds, values per layer, and small tensors of constants.

A key that is left out has the meaning that llama.cpp gives its absence; what is common to all architectures is read here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from numba_meta.errors import ModelFileError
from numba_meta.models.architectures.config import LayerSpec, ModelConfig, RopeConfig, YarnConfig
from numba_meta.models.files.gguf import GGUFFile
from numba_meta.quants import dequantize
from numba_meta.split.rules import ModelShape

_MOST = 1 << 31
Value = TypeVar("Value", int, bool)
Config = TypeVar("Config", bound=ModelConfig)


class Keys:
    """The keys `<architecture>.*` of a file. Every reader raises `ModelFileError` that names file and key."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.architecture = file.architecture
        self._constants: set[str] = set()
        n_blocks = self.number("block_count")
        if n_blocks > len(file.tensors):
            raise self.error(f"{self.name_of('block_count')} is {n_blocks}, but the file has {len(file.tensors)} tensors in all")
        self.n_blocks = n_blocks
        n_predict = self.number("nextn_predict_layers", 0, least=0)
        if n_predict >= n_blocks:
            raise self.error(f"{n_predict} layers of next-token prediction among {n_blocks} blocks; expected fewer than blocks")
        self.n_layer = n_blocks - n_predict  # the layers of next-token prediction are the last blocks

    # ---- single values -----------------------------------------------------------------------------------------------------------------

    def name_of(self, key: str) -> str:
        """The key in full."""
        return f"{self.architecture}.{key}"

    def error(self, message: str) -> ModelFileError:
        """An error of this file."""
        return ModelFileError(f"{self.file.path.name}: {message}")

    def has(self, key: str) -> bool:
        """Whether the file has this key."""
        return self.name_of(key) in self.file.metadata

    def number(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A whole number from `least` up to 2^31; required where there is no `default`."""
        name = self.name_of(key)
        value = self.file.value(name, int) if default is None else self.file.value(name, int, default)
        return self._bounded(name, value, least)

    def real(self, key: str, default: float | None = None) -> float:
        """A finite number; required where there is no `default`."""
        name = self.name_of(key)
        value = self.file.value(name, float) if default is None else self.file.value(name, float, default)
        if not math.isfinite(value):
            raise self.error(f"{name} is {value}, expected a finite number")
        return value

    def text(self, key: str, default: str) -> str:
        """A text."""
        return self.file.value(self.name_of(key), str, default)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        return self.file.value(self.name_of(key), bool, default)

    # ---- values per layer --------------------------------------------------------------------------------------------------------------

    def per_layer(self, key: str, default: int | None = None, least: int = 1) -> tuple[int, ...]:
        """A whole number for each layer, from an array with one entry per block or from one number for all."""
        name = self.name_of(key)
        found = self.file.metadata.get(name)
        if not isinstance(found, list):
            return (self.number(key, default, least),) * self.n_layer
        return tuple(self._bounded(f"{name}[{i}]", value, least) for i, value in enumerate(self._entries(name, found, (int,))))

    def flags_per_layer(self, key: str) -> tuple[bool, ...] | None:
        """True or false for each layer, where the file has an array of them (numbers 0 and 1 serve too); else None."""
        name = self.name_of(key)
        found = self.file.metadata.get(name)
        return tuple(bool(value) for value in self._entries(name, found, (bool, int))) if isinstance(found, list) else None

    def _entries(self, name: str, found: list[Value], kinds: tuple[type, ...]) -> list[Value]:
        if len(found) != self.n_blocks:
            raise self.error(f"{name} has {len(found)} entries for {self.n_blocks} blocks; expected one for each")
        wrong = next((value for value in found if type(value) not in kinds), None)
        if wrong is not None:
            raise self.error(f"{name} holds {wrong!r:.40}, expected {' or '.join(kind.__name__ for kind in kinds)} entries")
        return found[: self.n_layer]

    def _bounded(self, name: str, value: int, least: int) -> int:
        if not least <= value < _MOST:
            expected = "a positive number" if least == 1 else f"a number from {least} up"
            raise self.error(f"{name} is {value}, expected {expected} below 2^31")
        return value

    # ---- tensors -----------------------------------------------------------------------------------------------------------------------

    def has_tensor(self, name: str) -> bool:
        """Whether the file has this tensor."""
        return name in self.file.tensors

    def factors(self, name: str) -> tuple[float, ...] | None:
        """A small tensor of positive constants, which becomes part of the configuration; None where the file has none."""
        if not self.has_tensor(name):
            return None
        self._constants.add(name)
        values = dequantize(self.file.raw(name).reshape(-1), self.file.tensor(name).dtype)
        if not np.all(np.isfinite(values) & (values > 0)):
            raise self.error(f"{name} holds factors that are not positive numbers; the file is damaged")
        return tuple(float(value) for value in values)

    # ---- what architectures have in common ---------------------------------------------------------------------------------------------

    def shape(self) -> ModelShape:
        """The sizes of the model; those that can differ by layer are the first layer's."""
        n_embd, (n_head, n_head_kv) = self.number("embedding_length"), self._heads()
        head_dim = max(1, n_embd // n_head[0])
        embedding = self.file.tensors.get("token_embd.weight")
        if embedding is None:
            raise self.error("the tensor token_embd.weight [n_embd, n_vocab] is missing; the file is incomplete")
        if len(embedding.shape) != 2 or embedding.shape[0] != n_embd:
            raise self.error(f"token_embd.weight has the shape {list(embedding.shape)}, expected [{n_embd}, n_vocab]")
        return ModelShape(
            n_embd=n_embd,
            n_layer=self.n_layer,
            n_head=n_head[0],
            n_head_kv=n_head_kv[0],
            head_dim_k=self.number("attention.key_length", head_dim),
            head_dim_v=self.number("attention.value_length", head_dim),
            n_ff=self.per_layer("feed_forward_length")[0],
            n_vocab=embedding.shape[1],
        )

    def layers(self, shape: ModelShape, rope: RopeConfig | None, scale: float | None = None) -> tuple[LayerSpec, ...]:
        """Layers of attention that all see everything, with these positions; `scale` None: 1 / sqrt(head_dim)."""
        scale = 1.0 / math.sqrt(shape.head_dim_k) if scale is None else scale
        widths = self.per_layer("feed_forward_length")
        return tuple(LayerSpec(*sizes, rope, scale) for sizes in zip(*self._heads(), widths, strict=True))

    def _heads(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Query heads and KV heads of each layer; as many of both where the file does not tell them apart."""
        n_head = self.per_layer("attention.head_count")
        n_head_kv = self.per_layer("attention.head_count_kv") if self.has("attention.head_count_kv") else n_head
        for layer, (heads, kv_heads) in enumerate(zip(n_head, n_head_kv, strict=True)):
            if heads % kv_heads:
                raise self.error(f"layer {layer} has {heads} query heads over {kv_heads} KV heads; expected a multiple")
        return n_head, n_head_kv

    def rope(self, shape: ModelShape, interleaved: bool, factors: tuple[float, ...] | None = None, has_long: bool = False) -> RopeConfig:
        """Rotary embedding with the scaling that the file asks for: none, linear, YaRN; `has_long`: factors for short and long contexts."""
        scaling, known = self.text("rope.scaling.type", "linear"), ("none", "linear", "yarn", *(("longrope",) if has_long else ()))
        if scaling not in known:
            raise self.error(f"rope scaling {scaling[:60]!r} is not supported; supported are {', '.join(known)}")
        factor = self.real("rope.scaling.factor", self.real("rope.scale_linear", 0.0))
        if factor < 0:
            raise self.error(f"{self.name_of('rope.scaling.factor')} is {factor}, expected a positive number, or 0 for no scaling")
        factor = 1.0 if factor == 0 or scaling == "none" else factor
        magnitude = self.real("rope.scaling.attn_factor", 1.0)
        yarn, long_factors = None, None
        original = self.number("rope.scaling.original_context_length", self.number("context_length"))
        if has_long:
            factors, long_factors = self.factors("rope_factors_short.weight"), self.factors("rope_factors_long.weight")
            if (factors is None) != (long_factors is None):
                raise self.error("one of rope_factors_short.weight and rope_factors_long.weight is missing; expected both or none")
        if scaling == "yarn":
            yarn = YarnConfig(original)
            magnitude *= max(1.0, 1.0 + 0.1 * math.log(factor))
        rope = RopeConfig(
            n_dims=self.number("rope.dimension_count", shape.head_dim_k),
            base=self.real("rope.freq_base", 10000.0),
            interleaved=interleaved,
            scale=1.0 / factor,
            factors=factors,
            yarn=yarn,
            magnitude=magnitude,
            long_factors=long_factors,
            original_context=original if long_factors else 0,
        )
        return self.checked_rope(rope, shape)

    def checked_rope(self, rope: RopeConfig, shape: ModelShape) -> RopeConfig:
        """`rope`, where it fits heads of this width."""
        even = 0 < rope.n_dims <= shape.head_dim_k and rope.n_dims % 2 == 0
        has_base = rope.base > (0 if rope.yarn is None else 1)  # YaRN asks how often a pair turns: a base of 1 turns all alike
        if not (even and has_base and 0 < rope.scale < math.inf):
            raise self.error(
                f"rope over {rope.n_dims} dims, base {rope.base}, scale {rope.scale}; "
                f"expected an even number up to {shape.head_dim_k}, and both positive"
            )
        return rope

    def config(
        self,
        shape: ModelShape,
        layers: Sequence[LayerSpec],
        kind: type[Config] = ModelConfig,  # type: ignore[assignment]
        epsilon_key: str = "attention.layer_norm_rms_epsilon",
        **own: float,
    ) -> Config:
        """The configuration of these layers, with the keys that every architecture has, and the `own` fields of a derived `kind`."""
        context, epsilon = self.number("context_length"), self.real(epsilon_key)
        if not 0 < epsilon < 1:
            raise self.error(f"{self.name_of(epsilon_key)} is {epsilon}, expected a small positive number")
        if not self.flag("attention.causal", True):
            raise self.error(f"{self.name_of('attention.causal')} is false: a model that reads both ways; expected one that generates text")
        plain = replace(shape, n_head=layers[0].n_head, n_head_kv=layers[0].n_head_kv, n_ff=layers[0].n_ff)
        return kind(self.architecture, plain, tuple(layers), context, epsilon, frozenset(self._constants), **own)

    def refuse_experts(self) -> None:
        """For architectures without a graph for mixtures of experts."""
        if n_experts := self.number("expert_count", 0, least=0):
            raise self.error(f"a {self.architecture} model with {n_experts} experts per layer is not supported; expected a dense one")
