"""The kernels on lesser CPUs: the same checks, in a process whose code generator is told of fewer instructions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CHECKS = "every_half or floats_round or test_exp or (norm and 576) or (bytes_are_those and 192) or (float64 and narrow and q8_0-q4_0)"


@pytest.mark.parametrize(
    ("cpu", "features"), [("x86-64", ""), ("haswell", "+avx,+avx2,+fma,+f16c,+sse4.1,+sse4.2,+ssse3")], ids=["portable", "avx2"]
)
def test_a_lesser_cpu(cpu: str, features: str) -> None:
    files = [str(HERE / f"test_{name}.py") for name in ("simd_math", "norm", "rows", "attention")]
    environment = os.environ | {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", CHECKS, *files]
    done = subprocess.run(command, env=environment, cwd=HERE.parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout and "failed" not in done.stdout
