"""Ways to feed a model that the tests share, through `Context.decode` alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from numba_meta.models.model import Model

Logits = npt.NDArray[np.float32]


def continue_greedily(model: Model, logits: Logits, n: int) -> list[int]:
    """`n` ids after what sequence 0 holds, whose last logits are given."""
    ids = [int(np.argmax(logits))]
    while len(ids) < n:
        ids.append(int(np.argmax(model.context.decode([ids[-1]], [0], [0])[0])))
    return ids


def append(model: Model, ids: Sequence[int], sequence: int = 0, step: int = 16) -> Logits:
    """Appends ids to a sequence, `step` rows at a time: the logits of all, `[len(ids), n_vocab]`."""
    rows = []
    for at in range(0, len(ids), step):
        chunk = list(ids[at : at + step])
        rows.append(model.context.decode(chunk, [sequence] * len(chunk), range(len(chunk))).copy())
    return np.concatenate(rows)


def forced_logits(model: Model, prompt: Sequence[int], following: Sequence[int]) -> Logits:
    """Logits of the prompt's last row and of each following id, `[1 + len(following), n_vocab]`: the ids are given, not chosen."""
    return np.concatenate([model.logits(prompt, last=True)[None], append(model, following)])
