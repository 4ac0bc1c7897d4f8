"""Kernels that need no warp functions, run by the CUDA simulator: no GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("simulated_kernels.py")
CHECKS = [
    "binary",
    "cells_noted",
    "columns_beyond_a_block",
    "pieces_side_by_side",
    "rotated_and_stored",
    "rotations",
    "rows_looked_up",
    "rows_stored",
    "strided_copies",
    "sums_of_parts",
    "unary",
    "windows_and_rows_back",
    "zeros",
]


@pytest.fixture(scope="module")
def told() -> dict[str, str]:
    """What the simulator said of each check; the simulator is a matter of a whole process."""
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}
    done = subprocess.run([sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(told, dict)
    return told


def test_every_check_has_its_test(told: dict[str, str]) -> None:
    assert sorted(told) == CHECKS


@pytest.mark.parametrize("name", CHECKS)
def test_simulated(name: str, told: dict[str, str]) -> None:
    assert told[name] == "", told[name]
