"""Time of one sum over ranks inside a recorded graph.

`python benchmarks/gpu_reductions.py`: `ipc` between 2, 3 and 4 streams of one process on one GPU, which run at the same time: what the
kernel and its flags cost where memory is near. `mpirun -n 2 python benchmarks/gpu_reductions.py --ranks`: real ranks, rank r on GPU r of
its host, with every communicator that they can use; where they share a GPU, processes take turns and a sum costs milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

from command_line import count, run_main

from numba_meta.comm.communicators import NAMES, forced_name, negotiate, offered_names
from numba_meta.comm.failure import RankLaunch, ranks
from numba_meta.comm.join import JoinRequest
from numba_meta.devices.cuda_driver import GpuContext, call, n_gpus, open_gpu
from numba_meta.devices.cuda_graph import CudaGraph, capture
from numba_meta.devices.parse import DeviceSpec
from numba_meta.kernels.cuda.kernel import CudaKernel, Gpu
from numba_meta.models.loading.load_ranks import factories_for

SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 8 << 20)  # bytes
LAUNCHES = 20  # in a graph


def line(name: str, size: int, n_bytes: int, seconds: float) -> str:
    """GB/s: of one summand."""
    return f"{name:>16} {size} ranks {n_bytes // 1024:6} KiB {seconds * 1e6:10.2f} us {n_bytes / seconds / 1e9:8.1f} GB/s"


def time_streams(repeats: int) -> None:
    """Ranks that are streams of this process."""
    from streams_of_ranks import StreamsOfRanks

    for size in (2, 3, 4):
        streams = StreamsOfRanks(size)
        for n_bytes in SIZES:
            print(line("ipc, streams", size, n_bytes, streams.time_sum(n_bytes // 4, LAUNCHES, repeats)), flush=True)
        assert streams.errors() == [0] * size
        streams.close()


def time_ranks(launch: RankLaunch, repeats: int) -> None:
    """Ranks that are processes."""
    spec = DeviceSpec("cuda", launch.rank % max(1, n_gpus()))
    factories = factories_for(spec)
    joined = launch.join(lambda: JoinRequest(offers=offered_names(launch.world, factories), forced=forced_name()))
    gpu = open_gpu(spec.index)
    facts, stream = Gpu(gpu.facts.capability, gpu.facts.n_multiprocessors, gpu.facts.max_shared_bytes), gpu.create_stream()
    count = gpu.allocate(8)
    gpu.write(count, np.ones(1, np.int64))
    for name in NAMES:
        usable = [factory for factory in factories if factory.name == name and all(name in record.offers for record in joined.records)]
        if not usable:
            continue
        try:
            alone = replace(joined, records=tuple(replace(record, offers=(name,)) for record in joined.records))
            reduction = negotiate(launch.world, alone, usable, warn=print)
        except Exception as error:  # what cannot be used here is said, the others are timed
            print(f"{name}: {error}" if launch.rank == 0 else "", flush=True)
            continue
        table = reduction.communicators[0].table  # type: ignore[attr-defined]
        for n_bytes in SIZES:
            n = n_bytes // 4
            memory = gpu.allocate(n_bytes)
            values = {
                "table": table.address, "part": memory, "part_stride": n_bytes, "out": memory, "out_stride": n_bytes, "scratch": 0, "n": n,
                "n_rows": count,
            }  # fmt: skip
            work = prepare(gpu, table.all_reduce, values, facts, stream)
            with capture(gpu, stream) as recorded:
                for _ in range(LAUNCHES):
                    work()
            seconds = time_graph(launch, gpu, recorded.graph, stream, repeats)
            table.check()
            if launch.rank == 0:
                print(line(name, launch.size, n_bytes, seconds), flush=True)
            recorded.graph.destroy()
            gpu.free(memory)
        launch.world.exchange(b"", "all are done")
        reduction.close()


def prepare(context: GpuContext, kernel: object, values: dict[str, int], facts: Gpu, stream: int) -> Callable[[], None]:
    """What enqueues one sum."""
    if isinstance(kernel, CudaKernel):
        found, packed = kernel.launch(values, 1, facts), kernel.pack(**values)
        entry, cubin = kernel.binary(facts.capability)
        function = context.function(cubin, entry)
        return lambda: context.launch(function, found.grid, found.block, 0, stream, int(packed.addresses.ctypes.data))
    work = kernel.prepare(values, {}, 1)  # type: ignore[attr-defined]
    return lambda: work.enqueue(stream)


def time_graph(launch: RankLaunch, context: GpuContext, graph: CudaGraph, stream: int, repeats: int) -> float:
    """Seconds of one sum, all ranks having begun: the median."""
    times = []
    begin, end = (context.create_event(timed=True) for _ in range(2))
    limit = time.monotonic() + 2.0
    for _ in range(repeats):
        launch.world.exchange(b"", "begin")
        with context.current():
            call("cuEventRecord", begin, stream)
            graph.launch(stream)
            call("cuEventRecord", end, stream)
            context.synchronize(stream)
            times.append(call("cuEventElapsedTime", begin, end) / 1e3 / LAUNCHES)
        if any(each[0] for each in launch.world.exchange(bytes([time.monotonic() > limit]), "time")):
            break
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", action="store_true", help="between processes that mpirun started")
    parser.add_argument("--repeats", type=count(), default=20)
    options = parser.parse_args()
    if not options.ranks:
        time_streams(options.repeats)
        return
    with ranks() as launch:
        time_ranks(launch, options.repeats)


if __name__ == "__main__":
    run_main(main)
