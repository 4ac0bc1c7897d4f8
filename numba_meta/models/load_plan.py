"""What a load decides before any memory is taken: options checked against the model; cuts, cache and threads. Pure."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from numba_meta import dtypes
from numba_meta.devices.parse import DeviceSpec
from numba_meta.dtypes import DType
from numba_meta.errors import UsageError
from numba_meta.models.config import ModelConfig
from numba_meta.models.kv_cache import CacheShape, plan_cache_shape
from numba_meta.models.ranks import parse_rank_devices
from numba_meta.models.transport import HostCacheOptions
from numba_meta.schedule.ranks import device_ranges
from numba_meta.schedule.transport_plan import TransportOptions
from numba_meta.split.cut import parse_tensor_split
from numba_meta.split.policy import CutPlan, plan_cuts
from numba_meta.split.rules import TensorFacts


@dataclass(frozen=True)
class LoadOptions:
    """What a user may choose; see `numba_meta.load`."""

    devices: str | Sequence[str] = "cpu:0"
    tensor_split: str | Sequence[float] | None = None
    cache_type_k: str | None = None
    cache_type_v: str | None = None
    ctx_size: int | None = None
    ubatch_size: int = 512
    kv_unified: bool = True
    parallel: int = 1
    exact: bool = False
    threads: int | None = None
    kv: str = "device"
    kv_pipeline_depth: int = 1
    kv_pipeline_budget: int = 128
    kv_pipeline_headroom: int = 512
    kv_ring_by_share: bool = True
    kv_gpu_layers: int = 0
    kv_cpu_pinned: bool = True
    deterministic: bool = False


@dataclass(frozen=True)
class LoadPlan:
    """The decisions of a load, for the devices of one process. `rank_devices[r]`: the numbers of rank r's devices among those of all."""

    specs: tuple[DeviceSpec, ...]
    n_threads: tuple[int, ...]
    cuts: CutPlan
    cache_shape: CacheShape
    cache_types: tuple[DType, DType]
    host_cache: HostCacheOptions | None
    rank_devices: tuple[range, ...]


def plan_load(config: ModelConfig, tensors: dict[str, TensorFacts], options: LoadOptions, rank: int = 0, n_ranks: int = 1) -> LoadPlan:
    """Checks the options against the model and decides cuts, cache and threads. Raises `UsageError`."""
    _check_numbers(options)
    by_rank = parse_rank_devices(options.devices, n_ranks)
    specs, rank_devices = by_rank[rank], device_ranges([len(each) for each in by_rank])
    for spec in specs:
        if spec.kind == "cpu" and spec.index:
            raise UsageError(f"device {spec.name} is not there: this machine's CPU is cpu:0; name it several times for several devices")
    cache_types = (
        choose_cache_type("cache_type_k", options.cache_type_k, config, options.exact),
        choose_cache_type("cache_type_v", options.cache_type_v, config, options.exact),
    )
    ctx_size = options.ctx_size or config.context_length
    host_cache = choose_host_cache(options)
    shape = plan_cache_shape(ctx_size, options.parallel, options.kv_unified, config.window, options.ubatch_size, host_cache is not None)
    proportions = parse_tensor_split(options.tensor_split, rank_devices[-1].stop)
    cuts = plan_cuts(config.architecture, config.shape, tensors, proportions, cache_types, options.deterministic)
    return LoadPlan(specs, choose_threads(options.threads, len(specs)), cuts, shape, cache_types, host_cache, rank_devices)


_NUMBERS = {
    "ctx_size": (1, 1 << 31),
    "ubatch_size": (1, 1 << 31),
    "parallel": (1, 1 << 16),
    "threads": (1, 4096),
    "kv_pipeline_depth": (0, 64),
    "kv_pipeline_budget": (0, 65536),
    "kv_pipeline_headroom": (0, 1 << 31),
    "kv_gpu_layers": (0, 1 << 31),
}


def _check_numbers(options: LoadOptions) -> None:
    for name, (least, most) in _NUMBERS.items():
        value = getattr(options, name)
        if value is None and name in ("ctx_size", "threads"):
            continue
        if type(value) is not int or not least <= value <= most:
            raise UsageError(f"{name} {value!r} is impossible; expected a whole number from {least} to {most}")
    for name in ("kv_unified", "exact", "kv_ring_by_share", "kv_cpu_pinned", "deterministic"):
        if type(getattr(options, name)) is not bool:
            raise UsageError(f"{name} {getattr(options, name)!r} is impossible; expected True or False")
    if not isinstance(options.devices, (str, Sequence)):
        raise UsageError(f"devices {options.devices!r} is impossible; expected names as in 'cpu:0,cpu:0'")


def choose_host_cache(options: LoadOptions) -> HostCacheOptions | None:
    """How a cache in host memory is transported; None for one on the devices."""
    if options.kv not in ("device", "host"):
        raise UsageError(f"kv {options.kv!r} is unknown; expected device or host")
    transport = TransportOptions(
        options.kv_pipeline_depth, options.kv_pipeline_budget, options.kv_pipeline_headroom, options.kv_ring_by_share
    )
    return HostCacheOptions(options.kv_gpu_layers, options.kv_cpu_pinned, transport) if options.kv == "host" else None


def choose_cache_type(option: str, name: str | None, config: ModelConfig, exact: bool) -> DType:
    """The type of K or V in the cache: f16, or f32 in exact mode, unless told otherwise."""
    known = {t.name: t for t in dtypes.CACHE_TYPES}
    dtype = known.get(str(name or ("f32" if exact else "f16")).lower())
    if dtype is None:
        raise UsageError(f"{option} {name} is unknown; use one of {', '.join(known)}")
    head_dim = config.shape.head_dim_k if option.endswith("k") else config.shape.head_dim_v
    if head_dim % dtype.block_size:
        raise UsageError(f"{option} {dtype.name} does not fit heads of {head_dim} elements: its blocks have {dtype.block_size}; use f16")
    return dtype


def choose_threads(threads: int | None, n_devices: int) -> tuple[int, ...]:
    """Threads per device: the cores that this process may use, or `threads`, divided; every device has at least one."""
    total = threads or available_cores()
    return tuple(max(1, total * (j + 1) // n_devices - total * j // n_devices) for j in range(n_devices))


def available_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
