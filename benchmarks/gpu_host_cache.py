"""A host-resident cache on a GPU: ordered and pipelined steps in turns, against the bound of `schedule/bound.py`, and the delivered GB/s.

    python benchmarks/gpu_host_cache.py --contexts 4096,16384,32768 --devices cuda:0 --devices cuda:0,cuda:0

Random 8B-shaped Q8_0 weights and a q8_0 cache (as `gpu_generation.py` makes them). All steps lie in one bucket of cells: what is delivered
is the context given. Copies alone are timed as a graph of the step's own copies; what a step computes is an ordered step without them; the
bound follows by the recursion of `schedule/bound.py`, all layers being equal. Two devices on one GPU share its link: their copies follow
one another; GPUs have a link each, of which the one counts that has the most to do. `replay` is the recorded step without what Python does
before it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from command_line import count, gpus, listed, run_main
from gpu_generation import SHAPES, fill, random_weights, write_header

import numba_meta as nm
from numba_meta.devices.cuda import CudaDevice
from numba_meta.devices.cuda_graph import capture, capture_copy
from numba_meta.models.running.recordings import Capacity
from numba_meta.schedule.bound import step_bound
from numba_meta.schedule.record_cuda import RecordedCudaStep

STEPS = 16


def recorded_step(model: nm.Model) -> RecordedCudaStep:
    """The step of one token."""
    step = model.context._recordings[Capacity(1, 1)]._step
    assert isinstance(step, RecordedCudaStep)
    return step


def steps(model: nm.Model, depth: int, n_context: int) -> tuple[list[float], list[float]]:
    """Seconds of decode steps at a depth, with Python and without; the step is recorded anew first."""
    context = model.context
    context.transport.options = replace(context.transport.options, depth=depth)
    for recording in context._recordings.values():
        recording.release()
    context._recordings.clear()
    context.transport.release()
    fill(model, n_context)
    times, replays = [], []
    for i in range(STEPS + 2):
        begin = time.perf_counter()
        context.decode((100 + i,), (0,), (0,))
        times.append(time.perf_counter() - begin)
    for _ in range(STEPS + 2):
        begin = time.perf_counter()
        recorded_step(model).run()
        replays.append(time.perf_counter() - begin)
    assert model.transport.stats["path"] == ("pipelined" if depth else "ordered"), model.transport.stats["reason"]
    return times[2:], replays[2:]


def copy_seconds(model: nm.Model, n_cells: int) -> tuple[float, int]:
    """All copies of the step that was recorded last to a GPU, one after the other, and their bytes: those that take longest."""
    devices = [device for device in model.context.device.devices if isinstance(device, CudaDevice)]
    return max(copy_seconds_to(device, recorded_step(model), n_cells) for device in {each.gpu: each for each in devices}.values())


def copy_seconds_to(device: CudaDevice, step: RecordedCudaStep, n_cells: int) -> tuple[float, int]:
    """The same of one GPU."""
    stream, n_bytes = device.stream(), 0
    with capture(device.gpu, stream) as recorded:
        for _, group in step._parts.windows._groups:
            for delivery, _ in group:
                if delivery.gpu is device.gpu:
                    for copy in delivery.copies([0], n_cells):
                        capture_copy(device.gpu, copy, stream)
                        n_bytes += copy.width * copy.height
    times = []
    for _ in range(8):
        begin = time.perf_counter()
        recorded.graph.launch(stream)
        device.gpu.synchronize(stream)
        times.append(time.perf_counter() - begin)
    recorded.graph.destroy()
    return statistics.median(times[1:]), n_bytes


def measure(model: nm.Model, n_context: int, depths: list[int]) -> None:
    """A line for each depth."""
    n_layer = SHAPES["8b"][0]
    measured: dict[int, tuple[list[float], list[float]]] = {depth: ([], []) for depth in (0, *depths)}
    for _ in range(2):
        for depth, kinds in measured.items():
            for times, more in zip(kinds, steps(model, depth, n_context - STEPS - 4), strict=True):
                times += more
    copy, n_bytes = copy_seconds(model, n_context)
    medians = {depth: tuple(map(statistics.median, kinds)) for depth, kinds in measured.items()}
    compute = medians[0][0] - copy
    layers = [compute / n_layer] * n_layer
    for depth, (step, replay) in medians.items():
        bound = float(step_bound([copy / n_layer] * n_layer, layers, [0.0] * n_layer, depth=depth).step)
        path = f"depth {depth}" if depth else "ordered"
        parts = f"copy {1e3 * copy:6.2f} ({n_bytes / copy / 1e9:4.1f} GB/s)  compute {1e3 * compute:5.2f}  bound {1e3 * bound:6.2f}"
        ratio = f"step / bound {step / bound:5.3f}  delivered {n_bytes / step / 1e9:4.1f} GB/s"
        rates = f"{1e3 * step:7.2f} ms {1 / step:7.1f} t/s  replay {1e3 * replay:7.2f}"
        print(f"  {n_context:6d}  {path:8} {rates}  {parts}  {ratio}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--contexts", type=listed(count(STEPS + 5)), default="4096,16384,32768")
    parser.add_argument("--devices", type=gpus, action="append")
    parser.add_argument("--depths", type=listed(count(0)), default="1")
    arguments = parser.parse_args()
    contexts = arguments.contexts
    for devices in arguments.devices or ["cuda:0", "cuda:0,cuda:0"]:
        with tempfile.TemporaryDirectory() as folder, random_weights():
            path = Path(folder) / "random.gguf"
            write_header(path, "8b", "q8_0")
            options = {"kv": "host", "kv_pipeline_budget": 0, "kv_pipeline_headroom": 0, "ubatch_size": 16, "ctx_size": max(contexts) + 256}
            with nm.load(path, devices=devices, cache_type_k="q8_0", cache_type_v="q8_0", **options) as model:
                print(f"8b q8_0, host-resident q8_0 cache, {devices}", flush=True)
                host = model.context._memory.host
                assert host is not None
                host.data[:] = np.resize(np.random.default_rng(0).integers(1, 0x38, 1 << 20, dtype=np.uint8), host.data.size)
                for n in contexts:
                    measure(model, n, arguments.depths)


if __name__ == "__main__":
    run_main(main)
