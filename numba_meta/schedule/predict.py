"""How long each call of a decode step takes on devices of known speeds, for the recursion of `schedule/bound.py`. Pure: nothing is run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from numba_meta.errors import UsageError
from numba_meta.schedule.bound import DeviceLoad
from numba_meta.schedule.calls import Call
from numba_meta.schedule.plan import StepPlan
from numba_meta.schedule.trace import WindowSizes
from numba_meta.schedule.virtual_clock import Link
from numba_meta.schedule.virtual_step import step_loads
from numba_meta.tensor import Role, Tensor


class AttentionKind(NamedTuple):
    """Attention of one token as a device computes it: types of the cache, elements of a head, KV heads, query heads of each."""

    k_type: str
    v_type: str
    head_dim_k: int
    head_dim_v: int
    n_kv_heads: int
    group: int


class WeightKind(NamedTuple):
    """Products with one row of activations: the weight's type, and whether activations are float32."""

    dtype: str
    exact: bool


@dataclass(frozen=True)
class DeviceSpeeds:
    """How fast one device is, in bytes per second and seconds. Measured (`calibrate.py`) or given.

    weights: packed bytes that a product with one row reads. attention: bytes of K and V that a token's attention reads. copies: from memory
    to a slot, by one thread, and what elementwise kernels write. call_seconds: of any call, beside its bytes. meeting_seconds: from the
    last device's arrival until all go on. step_seconds: once a step, for what surrounds it.
    """

    weights: Mapping[WeightKind, float]
    attention: Mapping[AttentionKind, float]
    copies: float
    call_seconds: float = 0.0
    meeting_seconds: float = 0.0
    step_seconds: float = 0.0


@dataclass(frozen=True)
class Needs:
    """The kinds of work of one device in a step, whose speeds must be known."""

    weights: tuple[WeightKind, ...]
    attention: tuple[AttentionKind, ...]


def needs_of(plan: StepPlan) -> tuple[Needs, ...]:
    """What must be known of each device to predict a step."""
    needs = []
    for device in plan.devices:
        weights = dict.fromkeys(weight_kind(call) for call in device.calls if _runs(call, "matmul"))
        attention = dict.fromkeys(attention_kind(call) for call in device.calls if _runs(call, "attention_chunks"))
        needs.append(Needs(tuple(weights), tuple(attention)))
    return tuple(needs)


def weight_kind(call: Call) -> WeightKind:
    """Of a matrix product."""
    (weight,) = _tensors(call, 1)
    return WeightKind(weight.dtype.name, call.kernel is not None and "_exact_" in call.kernel.name)


def attention_kind(call: Call) -> AttentionKind:
    """Of an attention over the cells of a cache."""
    _, k, v = _tensors(call, 3)
    first, group, n_head = call.arguments["first_head"], call.arguments["group"], call.arguments["n_head"]
    n_kv = (first + n_head - 1) // group - first // group + 1
    return AttentionKind(k.dtype.name, v.dtype.name, k.shape[0], v.shape[0], n_kv, -(-n_head // n_kv))


def weight_bytes(call: Call) -> int:
    """Packed bytes that a product reads."""
    from numba_meta.kernels.cpu.packed import packed_bytes

    (weight,) = _tensors(call, 1)
    return packed_bytes(weight.dtype, call.arguments["n_out"], call.arguments["k"])


def attention_bytes(call: Call, n_cells: int) -> int:
    """Bytes of K and V that an attention over so many cells reads."""
    _, k, v = _tensors(call, 3)
    return n_cells * attention_kind(call).n_kv_heads * (k.dtype.row_bytes(k.shape[0]) + v.dtype.row_bytes(v.shape[0]))


def call_seconds(call: Call, attended: Mapping[int, int], speeds: DeviceSpeeds) -> float:
    """One call that computes: what every call costs, and its bytes. `attended[layer]`: cells that the layer's attention reads.

    A collective is given the time of its meeting.
    """
    if _runs(call, "matmul"):
        return speeds.call_seconds + weight_bytes(call) / _known(speeds.weights, weight_kind(call))
    if _runs(call, "attention_chunks"):
        n_bytes = attention_bytes(call, attended[int(call.node.rpartition(".")[2])])
        return speeds.call_seconds + n_bytes / _known(speeds.attention, attention_kind(call))
    meeting = speeds.meeting_seconds if _runs(call, "all_reduce") or _runs(call, "gather_columns") else 0.0
    written = sum(place.n_bytes for place in call.writes if isinstance(place, Tensor) and not _is_cache(place))
    return speeds.call_seconds + meeting + written / speeds.copies


def link_of(bytes_per_second: int, delay_ns: int, speeds: DeviceSpeeds) -> Link:
    """How a device is reached: over its simulated link (0: none), but no faster than memory is copied."""
    return Link(min(bytes_per_second or speeds.copies, speeds.copies), delay_ns / 1e9)


def device_loads(
    plan: StepPlan, attended: Mapping[int, int], windows: WindowSizes, speeds: Sequence[DeviceSpeeds], links: Sequence[Link]
) -> tuple[DeviceLoad, ...]:
    """What each device does in a step of one token, for `predict_step`.

    `plan`: of the ordered path. `windows`: what the step delivers by layer; empty where nothing is delivered. Raises
    `UsageError` for another number of speeds or links than devices.
    """
    if not len(plan.devices) == len(speeds) == len(links):
        raise UsageError(f"{len(plan.devices)} devices with {len(speeds)} speeds and {len(links)} links; expected one of each per device")

    def cost(device: int, call: Call) -> float:
        return call_seconds(call, attended, speeds[device])

    loads = step_loads(plan, cost, links, windows, 1) if windows else tuple(_resident(plan, device, cost) for device in range(len(links)))
    return tuple(
        replace(load, before=(load.before[0] + speed.step_seconds, *load.before[1:])) for load, speed in zip(loads, speeds, strict=True)
    )


def _resident(plan: StepPlan, device: int, cost: Any) -> DeviceLoad:
    """A step that delivers nothing."""
    segments = [0.0]
    for call in plan.devices[device].calls:
        if call.meets:
            segments.append(0.0)
        elif call.kernel is not None:
            segments[-1] += cost(device, call)
    return DeviceLoad((0,), (0,), ((0,),), tuple(segments))


def _known(table: Mapping[Any, float], kind: NamedTuple) -> float:
    if kind not in table:
        raise UsageError(f"no speed is known for {kind}; measure it, or give one for all kinds")
    return table[kind]


def _runs(call: Call, kernel: str) -> bool:
    return call.kernel is not None and call.kernel.name.startswith(kernel)


def _tensors(call: Call, n: int) -> tuple[Tensor, ...]:
    """The first places that a call reads."""
    return tuple(place for place in call.reads[:n] if isinstance(place, Tensor))


def _is_cache(tensor: Tensor) -> bool:
    """Of what is written there a step writes a row."""
    return tensor.storage.op == "deliver" or tensor.storage.role is not Role.NODE
