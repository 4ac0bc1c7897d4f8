"""The transport of a host-resident cache in a context: the ring that is held, and what was decided and moved."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numba_meta.devices.cpu import ALIGNMENT
from numba_meta.devices.cpu_stream import StreamTimes
from numba_meta.devices.meta import MetaBuffer, MetaDevice
from numba_meta.errors import NumbaMetaError, OutOfMemoryError
from numba_meta.models.cache.windows import Window
from numba_meta.one_process import OneProcess
from numba_meta.schedule.infer import SplitGraph
from numba_meta.schedule.lower_transport import Link
from numba_meta.schedule.trace import StepTrace, mean_times
from numba_meta.schedule.transport_plan import Change, DeviceFacts, TransportOptions, TransportPlan, plan_transport
from numba_meta.schedule.transport_slots import Delivery

_TRACED_STEPS = 128  # whose times `stats` gives as a mean


@dataclass(frozen=True)
class HostCacheOptions:
    """A cache in host memory: which first layers stay on the devices all the same, whether memory is pinned, how deliveries travel."""

    n_device_layers: int = 0
    pinned: bool = True
    transport: TransportOptions = TransportOptions()


def deliveries_of(split: SplitGraph, n_devices: int, is_pinned: bool, devices: range | None = None) -> list[Delivery]:
    """The deliveries of a graph, one per layer, in the order of their readers. A device that does not read a layer receives nothing.

    `devices`: those of this process (None: all `n_devices`), whose host memory holds their heads alone.
    """
    devices = range(n_devices) if devices is None else devices
    parts: dict[int, dict[str, Any]] = {}
    reads: dict[int, list[bool]] = {}
    for node in split.graph.nodes:
        if node.op == "deliver":
            parts.setdefault(node.params["layer"], {})[node.params["part"]] = node
        elif node.op == "attention" and node.sources[1].storage.op == "deliver":
            shapes = [split.states[node].piece_shape(node.shape, device) for device in devices]
            reads[node.sources[1].storage.params["layer"]] = [all(shape) for shape in shapes]
    deliveries = []
    for consumer, (layer, both) in enumerate(parts.items()):
        cells: list[int] = []
        pieces: list[tuple[int, ...]] = []
        for part in "kv":
            cache = both[part].sources[0]
            state = split.states[cache]
            rows = [cache.dtype.row_bytes(state.piece_shape(cache.shape, device)[0]) for device in devices]
            cells.append(sum(rows) if state.is_split else cache.strides[1])
            pieces.append(tuple(n_bytes if reads[layer][j] else 0 for j, n_bytes in enumerate(rows)))
        window = both["k"].params
        deliveries.append(
            Delivery(
                layer=layer,
                name=f"layer {layer}",
                consumer=consumer,
                k_cell_bytes=cells[0],
                v_cell_bytes=cells[1],
                k_piece_bytes=pieces[0],
                v_piece_bytes=pieces[1],
                n_cells_now=window["n_cells"],
                n_cells_full=window["n_cells_full"],
                n_streams=window["n_streams"],
                n_streams_full=window["n_streams_full"],
                is_pinned=is_pinned,
            )
        )
    return deliveries


class Transport(OneProcess):
    """Holds the ring of a meta device from graph to graph. `generation` moves whenever the ring's memory does."""

    _what = "the transport of a loaded model (not its stats)"

    def __init__(self, device: MetaDevice, options: TransportOptions, is_pinned: bool, devices: range | None = None) -> None:
        super().__init__()
        self.options = options
        self.may_use_ring = True  # False where another rank cannot: all take the same path
        self._devices = range(len(device)) if devices is None else devices
        self.is_pinned = is_pinned
        self.generation = 0
        self.plan: TransportPlan | None = None  # of the latest step; before the first one, of the latest recording
        self._device = device
        self._ring: MetaBuffer | None = None
        self._held: TransportPlan | None = None  # the plan that the ring was laid out for
        self._gave_up = False
        self._closed = False
        self._steps = 0
        self._windows: Mapping[int, Window] = {}  # by layer
        self._traces: deque[StepTrace] = deque(maxlen=_TRACED_STEPS)

    @property
    def links(self) -> list[Link]:
        """How each device is reached."""
        return [Link(d.spec.link_bytes_per_second, d.spec.delay_ns) for d in self._device.devices]

    @property
    def ring_addresses(self) -> Sequence[int]:
        """Where each device's ring begins; empty without a ring."""
        return self._ring.addresses if self._ring else ()

    def decide(self, split: SplitGraph) -> TransportPlan | None:
        """How a graph's deliveries would travel; nothing is done. None where nothing is delivered."""
        deliveries = deliveries_of(split, len(self._device), self.is_pinned, self._devices)
        if not deliveries:
            return None
        facts = [
            DeviceFacts(
                d.name,
                d.free_bytes,
                has_async_copies=d.spec.has_async_copies,
                gave_up_ring=self._gave_up,
                is_refused_by_peer=not self.may_use_ring,
            )
            for d in self._device.devices
        ]
        held = self._held.ring if self._held else None
        return plan_transport(deliveries, facts, ALIGNMENT, self.options, held)

    def has_room(self, split: SplitGraph) -> bool:
        """Whether this process need not fall back to the ordered path for a graph: also where nothing comes to its devices."""
        plan = self.decide(split)
        return plan is None or plan.is_pipelined_or_empty

    def prepare(self, split: SplitGraph) -> TransportPlan | None:
        """Decides how a graph's deliveries travel and lays the ring out for it. None where nothing is delivered."""
        plan = self.decide(split)
        if plan is None:
            return None
        if plan.change in (Change.LAY_OUT, Change.GROW, Change.SHRINK):
            self._lay_out(plan)
        elif plan.change is Change.RELEASE:
            self.release()
        if self._gave_up and plan.ring is not None:
            return self.prepare(split)
        self.plan = plan if self._steps == 0 else self.plan
        return plan

    def _lay_out(self, plan: TransportPlan) -> None:
        """Memory for a ring; an optional ring that does not fit is done without."""
        self.release()
        try:
            self._ring = self._device.allocate(plan.ring_bytes, "the ring")
        except OutOfMemoryError:
            self._gave_up = True
            return
        self._held = plan
        self.generation += 1

    def release(self) -> None:
        """Gives the ring back."""
        if self._ring is not None:
            self._ring.free()
            self._ring, self._held = None, None
            self.generation += 1

    def give_up(self) -> bool:
        """The graph does not fit beside the ring: ordered from now on. False where there was no ring to give up."""
        if self._ring is None:
            return False
        self._gave_up = True
        self.release()
        return True

    def close(self) -> None:
        """Ends with its model: there is nothing left to tell of."""
        self.release()
        self._closed = True

    def note_step(self, plan: TransportPlan, windows: Mapping[int, Window]) -> None:
        """Remembers what a step moved: the window of every layer that was delivered."""
        self.plan, self._windows = plan, windows
        self._steps += 1

    def note_times(self, times: tuple[StreamTimes, ...], n_rows: int, generates: bool) -> StepTrace:
        """Remembers the times of the step that was noted last, where it `generates`: a row for each of its sequences."""
        windows = {layer: (len(window.streams), window.n_cells) for layer, window in self._windows.items()}
        trace = StepTrace(times, windows, n_rows)
        if generates and self.plan is not None:
            self._traces.append(trace)
        return trace

    def _times(self) -> dict[str, Any]:
        """Means over the latest traced steps, in seconds per device; None where no step was traced."""
        traced: dict[str, Any] = {"traced_steps": len(self._traces)}
        times = mean_times([trace.transport_times(len(self._device)) for trace in self._traces]) if self._traces else None
        for name in ("ordered_copy", "consumer_wait", "recycle_wait"):
            traced[f"{name}_seconds"] = getattr(times, name) if times else None
        return traced

    def _moved(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(early, late) bytes of the latest step, per device."""
        n_devices = len(self._device)
        early, late = [0] * n_devices, [0] * n_devices
        for decision in self.plan.decisions if self.plan else ():
            window = self._windows.get(decision.delivery.layer)
            if window is None:
                continue  # no step has run
            for j in range(n_devices):
                (early if decision.is_staged else late)[j] += len(window.streams) * window.n_cells * decision.delivery.cell_bytes(j)
        return tuple(early), tuple(late)

    @property
    def stats(self) -> dict[str, Any]:
        """What was decided for the latest step and what it moved, bytes per device; `path` is `device` where nothing is host-resident.

        Seconds per device, as a mean over the latest 128 decode steps that were traced (`Model.record_timeline`), None without any:
        `ordered_copy_seconds` (copies on the compute stream), `consumer_wait_seconds` (it waits for deliveries), `recycle_wait_seconds`
        (the transfer stream waits for slots).
        """
        if self._closed:
            raise NumbaMetaError("the model was closed; load it again")
        if self.plan is None:
            return {"path": "device", "reason": "no layer's cache is in host memory", "ring_bytes": (), "early_bytes": (), "late_bytes": ()}
        early, late = self._moved()
        moved = {"early_bytes": early, "late_bytes": late, "steps": self._steps, "pinned": self.is_pinned}
        return {**self.plan.stats(), **moved, **self._times()}
