"""What was decided when a model was loaded, as data: cuts, shares, memory, threads."""

from __future__ import annotations

from dataclasses import dataclass


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
        from numba_meta.inspect.tables import plan_table

        return plan_table(self)

    def _repr_html_(self) -> str:
        from numba_meta.inspect.tables import plan_html

        return plan_html(self)

    def __repr__(self) -> str:
        return self.table()
