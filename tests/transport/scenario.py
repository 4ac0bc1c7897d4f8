"""One run through everything that a cache meets, and what came of it to the bit.

Prompts in chunks, sequences that grow together, one that goes back, one that is cleared and begun anew (its cells are reused: holes in a
unified cache), batches of other sequences in another order, several rows of one sequence in a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from numba_meta.models.model import Model

LENGTHS = {1: (500,), 8: (250, 3, 70, 17, 9, 40, 5, 30)}  # tokens of the prompts: past a bucket of 256 cells while they grow


@dataclass
class Played:
    """The logits of every step, to the bit, and the tokens that were chosen."""

    rows: list[bytes] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    paths: set[str] = field(default_factory=set)


def difference(got: Played, wanted: Played) -> str | None:
    """Where two runs part, in one line; None where they are equal to the bit."""
    for step, (one, other) in enumerate(zip(got.rows, wanted.rows, strict=True)):
        if one != other:
            values, expected = np.frombuffer(one, np.float32), np.frombuffer(other, np.float32)
            return f"step {step} of {len(wanted.rows)}: {np.count_nonzero(values != expected)} of {values.size} logits differ"
    return None if got.tokens == wanted.tokens else "the tokens differ"


def ids(seed: int, n: int, n_vocab: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, n_vocab, n)]


class Player:
    """Feeds a model's context and notes what it gives."""

    def __init__(self, model: Model) -> None:
        self.context = model.context
        self.n_vocab = model.config.shape.n_vocab
        self.transport = model.transport
        self.played = Played()
        self.last: dict[int, int] = {}  # the token that each sequence has not been fed yet

    def step(self, tokens: Sequence[int], sequences: Sequence[int], outputs: Sequence[int]) -> list[int]:
        """One step: the most likely token after each output row."""
        logits = self.context.decode(tokens, sequences, outputs)
        self.played.rows.append(logits.tobytes())
        chosen = [int(np.argmax(row)) for row in logits]
        self.played.tokens += chosen
        self.played.paths.add(self.transport.stats["path"])
        return chosen

    def feed(self, sequence: int, prompt: Sequence[int]) -> None:
        n = self.context.ubatch_size
        for at in range(0, len(prompt), n):
            chunk = prompt[at : at + n]
            (self.last[sequence],) = self.step(chunk, [sequence] * len(chunk), [len(chunk) - 1])

    def grow(self, sequences: Sequence[int], n_steps: int) -> None:
        """Each of these sequences by a token in each step."""
        for _ in range(n_steps):
            chosen = self.step([self.last[s] for s in sequences], sequences, range(len(sequences)))
            self.last.update(zip(sequences, chosen, strict=True))

    def several(self, sequence: int, tokens: Sequence[int]) -> None:
        """Several rows of one sequence in one step, all with logits."""
        self.last[sequence] = self.step(tokens, [sequence] * len(tokens), range(len(tokens)))[-1]

    def back(self, sequence: int, n_tokens: int) -> None:
        """A sequence forgets its last tokens."""
        self.context.cells.truncate(sequence, self.context.cells.length(sequence) - n_tokens)

    def clear(self, sequence: int) -> None:
        self.context.cells.truncate(sequence, 0)

    def finish(self) -> Played:
        self.played.stats = dict(self.transport.stats)
        return self.played


def play(model: Model, lengths: Sequence[int] | None = None) -> Played:
    """The whole run; the model's sequences say how many take part."""
    player = Player(model)
    lengths = lengths or LENGTHS[model.context.shape.n_sequences]
    sequences = list(range(len(lengths)))
    for sequence, n in enumerate(lengths):
        player.feed(sequence, ids(sequence, n, player.n_vocab))
    player.grow(sequences, 8)
    player.back(0, 5)
    player.several(0, ids(50, 3, player.n_vocab))
    if len(sequences) > 1:
        player.clear(1)
        player.grow(sequences[2:], 1)
        player.feed(1, ids(51, 30, player.n_vocab))
    player.grow(sequences[::-1], 3)
    player.grow(sequences[::2], 2)
    player.several(0, ids(52, 2, player.n_vocab))
    player.grow(sequences, 2)
    return player.finish()

