"""A forward pass of Llama and Gemma 3 in float64 numpy: what the tests compare logits of small models with.

Written from the models' papers, apart from numba_meta; files are read by the `gguf` package.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ReferenceModel:
    """Weights `[out, in]` in float64 by name, and the constants of the architecture."""

    architecture: str
    weights: dict[str, Array]
    n_layer: int
    head_dim: int
    score_scale: float
    n_rotated: int
    epsilon: float
    rope_base: float
    window: int  # 0: none
    pattern: int

    @classmethod
    def read(cls, path: Path) -> ReferenceModel:
        """From a GGUF file."""
        reader = gguf.GGUFReader(path)
        architecture = _field(reader, "general.architecture")

        def value(key: str, default: Any = None) -> Any:
            return _field(reader, f"{architecture}.{key}", default)

        weights = {t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float64) for t in reader.tensors}
        gemma = architecture == "gemma3"
        width = value("embedding_length") // _first(value("attention.head_count"))
        head_dim = value("attention.key_length", width)
        by_width = gemma and value("block_count") == 62  # Gemma 3 27B
        return cls(
            architecture=architecture,
            weights=weights,
            n_layer=value("block_count"),
            head_dim=head_dim,
            score_scale=(width if by_width else head_dim) ** -0.5,
            n_rotated=value("rope.dimension_count", head_dim),
            epsilon=value("attention.layer_norm_rms_epsilon"),
            rope_base=value("rope.freq_base"),
            window=value("attention.sliding_window", 0) if gemma else 0,
            pattern=value("attention.sliding_window_pattern", 6),
        )

    def logits(self, ids: npt.ArrayLike) -> Array:
        """`[len(ids), n_vocab]`, every token seeing those before it."""
        tokens = np.asarray(ids)
        gemma = self.architecture == "gemma3"
        x = self.weights["token_embd.weight"][tokens]  # [token, n_embd]
        if gemma:
            x = x * x.shape[1] ** 0.5
        for layer in range(self.n_layer):
            h = self._attention(self._norm(x, layer, "attn_norm"), layer)
            x = x + (self._norm(h, layer, "post_attention_norm") if gemma else h)
            h = self._feed_forward(self._norm(x, layer, "ffn_norm"), layer)
            x = x + (self._norm(h, layer, "post_ffw_norm") if gemma else h)
        head = self.weights.get("output.weight", self.weights["token_embd.weight"])
        result: Array = _rms_norm(x, self.weights["output_norm.weight"], self.epsilon) @ head.T
        return result

    def _project(self, x: Array, layer: int, part: str) -> Array:
        y = x @ self.weights[f"blk.{layer}.{part}.weight"].T
        bias = self.weights.get(f"blk.{layer}.{part}.bias")
        return y if bias is None else y + bias

    def _norm(self, x: Array, layer: int, part: str) -> Array:
        return _rms_norm(x, self.weights[f"blk.{layer}.{part}.weight"], self.epsilon)

    def _attention(self, x: Array, layer: int) -> Array:
        n, gemma = len(x), self.architecture == "gemma3"
        local = gemma and layer % self.pattern != self.pattern - 1
        heads = {part: self._project(x, layer, f"attn_{part}").reshape(n, -1, self.head_dim) for part in "qkv"}
        for part in "qk":
            if gemma:
                heads[part] = self._norm(heads[part], layer, f"attn_{part}_norm")
            heads[part] = self._rotate(heads[part], 10_000.0 if local else self.rope_base)
        k, v = (np.repeat(heads[part], heads["q"].shape[1] // heads[part].shape[1], axis=1) for part in "kv")
        scores = np.einsum("qhd,khd->hqk", heads["q"], k) * self.score_scale
        age = np.arange(n)[:, None] - np.arange(n)[None, :]
        seen = (age >= 0) & (age < self.window) if local else age >= 0
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        return self._project(np.einsum("hqk,khd->qhd", weights, v).reshape(n, -1), layer, "attn_output")

    def _rotate(self, x: Array, base: float) -> Array:
        """Rope of `[token, head, dim]`: Llama files hold pairs side by side, Gemma's halves apart."""
        half = self.n_rotated // 2
        angles = np.arange(len(x))[:, None, None] * base ** (-2.0 * np.arange(half) / self.n_rotated)
        first, second = (
            (slice(0, half), slice(half, self.n_rotated))
            if self.architecture == "gemma3"
            else (slice(0, self.n_rotated, 2), slice(1, self.n_rotated, 2))
        )
        out = x.copy()
        out[..., first] = x[..., first] * np.cos(angles) - x[..., second] * np.sin(angles)
        out[..., second] = x[..., first] * np.sin(angles) + x[..., second] * np.cos(angles)
        return out

    def _feed_forward(self, x: Array, layer: int) -> Array:
        gate, up = self._project(x, layer, "ffn_gate"), self._project(x, layer, "ffn_up")
        if self.architecture == "gemma3":
            hidden = 0.5 * gate * (1 + np.tanh((2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
        else:
            hidden = gate / (1 + np.exp(-gate))
        return self._project(hidden * up, layer, "ffn_down")


def _rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + epsilon) * weight


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) else value


def _field(reader: gguf.GGUFReader, key: str, default: Any = None) -> Any:
    field = reader.get_field(key)
    if field is None:
        if default is None:
            raise KeyError(key)
        return default
    return field.contents()
