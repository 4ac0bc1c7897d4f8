"""Which recording computes a few rows: on CUDA devices never one for many, whose tensor cores give other bits than one row alone has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from numba_meta.models.model import Model
from numba_meta.models.running.context import Context
from numba_meta.models.running.recordings import Capacity
from numba_meta.models.running.step_shape import SMALL_ROWS


class Steps(Context):
    """A context that notes the capacities of its steps, and computes nothing."""

    def __init__(self, few_rows_apart: bool, ubatch_size: int) -> None:
        self.few_rows_apart, self.ubatch_size = few_rows_apart, ubatch_size
        self.made: list[tuple[int, Capacity]] = []

    def decode(self, tokens: Sequence[int], sequences: Any, outputs: Sequence[int], capacity: Capacity | None = None) -> Any:
        self.made.append((len(tokens), capacity or self.capacity_for(len(tokens), len(outputs))))
        return np.zeros((len(outputs), 4), np.float32)


@pytest.mark.parametrize("ubatch_size", (8, 16, 40, 512))
def test_a_few_rows_on_cuda_devices(ubatch_size: int) -> None:
    context = Steps(True, ubatch_size)
    for n_rows in range(1, SMALL_ROWS + 1):
        for n_outputs in (1, n_rows):
            assert context.capacity_for(n_rows, n_outputs).n_rows <= SMALL_ROWS
    if ubatch_size > SMALL_ROWS:
        assert context.capacity_for(SMALL_ROWS + 1, 1) == Capacity(ubatch_size, 1)
    assert Steps(False, 512).capacity_for(2, 1) == Capacity(512, 1), "their bits are the same there"


@pytest.mark.parametrize(("few_rows_apart", "last"), ((True, Capacity(16, 16)), (False, Capacity(64, 64))))
def test_logits_of_a_few_last_rows(few_rows_apart: bool, last: Capacity) -> None:
    model = Model.__new__(Model)
    model.context = Steps(few_rows_apart, 512)
    assert sum(len(rows) for rows in model._feed_all(range(64 + 64 + 5))) == 133
    assert model.context.made == [(64, Capacity(64, 64)), (64, Capacity(64, 64)), (5, last)]
