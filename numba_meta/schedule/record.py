"""Binding: every place of a step plan gets its address. How it is recorded then depends on the devices (`record_cpu`, `record_cuda`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from numba_meta.errors import PlacementError
from numba_meta.lowering import Constant, Scratch
from numba_meta.schedule.calls import AddressList, Offset, Peer
from numba_meta.schedule.plan import StepPlan
from numba_meta.schedule.transport_plan import TransportPlan
from numba_meta.schedule.transport_slots import Ring
from numba_meta.tensor import Role, Tensor


@dataclass(frozen=True)
class InputBlock:
    """The inputs of a step as the host writes them, and each device's copy: same offsets everywhere, `offsets[name]` in bytes."""

    host_address: int
    device_addresses: tuple[int, ...]
    n_bytes: int
    offsets: Mapping[str, int]


class Binder:
    """Finds the address of every place of a plan.

    `persistent(device, tensor)` gives the address of weights and caches; `rings` where each device's ring begins, if it has one;
    `place_constant(device, data)` puts data that calls read where the device reads it (None: it reads the host's memory).
    """

    def __init__(
        self,
        plan: StepPlan,
        workspaces: Sequence[int],
        inputs: InputBlock,
        persistent: Callable[[int, Tensor], int],
        rings: Sequence[int] = (),
        place_constant: Callable[[int, np.ndarray], int] | None = None,
    ) -> None:
        self.plan = plan
        self.inputs = inputs
        self._place_elsewhere = place_constant
        self._constants: dict[tuple[int, int], int] = {}  # address by device and by the id of data that the plan keeps
        self._persistent = persistent
        self._offsets: list[dict[Tensor | Scratch, int]] = []
        for device, layout, base in zip(plan.devices, plan.workspace.layouts, workspaces, strict=True):
            self._offsets.append({place: base + offset for place, offset in zip(device.places, layout.offsets, strict=True)})
        if plan.transport and plan.transport.ring:
            self._place_windows(plan.transport, plan.transport.ring, rings)
        self._keep: list[np.ndarray] = []

    def _place_windows(self, transport: TransportPlan, ring: Ring, rings: Sequence[int]) -> None:
        """Windows of staged layers lie in their slots: one after the other, from the first again after the last."""
        slots = {delivery.layer: (index % ring.n_slots, ring.bind(delivery)) for index, delivery in enumerate(transport.staged)}
        for j, device in enumerate(self.plan.devices):
            for node in device.graph.graph.nodes:
                if node.op == "deliver" and node.params["layer"] in slots:
                    slot, bindings = slots[node.params["layer"]]
                    within = bindings["kv".index(node.params["part"])].offsets[j]
                    self._offsets[j][node] = rings[j] + ring.slot_offset(slot, j) + within

    def address(self, device: int, place: Any) -> int:
        """The address of a place as a device sees it; numbers stand for themselves."""
        if isinstance(place, Offset):
            return self.address(device, place.place) + place.n_bytes
        if isinstance(place, Peer):
            return self.address(place.device, place.tensor)
        if isinstance(place, AddressList):
            return self._place_constant(device, np.array([self.address(device, peer) for peer in place.peers], np.int64))
        if isinstance(place, Constant):
            key = (device, id(place))
            if key not in self._constants:
                self._constants[key] = self._place_constant(device, place.data)
            return self._constants[key]
        if isinstance(place, Scratch):
            return self._offsets[device][place]
        return self._tensor(device, place)

    def _tensor(self, device: int, tensor: Tensor) -> int:
        storage = tensor.storage
        if storage.role is Role.NODE:
            known = self._offsets[device].get(storage)
            if known is None:
                if storage.n_elements == 0:
                    return 0
                raise PlacementError(f"{storage.name} has no place on device {device}: it is read but never written")
            return known + tensor.storage_offset
        if storage.role is Role.INPUT:
            return self.inputs.device_addresses[device] + self.inputs.offsets[storage.name] + tensor.storage_offset
        return self._persistent(device, storage) + tensor.storage_offset

    def _place_constant(self, device: int, data: np.ndarray) -> int:
        if self._place_elsewhere is not None:
            return self._place_elsewhere(device, data)
        self._keep.append(data)
        return int(data.ctypes.data)

    def value(self, device: int, value: Any) -> Any:
        """An argument of a call as a kernel takes it: numbers stay, places become addresses."""
        return value if isinstance(value, (int, float)) else self.address(device, value)
