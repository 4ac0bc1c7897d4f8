"""Fast mode (8-bit activations, f16 cache) stays as near the exact answers as other programs' quantized runs do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from models.conftest import MODEL_NAMES, OpenModel
from models.feeding import forced_logits


@pytest.mark.parametrize("prompt", ("english", "code", "chat", "long"))
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_fed_exact_ids_it_chooses_the_same_where_margins_are_wide(name: str, prompt: str, open_model: OpenModel, references: Any) -> None:
    reference = references(name)[prompt]
    exact = reference["exact"]
    rows = forced_logits(open_model(name, False), reference["ids"], exact["greedy_ids"][:-1])
    top = np.argsort(-rows[0])[:20]
    assert len(set(top.tolist()) & set(exact["top20_ids"])) >= 16
    clear = np.array(exact["greedy_margins"]) > 0.9
    assert clear.sum() >= 5, "the test compares something"
    chosen = rows.argmax(axis=1)
    assert chosen[clear].tolist() == np.array(exact["greedy_ids"])[clear].tolist()


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_fast_mode_is_not_exact_mode(name: str, open_model: OpenModel, references: Any) -> None:
    """What is compared above does go through 8-bit activations."""
    ids = references(name)["english"]["ids"]
    difference = np.abs(open_model(name, False).logits(ids, last=True) - open_model(name, True).logits(ids, last=True)).max()
    assert 0.01 < difference < 3
