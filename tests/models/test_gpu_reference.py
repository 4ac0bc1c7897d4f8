"""The real model on a GPU: exact mode answers what an independent float32 forward answers, over one device and over two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.feeding import continue_greedily

import numba_meta as nm

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("options", ({}, {"kv": "host"}), ids=("device", "host"))
@pytest.mark.parametrize("devices", ("cuda:0", "cuda:0,cuda:0"))
def test_logits_and_greedy_ids_are_the_reference_ones(devices: str, options: dict[str, Any], smollm2_path: Path, references: Any) -> None:
    with nm.load(smollm2_path, devices=devices, exact=True, ctx_size=2048, **options) as model:
        for prompt in ("english", "code", "chat", "long"):
            exact = references("smollm2")[prompt]["exact"]
            model.cache.clear()
            logits = model.logits(references("smollm2")[prompt]["ids"], last=True)
            assert np.abs(logits[exact["top20_ids"]] - exact["top20_logits"]).max() < 1e-3
            assert np.sort(logits)[::-1][:20] == pytest.approx(exact["top20_logits"], abs=1e-3), "others are larger"
            assert continue_greedily(model, logits, 48) == exact["greedy_ids"]


def test_fast_mode_is_near(smollm2_path: Path, references: Any) -> None:
    """Activations of 8 bits and an f16 cache: the first token is the reference's, logits a small part of their spread away."""
    with nm.load(smollm2_path, devices="cuda:0", ctx_size=2048) as model:
        for prompt in ("english", "code", "chat", "long"):
            exact = references("smollm2")[prompt]["exact"]
            model.cache.clear()
            logits = model.logits(references("smollm2")[prompt]["ids"], last=True)
            assert int(np.argmax(logits)) == exact["greedy_ids"][0]
            assert np.sqrt(np.mean((logits[exact["top20_ids"]] - exact["top20_logits"]) ** 2)) < 0.1 * logits.std()
