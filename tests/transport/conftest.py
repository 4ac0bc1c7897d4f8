"""Tiny models and the gate that the transport tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
from transport.product import Gate, synthetic_models


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`llama` and `gemma3`: six layers, 128 wide."""
    return synthetic_models(tmp_path_factory.mktemp("transport"))


@pytest.fixture(scope="session")
def gate(tiny_models: dict[str, Path]) -> Gate:
    return Gate(tiny_models)
