"""Kernels that different processes compiled and left on disk keep apart when one process loads them all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
import numpy as np
from numba import njit
from numba_meta.kernels.cpu.kernel import CpuKernel, Ptr, on_compile
from numba_meta.kernels.cpu.simd import load_i64, store_i64

# Too long to be inlined: it stays a symbol of its own.
LONG = "def answer(out):\\n" + "    store_i64(out, (load_i64(out) * 3) ^ value)\\n" * 300

def make(value):
    scope = {"store_i64": store_i64, "load_i64": load_i64, "value": value}
    exec(LONG, scope)
    answer = njit(scope["answer"])
    def kernel(thread, n_threads, out: Ptr):
        answer(out)
        answer(out)
    return CpuKernel(kernel, f"answer_{value}")

compiled = []
on_compile.append(compiled.append)
for value in map(int, sys.argv[1:]):
    out = np.zeros(1, np.int64)
    make(value)(out=out)
    expected = 0
    for _ in range(600):
        expected = ((expected * 3) ^ value) % 2**64
    print(value if out.view(np.uint64)[0] == expected else -1, end=" ")
print(len(compiled))
"""


def test_equal_names_from_two_processes(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_META_CACHE": str(tmp_path)}

    def run(*values: int) -> list[int]:
        done = subprocess.run([sys.executable, "-c", PROGRAM, *map(str, values)], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return list(map(int, done.stdout.split()))

    assert run(11) == [11, 1]
    assert run(22) == [22, 1]
    assert run(11, 22) == [11, 22, 0]
