"""Weights: each device's pieces, cut from the mapped file and packed for its kernels. No device ever holds the whole model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from numba_meta.devices.meta import MetaBuffer, MetaDevice
from numba_meta.dtypes import F32
from numba_meta.kernels import KernelSet, kernel_set
from numba_meta.memory.placement import round_up
from numba_meta.models.gguf import GGUFFile
from numba_meta.quants import dequantize
from numba_meta.split.pieces import copy_piece_rows, piece_rows, take_piece
from numba_meta.split.state import SplitState
from numba_meta.tensor import Tensor


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
    file: GGUFFile, leaves: Sequence[Tensor], plan: WeightPlan, device: MetaDevice, progress: Callable[[int, int], None] | None = None
) -> MetaBuffer:
    """Fills a buffer on each device; mapped pages are given back as soon as a tensor is packed. `progress(done, total)` in bytes."""
    buffer = device.allocate(plan.n_bytes, "weights")
    kernels = kernel_set(device.kind)
    total = sum(file.tensor(leaf.name).n_bytes for leaf in leaves)
    done = 0
    for leaf in leaves:
        for j, piece in enumerate(buffer.pieces):
            state, number = plan.states[leaf.name], plan.devices[j]
            with piece.edit(plan.offsets[leaf.name][j], weight_bytes(leaf, state, number, kernels), keep=False) as out:
                _load_piece(file, leaf, state, number, out, kernels)
        file.release(leaf.name)
        done += file.tensor(leaf.name).n_bytes
        if progress:
            progress(done, total)
    return buffer


def _load_piece(file: GGUFFile, leaf: Tensor, state: SplitState, device: int, out: np.ndarray, kernels: KernelSet) -> None:
    info = file.tensor(leaf.name)
    raw = file.raw(leaf.name)
    if is_vector(leaf):
        values = take_piece(dequantize(raw.reshape(-1), info.dtype), state, device)
        out[:] = np.ascontiguousarray(values).view(np.uint8)
        return
    k, n_out, *_ = state.piece_shape(leaf.shape, device)
    if k == 0 or n_out == 0:
        return
    views = piece_rows(raw, info.shape, info.dtype, state, device)
    if len(views) == 1:
        piece = views[0]
    else:
        piece = np.empty((n_out, info.dtype.row_bytes(k)), np.uint8)
        copy_piece_rows(raw, info.shape, info.dtype, state, device, piece)
    kernels.packing.pack(piece, info.dtype, out)
