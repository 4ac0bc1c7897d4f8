"""Sums over real ranks, compiled and from Python: the bytes of the ordered float32 sum at every size."""

from __future__ import annotations

import pytest
from mpirun import Launch, needs_mpi

from numba_meta.comm.errors import RankError
from numba_meta.comm.mpi_table import MpiTable


@needs_mpi
@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_every_size_has_the_bits_of_the_ordered_sum(n, tmp_path):
    ended = Launch(n, tmp_path, program="reductions.py").end(120)
    assert ended.status == 0, ended.stderr
    per_communicator = 17 * 2 + 5 * 2
    expected = per_communicator * (3 if n == 2 else 2) + 25
    assert sorted(ended.stdout.splitlines()) == [f"rank {rank}: {expected} results are equal" for rank in range(n)]


def test_scratch_that_mpi_cannot_count():
    table = MpiTable.__new__(MpiTable)
    table.rank, table.size, table.large_bytes = 0, 3, 400
    assert table.reduce_scratch_bytes(10) == 4 * (10 + 30)
    assert table.reduce_scratch_bytes(1000) == 4 * (1000 + 1003)
    assert table.gather_scratch_bytes([5, 0, 7], 3) == 4 * 3 * (12 + 5)
    with pytest.raises(RankError, match=f"a reduction of {1 << 31} elements over ranks; expected at most {(1 << 31) - 1}"):
        table.reduce_scratch_bytes(1 << 31)
    with pytest.raises(RankError, match="a gather of"):
        table.gather_scratch_bytes([1 << 20] * 3, 1 << 12)
