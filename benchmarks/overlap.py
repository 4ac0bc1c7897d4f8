"""How near a pipelined step comes to the recursion of design page 3, on real threads with simulated links:

    python benchmarks/overlap.py                # one and two devices, copies of 0.5, 1 and 3 times the compute time
    python benchmarks/overlap.py --architecture gemma3 --steps 32

Each device has one compute thread and a link of its own, as fast as the wanted part of copies asks for. Compute times of every call are
the medians of traced steps of the ordered path; the bound follows from them and from the links' speeds alone. Steps are measured untraced,
ordered and pipelined in turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from synthetic import write_model  # noqa: E402

import numba_meta as nm  # noqa: E402
from numba_meta.models.context import Capacity  # noqa: E402
from numba_meta.models.model import Model  # noqa: E402
from numba_meta.schedule.bound import step_bound_devices  # noqa: E402
from numba_meta.schedule.lower import Call  # noqa: E402
from numba_meta.schedule.trace import Mark, StepTrace  # noqa: E402
from numba_meta.schedule.virtual_clock import Link  # noqa: E402
from numba_meta.schedule.virtual_step import step_loads  # noqa: E402

CallKey = tuple[int, str, str]  # device, node, kernel


@dataclass(frozen=True)
class Measured:
    """A step of one depth, in seconds."""

    n_devices: int
    ratio: float  # of copies to compute, of the device whose copies take longest
    depth: int
    step: float
    bound: float

    @property
    def excess(self) -> float:
        return self.step / self.bound


def key_of(device: int, call: Call) -> CallKey:
    """What a call is in the recordings of all depths."""
    return device, call.node, call.kernel.name if call.kernel else ""


def call_seconds(traces: Sequence[StepTrace]) -> Mapping[CallKey, float]:
    """Median seconds of every call."""
    times: dict[CallKey, list[int]] = {}
    for trace in traces:
        for stream in trace.streams:
            for mark, (start, stop) in zip(stream.marks, stream.times.tolist(), strict=True):
                if isinstance(mark, Mark):
                    times.setdefault(key_of(mark.device, mark.call), []).append(stop - start)
    return {key: statistics.median(ns) / 1e9 for key, ns in times.items()}


def prepared(path: Path, devices: str, depth: int, options: Mapping[str, Any], n_tokens: int) -> Model:
    """A model whose sequence 0 holds so many tokens."""
    n_devices = devices.count(",") + 1
    pipeline = {"kv": "host", "kv_pipeline_depth": depth, "kv_pipeline_budget": 0, "kv_pipeline_headroom": 0}
    model = nm.load(path, devices=devices, threads=n_devices, **pipeline, **options)
    for at in range(0, n_tokens, model.context.ubatch_size):
        chunk = [7 * i % 300 for i in range(at, min(n_tokens, at + model.context.ubatch_size))]
        model.context.decode(chunk, [0] * len(chunk), [len(chunk) - 1])
    one_step(model, n_tokens)
    return model


def one_step(model: Model, n_tokens: int) -> float:
    """Seconds of a step after `n_tokens`; the sequence is as long as before afterwards."""
    begin = time.perf_counter()
    model.context.decode([5], [0], [0])
    took = time.perf_counter() - begin
    model.context.cells.truncate(0, n_tokens)
    return took


def traced(model: Model, n_tokens: int, n_steps: int) -> Sequence[StepTrace]:
    with model.record_timeline(n_steps) as timelines:
        for _ in range(n_steps):
            one_step(model, n_tokens)
    return list(timelines.traces)


def compute_seconds(path: Path, n_devices: int, options: Mapping[str, Any], n_tokens: int) -> float:
    """A step without links: what copies are to be compared with."""
    with prepared(path, ",".join(["cpu:0"] * n_devices), 1, options, n_tokens) as model:
        return statistics.median(one_step(model, n_tokens) for _ in range(32))


def bound_of(model: Model, seconds: Mapping[CallKey, float], windows: Any, speeds: Sequence[int], overhead: float) -> float:
    """The recursion on the plan that the model runs."""
    plan = model.context.plan(Capacity(1, 1))

    def cost(device: int, call: Call) -> float:
        return seconds[key_of(device, call)]

    loads = step_loads(plan, cost, [Link(speed) for speed in speeds], windows, 1)
    depth = plan.transport.depth if plan.transport and plan.transport.ring else 0
    return float(step_bound_devices(loads, depth).step) + overhead


def measure(
    path: Path,
    n_devices: int,
    ratio: float,
    depths: Sequence[int],
    options: Mapping[str, Any],
    n_tokens: int,
    n_steps: int,
    link_shares: Sequence[float] = (1.0, 1.0),
) -> list[Measured]:
    """Steps of all depths in turns. `link_shares`: how fast each device's link is, as a part of the fastest one."""
    compute = compute_seconds(path, n_devices, options, n_tokens)
    with prepared(path, ",".join(["cpu:0"] * n_devices), 0, options, n_tokens) as model:
        late = model.transport.stats["late_bytes"]
    slowest = max(n_bytes / share for n_bytes, share in zip(late, link_shares, strict=False))
    speeds = [round(slowest / (ratio * compute) * share) for share, _ in zip(link_shares, late, strict=False)]
    devices = ",".join(f"cpu:0?link={speed / 1e9:.9f}" for speed in speeds)
    models = {depth: prepared(path, devices, depth, options, n_tokens) for depth in dict.fromkeys((0, *depths))}
    try:
        traces = traced(models[0], n_tokens, 32)
        seconds = call_seconds(traces)
        within = statistics.median(max(s.whole[1] for s in t.streams) - min(s.whole[0] for s in t.streams) for t in traces) / 1e9
        steps: dict[int, list[float]] = {depth: [] for depth in models}
        for _ in range(n_steps):
            for depth, model in models.items():
                steps[depth].append(one_step(model, n_tokens))
        overhead = max(0.0, statistics.median(one_step(models[0], n_tokens) for _ in range(16)) - within)
        return [
            Measured(n_devices, ratio, d, statistics.median(steps[d]), bound_of(models[d], seconds, traces[-1].windows, speeds, overhead))
            for d in models
        ]
    finally:
        for model in models.values():
            model.close()


def report(rows: Sequence[Measured], tell: Callable[[str], None] = print) -> None:
    for row in rows:
        ordered = next(each.step for each in rows if each.depth == 0)
        tell(
            f"| {row.n_devices} | {row.ratio:g} | {row.depth} | {1e3 * row.step:.2f} ms | {1e3 * row.bound:.2f} ms | {row.excess:.3f} | "
            f"{ordered / row.step - 1:+.1%} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architecture", choices=("llama", "gemma3"), default="llama")
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--ratios", type=float, nargs="+", default=(0.5, 1.0, 3.0))
    parser.add_argument("--depths", type=int, nargs="+", default=(1, 2, 4))
    options = parser.parse_args()
    sizes: dict[str, Any] = {"n_layer": options.layers, "n_embd": 512, "n_head": 8, "n_head_kv": 4, "head_dim": 64, "n_ff": 1536}
    with tempfile.TemporaryDirectory() as folder:
        path = write_model(
            Path(folder) / "model.gguf", options.architecture, n_vocab=4096, types="q8_0", context_length=8192, sliding_window=512, **sizes
        )
        print("| devices | copy / compute | depth | a step | bound | step / bound | gain |\n| --- | --- | --- | --- | --- | --- | --- |")
        shape = {"ctx_size": 4096, "ubatch_size": 512, "cache_type_k": "q8_0", "cache_type_v": "q8_0"}
        for n_devices in (1, 2):
            for ratio in options.ratios:
                report(measure(path, n_devices, ratio, options.depths, shape, options.tokens, options.steps))


if __name__ == "__main__":
    main()
