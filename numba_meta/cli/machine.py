"""What this machine has: cores, memory, copy bandwidth, and what CUDA and MPI would still need. Data only; `devices` prints it."""

from __future__ import annotations

import importlib.util
import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from numba_meta.errors import DeviceError

COPY_BYTES = 256 << 20  # beyond the caches of most machines
COPY_ROUNDS = 3


@dataclass(frozen=True)
class CpuReport:
    """The CPU device: `copy_bandwidth` in bytes per second, read and written both counted."""

    name: str
    n_usable_cores: int
    n_cores: int
    kernels: str
    memory_bytes: int
    free_bytes: int
    copy_bandwidth: float


@dataclass(frozen=True)
class GpuReport:
    """A CUDA device: memory in bytes, compute capability as in `9.0`, which other GPUs' memory its kernels can read.

    `problem`: why it cannot be used; the rest is not known then.
    """

    name: str
    capability: str = ""
    n_multiprocessors: int = 0
    memory_bytes: int = 0
    free_bytes: int = 0
    peers: tuple[int, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class Requirement:
    """Something that CUDA devices or ranks need: whether it is `present`, and what to do where it is not."""

    name: str
    present: bool
    remedy: str


def cpu_report() -> CpuReport:
    """Look at the CPU and measure its copies, in about half a second."""
    from numba_meta.kernels.cpu.isa import detect

    n_usable = len(os.sched_getaffinity(0))
    total, free = memory()
    return CpuReport(
        name=cpu_name(),
        n_usable_cores=n_usable,
        n_cores=os.cpu_count() or n_usable,
        kernels=detect().name.lower(),
        memory_bytes=total,
        free_bytes=free,
        copy_bandwidth=copy_bandwidth(n_usable, min(COPY_BYTES, free // 8)),
    )


def gpu_reports() -> tuple[GpuReport, ...]:
    """The GPUs that the driver shows; none without a driver or the packages for it."""
    from numba_meta.devices.cuda_driver import n_gpus, open_gpu

    found: list[GpuReport] = []
    uuids: list[str] = []
    for index in range(n_gpus()):
        try:
            gpu = open_gpu(index)
            facts, free = gpu.facts, gpu.free_bytes()
        except DeviceError as error:
            uuids.append("")
            found.append(GpuReport(f"GPU {index}", problem=str(error)))
            continue
        uuids.append(facts.uuid)
        found.append(GpuReport(facts.name, "{}.{}".format(*facts.capability), facts.n_multiprocessors, facts.total_bytes, free))
    for index, report in enumerate(found):
        if not report.problem:
            gpu = open_gpu(index)
            peers = tuple(other for other, uuid in enumerate(uuids) if other != index and uuid and gpu.reaches(uuid))
            found[index] = replace(report, peers=peers)
    return tuple(found)


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name") and ":" in line]
    return names[0] if names else platform.processor() or platform.machine()


def memory() -> tuple[int, int]:
    """Bytes of memory in all and free, within the limit of the control group that this process is in."""
    fields = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        key, _, value = line.partition(":")
        fields[key] = int(value.split()[0]) * 1024 if value.split()[1:] == ["kB"] else 0
    total, free = fields["MemTotal"], fields["MemAvailable"]
    for limit_file, used_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limit, used = int(Path(limit_file).read_text()), int(Path(used_file).read_text())
        except (OSError, ValueError):  # no such hierarchy, or "max": no limit
            continue
        if limit < total:
            total, free = limit, min(free, max(0, limit - used))
    return total, free


def copy_bandwidth(n_threads: int, n_bytes: int) -> float:
    """Bytes per second, read and written, of `n_threads` that together copy `n_bytes` of memory: the best of a few rounds."""
    import numpy as np

    part = max(1, n_bytes // n_threads)
    sources = [np.full(part, 1, np.uint8) for _ in range(n_threads)]
    targets = [np.zeros_like(source) for source in sources]
    best = 0.0
    with ThreadPoolExecutor(n_threads) as pool:
        for _ in range(COPY_ROUNDS + 1):  # the first touches the pages
            start = time.perf_counter()
            list(pool.map(np.copyto, targets, sources))
            best = max(best, 2 * part * n_threads / (time.perf_counter() - start))
    return best


def cuda_requirements() -> tuple[Requirement, ...]:
    """What CUDA devices need from this machine."""
    from numba_meta.devices import cuda_driver

    install = "pip install 'numba-meta[cuda13]', or cuda12 for an older driver"
    has_bindings = _has_package("cuda") and _has_package("cuda.bindings")
    has_driver, remedy = cuda_driver.has_library(cuda_driver.DRIVER_LIBRARY), "install the driver of your GPU"
    if has_driver and has_bindings:
        try:
            cuda_driver.start()
        except DeviceError as error:
            has_driver, remedy = False, str(error)
    return (
        Requirement("NVIDIA driver", has_driver, remedy),
        Requirement("cuda-bindings", has_bindings, install),
        Requirement("numba-cuda", _has_package("numba_cuda"), install),
    )


def mpi_requirements() -> tuple[Requirement, ...]:
    """What several ranks need from this machine."""
    from numba_meta.cli.launch import why_no_mpirun

    problem = why_no_mpirun(os.environ)
    return (
        Requirement("mpi4py", _has_package("mpi4py"), "pip install 'numba-meta[mpi]'"),
        Requirement("mpirun", problem is None, problem or "pip install 'numba-meta[mpi]' brings Open MPI"),
    )


def _has_package(name: str) -> bool:
    return importlib.util.find_spec(name) is not None

