"""Lowering of collectives over ranks: a rank's devices meet, its first one exchanges with the other ranks, the others copy the result.

The exchange is part of the first device's compute stream. Where that is a CPU device, thread 0 calls MPI, which is the Python thread that
runs the step. The first device takes part in every collective, also where it does not need the result: the other ranks wait for it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import numpy as np

from numba_meta.schedule.calls import AddressList, DeviceCalls, Peer, Place
from numba_meta.tensor import Tensor

if TYPE_CHECKING:
    from numba_meta.schedule.infer import SplitGraph
    from numba_meta.schedule.ranks import Ranks


class RankLowering:
    """Collectives of one device of a rank. With one device in the rank nobody meets here."""

    def __init__(self, to: DeviceCalls, ranks: Ranks, split: SplitGraph) -> None:
        self._to: DeviceCalls = weakref.proxy(to)  # which is held by who holds this: a circle would keep a plan until the next collection
        self._ranks = ranks
        self._split = split
        self._is_alone = len(ranks.own) == 1

    def all_reduce(self, part: Tensor, out: Tensor) -> None:
        """The sum over all devices of all ranks: first within each rank, in device order, then in rank order."""
        if not self._is_alone:
            self._to.meet()
        if self._to.device == 0:
            self._reduce(part, out)
        self._hand_out(out)

    def gather(self, piece: Tensor, out: Tensor) -> None:
        """The pieces of all devices of all ranks, side by side."""
        if not self._is_alone:
            self._to.meet()
        if self._to.device == 0:
            self._gather(piece, out)
        self._hand_out(out)

    def _reduce(self, part: Tensor, out: Tensor) -> None:
        n, stride = self._to.row_extent(out)
        rows, n_elements = self._to.count(out), out.n_elements
        own: Place = part
        if not self._is_alone:
            own = self._to.scratch("of_rank", 4 * n_elements)
            self._to.add_up(AddressList(self._to.peers(part)), own, n, stride, rows)
        scratch = self._to.scratch("over_ranks", self._ranks.table.reduce_scratch_bytes(n_elements))
        self._to.call(
            self._ranks.table.all_reduce,
            (own,),
            (out, scratch),
            table=self._ranks.table.address,
            part=own,
            part_stride=stride,
            out=out,
            out_stride=stride,
            scratch=scratch,
            n=n,
            n_rows=rows,
        )

    def _gather(self, piece: Tensor, out: Tensor) -> None:
        extents = self._split.states[self._to.whole(piece)].extents
        widths = [sum(extents[device] for device in devices) for devices in self._ranks.devices]
        width, rows = widths[self._ranks.rank], self._to.count(out)
        own: Place = piece
        if not self._is_alone:
            own = self._to.scratch("of_rank", 4 * width * out.shape[1])
            self._to.join_columns(self._to.peers(piece), own, 4 * width, rows, out.name)
        scratch = self._to.scratch("over_ranks", self._ranks.table.gather_scratch_bytes(widths, out.shape[1]))
        self._to.call(
            self._ranks.table.gather_columns,
            (own,),
            (out, scratch),
            table=self._ranks.table.address,
            part=own,
            part_stride=4 * width,
            widths=self._to.constant(f"{out.name}.rank widths", np.array(widths, np.int64)),
            out=out,
            out_stride=out.strides[1],
            scratch=scratch,
            n_rows=rows,
        )

    def _hand_out(self, out: Tensor) -> None:
        """The first device's result to the others that need it."""
        if self._is_alone:
            return
        self._to.meet()
        if self._to.device > 0 and self._to.is_used(out):
            n, stride = self._to.row_extent(out)
            first = next(peer for peer in self._to.peers(out) if peer.device == 0)
            self._to.add_up(AddressList((Peer(0, first.tensor),)), out, n, stride, self._to.count(out))
