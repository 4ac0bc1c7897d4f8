"""The sizes and constants of a model, as its architecture reads them from the metadata of a GGUF file. Data alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from numba_meta.errors import ModelFileError
from numba_meta.split.rules import ModelShape


@dataclass(frozen=True)
class YarnConfig:
    """YaRN (Peng et al. 2023): which pairs keep their angles beyond the `original_context` tokens of training, and which slow down."""

    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: the first `n_dims` dims of each head are turned in pairs, (2i, 2i + 1) if `interleaved`, else (i, i + n_dims / 2).

    The angle of pair i is position * base^(-2i / n_dims) / factors[i] * scale; with `yarn` only some pairs are scaled, or in part.
    Cosines and sines are multiplied by `magnitude`. Sequences of more than `original_context` positions have `long_factors`.
    """

    n_dims: int
    base: float
    interleaved: bool = False
    scale: float = 1.0
    factors: tuple[float, ...] | None = None
    yarn: YarnConfig | None = None
    magnitude: float = 1.0
    long_factors: tuple[float, ...] | None = None
    original_context: int = 0

    def __post_init__(self) -> None:
        for factors in (self.factors, self.long_factors):
            if factors is not None and len(factors) != self.n_dims // 2:
                raise ModelFileError(f"{len(factors)} rope factors, expected {self.n_dims // 2}, one per rotated pair")

    def for_context(self, n_positions: int) -> RopeConfig:
        """What sequences of up to so many positions are turned by. It follows from their room, not from how long they are."""
        is_long = self.long_factors is not None and n_positions > self.original_context
        return replace(self, factors=self.long_factors if is_long else self.factors, long_factors=None, original_context=0)

    @property
    def inverse_frequencies(self) -> tuple[float, ...]:
        """The angle of each pair per position."""
        half = self.n_dims // 2
        plain = [self.base ** (-2.0 * i / self.n_dims) / (self.factors[i] if self.factors else 1.0) for i in range(half)]
        kept = self._kept()
        return tuple(f * (self.scale * (1.0 - part) + part) for f, part in zip(plain, kept, strict=True))

    def _kept(self) -> list[float]:
        """What part of each pair's angle is not scaled: 1 where YaRN leaves it as it was trained."""
        half = self.n_dims // 2
        if self.yarn is None:
            return [0.0] * half

        def pair_of(beta: float) -> float:
            """The pair that turns `beta` times within the original context."""
            turns = self.yarn.original_context / (beta * 2.0 * math.pi)  # type: ignore[union-attr]
            return self.n_dims * math.log(turns) / (2.0 * math.log(self.base))

        low = max(0.0, math.floor(pair_of(self.yarn.beta_fast)))
        high = min(self.n_dims - 1.0, math.ceil(pair_of(self.yarn.beta_slow)))
        return [1.0 - min(1.0, max(0.0, (i - low) / max(0.001, high - low))) for i in range(half)]


@dataclass(frozen=True)
class LayerSpec:
    """One layer: its heads, the width of its feed-forward part, what its attention sees and how positions turn its heads.

    `window`: cells that it sees, 0 for all. `rope` None: they do not. `scale` multiplies scores before the softmax.
    """

    n_head: int
    n_head_kv: int
    n_ff: int
    rope: RopeConfig | None
    scale: float
    window: int = 0


@dataclass(frozen=True)
class ModelConfig:
    """What a graph builder needs to know. `shape`: the sizes that are the same in all layers, and those of the first layer.

    `constants`: tensors of the file that were read into this configuration. An architecture with numbers of its own adds them in a
    dataclass derived from this one.
    """

    architecture: str
    shape: ModelShape
    layers: tuple[LayerSpec, ...]
    context_length: int
    norm_epsilon: float
    constants: frozenset[str] = field(default=frozenset(), repr=False)

    @property
    def windows(self) -> tuple[int, ...]:
        """The cells that each layer sees; 0: all."""
        return tuple(layer.window for layer in self.layers)

    @property
    def window(self) -> int:
        """The sliding window in cells; 0 where every layer sees everything."""
        return max(self.windows)

    @property
    def layer_shapes(self) -> tuple[ModelShape, ...]:
        """The sizes of each layer, as its cuts need them."""
        return tuple(replace(self.shape, n_head=each.n_head, n_head_kv=each.n_head_kv, n_ff=each.n_ff) for each in self.layers)
