"""A host-resident cache on a GPU: ordered and pipelined steps in turns, against the bound of design page 3, and the delivered GB/s.

    python benchmarks/gpu_host_cache.py --contexts 4096,16384,32768 --devices cuda:0 --devices cuda:0,cuda:0

Random 8B-shaped Q8_0 weights and a q8_0 cache (as `gpu_generation.py` makes them). Copies alone are timed as a graph of the same copies;
what a step computes is an ordered step without them; the bound follows by the recursion of `schedule/bound.py`, all layers being equal. Two
devices on one GPU share its link: their copies are those of one.
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
from gpu_generation import SHAPES, fill, random_weights, write_header

import numba_meta as nm
from numba_meta.devices.cuda import CudaDevice
from numba_meta.devices.cuda_graph import Copy2D, capture, capture_copy
from numba_meta.dtypes import BY_NAME
from numba_meta.schedule.bound import step_bound

STEPS = 16


def steps(model: nm.Model, depth: int, n_context: int) -> list[float]:
    """Seconds of decode steps at a depth; the step is recorded anew first."""
    context = model.context
    context.transport.options = replace(context.transport.options, depth=depth)
    for recording in context._recordings.values():
        recording.release()
    context._recordings.clear()
    context.transport.release()
    fill(model, n_context)
    times = []
    for i in range(STEPS + 2):
        begin = time.perf_counter()
        context.decode((100 + i,), (0,), (0,))
        times.append(time.perf_counter() - begin)
    assert model.transport.stats["path"] == ("pipelined" if depth else "ordered"), model.transport.stats["reason"]
    return times[2:]


def copy_seconds(model: nm.Model, n_cells: int) -> tuple[float, int]:
    """All deliveries of a step, one after the other, and their bytes."""
    device, host = model.context.device.devices[0], model.context._memory.host
    assert isinstance(device, CudaDevice) and host is not None
    n_layer, _, _, n_kv, head_dim, _, _ = SHAPES["8b"]
    n_bytes = n_cells * BY_NAME["q8_0"].row_bytes(n_kv * head_dim)
    target, stream = device.gpu.allocate(n_bytes), device.stream()
    per_tensor = host.data.size // (2 * n_layer)
    with capture(device.gpu, stream) as recorded:
        for i in range(2 * n_layer):
            capture_copy(device.gpu, Copy2D(host.address + i * per_tensor, n_bytes, target, n_bytes, n_bytes, 1), stream)
    times = []
    for _ in range(8):
        begin = time.perf_counter()
        recorded.graph.launch(stream)
        device.gpu.synchronize(stream)
        times.append(time.perf_counter() - begin)
    recorded.graph.destroy()
    device.gpu.free(target)
    return statistics.median(times[1:]), 2 * n_layer * n_bytes


def measure(model: nm.Model, n_context: int, depths: list[int]) -> None:
    """A line for each depth."""
    n_layer = SHAPES["8b"][0]
    copy, n_bytes = copy_seconds(model, n_context)
    measured: dict[int, list[float]] = {depth: [] for depth in (0, *depths)}
    for _ in range(2):
        for depth, times in measured.items():
            times += steps(model, depth, n_context - 1)
    medians = {depth: statistics.median(times) for depth, times in measured.items()}
    compute = medians[0] - copy
    layers = [compute / n_layer] * n_layer
    for depth, step in medians.items():
        bound = float(step_bound([copy / n_layer] * n_layer, layers, [0.0] * n_layer, depth=depth).step)
        path = f"depth {depth}" if depth else "ordered"
        parts = f"copy {1e3 * copy:6.2f} ({n_bytes / copy / 1e9:4.1f} GB/s)  compute {1e3 * compute:5.2f}  bound {1e3 * bound:6.2f}"
        ratio = f"step / bound {step / bound:5.3f}  delivered {n_bytes / step / 1e9:4.1f} GB/s"
        print(f"  {n_context:6d}  {path:8} {1e3 * step:7.2f} ms {1 / step:7.1f} t/s  {parts}  {ratio}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--contexts", default="4096,16384,32768")
    parser.add_argument("--devices", action="append")
    parser.add_argument("--depths", default="1")
    arguments = parser.parse_args()
    contexts = [int(n) for n in arguments.contexts.split(",")]
    for devices in arguments.devices or ["cuda:0", "cuda:0,cuda:0"]:
        with tempfile.TemporaryDirectory() as folder, random_weights():
            path = Path(folder) / "random.gguf"
            write_header(path, "8b", "q8_0")
            options = {"kv": "host", "kv_pipeline_budget": 0, "kv_pipeline_headroom": 0, "ubatch_size": 16, "ctx_size": max(contexts) + 256}
            with nm.load(path, devices=devices, cache_type_k="q8_0", cache_type_v="q8_0", **options) as model:  # type: ignore[arg-type]
                print(f"8b q8_0, host-resident q8_0 cache, {devices}", flush=True)
                host = model.context._memory.host
                assert host is not None
                host.data[:] = np.resize(np.random.default_rng(0).integers(1, 0x38, 1 << 20, dtype=np.uint8), host.data.size)
                for n in contexts:
                    measure(model, n, [int(depth) for depth in arguments.depths.split(",")])


if __name__ == "__main__":
    main()
