"""`numba-meta bench`: prompt and generation speed of one model in several configurations, measured in turns (A/B/A/B)."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

import click

from numba_meta import __version__
from numba_meta.cli.machine import cpu_name
from numba_meta.cli.options import BATCH_OPTIONS, LoadOptions, cache_types, counts, with_options
from numba_meta.cli.session import bench_ids, generation_speed, open_model, prompt_speed
from numba_meta.cli.terminal import Progress, table

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
    """The speeds of one workload in one configuration: tokens per second, one per turn."""

    configuration: str
    workload: Workload
    speeds: tuple[float, ...]

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
        help="Devices of a configuration; may be given again.  [default: cpu:0]",
    ),
    click.option("-ts", "--tensor-split", "splits", multiple=True, metavar="W,…", help="A split; may be given again."),
    click.option("-t", "--threads", type=counts(1), metavar="N,…", help="Numbers of CPU threads.  [default: all cores]"),
    click.option("-ctk", "--cache-type-k", type=cache_types, metavar="TYPE,…", help="Types of the cached keys."),
    click.option("-ctv", "--cache-type-v", type=cache_types, metavar="TYPE,…", help="Types of the cached values.  [default: as the keys]"),
    click.option("-p", "--n-prompt", type=counts(0), metavar="N,…", default="512", show_default=True, help="Lengths of prompts; 0: none."),
    click.option(
        "-n", "--n-gen", type=click.IntRange(min=0), metavar="N", default=64, show_default=True, help="Tokens to generate; 0: none."
    ),
    click.option("-d", "--n-depth", type=counts(0), metavar="N,…", default="0", show_default=True, help="Contexts before a generation."),
    click.option("-r", "--repetitions", type=click.IntRange(min=1), metavar="N", default=5, show_default=True, help="Turns."),
    click.option("-o", "--output", type=click.Choice(["table", "md", "json"]), default="table", show_default=True),
)  # fmt: skip


@click.command(short_help="Measure prompt and generation speed.")
@click.argument("model")
@with_options(*LIST_OPTIONS, *BATCH_OPTIONS)
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
    repetitions: int,
    output: str,
    batch_size: int,
    ubatch_size: int,
    exact: bool,
) -> None:
    """Measure how fast MODEL processes prompts and generates, in tokens per second.

    Every combination of the listed devices, splits, threads and cache types is one configuration. All are loaded at once and take
    turns, so that a busy spell of the machine meets all of them; the first turn is not counted. The table gives medians, and the
    slowest and fastest turn.

    \b
    Examples:
      numba-meta bench smollm2
      numba-meta bench smollm2 --device cpu:0 --device cpu:0,cpu:0 -p 128,512 -d 0,1024
      numba-meta bench gemma3 --cache-type-k f16,q8_0 --output md
    """
    workloads = plan_workloads(n_prompt, n_gen, n_depth)
    if not workloads:
        raise click.UsageError("Nothing to measure: both --n-prompt and --n-gen are 0.")
    n_cells = max(workload.n_cells for workload in workloads)
    base = LoadOptions(ctx_size=n_cells, batch_size=batch_size, ubatch_size=ubatch_size, exact=exact)
    configurations = plan_configurations(base, devices, splits, threads, cache_type_k, cache_type_v)
    progress = Progress()
    with contextlib.ExitStack() as stack:
        models = {name: stack.enter_context(open_model(model, load, 1, progress)) for name, load in configurations.items()}
        results = take_turns(models, workloads, repetitions, progress)
    progress.clear()
    click.echo(as_json(model, results) if output == "json" else as_table(results, markdown=output == "md"))


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
) -> dict[str, LoadOptions]:
    """Every combination, by a name that says what it is; V has the type of K unless types for V are listed."""
    configurations = {}
    lists = (devices, splits or (None,), threads or (None,), cache_type_k or (None,), cache_type_v or (None,))
    for device, split, n, k, v in itertools.product(*lists):
        load = replace(base, devices=device, tensor_split=split, threads=n, cache_type_k=k, cache_type_v=v or k)
        parts = [device]
        parts += [f"split {split}"] if split else []
        parts += [f"{n} threads"] if n else []
        parts += [f"cache {load.cache_type_k or 'default'}/{load.cache_type_v or 'default'}"] if k or v else []
        configurations["  ".join(parts)] = load
    return configurations


def take_turns(models: dict[str, Model], workloads: Sequence[Workload], repetitions: int, progress: Progress) -> list[Result]:
    """Measure every workload in every configuration, one after the other, `repetitions` times after a turn that is not counted."""
    speeds: dict[tuple[Workload, str], list[float]] = {(workload, name): [] for workload in workloads for name in models}
    total, done = (repetitions + 1) * len(speeds), 0
    for turn in range(repetitions + 1):
        for (workload, name), measured in speeds.items():
            speed = measure(models[name], workload)
            if turn:
                measured.append(speed)
            done += 1
            progress("measuring", done, total)
    return [Result(name, workload, tuple(measured)) for (workload, name), measured in speeds.items()]


def measure(model: Model, workload: Workload) -> float:
    """Tokens per second of one run of `workload`."""
    if workload.n_prompt:
        return prompt_speed(model, bench_ids(model, workload.n_prompt))
    return generation_speed(model, bench_ids(model, max(1, workload.depth)), workload.n_generated)


def as_table(results: Sequence[Result], markdown: bool) -> str:
    """Medians with the slowest and fastest turn, in tokens per second."""
    rows = [(r.configuration, r.workload.label, f"{r.median:.1f}", f"{r.spread[0]:.1f} to {r.spread[1]:.1f}") for r in results]
    return table(("configuration", "workload", "t/s", "slowest to fastest"), rows, markdown)


def as_json(model: str, results: Sequence[Result]) -> str:
    """The same with every turn, and what it was measured on."""
    entries = [{"configuration": r.configuration, **asdict(r.workload), "median": r.median, "turns": r.speeds} for r in results]
    data = {"model": model, "version": __version__, "cpu": cpu_name(), "unit": "tokens/s", "results": entries}
    return json.dumps(data, ensure_ascii=False)
