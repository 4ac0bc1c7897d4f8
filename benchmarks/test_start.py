"""How long a start takes: the import of the package (limit 0.5 s) and the help of the command line, each in a fresh interpreter.

python -m pytest benchmarks/test_start.py --benchmark-enable
"""

from __future__ import annotations

import subprocess
import sys

import pytest

STARTS = {
    "interpreter alone": ["-c", "pass"],
    "import numba_meta": ["-c", "import numba_meta"],
    "numba-meta --help": ["-m", "numba_meta", "--help"],
    "numba-meta generate --help": ["-m", "numba_meta", "generate", "--help"],
}


@pytest.mark.parametrize("arguments", STARTS.values(), ids=STARTS)
def test_start(benchmark, arguments):
    command = [sys.executable, *arguments]
    benchmark.pedantic(subprocess.run, args=(command,), kwargs={"check": True, "capture_output": True}, rounds=10, warmup_rounds=1)
    if benchmark.stats is not None:  # None where benchmarks are disabled
        assert benchmark.stats.stats.median < 0.5
