"""A driver without a GPU on which whole models run: streams take work, launches are noted; what kernels compute is not seen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from devices.fake_driver import SUCCESS, GraphDriver

SHARED_KIB = {(7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}  # that a block may have


@dataclass(frozen=True)
class Started:
    """One launch, and where."""

    context: str
    code: bytes
    grid: tuple[int, ...]
    n_threads: int
    shared_bytes: int


class StepDriver(GraphDriver):
    """With streams that take work, and GPUs of these capabilities, whose blocks have so much shared memory."""

    CUDA_MEMCPY2D = CUlaunchAttribute = CUlaunchAttributeValue = CUlaunchConfig = SimpleNamespace
    CUlaunchAttributeID = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=1)

    def __init__(self, gpus: Sequence[tuple[int, int]], reach_each_other: bool) -> None:
        super().__init__(memory=1 << 30, n_gpus=len(gpus))
        self.gpus = gpus
        self.reach_each_other = reach_each_other
        self.launches: list[Started] = []

    def cuDeviceGetAttribute(self, attribute: str, device: int) -> Any:
        major, minor = self.gpus[device]
        own = {"major": major, "minor": minor, "shared": SHARED_KIB[major, minor] << 10}
        return SUCCESS, (self.attributes | own)[attribute]

    def cuDeviceCanAccessPeer(self, device: int, other: int) -> Any:
        return SUCCESS, int(self.reach_each_other)

    def cuModuleGetFunction(self, module: bytes, entry: bytes) -> Any:
        return SUCCESS, module

    def cuLaunchKernel(self, code: bytes, *places: int) -> Any:
        self.launches.append(Started(self.stack[-1], code, places[:3], math.prod(places[3:6]), places[6]))
        return (SUCCESS,)

    def cuLaunchKernelEx(self, to: Any, code: bytes, parameters: int, extra: int) -> Any:
        n_threads = to.blockDimX * to.blockDimY * to.blockDimZ
        self.launches.append(Started(self.stack[-1], code, (to.gridDimX, to.gridDimY, to.gridDimZ), n_threads, to.sharedMemBytes))
        return (SUCCESS,)

    def check_launches(self) -> None:
        """Each within what its GPU allows."""
        for launch in self.launches:
            limit = SHARED_KIB[self.gpus[int(launch.context.split()[1])]] << 10
            assert 0 < launch.n_threads <= 1024 and launch.shared_bytes <= limit
            assert all(0 < n <= most for n, most in zip(launch.grid, (2**31 - 1, 65535, 65535), strict=True))

    def cuStreamGetCaptureInfo(self, stream: int) -> Any:
        return SUCCESS, 1, 1, "graph", ("node",), (None,), 1

    def cuMemcpyAsync(self, *arguments: Any) -> Any:
        return (SUCCESS,)

    cuMemcpy3DAsync = cuEventRecord = cuStreamWaitEvent = cuGraphLaunch = cuMemcpyAsync
