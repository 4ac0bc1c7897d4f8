"""Recording for CUDA devices: the step of all local devices becomes one graph, which one call replays.

Streams are captured: what a device computes goes to its compute stream, deliveries to its transfer stream; events order them, and where all
devices meet, each waits for the others' events. Devices that share a GPU so never spin on each other, and the host waits for nothing inside
a step. What changes from step to step lies in pinned memory that the graph's first nodes copy.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from numba_meta.devices.account import at_end
from numba_meta.devices.cpu_stream import StreamTimes
from numba_meta.devices.cuda import CudaBuffer, CudaDevice
from numba_meta.devices.cuda_driver import PinnedMemory
from numba_meta.devices.cuda_graph import CudaGraph, capture, capture_copy
from numba_meta.devices.meta import MetaDevice
from numba_meta.devices.simple import Buffer
from numba_meta.errors import PlacementError
from numba_meta.kernels.cuda.kernel import CudaArguments, CudaKernel, Launch
from numba_meta.kernels.cuda.variants import VariantKernel
from numba_meta.lowering import Constant
from numba_meta.schedule.calls import AddressList, Call, EventName
from numba_meta.schedule.cuda_staging import plan_staging
from numba_meta.schedule.cuda_transport import Delivery, LateRows, LiveWindows
from numba_meta.schedule.ranks import StreamCall, StreamWork
from numba_meta.schedule.record import Binder
from numba_meta.schedule.trace import is_delivery, is_write_back

_CONSTANT_BYTES = 1 << 16  # of a block of constants
_CONSTANT_ALIGNMENT = 16


class CudaSteps:
    """Streams of CUDA devices, constants on them, and the steps that are recorded on them."""

    def __init__(self, device: MetaDevice) -> None:
        self._devices = [each for each in device.devices if isinstance(each, CudaDevice)]
        self._compute = [each.stream() for each in self._devices]
        self._transfer: dict[int, int] = {}
        self._constants = [_Constants(each) for each in self._devices]

    def host_memory(self, n_bytes: int) -> PinnedMemory:
        """Zeroed pinned host memory that steps copy from, until it is freed or the devices are closed."""
        return self._devices[0].pinned(n_bytes)

    def place_constant(self, device: int, data: np.ndarray) -> int:
        """The address of a copy on the device; equal data is there once."""
        return self._constants[device].place(data)

    def record(self, binder: Binder, output: Buffer, offset: int, n_bytes: int) -> RecordedCudaStep:
        """The step of a binder's plan as one graph; its output is copied to pinned memory at the end."""
        for j, plan in enumerate(binder.plan.devices):
            if plan.transfer_calls and j not in self._transfer:
                self._transfer[j] = self._transfer_stream(self._devices[j])
        memory = self._devices[0].pinned(n_bytes)
        assert isinstance(output, CudaBuffer)
        try:
            recorder = _Recorder(self._devices, self._compute, self._transfer, binder, self.place_constant)
            graph, parts = recorder.record(output.address + offset, memory)
        except BaseException:
            memory.free()
            raise
        return RecordedCudaStep(self._devices[0], self._compute[0], graph, memory, parts)

    def _transfer_stream(self, device: CudaDevice) -> int:
        """Devices that share a GPU share its link, and one stream: a copy engine loses microseconds when it changes streams."""
        shared = (stream for j, stream in self._transfer.items() if self._devices[j].gpu is device.gpu)
        return next(shared, None) or device.stream()

    def end_transfers(self) -> None:
        """Transfer streams cost nothing while nothing runs on them: they stay for the next ring."""


class RecordedCudaStep:
    """A recorded graph: `output` uint8 is what it leaves for the host, which the next step overwrites."""

    def __init__(self, device: CudaDevice, stream: int, graph: CudaGraph, memory: PinnedMemory, parts: _Parts) -> None:
        self._device = device
        self._stream = stream
        self._graph = graph
        self._memory = memory
        self._parts = parts
        self.n_launches = len(parts.launches)
        self.output = memory.data
        self._give_back = at_end(self, _give_back, graph, memory, parts.owned)

    def run(self) -> None:
        """Replays the step and waits for its end."""
        self._parts.windows.update()
        self._graph.launch(self._stream)
        self._device.gpu.synchronize(self._stream)
        for rows in self._parts.late_rows:
            rows.store()

    def run_noting_times(self) -> tuple[StreamTimes, ...]:
        """As `run`. When each call ran is not known from outside of a graph: one span for the whole step."""
        begin = time.monotonic_ns()
        self.run()
        end = time.monotonic_ns()
        return (StreamTimes(f"{self._device.name} step", (), np.empty((0, 2), np.int64), (begin, end)),)

    def release(self) -> None:
        """Gives the graph and its output's memory back. Twice is once."""
        self._give_back()


def _give_back(graph: CudaGraph, memory: PinnedMemory, owned: Sequence[StreamWork | PinnedMemory | CudaBuffer]) -> None:
    graph.destroy()
    memory.free()
    for each in owned:
        each.free()


class _Constants:
    """Data on one device that never changes."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._known: dict[bytes, int] = {}
        self._blocks: list[CudaBuffer] = []
        self._used = 0

    def place(self, data: np.ndarray) -> int:
        content = data.tobytes()
        if content not in self._known:
            n_bytes = -(-max(1, len(content)) // _CONSTANT_ALIGNMENT) * _CONSTANT_ALIGNMENT
            if not self._blocks or self._used + n_bytes > self._blocks[-1].n_bytes:
                self._blocks.append(self._device.allocate(max(_CONSTANT_BYTES, n_bytes), "constants"))
                self._used = 0
            block = self._blocks[-1]
            with block.edit(self._used, len(content), keep=False) as out:
                out[:] = np.frombuffer(content, np.uint8)
            self._known[content] = block.address + self._used
            self._used += n_bytes
        return self._known[content]


@dataclass(frozen=True)
class _Launch:
    """A kernel that is loaded, with its arguments."""

    function: Any
    launch: Launch
    arguments: CudaArguments


@dataclass(frozen=True)
class _Parts:
    """What a recorded graph needs as long as it runs: its arguments, what sets its copies before a step, what moves rows after it.

    `owned` belongs to this recording alone.
    """

    launches: tuple[_Launch, ...]
    windows: LiveWindows
    late_rows: tuple[LateRows, ...]
    owned: tuple[StreamWork | PinnedMemory | CudaBuffer, ...]


def in_order(programs: Mapping[tuple[int, str], Sequence[Call]]) -> Iterator[tuple[int, str, Call]]:
    """All calls of all streams (device, purpose) in an order in which they could run.

    A meeting stands once, for device 0, when all compute streams have come to it. Streams take turns at events, so that devices which share
    a transfer stream get their windows layer by layer. Raises `PlacementError` where something is waited for that nothing records.
    """
    queues = {key: deque(calls) for key, calls in programs.items()}
    compute = [queue for (_, purpose), queue in queues.items() if purpose == "compute"]
    recorded: set[tuple[int, EventName]] = set()
    while any(queues.values()):
        moved = False
        for (device, purpose), calls in queues.items():
            while calls and not calls[0].meets and (calls[0].waits is None or (device, calls[0].waits) in recorded):
                call = calls.popleft()
                yield device, purpose, call
                moved = True
                if call.records is not None:
                    recorded.add((device, call.records))
                    break
        if all(calls and calls[0].meets for calls in compute):
            yield 0, "compute", [calls.popleft() for calls in compute][0]
            moved = True
        if not moved:
            stuck = next(calls[0] for calls in queues.values() if calls)
            raise PlacementError(f"{stuck.node}: {stuck.waits or 'a meeting'} is waited for, and nothing records it before")


class _Recorder:
    """Captures one step."""

    def __init__(
        self,
        devices: list[CudaDevice],
        compute: list[int],
        transfer: dict[int, int],
        binder: Binder,
        place_constant: Callable[[int, np.ndarray], int],
    ) -> None:
        self._devices = devices
        self._place_constant = place_constant
        self._streams = {(j, "compute"): stream for j, stream in enumerate(compute)}
        self._streams |= {(j, "transfer"): stream for j, stream in transfer.items()}
        self._binder = binder
        self._staging = plan_staging(binder.plan.devices, lambda reader, owner: devices[reader].gpu.can_read(devices[owner].gpu))
        self._staged: PinnedMemory | None = None
        self._n_meetings = 0
        self._events: list[tuple[CudaDevice, int]] = []
        self._deliveries: list[tuple[Delivery, list[Any]]] = []
        self._late: list[LateRows] = []
        self._owned: list[StreamWork | PinnedMemory | CudaBuffer] = []
        self._lists: dict[tuple[int, AddressList], int] = {}  # where lists lie that name places in host memory
        self._behind_kernel: set[int] = set()  # streams whose last entry is a kernel: the next one may begin early

    def record(self, output: int, memory: PinnedMemory) -> tuple[CudaGraph, _Parts]:
        gpu, main = self._devices[0].gpu, self._streams[0, "compute"]
        try:
            if self._staging.n_bytes:
                self._stage()
            plans = self._binder.plan.devices
            programs = {(j, purpose): calls for j, plan in enumerate(plans) for purpose, calls in plan.streams().items()}
            # Modules are loaded and constants placed first: neither may happen while a stream is captured.
            order = [(device, purpose, call, self._prepared(device, call)) for device, purpose, call in in_order(programs)]
            used = [(j, "compute") for j in range(len(self._devices))] + [(device, purpose) for device, purpose, _, _ in order]
            others = {self._streams[key]: key[0] for key in used if self._streams[key] != main}
            with capture(gpu, main) as recorded:
                begun = self._record_event(0, main)
                for stream, device in others.items():
                    self._wait(device, stream, begun)
                self._copy_inputs()
                named: dict[tuple[int, EventName], int] = {}
                for device, purpose, call, prepared in order:
                    self._enqueue(device, self._streams[device, purpose], call, prepared, named)
                for stream, device in others.items():
                    self._wait(0, main, self._record_event(device, stream))
                gpu.copy_async(memory.address, output, memory.data.size, main)
            launches = [prepared for _, _, _, prepared in order if isinstance(prepared, _Launch)]
            windows = LiveWindows(recorded.graph, self._binder, self._deliveries)
            return recorded.graph, _Parts(tuple(launches), windows, tuple(self._late), tuple(self._owned))
        except BaseException:
            for each in self._owned:
                each.free()
            raise
        finally:
            for owner, event in self._events:
                owner.gpu.destroy_event(event)

    def _prepared(self, device: int, call: Call) -> _Launch | StreamWork | Delivery | None:
        if call.kernel is None:
            return None
        if is_delivery(call) and "n_cells" in call.arguments:
            return self._delivery(device, call)
        on = self._devices[device]
        values = {name: self._value(device, value) for name, value in call.arguments.items()}
        if isinstance(call.kernel, StreamCall):
            data = {name: value.data for name, value in call.arguments.items() if isinstance(value, Constant)}
            work = call.kernel.prepare(values, data, call.max_rows)
            self._owned.append(work)
            return work
        assert isinstance(call.kernel, CudaKernel | VariantKernel)
        if is_write_back(call) and not on.gpu.is_pinned(values["host"]):
            rows, count = call.arguments["cells"], call.arguments["n_rows"]
            late = LateRows(on, self._binder, values["host"], values["width"], call.max_rows, rows.name, count.name)
            self._late.append(late)
            self._owned.append(late.memory)
            values = late.arguments(values, self._place_constant(device, np.arange(call.max_rows, dtype=np.int32)))
        kernel = call.kernel.for_gpu(on.launch_facts)
        launch = kernel.launch(values, call.max_rows, on.launch_facts)
        if not all(launch.grid):
            return None
        entry, cubin = kernel.binary(on.gpu.facts.capability)
        return _Launch(on.gpu.function(cubin, entry, launch.shared_bytes), launch, kernel.pack(**values))

    def _stage(self) -> None:
        """Host memory for summands and pieces, and the lists that name places in it, on their readers."""
        self._staged = self._devices[0].pinned(self._staging.n_bytes)
        self._owned.append(self._staged)
        for reader, device in enumerate(self._devices):
            own = {value: places for (owner, value), places in self._staging.places.items() if owner == reader}
            addresses: list[int] = []
            block = device.allocate(8 * sum(map(len, own.values())), "addresses of summands in host memory")
            self._owned.append(block)
            for value, places in own.items():
                self._lists[reader, value] = block.address + 8 * len(addresses)
                for peer, place in zip(value.peers, places, strict=True):
                    addresses.append(self._binder.address(reader, peer) if place is None else self._staged.address + place)
            with block.edit(0, 8 * len(addresses), keep=False) as out:
                out[:] = np.array(addresses, np.int64).view(np.uint8)

    def _value(self, device: int, value: Any) -> Any:
        """An argument as a kernel takes it; addresses of what is staged lie in host memory."""
        known = self._lists.get((device, value)) if isinstance(value, AddressList) else None
        return self._binder.value(device, value) if known is None else known

    def _delivery(self, device: int, call: Call) -> Delivery:
        arguments = call.arguments
        names = ("source", "stream_bytes", "cell_bytes", "destination", "width")
        source, stream_bytes, cell_bytes, destination, width = (int(self._binder.value(device, arguments[name])) for name in names)
        streams, n_streams, n_cells = (arguments[name].name for name in ("streams", "n_streams", "n_cells"))
        room = arguments["destination"].params["n_streams"]
        gpu, live = self._devices[device].gpu, (streams, n_streams, n_cells)
        return Delivery(gpu, source, stream_bytes, cell_bytes, destination, width, room, live)

    def _enqueue(
        self,
        device: int,
        stream: int,
        call: Call,
        prepared: _Launch | StreamWork | Delivery | None,
        named: dict[tuple[int, EventName], int],
    ) -> None:
        if isinstance(prepared, Delivery):
            first = tuple(range(prepared.max_streams))
            self._behind_kernel.discard(stream)
            self._deliveries.append((prepared, [capture_copy(prepared.gpu, copy, stream) for copy in prepared.copies(first, 1)]))
        elif isinstance(prepared, _Launch):
            launch, parameters = prepared.launch, int(prepared.arguments.addresses.ctypes.data)
            gpu = self._devices[device].gpu
            early = stream in self._behind_kernel and gpu.records_early_launches and call.arguments.get("k") != 0
            gpu.launch(prepared.function, launch.grid, launch.block, launch.shared_bytes, stream, parameters, early)
            self._behind_kernel.add(stream)
        elif prepared is not None:
            self._behind_kernel.discard(stream)
            prepared.enqueue(stream)
        elif call.records is not None:
            named[device, call.records] = self._record_event(device, stream)
        elif call.waits is not None:
            self._wait(device, stream, named[device, call.waits])
        elif call.meets:
            self._meet()

    def _meet(self) -> None:
        """Every device's compute stream waits for all others, whose summands that it cannot read have come to host memory."""
        for part in self._staging.parts.get(self._n_meetings, ()):
            assert self._staged is not None
            gpu, stream = self._devices[part.owner].gpu, self._streams[part.owner, "compute"]
            gpu.copy_async(self._staged.address + part.offset, self._binder.address(part.owner, part.tensor), part.tensor.n_bytes, stream)
            self._behind_kernel.discard(stream)
        self._n_meetings += 1
        if len(self._devices) > 1:
            events = [self._record_event(j, self._streams[j, "compute"]) for j in range(len(self._devices))]
            for j in range(len(self._devices)):
                for other, event in enumerate(events):
                    if other != j:
                        self._wait(j, self._streams[j, "compute"], event)

    def _copy_inputs(self) -> None:
        inputs = self._binder.inputs
        for j, (device, address) in enumerate(zip(self._devices, inputs.device_addresses, strict=True)):
            if inputs.n_bytes:
                device.gpu.copy_async(address, inputs.host_address, inputs.n_bytes, self._streams[j, "compute"])

    def _record_event(self, device: int, stream: int) -> int:
        on = self._devices[device]
        event = on.gpu.create_event()
        self._events.append((on, event))
        on.gpu.record_event(event, stream)
        return event

    def _wait(self, device: int, stream: int, event: int) -> None:
        self._behind_kernel.discard(stream)
        self._devices[device].gpu.wait_event(stream, event)
