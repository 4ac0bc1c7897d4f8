"""A case of a model over ranks, and what it gives: the same code in one process and in each rank."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numba_meta as nm
from numba_meta.errors import UsageError
from numba_meta.models.model import Model

PROMPT = tuple((31 * i) % 290 + 5 for i in range(40))
GROWING = (100, 500, 1500)  # tokens: windows of 256, 512 and 2048 cells
OPTIONS: dict[str, Any] = {"ctx_size": 512, "ubatch_size": 32}


@dataclass(frozen=True)
class Case:
    """A load and what is done with the model. `of_rank`: fields that are others on a rank, by its number."""

    path: str
    options: dict[str, Any] = field(default_factory=dict)
    prompt: Sequence[int] = PROMPT
    n_tokens: int = 12
    play: str = "greedy"
    of_rank: dict[str, dict[str, Any]] = field(default_factory=dict)


def play(case: Case, ranks: Any = None) -> dict[str, Any]:
    """What a case gives, as JSON: `ids`, a digest of the logits' bits, the transport's path, and more by the way it is played."""
    with nm.load(case.path, **{**OPTIONS, "exact": True, **case.options}, ranks=ranks) as model:
        return WAYS[case.play](model, case)


def _greedy(model: Model, case: Case) -> dict[str, Any]:
    ids = model.generate_ids(case.prompt, case.n_tokens, ignore_eos=True)
    logits = model.logits(case.prompt)
    stats = model.transport.stats
    return {
        "ids": ids,
        "bits": hashlib.sha256(logits.tobytes()).hexdigest(),
        "path": stats["path"],
        "reason": stats["reason"],
        "host_bytes": model.context.host_cache_bytes,
        "weight_bytes": sum(device.weight_bytes for device in model.plan.devices),
    }


def _batch(model: Model, case: Case) -> dict[str, Any]:
    """Four sequences at once, which must each give what one alone gives."""
    prompts = [list(case.prompt[i:]) for i in range(4)]
    return {"ids": model.generate_many(prompts, case.n_tokens, ignore_eos=True)}


def _rows(model: Model, case: Case) -> dict[str, Any]:
    """The logits of one more token after each of four texts, decoded alone and in one batch: digests of their bits, text by text."""
    sequences = range(4)
    texts = [list(case.prompt[i : i + 9 + 2 * i]) for i in sequences]
    given = {}
    for way in ("alone", "together"):
        model.context.cells.clear()
        for i, text in zip(sequences, texts, strict=True):
            model.context.decode(text, [i] * len(text), [len(text) - 1])
        if way == "alone":
            rows = [model.context.decode([case.prompt[i]], [i], [0])[0].copy() for i in sequences]
        else:
            rows = list(model.context.decode([case.prompt[i] for i in sequences], sequences, sequences))
        given[way] = [hashlib.sha256(row.tobytes()).hexdigest() for row in rows]
    return given


def _sampled(model: Model, case: Case) -> dict[str, Any]:
    """Drawn twice without a seed, once with one."""
    drawn = [model.generate_ids(case.prompt, case.n_tokens, ignore_eos=True, temperature=100.0) for _ in range(2)]
    return {"drawn": drawn, "seeded": model.generate_ids(case.prompt, case.n_tokens, ignore_eos=True, temperature=100.0, seed=7)}


def _edited(model: Model, case: Case) -> dict[str, Any]:
    """The cache is shifted while a text grows, then copied, cut and gone on from."""
    ids = model.generate_ids(case.prompt, case.n_tokens, ignore_eos=True, context_shift=True, keep=4)
    model.cache.copy(0, 1)
    model.cache.clear(0)
    model.cache.copy(1, 0)
    model.cache.remove(0, 8, 12)
    tokens = model.cache.tokens(0)
    logits = model.context.decode((tokens[-1],), (0,), (0,))
    return {"ids": ids, "tokens": tokens, "bits": hashlib.sha256(logits.tobytes()).hexdigest()}


def _growing(model: Model, case: Case) -> dict[str, Any]:
    """Longer and longer prompts, then a short one again: tokens and path of each."""
    lengths = (*GROWING, GROWING[0])
    ids, paths = [], []
    for n in lengths:
        prompt = [case.prompt[i % len(case.prompt)] for i in range(n)]
        ids.append(model.generate_ids(prompt, case.n_tokens, ignore_eos=True))
        paths.append(model.transport.stats["path"])
    return {"ids": ids, "paths": paths, "memory": list(model.memory().values())}


def _refused(model: Model, case: Case) -> dict[str, Any]:
    """What ranks cannot do yet says so, and nothing else is harmed."""
    said = []
    for work in (model.save_state, model.load_state):
        try:
            work("state")
        except UsageError as error:
            said.append(str(error))
    return {"said": said, "ids": model.generate_ids(case.prompt, case.n_tokens, ignore_eos=True)}


WAYS = {"greedy": _greedy, "growing": _growing, "batch": _batch, "rows": _rows, "sampled": _sampled, "edited": _edited, "refused": _refused}
