"""Logits after a cache was edited, in float64: what tokens that came after a removal or a shift must see. Written apart from numba_meta."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from models.numpy_reference import Array, ReferenceModel


@dataclass(frozen=True)
class Edit:
    """From token `first` on, the tokens before it are at `positions` (None: removed), later ones from `position` on.

    `unseen_by_windows`: tokens of which layers with a sliding window have no row any more.
    """

    first: int
    positions: tuple[int | None, ...]
    position: int
    unseen_by_windows: frozenset[int] = frozenset()


@dataclass(frozen=True)
class EditedModel(ReferenceModel):
    """A model whose attention goes by `edits`. K and V of a token stay what they were when it was computed; only their positions change."""

    edits: tuple[Edit, ...] = ()

    def _attention(self, x: Array, layer: int) -> Array:
        n, gemma = len(x), self.architecture == "gemma3"
        local = gemma and layer % self.pattern != self.pattern - 1
        q, k, v = (self._project(x, layer, f"attn_{part}").reshape(n, -1, self.head_dim) for part in "qkv")
        if gemma:
            q, k = self._norm(q, layer, "attn_q_norm"), self._norm(k, layer, "attn_k_norm")
        group = q.shape[1] // k.shape[1]
        v = np.repeat(v, group, axis=1)
        out = np.empty((n, q.shape[1], self.head_dim))
        edits = [Edit(0, (), 0), *self.edits]
        for edit, stop in zip(edits, [*(e.first for e in self.edits), n], strict=True):
            positions: list[int | None] = [*edit.positions, *range(edit.position, edit.position + n - edit.first)]
            where = np.array([0 if p is None else p for p in positions])
            base = 10_000.0 if local else self.rope_base
            keys = np.repeat(self._at(k, where, base), group, axis=1)
            queries = self._at(q, where, base)[edit.first : stop]
            age = where[edit.first : stop, None] - where[None, :]
            seen = (age >= 0) & np.array([p is not None for p in positions]) & (np.arange(n) <= np.arange(edit.first, stop)[:, None])
            if local:
                seen &= (age < self.window) & np.array([i not in edit.unseen_by_windows for i in range(n)])
            scores = np.where(seen, np.einsum("qhd,khd->hqk", queries, keys) * self.head_dim**-0.5, -np.inf)
            weights = np.exp(scores - scores.max(axis=2, keepdims=True))
            out[edit.first : stop] = np.einsum("hqk,khd->qhd", weights / weights.sum(axis=2, keepdims=True), v)
        return self._project(out.reshape(n, -1), layer, "attn_output")

    def _at(self, x: Array, positions: npt.NDArray[np.int64], base: float) -> Array:
        return turned(x, positions, base ** (-2.0 * np.arange(self.n_rotated // 2) / self.n_rotated), self.architecture != "gemma3")


def turned(x: Array, positions: npt.NDArray[np.int64], frequencies: Array, interleaved: bool) -> Array:
    """`[token, head, dim]`: pairs of dims as complex numbers, times e^(i position frequency)."""
    half = len(frequencies)
    first, second = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    pairs = (x[..., first] + 1j * x[..., second]) * np.exp(1j * np.asarray(positions)[:, None, None] * frequencies)
    out = x.copy()
    out[..., first], out[..., second] = pairs.real, pairs.imag
    return out


def removed(length: int, start: int, stop: int) -> Edit:
    """The positions start..stop are removed from a sequence of `length` tokens; later ones stay."""
    return Edit(length, tuple(None if start <= p < stop else p for p in range(length)), length)


def shifted(length: int, keep: int, drop: int, unseen_by_windows: Sequence[int] = ()) -> Edit:
    """The `drop` tokens behind the first `keep` go, later ones move down."""
    positions = tuple(p if p < keep else None if p < keep + drop else p - drop for p in range(length))
    return Edit(length, positions, length - drop, frozenset(unseen_by_windows))
