"""How near a pipelined step comes to the recursion of `schedule/bound.py`, on real threads with simulated links:

    python benchmarks/overlap.py                # one and two devices, copies of 0.5, 1 and 3 times the compute time
    python benchmarks/overlap.py --architecture gemma3 --steps 32

Each device has one compute thread and a link of its own, as fast as the wanted part of copies asks for. Compute times of every call are
the medians of traced steps of the ordered path; the bound follows from them and from the links' speeds alone. Traced and untraced, ordered
and pipelined steps take turns. `--quantile 0.1` takes the fastest tenth in place of medians, for a machine that is busy with other things.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from synthetic import write_model

import numba_meta as nm
from numba_meta.models.model import Model
from numba_meta.models.running.recordings import Capacity
from numba_meta.schedule.bound import step_bound_devices
from numba_meta.schedule.calls import Call
from numba_meta.schedule.trace import Mark, StepTrace
from numba_meta.schedule.virtual_clock import Link
from numba_meta.schedule.virtual_step import step_loads

CallKey = tuple[int, str, str]  # device, node, kernel
_BLOCK = 8  # steps of one depth before it is the next one's turn


@dataclass(frozen=True)
class Case:
    """What is measured: a model with a context of `n_tokens`, and how often."""

    path: Path
    options: Mapping[str, Any]
    n_tokens: int
    n_steps: int = 128
    quantile: float = 0.5

    def typical(self, times: Sequence[float]) -> float:
        """The median, or the wanted quantile."""
        return sorted(times)[int(self.quantile * (len(times) - 1))]


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


def call_seconds(case: Case, traces: Sequence[StepTrace]) -> Mapping[CallKey, float]:
    """What every call takes."""
    times: dict[CallKey, list[float]] = {}
    for trace in traces:
        for stream in trace.streams:
            for mark, (start, stop) in zip(stream.marks, stream.times.tolist(), strict=True):
                if isinstance(mark, Mark):
                    times.setdefault(key_of(mark.device, mark.call), []).append((stop - start) / 1e9)
    return {key: case.typical(seconds) for key, seconds in times.items()}


def prepared(case: Case, devices: str, depth: int) -> Model:
    """A model whose sequence 0 holds `n_tokens`. One compute thread for each device."""
    pipeline = {"kv": "host", "kv_pipeline_depth": depth, "kv_pipeline_budget": 0, "kv_pipeline_headroom": 0}
    model = nm.load(case.path, devices=devices, threads=devices.count(",") + 1, **pipeline, **case.options)
    n = model.context.ubatch_size
    for at in range(0, case.n_tokens, n):
        chunk = [7 * i % 300 for i in range(at, min(case.n_tokens, at + n))]
        model.context.decode(chunk, [0] * len(chunk), [len(chunk) - 1])
    one_step(case, model)
    return model


def one_step(case: Case, model: Model) -> float:
    """Seconds of a step; the sequence is as long as before afterwards."""
    begin = time.perf_counter()
    model.context.decode([5], [0], [0])
    took = time.perf_counter() - begin
    model.context.cells.truncate(0, case.n_tokens)
    return took


def traced(case: Case, model: Model, n_steps: int) -> Sequence[StepTrace]:
    with model.record_timeline(n_steps) as timelines:
        for _ in range(n_steps):
            one_step(case, model)
    return list(timelines.traces)


def compute_seconds(trace: StepTrace, device: int) -> float:
    """What a device computed in a step, meetings with others included."""
    timeline = trace.timeline()
    streams = {(mark.device, mark.purpose): each.stream for each in trace.streams for mark in each.marks if isinstance(mark, Mark)}
    return float(timeline.seconds(streams[device, "compute"], "attention", "compute", "meet"))


def choose_links(case: Case, n_devices: int, ratio: float, link_shares: Sequence[float]) -> list[int]:
    """Bytes per second of each device's link, so that the slowest one's copies take `ratio` times as long as what the devices compute.

    That is taken from traced steps of the ordered path: whole steps without links would tell of threads that wait for a core as well.
    """
    with prepared(case, ",".join(["cpu:0"] * n_devices), 0) as model:
        one_step(case, model)
        compute = case.typical([max(compute_seconds(trace, j) for j in range(n_devices)) for trace in traced(case, model, 32)])
        n_bytes = model.transport.stats["late_bytes"]
    slowest = max(n / share for n, share in zip(n_bytes, link_shares, strict=False))
    return [round(slowest / (ratio * compute) * share) for share, _ in zip(link_shares, n_bytes, strict=False)]


def measure(case: Case, n_devices: int, ratio: float, depths: Sequence[int], link_shares: Sequence[float] = (1.0, 1.0)) -> list[Measured]:
    """Steps of all depths in turns, the ordered path first. `link_shares`: how fast each device's link is, as a part of the fastest one."""
    speeds = choose_links(case, n_devices, ratio, link_shares)
    devices = ",".join(f"cpu:0?link={speed / 1e9:.9f}" for speed in speeds)
    models = {depth: prepared(case, devices, depth) for depth in dict.fromkeys((0, *depths))}
    traces: list[StepTrace] = []
    steps: dict[int, list[float]] = {depth: [] for depth in models}
    try:
        for _ in range(-(-case.n_steps // _BLOCK)):
            one_step(case, models[0])  # its threads are awake again
            traces += traced(case, models[0], _BLOCK)
            for depth, model in models.items():
                one_step(case, model)
                steps[depth] += [one_step(case, model) for _ in range(_BLOCK)]
        seconds = call_seconds(case, traces)
        walked = case.typical([(max(s.whole[1] for s in t.streams) - min(s.whole[0] for s in t.streams)) / 1e9 for t in traces])
        around = max(0.0, case.typical(steps[0]) - walked)  # what Python does before and after
        bounds = {depth: bound_of(model, seconds, traces[-1].windows, speeds) + around for depth, model in models.items()}
        return [Measured(n_devices, ratio, depth, case.typical(steps[depth]), bounds[depth]) for depth in models]
    finally:
        for model in models.values():
            model.close()


def bound_of(model: Model, seconds: Mapping[CallKey, float], windows: Any, speeds: Sequence[int]) -> float:
    """The recursion on the plan that the model runs."""
    plan = model.context.plan(Capacity(1, 1))

    def cost(device: int, call: Call) -> float:
        return seconds[key_of(device, call)]

    loads = step_loads(plan, cost, [Link(speed) for speed in speeds], windows, 1)
    return float(step_bound_devices(loads, plan.transport.depth if plan.transport and plan.transport.ring else 0).step)


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
    parser.add_argument("--quantile", type=float, default=0.5)
    parser.add_argument("--devices", type=int, nargs="+", default=(1, 2))
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--ratios", type=float, nargs="+", default=(0.5, 1.0, 3.0))
    parser.add_argument("--depths", type=int, nargs="+", default=(1, 2, 4))
    options = parser.parse_args()
    sizes: dict[str, Any] = {"n_layer": options.layers, "n_embd": 512, "n_head": 8, "n_head_kv": 4, "head_dim": 64, "n_ff": 4096}
    with tempfile.TemporaryDirectory() as folder:
        path = write_model(
            Path(folder) / "model.gguf", options.architecture, n_vocab=4096, types="q8_0", context_length=8192, sliding_window=512, **sizes
        )
        print("| devices | copy / compute | depth | a step | bound | step / bound | gain |\n| --- | --- | --- | --- | --- | --- | --- |")
        shape = {"ctx_size": 4096, "ubatch_size": 512, "cache_type_k": "q8_0", "cache_type_v": "q8_0"}
        case = Case(path, shape, options.tokens, options.steps, options.quantile)
        for n_devices in options.devices:
            for ratio in options.ratios:
                report(measure(case, n_devices, ratio, options.depths))


if __name__ == "__main__":
    from command_line import run_main  # beside this file, where it is a script

    run_main(main)
