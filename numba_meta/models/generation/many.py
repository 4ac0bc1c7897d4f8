"""Several sequences decoded together: each prompt is processed alone, then all grow by a token in one step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from numba_meta.interrupts import held_back
from numba_meta.models.generation.timings import Timings
from numba_meta.models.running.context import Context
from numba_meta.models.running.step_shape import SMALL_ROWS
from numba_meta.models.text.sampling import Sampler, SamplingOptions


@dataclass
class _Growing:
    """A prompt that is being continued in a sequence of the cache."""

    index: int
    sequence: int
    sampler: Sampler
    recent: list[int]
    most: int  # tokens to generate
    generated: list[int] = field(default_factory=list)


def generate_many(
    context: Context,
    prompts: Sequence[list[int]],
    most: Sequence[int],
    ends: frozenset[int],
    options: SamplingOptions,
    is_over: Callable[[Sequence[int]], bool] = lambda _: False,
    n_tokens: int | None = None,
) -> tuple[list[list[int]], Timings]:
    """Ids per prompt, and the timings of all. A prompt waits until a sequence and enough cells are free.

    `most`: tokens to generate at most, for each prompt. `n_tokens`: of the vocabulary, as for a `Sampler`. `is_over(generated ids)` ends a
    sequence early. With a seed, prompt i samples with seed + i, so that equal prompts differ and every run is the same.
    """
    results: list[list[int]] = [[] for _ in prompts]
    waiting = list(range(len(prompts)))[::-1]
    growing: list[_Growing] = []
    idle = list(range(context.shape.n_sequences))[::-1]
    n_prompt = n_generated = 0
    prompt_seconds = generation_seconds = 0.0
    if max(most, default=0) == 0:
        return results, Timings()
    while waiting or growing:
        begin = time.perf_counter()
        while waiting and idle and _fits(context, growing, len(prompts[waiting[-1]]) + most[waiting[-1]]):
            index, sequence = waiting.pop(), idle.pop()
            own = options if options.seed is None else replace(options, seed=options.seed + index)
            one = _Growing(index, sequence, Sampler(own, n_tokens), list(prompts[index]), most[index])
            logits = _feed(context, sequence, prompts[index])
            n_prompt += len(prompts[index])
            if _grow(one, one.sampler.sample(logits, one.recent), ends, is_over):
                growing.append(one)
            else:
                _finish(context, one, results, idle)
        middle = time.perf_counter()
        for at in range(0, len(growing), SMALL_ROWS):
            some = growing[at : at + SMALL_ROWS]
            rows = context.decode([one.recent[-1] for one in some], [one.sequence for one in some], range(len(some)))
            tokens = [one.sampler.sample(row, one.recent) for one, row in zip(some, rows, strict=True)]
            for one, token in zip(some, tokens, strict=True):
                n_generated += 1
                if not _grow(one, token, ends, is_over):
                    _finish(context, one, results, idle)
        growing = [one for one in growing if one.sequence >= 0]
        prompt_seconds += middle - begin
        generation_seconds += time.perf_counter() - middle
    return results, Timings(n_prompt, prompt_seconds, n_generated, generation_seconds)


def _fits(context: Context, growing: Sequence[_Growing], n_wanted: int) -> bool:
    """Whether a prompt and its whole answer fit beside those that are growing; alone it always may try."""
    if not growing or not context.shape.unified:
        return True
    promised = sum(len(one.recent) + one.most - len(one.generated) for one in growing)
    return promised + n_wanted <= context.shape.n_cells


def _feed(context: Context, sequence: int, ids: Sequence[int]):  # type: ignore[no-untyped-def]
    n = context.ubatch_size
    logits = None
    for at in range(0, len(ids), n):
        chunk = ids[at : at + n]
        logits = context.decode(chunk, [sequence] * len(chunk), [len(chunk) - 1])[0]
    return logits


def _grow(one: _Growing, token: int, ends: frozenset[int], is_over: Callable[[Sequence[int]], bool]) -> bool:
    """Appends a token; whether more are wanted."""
    if token in ends:
        return False
    one.generated.append(token)
    one.recent.append(token)
    return len(one.generated) < one.most and not is_over(one.generated)


def _finish(context: Context, one: _Growing, results: list[list[int]], idle: list[int]) -> None:
    results[one.index] = one.generated
    with held_back():
        context.cells.truncate(one.sequence, 0)
    idle.append(one.sequence)
    one.sequence = -1
