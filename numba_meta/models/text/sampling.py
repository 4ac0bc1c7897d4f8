"""The next token from a row of logits: greedy, or drawn after the usual filters, in llama.cpp's order.

1. repetition penalty: logits of recent tokens are divided by it where positive, multiplied where not (Keskar et al. 2019, CTRL)
2. top-k: the k largest logits stay
3. top-p: of these, the fewest whose probabilities (softmax at temperature 1) sum to p or more (Holtzman et al. 2019)
4. min-p: of these, the ones at least `min_p` times as probable as the most probable (Nguyen et al. 2024)
5. temperature: what is left is divided by it; softmax gives the probabilities to draw from

Of equal logits the lowest id counts as the larger, everywhere, so that results do not depend on a sort's whims.
"""

from __future__ import annotations

import math
import numbers
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numba_meta.errors import NumbaMetaError, ShapeError, UsageError

_LEAST_PENALTY, _MOST_PENALTY = 1e-6, 1e6  # of repetition; float32 logits stay numbers between them
_FIRST_TOP = 256  # candidates that top-p sorts at first; it takes more only where these do not hold p


@dataclass(frozen=True)
class SamplingOptions:
    """How a token is chosen. The defaults are greedy. Raises UsageError, in one line, for a value outside its range."""

    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0, or less: all
    top_p: float = 1.0  # 1: all
    min_p: float = 0.0  # 0: all
    repetition_penalty: float = 1.0  # 1: none; above 1 discourages
    repetition_last_n: int = 64  # recent tokens that the penalty looks at; -1: all, 0: none
    seed: int | None = None  # None or -1: a random one

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, lambda x: 0 <= x < math.inf, "a finite number of at least 0 (0 is greedy)")
        _check_integer("top_k", self.top_k, None, "an integer (0 and -1 keep all)")
        _check_number("top_p", self.top_p, lambda x: 0 <= x <= 1, "a number from 0 to 1 (1 keeps all)")
        _check_number("min_p", self.min_p, lambda x: 0 <= x <= 1, "a number from 0 to 1 (0 keeps all)")
        expected = f"a number from {_LEAST_PENALTY:g} to {_MOST_PENALTY:g} (1 is none)"
        _check_number("repetition_penalty", self.repetition_penalty, lambda x: _LEAST_PENALTY <= x <= _MOST_PENALTY, expected)
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            object.__setattr__(self, name, float(getattr(self, name)))  # fractions and numpy's numbers as plain ones
        _check_integer("repetition_last_n", self.repetition_last_n, -1, "an integer of at least -1 (-1 is all, 0 none)")
        if self.seed is not None:
            expected = "an integer from 0 to 2**64 - 1, or None or -1 for a random one"
            _check_integer("seed", self.seed, -1, expected)
            if self.seed >= 1 << 64:
                raise UsageError(f"seed is {self.seed}, expected {expected}")
            object.__setattr__(self, "seed", None if self.seed == -1 else int(self.seed))
        for name in ("top_k", "repetition_last_n"):
            object.__setattr__(self, name, int(getattr(self, name)))  # numpy's small ones would overflow

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken and nothing drawn."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def penalizes(self) -> bool:
        return self.repetition_penalty != 1 and self.repetition_last_n != 0


def sampling_options(sampling: dict[str, Any]) -> SamplingOptions:
    try:
        return SamplingOptions(**sampling)
    except TypeError:
        known = SamplingOptions.__dataclass_fields__
        wrong = ", ".join(name for name in sampling if name not in known)
        raise UsageError(f"unknown sampling options {wrong}; known are {', '.join(known)}") from None


def _check_number(name: str, value: Any, fits: Callable[[float], bool], expected: str) -> None:
    try:
        is_right = not isinstance(value, bool) and isinstance(value, numbers.Real) and fits(float(value))
    except OverflowError:  # of a whole number or a fraction
        is_right = False
    if not is_right:
        raise UsageError(f"{name} is {value!r:.60}, expected {expected}")


def _check_integer(name: str, value: Any, least: int | None, expected: str) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or (least is not None and value < least):
        raise UsageError(f"{name} is {value!r:.60}, expected {expected}")


class Sampler:
    """Chooses tokens for one sequence. The same seed, logits and recent tokens give the same choices, call after call.

    `n_tokens`: tokens of the vocabulary, None: as many as there are logits. What a model computes beyond them (rows of an embedding that
    was padded to a round size) is never chosen.
    """

    def __init__(self, options: SamplingOptions, n_tokens: int | None = None) -> None:
        self.options = options
        self._n_tokens = n_tokens
        self.seed: int = secrets.randbits(32) if options.seed is None else int(options.seed)  # what was used, to repeat a run
        self._random = np.random.Generator(np.random.PCG64(self.seed))

    def sample(self, logits: NDArray[np.float32], recent_ids: Sequence[int] = ()) -> int:
        """The next token's id. `logits`: [rows]; `recent_ids`: the sequence so far, of which the penalty sees the last.

        Raises NumbaMetaError where logits are not finite at their largest (NaN, infinite, or all minus infinity).
        """
        if self.options.penalizes:
            logits = penalized(logits, self.options, recent_ids)  # of all rows: a prompt's ids may be any of them
        logits = logits[: self._n_tokens]
        if self.options.greedy:
            return _largest_id(logits)
        ids, probabilities = _filtered(logits, self.options)
        cumulative = np.cumsum(probabilities)
        drawn = int(np.searchsorted(cumulative, self._random.random() * cumulative[-1], side="right"))
        return int(ids[min(drawn, len(ids) - 1)])


def candidates(
    logits: NDArray[np.float32], options: SamplingOptions, recent_ids: Sequence[int] = ()
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """(ids, probabilities) that a token is drawn from: what this module's filters leave of `logits` [vocabulary].

    Probabilities sum to 1; a greedy choice leaves one candidate. Raises as `Sampler.sample`.
    """
    return _filtered(penalized(logits, options, recent_ids) if options.penalizes else logits, options)


def _filtered(logits: NDArray[np.float32], options: SamplingOptions) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """`candidates` of logits that are penalized already."""
    best = _largest_id(logits)
    if options.greedy:
        return np.array([best], np.int64), np.ones(1)
    ids = top_k_ids(logits, options.top_k) if 0 < options.top_k < logits.size else None  # None: every id, in order
    if options.top_p < 1:
        ids = top_p_ids(logits, options.top_p, ids)
    values = (logits if ids is None else logits[ids]).astype(np.float64) - float(logits[best])  # at most 0
    if options.min_p > 0:
        kept = values >= math.log(options.min_p)
        ids = np.flatnonzero(kept) if ids is None else ids[kept]
        values = values[kept]
    with np.errstate(over="ignore"):  # a tiny temperature makes -inf of all but the best, which is right
        probabilities = np.exp(values / options.temperature)
    probabilities /= probabilities.sum()
    return (np.arange(logits.size) if ids is None else ids), probabilities


def penalized(logits: NDArray[np.float32], options: SamplingOptions, recent_ids: Sequence[int]) -> NDArray[np.float32]:
    """A copy of `logits` with the repetition penalty on every token among the last of `recent_ids`, once each."""
    n = options.repetition_last_n
    last = np.asarray(recent_ids if n < 0 else recent_ids[max(0, len(recent_ids) - n) :], np.int64)
    if last.size and not 0 <= int(last.min()) <= int(last.max()) < logits.size:
        raise UsageError(f"recent ids reach from {last.min()} to {last.max()}, expected 0 to {logits.size - 1}")
    out = np.array(logits, np.float32)
    seen = np.unique(last)
    values = out[seen]
    with np.errstate(over="ignore"):
        out[seen] = np.where(values > 0, values / options.repetition_penalty, values * options.repetition_penalty)
    return out


def top_k_ids(logits: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """The ids of the k largest logits, largest first; of equal ones the lowest id first. `k` from 1 to the size."""
    n = logits.size
    if k >= n:
        return np.argsort(-logits, kind="stable")
    threshold = np.partition(logits, n - k)[n - k]
    above = np.flatnonzero(logits > threshold)
    ids = np.concatenate([above, np.flatnonzero(logits == threshold)[: k - above.size]])
    return ids[np.lexsort((ids, -logits[ids]))]


def top_p_ids(logits: NDArray[np.float32], p: float, ids: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    """The fewest of the most probable tokens that hold probability `p` together, at least one, largest first.

    `ids`: tokens to choose among, largest first (None: all); their probabilities sum to 1.
    """
    chosen = logits if ids is None else logits[ids]
    weights = np.exp(chosen.astype(np.float64) - float(chosen.max()))
    wanted = p * float(weights.sum())
    n = chosen.size
    k = n if ids is not None else min(n, _FIRST_TOP)
    while True:
        order = np.arange(n) if ids is not None else top_k_ids(chosen, k)
        cumulative = np.cumsum(weights[order])
        if k == n or cumulative[-1] >= wanted:
            break
        k = min(n, k * 8)
    n_kept = min(int(np.searchsorted(cumulative, wanted, side="left")) + 1, n)
    return order[:n_kept] if ids is None else ids[:n_kept]


def _largest_id(logits: NDArray[np.float32]) -> int:
    """The id of the largest logit, the lowest of equals. A NaN anywhere would be what argmax finds, so one look tells."""
    if logits.ndim != 1 or logits.size == 0:
        raise ShapeError(f"logits have shape {logits.shape}, expected one row [vocabulary]")
    best = int(np.argmax(logits))
    if not math.isfinite(logits[best]):
        raise NumbaMetaError(
            f"no token can be chosen: the largest logit is {logits[best]}, at id {best}; expected a finite one, so check the model file"
        )
    return best
