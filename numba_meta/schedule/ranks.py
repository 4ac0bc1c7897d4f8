"""One process among several that compute a step together: which devices are its own, and how compiled code reaches the other processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class ReductionTable(Protocol):
    """What compiled reductions over ranks need (`comm.mpi_table.MpiTable`)."""

    @property
    def address(self) -> int:
        """Where its words begin."""

    def reduce_scratch_bytes(self, n_elements: int) -> int:
        """Scratch bytes for a reduction of up to `n_elements`."""

    def gather_scratch_bytes(self, widths: Sequence[int], n_rows: int) -> int:
        """Scratch bytes for a gather of up to `n_rows` rows, `widths[r]` elements of each from rank r."""

    def check(self) -> None:
        """Raises where a collective failed in compiled code."""


@dataclass(frozen=True)
class Ranks:
    """This process is `rank`; rank r owns the devices `devices[r]` of the whole model, counted over all ranks."""

    rank: int
    devices: tuple[range, ...]
    table: ReductionTable

    @property
    def own(self) -> range:
        """This rank's devices."""
        return self.devices[self.rank]

    @property
    def n_devices(self) -> int:
        """Devices of all ranks."""
        return self.devices[-1].stop


def device_ranges(counts: Sequence[int]) -> tuple[range, ...]:
    """The devices of each rank, in rank order, from how many each has: (2, 1) gives 0..1 and 2."""
    starts = [sum(counts[:rank]) for rank in range(len(counts))]
    return tuple(range(start, start + n) for start, n in zip(starts, counts, strict=True))
