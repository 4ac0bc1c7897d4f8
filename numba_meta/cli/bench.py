"""`numba-meta bench`: prompt and generation speed of one model in several configurations, measured in turns (A/B/A/B)."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any

import click

from numba_meta import __version__
from numba_meta.cli.machine import cpu_name
from numba_meta.cli.options import BATCH_OPTIONS, RING_OPTIONS, LoadOptions, cache_types, counts, listed, places, with_options
from numba_meta.cli.session import (
    HOST_CACHE_ARGUMENTS,
    bench_ids,
    check_load,
    current_launch,
    generation_speed,
    is_rehearsal,
    open_model,
    prompt_speed,
)
from numba_meta.cli.terminal import Progress, table
from numba_meta.devices.parse import format_bytes
from numba_meta.errors import counted

if TYPE_CHECKING:
    from numba_meta.models.model import Model


@dataclass(frozen=True)
class Workload:
    """What is measured: `n_prompt` tokens from an empty cache, or `n_generated` tokens after a context of `depth`."""

    n_prompt: int = 0
    n_generated: int = 0
    depth: int = 0

    @property
    def label(self) -> str:
        """`prompt 512`, `generate 128 at 4096`."""
        return f"prompt {self.n_prompt}" if self.n_prompt else f"generate {self.n_generated} at {self.depth}"

    @property
    def n_cells(self) -> int:
        """Cells of the KV cache that it fills; a generation starts from one token at least."""
        return max(self.n_prompt, max(1, self.depth) + self.n_generated) + 1


@dataclass(frozen=True)
class Result:
    """The speeds of one workload in one configuration: tokens per second, one per turn. `transport`: of its last step."""

    configuration: str
    workload: Workload
    speeds: tuple[float, ...]
    transport: dict[str, Any] = field(default_factory=lambda: {"path": "device", "early_bytes": (), "late_bytes": (), "ring_bytes": ()})

    @property
    def median(self) -> float:
        """The middle turn."""
        return median(self.speeds)

    @property
    def spread(self) -> tuple[float, float]:
        """The slowest and the fastest turn."""
        return min(self.speeds), max(self.speeds)


LIST_OPTIONS = (
    click.option(
        "-dev", "--device", "devices", multiple=True, default=("cpu:0",), metavar="LIST",
        help="Devices of a configuration: cpu:0, cpu:0,cpu:0, cuda:0, cuda:0,cuda:1; may be given again.  [default: cpu:0]",
    ),
    click.option("-ts", "--tensor-split", "splits", multiple=True, metavar="W,…", help="A split; may be given again."),
    listed("-t", "--threads", read=counts(1), metavar="N,…", help="Numbers of CPU threads.  [default: all cores]"),
    listed("-ctk", "--cache-type-k", read=cache_types, metavar="TYPE,…", help="Types of the cached keys."),
    listed("-ctv", "--cache-type-v", read=cache_types, metavar="TYPE,…", help="Types of the cached values.  [default: as the keys]"),
    listed("-p", "--n-prompt", read=counts(0), metavar="N,…", default="512", help="Lengths of prompts; 0: none."),
    click.option(
        "-n", "--n-gen", type=click.IntRange(min=0), metavar="N", default=64, show_default=True, help="Tokens to generate; 0: none."
    ),
    listed("-d", "--n-depth", read=counts(0), metavar="N,…", default="0", help="Contexts before a generation."),
    listed(
        "-nkvo", "--no-kv-offload", "host_places", read=places, default="0", metavar="0|1,…",
        help="1: the KV cache in host memory; 0,1: both.",
    ),
    listed(
        "--kv-pipeline-depth", "pipeline_depths", read=counts(0), metavar="N,…",
        help="Of a cache in the host: layers delivered ahead; 0: ordered.  [default: 0,1]",
    ),
    click.option("-r", "--repetitions", type=click.IntRange(min=1), metavar="N", default=5, show_default=True, help="Turns."),
    click.option("-o", "--output", type=click.Choice(["table", "md", "json"]), default="table", show_default=True),
)  # fmt: skip


@click.command(short_help="Measure prompt and generation speed.")
@click.argument("model")
@with_options(*LIST_OPTIONS, *RING_OPTIONS, *BATCH_OPTIONS)
def bench(
    model: str,
    devices: tuple[str, ...],
    splits: tuple[str, ...],
    threads: tuple[int, ...] | None,
    cache_type_k: tuple[str, ...] | None,
    cache_type_v: tuple[str, ...] | None,
    n_prompt: tuple[int, ...],
    n_gen: int,
    n_depth: tuple[int, ...],
    host_places: tuple[bool, ...],
    pipeline_depths: tuple[int, ...] | None,
    repetitions: int,
    output: str,
    **load_values: Any,
) -> None:
    """Measure how fast MODEL processes prompts and generates, in tokens per second.

    Every combination of the listed devices, splits, threads, cache types, places of the cache and pipeline depths is one
    configuration. All are loaded at once and take turns, so that a busy spell of the machine meets all of them; the first turn is not
    counted. The table gives medians, the slowest and fastest turn, and what a step delivers early (ahead) and late (in order).

    \b
    Examples:
      numba-meta bench smollm2
      numba-meta bench smollm2 --device cpu:0 --device cpu:0,cpu:0 -p 128,512 -d 0,1024
      numba-meta bench smollm2 -nkvo 1 --device "cpu:0?link=5.3,cpu:0?link=2.7" -p 0 -d 512,2048,4096
      numba-meta bench gemma3 --cache-type-k f16,q8_0 --output md
    """
    workloads = plan_workloads(n_prompt, n_gen, n_depth)
    if not workloads:
        raise click.UsageError("Nothing to measure: both --n-prompt and --n-gen are 0.")
    if pipeline_depths is not None and True not in host_places:
        raise click.UsageError("--kv-pipeline-depth says how a KV cache in host memory is delivered; add --no-kv-offload 1.")
    n_cells = max(workload.n_cells for workload in workloads)
    base = LoadOptions(ctx_size=n_cells, **load_values)
    where = plan_places(host_places, pipeline_depths or (0, 1))
    configurations = plan_configurations(base, devices, splits, threads, cache_type_k, cache_type_v, where)
    for load in configurations.values():
        check_load(load)
    if not is_rehearsal():
        check_devices(devices)
    progress = Progress()
    with contextlib.ExitStack() as stack:
        models = {
            name: stack.enter_context(open_model(model, load, 1, progress, needs_text=False)) for name, load in configurations.items()
        }
        results = take_turns(models, workloads, repetitions, progress)
    progress.clear()
    click.echo(as_json(model, results) if output == "json" else as_table(results, markdown=output == "md"))


def check_devices(lists: Sequence[str]) -> None:
    """Raises what a load on one of these lists of devices would; the loads before it may compile for a minute."""
    from numba_meta.devices.meta import MetaDevice
    from numba_meta.models.loading.load_plan import plan_devices

    launch = current_launch()
    rank, n_ranks = (launch.rank, launch.size) if launch else (0, 1)
    planned = [plan_devices(devices, n_ranks)[rank] for devices in lists]
    for specs in planned:
        MetaDevice.open(specs, (1,) * len(specs)).close()


def plan_workloads(n_prompt: Sequence[int], n_gen: int, n_depth: Sequence[int]) -> list[Workload]:
    """One workload per length of prompt, and one per depth if tokens are generated."""
    prompts = [Workload(n_prompt=n) for n in dict.fromkeys(n_prompt) if n]
    return prompts + [Workload(n_generated=n_gen, depth=depth) for depth in dict.fromkeys(n_depth) if n_gen]


def plan_configurations(
    base: LoadOptions,
    devices: Sequence[str],
    splits: Sequence[str],
    threads: Sequence[int] | None,
    cache_type_k: Sequence[str] | None,
    cache_type_v: Sequence[str] | None,
    places: Sequence[tuple[str, dict[str, Any]]] = (("", {}),),
) -> dict[str, LoadOptions]:
    """Every combination, by a name that says what it is; V has the type of K unless types for V are listed."""
    configurations = {}
    lists = (devices, splits or (None,), threads or (None,), cache_type_k or (None,), cache_type_v or (None,))
    for (device, split, n, k, v), (place, where) in itertools.product(itertools.product(*lists), places):
        load = replace(base, devices=device, tensor_split=split, threads=n, cache_type_k=k, cache_type_v=v or k, **where)
        parts = [device]
        parts += [f"split {split}"] if split else []
        parts += [f"{n} threads"] if n else []
        parts += [f"cache {load.cache_type_k or 'default'}/{load.cache_type_v or 'default'}"] if k or v else []
        parts += [place] if place else []
        configurations["  ".join(parts)] = load
    return configurations


def plan_places(places: Sequence[bool], pipeline_depths: Sequence[int]) -> list[tuple[str, dict[str, Any]]]:
    """Where the cache lies and how far ahead it is delivered: a name (none for the devices alone) and the options of each."""
    found: list[tuple[str, dict[str, Any]]] = []
    for in_host in dict.fromkeys(places):
        if not in_host:
            others = dict.fromkeys(HOST_CACHE_ARGUMENTS) if True in places else {}  # without any they are refused
            found.append(("cache on the device" if True in places else "", others))
            continue
        for depth in dict.fromkeys(pipeline_depths):
            found.append((f"host cache, depth {depth}", {"no_kv_offload": True, "kv_pipeline_depth": depth}))
    return found


def take_turns(models: dict[str, Model], workloads: Sequence[Workload], repetitions: int, progress: Progress) -> list[Result]:
    """Measure each workload in all configurations, one after the other, `repetitions` times after a turn that is not counted."""
    results: list[Result] = []
    total, done = (repetitions + 1) * len(workloads) * len(models), 0
    for workload in workloads:
        speeds: dict[str, list[float]] = {name: [] for name in models}
        for turn in range(repetitions + 1):
            for name, measured in speeds.items():
                speed = measure(models[name], workload)
                if turn:
                    measured.append(speed)
                done += 1
                progress("measuring", done, total)
        measured_now = [Result(name, workload, tuple(measured), transport_of(models[name])) for name, measured in speeds.items()]
        results += measured_now
        medians = " / ".join(f"{result.median:.1f}" for result in measured_now)
        progress.milestone(f"{workload.label}: {medians} t/s ({len(results) // len(models)} of {counted(len(workloads), 'workload')} done)")
    return results


def transport_of(model: Model) -> dict[str, Any]:
    """What the latest step delivered and how: path, reason, bytes per device."""
    stats = model.transport.stats
    return {key: stats[key] for key in ("path", "reason", "early_bytes", "late_bytes", "ring_bytes")}


def measure(model: Model, workload: Workload) -> float:
    """Tokens per second of one run of `workload`."""
    if workload.n_prompt:
        return prompt_speed(model, bench_ids(model, workload.n_prompt))
    return generation_speed(model, bench_ids(model, max(1, workload.depth)), workload.n_generated)


def as_table(results: Sequence[Result], markdown: bool) -> str:
    """Medians with the slowest and fastest turn, in tokens per second; with a cache in the host also its path and bytes of a step."""
    header = ["configuration", "workload", "t/s", "slowest to fastest"]
    rows = [[r.configuration, r.workload.label, f"{r.median:.1f}", f"{r.spread[0]:.1f} to {r.spread[1]:.1f}"] for r in results]
    if any(r.transport["path"] != "device" for r in results):
        header += ["path", "early", "late"]
        for row, r in zip(rows, results, strict=True):
            row += [r.transport["path"], format_bytes(sum(r.transport["early_bytes"])), format_bytes(sum(r.transport["late_bytes"]))]
    return table(header, rows, markdown)


def as_json(model: str, results: Sequence[Result]) -> str:
    """The same with every turn, and what it was measured on."""
    entries = [
        {"configuration": r.configuration, **asdict(r.workload), "median": r.median, "turns": r.speeds, "transport": r.transport}
        for r in results
    ]
    data = {"model": model, "version": __version__, "cpu": cpu_name(), "unit": "tokens/s", "results": entries}
    return json.dumps(data, ensure_ascii=False)
