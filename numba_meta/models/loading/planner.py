"""What a load would decide and how fast its steps would be, from the header of a file alone. Pure: nothing is allocated, read or run.

The decisions are those of `load` itself (`plan_load`, `plan_cuts`, `plan_transport`); times follow from the calls of a decode step, the
speeds of the devices, and the recursion of `schedule/bound.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from numba_meta.devices.shortage import what_helps
from numba_meta.errors import OutOfMemoryError, UsageError
from numba_meta.graph import Graph
from numba_meta.kernels import kernel_set
from numba_meta.memory.placement import Placement
from numba_meta.models.architectures.config import ModelConfig
from numba_meta.models.architectures.description import ModelDescription
from numba_meta.models.cache.cells import CacheShape, plan_cache
from numba_meta.models.cache.transport import deliveries_of
from numba_meta.models.cache.windows import Window, choose_window_shape, full_window, tight_window_shape
from numba_meta.models.loading.load_plan import LoadOptions, LoadPlan, plan_load
from numba_meta.models.running.step_shape import batch_shape, leaf_state
from numba_meta.models.running.weights import plan_weights
from numba_meta.ops.transport import WindowShape
from numba_meta.schedule.bound import DeviceLoad, StepPrediction, predict_step, step_bound_devices
from numba_meta.schedule.infer import SplitGraph, infer_splits
from numba_meta.schedule.plan import plan_step
from numba_meta.schedule.predict import DeviceSpeeds, Needs, device_loads, link_of, needs_of
from numba_meta.schedule.transport_plan import DeviceFacts, TransportPlan, plan_transport
from numba_meta.schedule.transport_slots import Delivery, Ring, bucket_cells
from numba_meta.schedule.virtual_clock import Link
from numba_meta.tensor import Role

_FIRST_CONTEXT = 512
_AWAKE_SECONDS = 100e-6  # the end of a wait for a simulated link is not slept, nor a wait of less than twice that
Speeds = Callable[[Sequence[Needs], Sequence[int]], Sequence[DeviceSpeeds]]


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes of each device, and of the host. `workspace`: of single tokens and of prompts, on the ordered path at the smallest window."""

    weights: tuple[int, ...]
    cache: tuple[int, ...]
    workspace: tuple[int, ...]
    host: int
    cache_placement: Placement


@dataclass(frozen=True)
class StepForecast:
    """A step of one token after a context of `context` tokens. `delivered[j]`: bytes that travel to device j."""

    context: int
    transport: TransportPlan | None  # None: nothing is delivered
    delivered: tuple[int, ...]
    times: StepPrediction | None  # None without speeds

    @property
    def path(self) -> str:
        """`device`, `ordered` or `pipelined`."""
        return self.transport.path if self.transport else "device"

    @property
    def seconds(self) -> float:
        """Of a step on the path that would be taken. Raises `UsageError` where no speeds were given."""
        if self.times is None:
            raise UsageError("no speeds were given to predict a step with; give some, or read the decisions alone")
        return float(self.times.pipelined if self.path == "pipelined" else self.times.ordered)


@dataclass(frozen=True)
class ModelForecast:
    """Everything that a load would decide, and its steps by context."""

    load: LoadPlan
    devices: tuple[str, ...]
    memory: MemoryNeeds
    n_meetings: int  # of all devices, in a step
    cell_bytes: Mapping[int, tuple[int, ...]]  # of K and V of one token, by layer that is delivered, per device
    speeds: tuple[DeviceSpeeds, ...]  # none where none were given
    links: tuple[Link, ...]  # how fast deliveries come, at the speeds
    steps: tuple[StepForecast, ...]


def default_contexts(n_positions: int) -> tuple[int, ...]:
    """512, 2048, 8192 ... and the longest that leaves room for one more token."""
    contexts, context = [], _FIRST_CONTEXT
    while context < n_positions - 1:
        contexts.append(context)
        context *= 4
    return (*contexts, max(0, n_positions - 1))


def plan_transport_of_model(
    model: ModelDescription,
    options: LoadOptions,
    contexts: Sequence[int] | None = None,
    speeds: Speeds | None = None,
    free_bytes: int | None = None,
    n_cores: int | None = None,
) -> ModelForecast:
    """Plans a load with these options and predicts decode steps of one sequence after each of `contexts` (None: `default_contexts`).

    `speeds(needs, threads)` gives the speeds of CPU devices for what a step does (None, and on CUDA devices: decisions alone).
    `free_bytes`: what the machine has for CPU devices without a limit of their own, None for any amount; what a GPU has is not known here.
    `n_cores`: cores for all threads; where there are fewer than threads, a copy's work comes on top of what is computed. Raises
    `UsageError` for what is impossible.
    """
    plan, config = plan_load(model, options), model.config
    n_devices = len(plan.specs)
    chosen = sorted(set(default_contexts(plan.cache_shape.n_positions) if contexts is None else contexts))
    if not chosen or chosen[0] < 0 or chosen[-1] >= plan.cache_shape.n_positions:
        most = plan.cache_shape.n_positions - 1
        raise UsageError(f"contexts {chosen}: expected 0 to {most}, with room for one more token in the context (ctx_size, --ctx-size)")
    graph = smallest_graph(model, plan)
    split = infer_splits(graph, leaf_state(plan.cuts), n_devices, may_gather=lambda _: options.deterministic)
    kernels = kernel_set(plan.specs[0].kind)
    step = plan_step(split, plan.n_threads, options.exact, _alignment(plan), kernels=kernels)
    prompt_graph = smallest_graph(model, plan, plan.ubatch_size)
    prompt_split = infer_splits(prompt_graph, leaf_state(plan.cuts), n_devices, may_gather=lambda _: options.deterministic)
    prompt = plan_step(prompt_split, plan.n_threads, options.exact, _alignment(plan), kernels=kernels)
    memory = _memory(plan, split, [a + b for a, b in zip(step.workspace.n_bytes, prompt.workspace.n_bytes, strict=True)])
    _check_room(plan, memory)
    pinned = plan.host_cache is not None and plan.host_cache.pinned and all(spec.can_pin for spec in plan.specs)
    deliveries = deliveries_of(split, n_devices, pinned)
    cell_bytes = {d.layer: tuple(d.cell_bytes(j) for j in range(n_devices)) for d in deliveries}
    known = tuple(speeds(needs_of(step), plan.n_threads)) if speeds and kernels.kind == "cpu" else ()
    links = tuple(link_of(spec.link_bytes_per_second, spec.delay_ns, speed) for spec, speed in zip(plan.specs, known, strict=False))
    names = _names(plan)
    depth = plan.host_cache.transport.depth if plan.host_cache else 0
    steps, ring = [], None
    for context in chosen:
        transport = _plan_transport(plan, config, deliveries, context, _facts(plan, names, memory, ring, free_bytes))
        ring = transport.ring if transport else None
        windows = {layer: (1, _delivered_cells(config, plan.cache_shape, layer, context)) for layer in cell_bytes}
        delivered = tuple(sum(windows[layer][1] * n[j] for layer, n in cell_bytes.items()) for j in range(n_devices))
        times = None
        if known:
            attended = {layer: min(context + 1, window or context + 1) for layer, window in enumerate(config.windows)}
            loads = device_loads(step, attended, windows, known, links)
            busy = [
                {layer: _busy_seconds(n * cell_bytes[layer][j], link, speed) for layer, (_, n) in windows.items()}
                for j, (link, speed) in enumerate(zip(links, known, strict=True))
            ]
            times = _predict(loads, depth, transport, _taken_from_computing(plan, busy, n_cores))
        steps.append(StepForecast(context, transport, delivered, times))
    return ModelForecast(plan, names, memory, step.n_collectives, cell_bytes, known, links, tuple(steps))


# ---- graphs and memory -----------------------------------------------------------------------------------------------------------------


def _alignment(plan: LoadPlan) -> int:
    """Bytes at whose multiples tensors begin on devices of this kind."""
    if plan.specs[0].kind == "cuda":
        from numba_meta.devices.cuda import CudaDevice

        return CudaDevice.alignment
    from numba_meta.devices.cpu import CpuDevice

    return CpuDevice.alignment


def _names(plan: LoadPlan) -> tuple[str, ...]:
    from numba_meta.devices.meta import name_devices

    return name_devices(plan.specs)


def _check_room(plan: LoadPlan, memory: MemoryNeeds) -> None:
    """Raises the `OutOfMemoryError` that a load would end in on a device with a limit."""
    for name, spec, *parts in zip(_names(plan), plan.specs, memory.weights, memory.cache, memory.workspace, strict=True):
        if spec.memory_limit is not None and sum(parts) > spec.memory_limit:
            helps = what_helps("weights" if parts[0] > spec.memory_limit else "the KV cache", plan.rank_devices[-1].stop > 1)
            raise OutOfMemoryError(
                f"{name}: this model needs {sum(parts)} bytes there (weights {parts[0]}, cache {parts[1]}, workspace {parts[2]}), "
                f"the limit is {spec.memory_limit}; {helps}"
            )


def smallest_graph(model: ModelDescription, plan: LoadPlan, n_rows: int = 1) -> Graph:
    """One token or a prompt, and windows of one bucket: what is read and where devices meet does not depend on more."""
    shape = plan.cache_shape
    windows: dict[bool, WindowShape] = {}
    if plan.host_cache:
        for local in (False, True) if shape.n_window_cells else (False,):
            windows[local] = choose_window_shape(Window((0,), 0), full_window(shape, local), None)
    batch = batch_shape(shape, plan.cache_types, plan.host_cache, n_rows, 1, windows)
    return model.graph(batch)


def _memory(plan: LoadPlan, split: SplitGraph, workspace: Sequence[int]) -> MemoryNeeds:
    n_devices, alignment, kind = len(plan.specs), _alignment(plan), plan.specs[0].kind
    leaves, state = split.graph.leaves, leaf_state(plan.cuts)
    weight_leaves = [leaf for leaf in leaves if leaf.role is Role.WEIGHT]
    weights = plan_weights(weight_leaves, plan.cuts.weights, n_devices, kind=kind, alignment=alignment)
    kept = [leaf for leaf in leaves if leaf.role is Role.CACHE and leaf.name.startswith("cache_")]
    tables = sum(leaf.n_bytes for leaf in leaves if leaf.role is Role.CACHE) - sum(leaf.n_bytes for leaf in kept)
    placement = plan_cache([(k.name, k.dtype, k.shape[0], k.shape[1], state(k)) for k in kept], n_devices, alignment).placement
    resident = tuple((placement.simple_bytes(j) if kept else 0) + tables for j in range(n_devices))
    host = sum(leaf.n_bytes for leaf in leaves if leaf.role is Role.HOST)
    return MemoryNeeds(weights.n_bytes, resident, tuple(workspace), host, placement)


# ---- transport -------------------------------------------------------------------------------------------------------------------------


def _delivered_cells(config: ModelConfig, shape: CacheShape, layer: int, context: int) -> int:
    """Of a step after `context` tokens: its own row is read too."""
    delivered = bucket_cells(context + 1)
    return min(delivered, shape.n_window_cells) if config.windows[layer] else delivered


def _plan_transport(
    plan: LoadPlan, config: ModelConfig, deliveries: Sequence[Delivery], context: int, facts: tuple[list[DeviceFacts], Ring | None]
) -> TransportPlan | None:
    """The plan of the graph that serves a step of this context."""
    if not deliveries or plan.host_cache is None:
        return None
    options = plan.host_cache.transport

    def planned(shape_of: Callable[[Window, WindowShape], WindowShape]) -> TransportPlan:
        now = []
        for delivery in deliveries:
            window = Window((0,), _delivered_cells(config, plan.cache_shape, delivery.layer, context))
            shape = shape_of(window, full_window(plan.cache_shape, bool(config.windows[delivery.layer])))
            now.append(replace(delivery, n_cells_now=shape.n_cells, n_streams=shape.n_streams))
        return plan_transport(now, facts[0], _alignment(plan), options, facts[1])

    roomy = planned(lambda window, full: choose_window_shape(window, full, None))
    if not roomy.is_too_large:
        return roomy
    tight = planned(tight_window_shape)  # as a context does where there is no room to grow into
    return roomy if tight.is_too_large else tight


def _facts(
    plan: LoadPlan, names: Sequence[str], memory: MemoryNeeds, ring: Ring | None, free_bytes: int | None
) -> tuple[list[DeviceFacts], Ring | None]:
    """What is free beside weights, cache and the ring that is held; CPU devices without a limit share the machine's memory."""
    used = [memory.weights[j] + memory.cache[j] + (ring.ring_bytes[j] if ring else 0) for j in range(len(names))]
    facts = []
    for j, (name, spec) in enumerate(zip(names, plan.specs, strict=True)):
        free = None if free_bytes is None or spec.kind != "cpu" else max(0, free_bytes - sum(used))
        if spec.memory_limit is not None:
            free = spec.memory_limit - used[j]
        facts.append(DeviceFacts(name, free, has_async_copies=spec.has_async_copies))
    return facts, ring


# ---- times -----------------------------------------------------------------------------------------------------------------------------


def _busy_seconds(n_bytes: int, link: Link, speeds: DeviceSpeeds) -> float:
    """What K and V of a layer take of a core on their way: all of it while they are copied, half of it while a simulated link is awaited.

    (Who awaits a time without sleeping yields the core again and again: two threads then have half of it each.)
    """
    part = n_bytes / 2
    linked, own = part / float(link.bytes_per_second), part / speeds.copies
    awake = linked if linked <= 2 * _AWAKE_SECONDS else _AWAKE_SECONDS
    return 2 * (own + max(0.0, awake - own) / 2)


def _taken_from_computing(plan: LoadPlan, copies: Sequence[Mapping[int, float]], n_cores: int | None) -> list[dict[int, float]]:
    """Of the seconds in which a device's copies keep a core busy, by layer: those that its compute threads lack when copies overlap.

    On a CPU somebody's core moves the bytes. With a core for every thread nothing is taken; without any to spare, all of it.
    """
    n_transfer, n_compute = len(plan.specs), sum(plan.n_threads)
    missing = 0.0 if n_cores is None else min(1.0, max(0.0, (n_compute + n_transfer - n_cores) / n_transfer))
    return [{layer: missing * seconds for layer, seconds in own.items()} for own in copies]


def _predict(
    loads: Sequence[DeviceLoad], depth: int, transport: TransportPlan | None, taken: Sequence[Mapping[int, float]]
) -> StepPrediction:
    """Both paths. The pipelined one with what copies take from computing where cores are shared."""
    times = predict_step(loads, depth)
    if transport is None:
        return times
    busy = [
        replace(load, segments=tuple((first + more, *rest) for (first, *rest), more in zip(load.segments, extra.values(), strict=True)))
        for load, extra in zip(loads, taken, strict=True)
    ]
    return replace(times, pipelined=step_bound_devices(busy, depth).step)
