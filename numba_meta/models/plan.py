"""What was decided when a model was loaded, as data: cuts, shares, memory, threads."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from numba_meta.devices.parse import format_bytes
from numba_meta.errors import counted
from numba_meta.tables import html_table, text_table

_HEADER = ("device", "threads", "weights", "KV cache", "KV share", "workspace")


@dataclass(frozen=True)
class DeviceFacts:
    """One simple device of a loaded model; sizes in bytes. `kv_share` is its share of the KV cache, in 1/65536."""

    name: str
    n_threads: int
    weight_bytes: int
    cache_bytes: int
    kv_share: int
    workspace_bytes: dict[str, int]  # by kind of step: "decode", "batch", "prompt"; what exists so far


@dataclass(frozen=True, repr=False)
class ModelPlan:
    """The decisions for a loaded model. `cuts` has one line per group of tensors that are cut alike.

    `host_cache_bytes` of the KV cache lie in host memory; then the first `n_device_layers` layers have theirs on the devices (None: all).
    Over ranks `devices` are this rank's.
    """

    model: str
    architecture: str
    isa: str
    exact: bool
    cache_types: tuple[str, str]
    n_cells: int
    n_window_cells: int
    n_sequences: int
    collectives_per_step: int
    cuts: tuple[str, ...]
    devices: tuple[DeviceFacts, ...]
    host_cache_bytes: int = 0
    n_device_layers: int | None = None
    devices_of_ranks: tuple[int, ...] = ()  # how many each rank has; empty in a process that works alone

    def table(self) -> str:
        """All of it as text, for a terminal."""
        return "\n".join([*_facts(self), text_table(_HEADER, _device_rows(self))])

    def _repr_html_(self) -> str:
        lines = "<br>".join(escape(line) for line in _facts(self))
        return f"<p>{lines}</p>{html_table(_HEADER, _device_rows(self))}"

    def __repr__(self) -> str:
        return self.table()


def _facts(plan: ModelPlan) -> list[str]:
    """The lines above the table of devices."""
    window = f", {plan.n_window_cells} cells per sequence in layers with a sliding window" if plan.n_window_cells else ""
    place = cache_place(plan.n_device_layers, plan.host_cache_bytes)
    arithmetic = "float32 activations (exact)" if plan.exact else "8-bit activations"
    return [
        f"{plan.model}: {plan.architecture}, {arithmetic}, kernels for {plan.isa}",
        f"{place}: {plan.n_cells} cells for {counted(plan.n_sequences, 'sequence')}, {'/'.join(plan.cache_types)}{window}",
        f"{counted(plan.collectives_per_step, 'meeting')} of {_who_meets(plan)} per step",
        *plan.cuts,
    ]


def cache_place(n_device_layers: int | None, host_bytes: int) -> str:
    """`KV cache on the device`, or `KV cache in the host (180.0 MiB), of the first 2 layers on the device`."""
    if n_device_layers is None:
        return "KV cache on the device"
    first = f", of the first {counted(n_device_layers, 'layer')} on the device" if n_device_layers else ""
    return f"KV cache in the host ({format_bytes(host_bytes)}){first}"


def _who_meets(plan: ModelPlan) -> str:
    if not plan.devices_of_ranks:
        return counted(len(plan.devices), "device")
    return f"{counted(sum(plan.devices_of_ranks), 'device')} in {counted(len(plan.devices_of_ranks), 'rank')}"


def _device_rows(plan: ModelPlan) -> list[list[str]]:
    """One row per device, under the header of the table."""
    return [
        [
            d.name,
            str(d.n_threads),
            format_bytes(d.weight_bytes),
            format_bytes(d.cache_bytes),
            f"{d.kv_share / 65536:.3f}",
            ", ".join(f"{kind} {format_bytes(n)}" for kind, n in d.workspace_bytes.items()) or "none yet",
        ]
        for d in plan.devices
    ]
