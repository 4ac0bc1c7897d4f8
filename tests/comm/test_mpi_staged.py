"""MPI between ranks on GPUs, whose memory is the host's here, and a rank on a CPU device: one sum, one order, the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from mpirun import Launch, needs_mpi


@needs_mpi
@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_gpu_ranks_beside_a_cpu_rank(n: int, tmp_path: Path) -> None:
    ended = Launch(n, tmp_path, program="staged.py").end(120)
    assert ended.status == 0, ended.stderr
    expected = 12 * (2 if n == 2 else 1)
    assert sorted(ended.stdout.splitlines()) == [f"rank {rank}: {expected} results are equal" for rank in range(n)]
