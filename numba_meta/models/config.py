"""The sizes and constants of a model, from its GGUF metadata."""

from __future__ import annotations

import math
from dataclasses import dataclass

from numba_meta.errors import ModelFileError
from numba_meta.models.gguf import GGUFFile
from numba_meta.split.rules import ModelShape


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: `n_dims` of each head rotate; angle = position * scale * base^(-2i / n_dims)."""

    n_dims: int
    base: float
    scale: float = 1.0

    def inverse_frequencies(self, factors: tuple[float, ...] | None = None) -> tuple[float, ...]:
        """One per rotated pair, divided by the model's own factors where it has some (Llama 3's long contexts)."""
        half = self.n_dims // 2
        plain = [self.base ** (-2.0 * i / self.n_dims) for i in range(half)]
        if factors is None:
            return tuple(plain)
        if len(factors) != half:
            raise ModelFileError(f"rope_freqs.weight holds {len(factors)} factors, expected {half}, one per rotated pair")
        return tuple(f / factor for f, factor in zip(plain, factors, strict=True))


@dataclass(frozen=True)
class ModelConfig:
    """What a graph builder needs to know. Head dims in elements; `windows[layer]` is 0 for full attention, else the cells that it sees."""

    architecture: str
    shape: ModelShape
    context_length: int
    norm_epsilon: float
    rope: RopeConfig
    rope_local: RopeConfig  # of layers with a window
    windows: tuple[int, ...]
    embedding_scale: float = 1.0

    @property
    def attention_scale(self) -> float:
        """1 / sqrt(head_dim)."""
        return 1.0 / math.sqrt(self.shape.head_dim_k)

    @property
    def window(self) -> int:
        """The sliding window in cells; 0 where every layer sees everything."""
        return max(self.windows)


def read_config(file: GGUFFile) -> ModelConfig:
    """The configuration of a supported architecture. Raises `ModelFileError` for others, and for missing or impossible values."""
    architecture = file.architecture
    if architecture not in _READERS:
        known = ", ".join(sorted(_READERS))
        raise ModelFileError(f"{file.path.name}: the architecture {architecture[:60]!r} is not supported; supported are {known}")
    config = _READERS[architecture](file, architecture)
    _check(file, config)
    return config


def _shape(file: GGUFFile, prefix: str) -> ModelShape:
    def number(key: str, default: int | None = None) -> int:
        value = file.value(f"{prefix}.{key}", int) if default is None else file.value(f"{prefix}.{key}", int, default)
        if not 0 < value < 1 << 31:
            raise ModelFileError(f"{file.path.name}: {prefix}.{key} is {value}, expected a positive number below 2^31")
        return value

    n_embd, n_head = number("embedding_length"), number("attention.head_count")
    n_head_kv = number("attention.head_count_kv", n_head)
    if n_head % n_head_kv:
        raise ModelFileError(f"{file.path.name}: {n_head} query heads over {n_head_kv} KV heads; expected a multiple")
    head_dim = number("attention.key_length", max(1, n_embd // n_head))
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelFileError(f"{file.path.name}: the tensor token_embd.weight [n_embd, n_vocab] is missing; the file is incomplete")
    if len(embedding.shape) != 2 or embedding.shape[0] != n_embd:
        raise ModelFileError(f"{file.path.name}: token_embd.weight has the shape {list(embedding.shape)}, expected [{n_embd}, n_vocab]")
    n_layer = number("block_count")
    if n_layer > len(file.tensors):
        raise ModelFileError(f"{file.path.name}: {prefix}.block_count is {n_layer}, but the file has {len(file.tensors)} tensors in all")
    return ModelShape(
        n_embd=n_embd,
        n_layer=n_layer,
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_dim_k=head_dim,
        head_dim_v=number("attention.value_length", head_dim),
        n_ff=number("feed_forward_length"),
        n_vocab=embedding.shape[1],
    )


def _rope(file: GGUFFile, prefix: str, shape: ModelShape, default_base: float) -> RopeConfig:
    n_dims = file.value(f"{prefix}.rope.dimension_count", int, shape.head_dim_k)
    base = file.value(f"{prefix}.rope.freq_base", float, default_base)
    kind = file.value(f"{prefix}.rope.scaling.type", str, "none")
    if kind not in ("none", "linear"):
        raise ModelFileError(f"{file.path.name}: rope scaling {kind[:60]!r} is not supported; supported are none and linear")
    factor = file.value(f"{prefix}.rope.scaling.factor", float, 1.0) if kind == "linear" else 1.0
    config = RopeConfig(n_dims, base, 1.0 / factor if factor else math.inf)
    _check_rope(file, config, shape)
    return config


def _check_rope(file: GGUFFile, rope: RopeConfig, shape: ModelShape) -> None:
    even = 0 < rope.n_dims <= shape.head_dim_k and rope.n_dims % 2 == 0
    if not (even and 0 < rope.base < math.inf and 0 < rope.scale < math.inf):
        raise ModelFileError(
            f"{file.path.name}: rope over {rope.n_dims} dims, base {rope.base}, scale {rope.scale}; "
            f"expected an even number up to {shape.head_dim_k}, and both positive"
        )


def _read_llama(file: GGUFFile, prefix: str) -> ModelConfig:
    shape = _shape(file, prefix)
    rope = _rope(file, prefix, shape, 10000.0)
    return ModelConfig(
        architecture=prefix,
        shape=shape,
        context_length=file.value(f"{prefix}.context_length", int),
        norm_epsilon=file.value(f"{prefix}.attention.layer_norm_rms_epsilon", float),
        rope=rope,
        rope_local=rope,
        windows=(0,) * shape.n_layer,
    )


def _read_gemma3(file: GGUFFile, prefix: str) -> ModelConfig:
    shape = _shape(file, prefix)
    # Files of the small models lack the pattern and the local base: five local layers, then a global one; base 10,000.
    pattern = file.value(f"{prefix}.attention.sliding_window_pattern", int, 6)
    window = file.value(f"{prefix}.attention.sliding_window", int)
    local = file.value(f"{prefix}.rope.freq_base_swa", float, 10000.0)
    if window < 1 or pattern < 1:
        raise ModelFileError(
            f"{file.path.name}: a sliding window of {window} cells in a pattern of {pattern} layers; expected positive numbers"
        )
    rope = _rope(file, prefix, shape, 1000000.0)
    rope_local = RopeConfig(rope.n_dims, local)
    _check_rope(file, rope_local, shape)
    return ModelConfig(
        architecture=prefix,
        shape=shape,
        context_length=file.value(f"{prefix}.context_length", int),
        norm_epsilon=file.value(f"{prefix}.attention.layer_norm_rms_epsilon", float),
        rope=rope,
        rope_local=rope_local,
        windows=tuple(0 if layer % pattern == pattern - 1 else window for layer in range(shape.n_layer)),
        embedding_scale=math.sqrt(shape.n_embd),
    )


def _check(file: GGUFFile, config: ModelConfig) -> None:
    if config.context_length < 1 or not 0 < config.norm_epsilon < 1:
        raise ModelFileError(
            f"{file.path.name}: a context of {config.context_length} tokens, norm epsilon {config.norm_epsilon}; "
            "expected at least 1 and a small positive number"
        )


_READERS = {"llama": _read_llama, "gemma3": _read_gemma3}
