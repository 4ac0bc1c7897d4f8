"""How near the planner comes to measured steps of a host-resident cache: simulated links, several contexts, both paths.

    python benchmarks/planner.py [--model smollm2] [--links 5.3,2.7 --links 2,1] [--contexts 512,2048,4096,8000] [--rounds 5]

Each round measures the machine's speeds anew (its kernels, as `numba-meta plan --calibrate` does), then takes steps on the ordered and on
the pipelined path in turns, at every context.

The error is the median over the rounds of planned / measured - 1: to a round's median step, and to its second-quickest one, which is how
the speeds are measured too. The planner says what an undisturbed machine does, and other programs only ever add to a step.

Contexts are filled with random bytes instead of being computed: only bytes and cells matter for the time of a step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
from command_line import count, listed, run_main

import numba_meta as nm
from numba_meta.cli.terminal import table
from numba_meta.models.architectures.description import describe_model
from numba_meta.models.files.gguf import read_gguf
from numba_meta.models.files.pull import resolve_model
from numba_meta.models.loading.load_plan import LoadOptions, available_cores
from numba_meta.models.loading.planner import ModelForecast, plan_transport_of_model
from numba_meta.schedule.calibrate import measure_speeds

STEPS = 12
DEPTHS = (0, 1)


def fill(model: nm.Model, n_tokens: int) -> None:
    """Makes sequence 0 hold so many tokens, whatever they are."""
    context = model.context
    context.cells.clear()
    for at in range(0, n_tokens, 256):
        n = min(256, n_tokens - at)
        context.cells.take(0, n, [1] * n)
    for layout in context._layouts.values():
        layout.forget_tables()


def random_cache(model: nm.Model) -> None:
    """Small positive numbers in every cell of the host's cache."""
    host = model.context._memory.host
    assert host is not None
    host.data[:] = np.resize(np.random.default_rng(0).integers(1, 0x38, 1 << 20, dtype=np.uint8), host.data.size)


def step_seconds(model: nm.Model, context: int) -> list[float]:
    """Times of decode steps after a context; the first ones may record."""
    fill(model, context)
    times = []
    for step in range(STEPS + 2):
        begin = time.perf_counter()
        model.context.decode((100 + step,), (0,), (0,))
        times.append(time.perf_counter() - begin)
    return times[2:]


def forecast(path: Path, devices: str, contexts: list[int], options: dict[str, int | str]) -> ModelForecast:
    """What the planner says with the machine's speeds as they are now."""
    file = read_gguf(path)
    try:
        load = LoadOptions(devices=devices, kv="host", kv_pipeline_depth=1, **options)  # type: ignore[arg-type]
        return plan_transport_of_model(describe_model(file), load, contexts, measure_speeds, None, available_cores())
    finally:
        file.close()


def compare(path: Path, links: str, contexts: list[int], rounds: int, options: dict[str, int | str]) -> list[list[str]]:
    """A row per context and path for one list of links."""
    devices = ",".join(f"cpu:0?link={link}" for link in links.split(","))
    told: dict[tuple[int, int], list[float]] = defaultdict(list)
    errors: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)  # to the median, to the second-quickest
    measured: dict[tuple[int, int], list[float]] = defaultdict(list)
    models = {depth: nm.load(path, devices=devices, kv="host", kv_pipeline_depth=depth, **options) for depth in DEPTHS}  # type: ignore[arg-type]
    for model in models.values():
        random_cache(model)
    for _ in range(rounds):
        for step in forecast(path, devices, contexts, options).steps:
            assert step.times is not None
            for depth, seconds in zip(DEPTHS, (step.times.ordered, step.times.pipelined), strict=True):
                told[step.context, depth].append(float(seconds))
        for context in contexts:
            for depth, model in models.items():
                steps, planned = step_seconds(model, context), told[context, depth][-1]
                measured[context, depth] += steps
                errors[context, depth].append((planned / statistics.median(steps) - 1, planned / sorted(steps)[1] - 1))
    for model in models.values():
        model.close()
    rows = []
    for (context, depth), steps in measured.items():
        low, middle, high = (1e3 * q for q in statistics.quantiles(steps, n=4))
        predicted = 1e3 * statistics.median(told[context, depth])
        row = (links, str(context), "pipelined" if depth else "ordered", f"{predicted:.2f}", f"{middle:.2f}", f"{low:.2f} to {high:.2f}")
        rows.append([*row, *(f"{100 * statistics.median(each):+.1f}%" for each in zip(*errors[context, depth], strict=True))])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--links", action="append", help="GB/s of each device, comma-separated")
    parser.add_argument("--contexts", type=listed(count(0)), default="512,2048,4096,8000")
    parser.add_argument("--rounds", type=count(), default=5)
    parser.add_argument("--threads", type=count(), default=None)
    parser.add_argument("--cache-type", default=None)
    arguments = parser.parse_args()
    contexts = arguments.contexts
    options = {"ctx_size": max(contexts) + 192, "threads": arguments.threads}
    options |= {"cache_type_k": arguments.cache_type, "cache_type_v": arguments.cache_type}
    path = resolve_model(arguments.model)
    rows = []
    for links in arguments.links or ["5.3,2.7", "2,1"]:
        rows += compare(path, links, contexts, arguments.rounds, options)
    header = ("links GB/s", "context", "path", "planned ms", "median ms", "middle half", "to the median", "to the second-quickest")
    print(f"{path.name}, {available_cores()} cores; steps of one token, {arguments.rounds} rounds of {STEPS}")
    print(table(header, rows, markdown=True))


if __name__ == "__main__":
    run_main(main)
