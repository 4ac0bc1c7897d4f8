"""Weights: each device's pieces, read from the file and packed for its kernels. No device ever holds the whole model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from numba_meta.devices.meta import MetaBuffer, MetaDevice
from numba_meta.dtypes import F32
from numba_meta.interrupts import let_through
from numba_meta.kernels import KernelSet, kernel_set
from numba_meta.memory.placement import round_up
from numba_meta.models.files.gguf import GGUFFile, TensorInfo
from numba_meta.quants import dequantize
from numba_meta.split.pieces import piece_spans, take_piece
from numba_meta.split.state import SplitState
from numba_meta.tensor import Tensor

_READ_BYTES = 1 << 20  # of the file at once


@dataclass(frozen=True)
class WeightPlan:
    """Where each weight lies on each device of this process: `offsets[name][j]` in bytes; `n_bytes[j]` in all.

    `devices[j]`: its number among all devices of the model, by which `states` count.
    """

    states: Mapping[str, SplitState]
    offsets: Mapping[str, tuple[int, ...]]
    n_bytes: tuple[int, ...]
    devices: range


def plan_weights(
    leaves: Sequence[Tensor],
    states: Mapping[str, SplitState],
    n_devices: int,
    devices: range | None = None,
    kind: str = "cpu",
    alignment: int = 64,
) -> WeightPlan:
    """Lays out all weights of a model, in the order in which they are read, on `devices` of its `n_devices` (None: on all).

    `kind` of the devices, and `alignment` of each weight in bytes.
    """
    devices = range(n_devices) if devices is None else devices
    ends = [0] * len(devices)
    offsets = {}
    for leaf in leaves:
        offsets[leaf.name] = tuple(ends)
        for j, device in enumerate(devices):
            ends[j] += round_up(weight_bytes(leaf, states[leaf.name], device, kernel_set(kind)), alignment)
    return WeightPlan({leaf.name: states[leaf.name] for leaf in leaves}, offsets, tuple(ends), devices)


def weight_bytes(leaf: Tensor, state: SplitState, device: int, kernels: KernelSet) -> int:
    """Bytes of a device's piece of a weight, packed for its kernels."""
    k, n_out, *_ = state.piece_shape(leaf.shape, device)
    return 4 * k if is_vector(leaf) else int(kernels.packed.packed_bytes(leaf.dtype, n_out, k))


def is_vector(leaf: Tensor) -> bool:
    """Vectors (norms, biases) are kept as float32, not packed."""
    return leaf.dtype == F32 and leaf.shape[1:] == (1, 1, 1)


def load_weights(
    file: GGUFFile,
    tensors: Mapping[str, TensorInfo],
    leaves: Sequence[Tensor],
    plan: WeightPlan,
    device: MetaDevice,
    progress: Callable[[int, int], None] | None = None,
) -> MetaBuffer:
    """Fills a buffer on each device, some rows of a tensor at a time. `tensors`: where each leaf lies. `progress(done, total)` in bytes."""
    buffer = device.allocate(plan.n_bytes, "weights")
    kernels = kernel_set(device.kind)
    infos = [tensors[leaf.name] for leaf in leaves]
    room = np.empty(max((min(_rows_at_once(info, kernels), info.n_rows) * info.row_bytes for info in infos), default=0), np.uint8)
    total, done = sum(info.n_bytes for info in infos), 0
    for leaf, info in zip(leaves, infos, strict=True):
        for j, piece in enumerate(buffer.pieces):
            state, number = plan.states[leaf.name], plan.devices[j]
            with piece.edit(plan.offsets[leaf.name][j], weight_bytes(leaf, state, number, kernels), keep=False) as out:
                _load_piece(file, info, leaf, state, number, out, kernels, room)
        let_through()
        done += info.n_bytes
        if progress:
            progress(done, total)
    return buffer


def _load_piece(
    file: GGUFFile, info: TensorInfo, leaf: Tensor, state: SplitState, device: int, out: np.ndarray, kernels: KernelSet, room: np.ndarray
) -> None:
    """Packs a device's piece; `room` is memory for some whole rows of the file, uint8."""
    if is_vector(leaf):
        raw = np.empty((info.n_rows, info.row_bytes), np.uint8)
        file.read_rows(info, 0, raw)
        values = take_piece(dequantize(raw.reshape(-1), info.dtype), state, device)
        out[:] = np.ascontiguousarray(values).view(np.uint8)
        return
    k, n_out, *_ = state.piece_shape(leaf.shape, device)
    if k == 0 or n_out == 0:
        return
    spans = piece_spans(info.shape, info.dtype, state, device)
    n_rows = min(_rows_at_once(info, kernels), info.n_rows)
    rows = room[: n_rows * info.row_bytes].reshape(n_rows, info.row_bytes)
    for first in range(0, n_out, n_rows):
        at = 0
        for start, stop in spans.rows_between(first, min(n_out, first + n_rows)):
            file.read_rows(info, start, rows[at : at + stop - start])
            at += stop - start
        kernels.packing.pack_part(spans.joined(rows[:at]), info.dtype, out, first, n_out)


def _rows_at_once(info: TensorInfo, kernels: KernelSet) -> int:
    """How many rows of a tensor are read before they are packed: so many that reading takes few calls, and that they stay in a cache."""
    unit: int = kernels.packing.PART_ROWS
    return max(1, _READ_BYTES // (unit * info.row_bytes)) * unit
