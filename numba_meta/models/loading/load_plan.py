"""What a load decides before any memory is taken: options checked against the model; cuts, cache and threads. Pure."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from numba_meta import dtypes
from numba_meta.arguments import file_path
from numba_meta.devices.parse import DeviceSpec
from numba_meta.dtypes import DType
from numba_meta.errors import UsageError, counted
from numba_meta.models.architectures.config import ModelConfig
from numba_meta.models.architectures.description import ModelDescription
from numba_meta.models.cache.cells import CacheShape, plan_cache_shape
from numba_meta.models.cache.transport import HostCacheOptions
from numba_meta.models.running.ranks import parse_rank_devices
from numba_meta.models.running.step_shape import SMALL_ROWS
from numba_meta.schedule.ranks import device_ranges
from numba_meta.schedule.transport_plan import TransportOptions
from numba_meta.split.cut import parse_tensor_split
from numba_meta.split.policy import CutPlan, plan_cuts

MAX_DEVICES = 64  # as many as ranks: planning takes the square of their number
Chosen = TypeVar("Chosen", int, bool)


@dataclass(frozen=True)
class LoadOptions:
    """What a user may choose; see `numba_meta.load`. None: the usual; what says how a cache in host memory travels belongs to one alone."""

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
    kv_pipeline_depth: int | None = None
    kv_pipeline_budget: int | None = None
    kv_pipeline_headroom: int | None = None
    kv_ring_by_share: bool | None = None
    kv_gpu_layers: int | None = None
    kv_cpu_pinned: bool | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        """Numpy's numbers and switches are Python's, here and wherever they are compared, told or written from here."""
        for name, value in vars(self).items():
            if isinstance(value, np.integer | np.bool_):
                object.__setattr__(self, name, value.item())


@dataclass(frozen=True)
class LoadPlan:
    """The decisions of a load, for the devices of one process.

    `rank_devices[r]`: the numbers of rank r's devices among those of all. `ubatch_size`: tokens of a step at most. `few_rows_apart`: up
    to SMALL_ROWS rows are never computed by a step that has room for more, since a GPU computes that one on tensor cores, whose bits
    differ. Both are the same on all ranks, which take each step together.
    """

    specs: tuple[DeviceSpec, ...]
    n_threads: tuple[int, ...]
    cuts: CutPlan
    cache_shape: CacheShape
    cache_types: tuple[DType, DType]
    host_cache: HostCacheOptions | None
    rank_devices: tuple[range, ...]
    ubatch_size: int
    few_rows_apart: bool


def check_options(options: LoadOptions, n_ranks: int = 1) -> None:
    """Raises `UsageError` for what is impossible whatever the model: before one is fetched, and its header read."""
    _check_numbers(options)
    n_devices = sum(map(len, plan_devices(options.devices, n_ranks)))
    parse_tensor_split(options.tensor_split, n_devices)
    known_cache_type("cache_type_k", options.cache_type_k)
    known_cache_type("cache_type_v", options.cache_type_v)
    choose_host_cache(options, _NUMBERS["kv_gpu_layers"][1])
    if options.ctx_size is not None:
        plan_cache_shape(options.ctx_size, options.parallel, options.kv_unified, 0, options.ubatch_size)


def plan_load(model: ModelDescription, options: LoadOptions, rank: int = 0, n_ranks: int = 1) -> LoadPlan:
    """Checks the options against the model and decides cuts, cache and threads. Raises `UsageError`."""
    _check_numbers(options)
    config = model.config
    by_rank = plan_devices(options.devices, n_ranks)
    specs, rank_devices = by_rank[rank], device_ranges([len(each) for each in by_rank])
    cache_types = (
        choose_cache_type("cache_type_k", options.cache_type_k, config, options.exact),
        choose_cache_type("cache_type_v", options.cache_type_v, config, options.exact),
    )
    ctx_size = options.ctx_size or config.context_length
    host_cache = choose_host_cache(options, config.shape.n_layer)
    shape = plan_cache_shape(ctx_size, options.parallel, options.kv_unified, config.window, options.ubatch_size, host_cache is not None)
    proportions = parse_tensor_split(options.tensor_split, rank_devices[-1].stop)
    family, sizes = model.architecture.family, config.layer_shapes
    cuts = plan_cuts(family, config.shape, model.tensors, proportions, cache_types, options.deterministic, sizes)
    few_rows_apart = any(spec.kind == "cuda" for specs in by_rank for spec in specs)
    ubatch_size = options.ubatch_size
    if options.deterministic and not options.exact and few_rows_apart:
        ubatch_size = min(ubatch_size, SMALL_ROWS)
    n_threads = choose_threads(options.threads, len(specs)) if specs[0].kind == "cpu" else (1,) * len(specs)  # a GPU counts as one
    return LoadPlan(specs, n_threads, cuts, shape, cache_types, host_cache, rank_devices, ubatch_size, few_rows_apart)


def plan_devices(devices: str | Sequence[str], n_ranks: int = 1) -> tuple[tuple[DeviceSpec, ...], ...]:
    """The devices of every rank, those of one rank all of one kind; nothing is opened. Raises `UsageError`."""
    by_rank = parse_rank_devices(devices, n_ranks)
    if (n_devices := sum(map(len, by_rank))) > MAX_DEVICES:
        raise UsageError(f"{n_devices} devices are too many for one model; expected at most {MAX_DEVICES}")
    for specs in by_rank:
        for spec in specs:
            if spec.kind == "cpu" and spec.index:
                raise UsageError(f"device {spec.name} is not there: this machine's CPU is cpu:0; name it several times for several devices")
        kinds = list(dict.fromkeys(spec.kind for spec in specs))
        if len(kinds) > 1:
            names = ",".join(spec.name for spec in specs)
            lists = ";".join(",".join(spec.name for spec in specs if spec.kind == kind) for kind in kinds)
            raise UsageError(
                f"devices {names} are of several kinds in one process; expected CPU devices alone, CUDA devices alone, or a rank for each "
                f'kind, as in: numba-meta launch -n {len(kinds)} -- ... --device "{lists}"'
            )
    return by_rank


def check_call(name_or_path: object, progress: object, ranks: object) -> None:
    """Raises `UsageError` for arguments of `numba_meta.load` that are no options and of a type that cannot be."""
    file_path("a model is loaded from", name_or_path)
    if progress is not None and not callable(progress):
        raise UsageError(f"progress {progress!r:.60} is impossible; expected a function of (what, done, total), or None")
    if ranks is not None and not (hasattr(ranks, "size") and hasattr(ranks, "world")):
        raise UsageError(f"ranks {ranks!r:.60} is impossible; expected what numba_meta.comm.failure.ranks() gives, or None")


def beyond_training(config: ModelConfig, shape: CacheShape) -> str | None:
    """A line where the context holds more than the model was trained with, for each of its sequences; None where it does not."""
    n_sharing, trained = shape.n_sequences if shape.unified else 1, config.context_length
    if shape.n_positions <= n_sharing * trained:
        return None
    most = trained * shape.n_sequences
    return (
        f"a context of {shape.n_cells} tokens is longer than what the model was trained with ({trained}"
        + (f" for each of {shape.n_sequences} sequences" if shape.n_sequences > 1 else "")
        + f"): text beyond that will be poor; at most {most} serve well"
    )


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


_HOST_CACHE = ("kv_pipeline_depth", "kv_pipeline_budget", "kv_pipeline_headroom", "kv_ring_by_share", "kv_gpu_layers", "kv_cpu_pinned")
_MAY_BE_LEFT_OUT = ("ctx_size", "threads", *_HOST_CACHE)


def _check_numbers(options: LoadOptions) -> None:
    for name, (least, most) in _NUMBERS.items():
        value = getattr(options, name)
        if value is None and name in _MAY_BE_LEFT_OUT:
            continue
        if type(value) is not int or not least <= value <= most:
            raise UsageError(f"{name} {value!r:.60} is impossible; expected a whole number from {least} to {most}")
    for name in ("kv_unified", "exact", "kv_ring_by_share", "kv_cpu_pinned", "deterministic"):
        value = getattr(options, name)
        if type(value) is not bool and not (value is None and name in _MAY_BE_LEFT_OUT):
            raise UsageError(f"{name} {value!r:.60} is impossible; expected True or False")
    devices = options.devices
    if not isinstance(devices, str) and not (isinstance(devices, Sequence) and all(isinstance(name, str) for name in devices)):
        raise UsageError(f"devices {devices!r:.60} is impossible; expected names as in 'cpu:0,cpu:0'")


def choose_host_cache(options: LoadOptions, n_layers: int) -> HostCacheOptions | None:
    """How a cache in host memory is transported; None for one on the devices, where an option that says how is refused."""
    if not isinstance(options.kv, str) or options.kv not in ("device", "host"):
        raise UsageError(f"kv {options.kv!r:.60} is unknown; expected device or host")
    given = [name for name in _HOST_CACHE if getattr(options, name) is not None]
    if options.kv == "device":
        if given:
            raise UsageError(f"{given[0]} says how a KV cache in host memory is delivered, and this one is on the devices; add kv='host'")
        return None
    usual, usual_transport = HostCacheOptions(), TransportOptions()
    n_device_layers = _chosen(options.kv_gpu_layers, usual.n_device_layers)
    if n_device_layers > n_layers:
        raise UsageError(f"kv_gpu_layers {n_device_layers} is impossible: the model has {counted(n_layers, 'layer')}; use 0 to {n_layers}")
    transport = TransportOptions(
        _chosen(options.kv_pipeline_depth, usual_transport.depth),
        _chosen(options.kv_pipeline_budget, usual_transport.budget_mib),
        _chosen(options.kv_pipeline_headroom, usual_transport.headroom_mib),
        _chosen(options.kv_ring_by_share, usual_transport.by_share),
    )
    return HostCacheOptions(n_device_layers, _chosen(options.kv_cpu_pinned, usual.pinned), transport)


def _chosen(given: Chosen | None, usual: Chosen) -> Chosen:
    return usual if given is None else given


def choose_cache_type(option: str, name: str | None, config: ModelConfig, exact: bool) -> DType:
    """The type of K or V in the cache: f16, or f32 in exact mode, unless told otherwise."""
    dtype = known_cache_type(option, name) or (dtypes.F32 if exact else dtypes.F16)
    head_dim = config.shape.head_dim_k if option.endswith("k") else config.shape.head_dim_v
    if head_dim % dtype.block_size:
        raise UsageError(f"{option} {dtype.name} does not fit heads of {head_dim} elements: its blocks have {dtype.block_size}; use f16")
    return dtype


def known_cache_type(option: str, name: str | None) -> DType | None:
    """The type of that name; None for none."""
    known = {t.name: t for t in dtypes.CACHE_TYPES}
    if name is not None and str(name).lower() not in known:
        raise UsageError(f"{option} {str(name) or repr(name):.60} is unknown; use one of {', '.join(known)}")
    return None if name is None else known[str(name).lower()]


def choose_threads(threads: int | None, n_devices: int) -> tuple[int, ...]:
    """Threads per device: the cores that this process may use, or `threads`, divided; every device has at least one."""
    total = threads or available_cores()
    return tuple(max(1, total * (j + 1) // n_devices - total * j // n_devices) for j in range(n_devices))


def available_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
