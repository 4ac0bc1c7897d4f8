"""Carries out a step plan call by call in plain memory, with everything poisoned that no call has written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from numba_meta.dtypes import F16, F32, I32, I64
from numba_meta.kernels.cpu.packed import packed_bytes
from numba_meta.kernels.cpu.packing import pack
from numba_meta.schedule.plan import StepPlan
from numba_meta.schedule.record import Binder, InputBlock
from numba_meta.tensor import Role, Tensor

Array = npt.NDArray[Any]
_NUMPY = {F32: np.float32, F16: np.float16, I32: np.int32, I64: np.int64}
ALIGNMENT = 64


def stored(leaf: Tensor, tensor: Tensor, value: Array) -> npt.NDArray[np.uint8]:
    """The bytes of a device's piece of a leaf as kernels expect them: matrices packed, all else as they are."""
    flat = np.ascontiguousarray(value.astype(_NUMPY[tensor.dtype]).reshape(-1, order="F"))
    if leaf.role is not Role.WEIGHT or leaf.shape[1:] == (1, 1, 1):
        return flat.view(np.uint8)
    k, n, *_ = tensor.shape
    packed = np.zeros(packed_bytes(tensor.dtype, n, k), np.uint8)
    pack(flat.view(np.uint8).reshape(n, tensor.dtype.row_bytes(k)), tensor.dtype, packed)
    return packed


def loaded(tensor: Tensor, data: npt.NDArray[np.uint8], start: int = 0) -> Array:
    """A contiguous tensor from its bytes."""
    return data[start : start + tensor.n_bytes].view(_NUMPY[tensor.dtype]).reshape(tensor.shape, order="F").copy()


class PlanRun:
    """The memory of all devices of a plan. `pieces[leaf][device]` are the leaves; counts of live rows are whole tensors."""

    def __init__(self, plan: StepPlan, pieces: Mapping[Tensor, Sequence[Array]], n_threads: int = 2) -> None:
        self.plan = plan
        self.n_threads = n_threads
        n_devices = len(plan.devices)
        simple = [device.graph.simple for device in plan.devices]
        self.leaves = [
            {leaf.name: self._aligned(stored(leaf, simple[j][leaf], held[j])) for leaf, held in pieces.items()} for j in range(n_devices)
        ]
        # Not-a-numbers wherever a kernel has not written: 0xff.
        self.workspaces = [self._aligned(np.full(layout.n_bytes, 0xFF, np.uint8)) for layout in plan.workspace.layouts]
        inputs = [leaf for leaf in plan.split.graph.leaves if leaf.role is Role.INPUT]
        addresses = [{leaf.name: self.leaves[j][leaf.name].ctypes.data for leaf in inputs} for j in range(n_devices)]
        blocks = InputBlock(0, (0,) * n_devices, 0, dict.fromkeys(addresses[0], 0))
        bases = tuple(workspace.ctypes.data for workspace in self.workspaces)
        self.binder = Binder(plan, bases, blocks, lambda device, leaf: self.leaves[device][leaf.name].ctypes.data)
        self._inputs = addresses

    @staticmethod
    def _aligned(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        whole = np.zeros(data.nbytes + ALIGNMENT, np.uint8)
        start = -whole.ctypes.data % ALIGNMENT
        whole[start : start + data.nbytes] = data
        return whole[start : start + data.nbytes]

    def run(self) -> list[Array]:
        """The outputs, as device 0 holds them after one step."""
        at = [0] * len(self.plan.devices)
        while any(i < len(device.calls) for i, device in zip(at, self.plan.devices, strict=True)):
            for j, device in enumerate(self.plan.devices):
                while at[j] < len(device.calls) and not device.calls[at[j]].meets:
                    call = device.calls[at[j]]
                    assert call.kernel is not None
                    values = {name: self._value(j, value) for name, value in call.arguments.items()}
                    call.kernel(threads=self.n_threads, **values)
                    at[j] += 1
            at = [i + 1 for i in at]  # all devices meet
        graph = self.plan.devices[0].graph.graph
        start = self.workspaces[0].ctypes.data
        return [loaded(output, self.workspaces[0], self.binder.address(0, output) - start) for output in graph.outputs]

    def _value(self, device: int, value: Any) -> Any:
        if isinstance(value, (int, float)):
            return value
        base, offset = (value.place, value.n_bytes) if hasattr(value, "place") else (value, 0)
        if isinstance(base, Tensor) and base.storage.role is Role.INPUT:
            return self._inputs[device][base.storage.name] + base.storage_offset + offset
        return self.binder.address(device, value)
