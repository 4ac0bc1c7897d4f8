"""Recorded steps of any kind of device: who records them, and what a recording can do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from numba_meta.devices.cpu_stream import StreamTimes
from numba_meta.devices.meta import MetaDevice
from numba_meta.devices.simple import Buffer
from numba_meta.schedule.record import Binder


class RecordedStep(Protocol):
    """A step that is ready to run again and again."""

    output: np.ndarray  # uint8: what a step leaves for the host; the next one overwrites it

    def run(self) -> None:
        """Runs the step to its end."""

    def run_noting_times(self) -> tuple[StreamTimes, ...]:
        """As `run`; says when each stream was at which call."""

    def release(self) -> None:
        """Gives back what belongs to this recording alone; it must not run any more."""


class Steps(Protocol):
    """Records steps on the streams of a meta device, which it holds."""

    @property
    def place_constant(self) -> Callable[[int, np.ndarray], int] | None:
        """Puts data that calls read where a device reads it; None where devices read the host's memory."""

    def host_memory(self, n_bytes: int) -> np.ndarray:
        """Zeroed host memory that steps copy from, uint8, at least `n_bytes`."""

    def record(self, binder: Binder, output: Buffer, offset: int, n_bytes: int) -> RecordedStep:
        """The step of a binder's plan; its output is bytes of a buffer of the first device."""

    def end_transfers(self) -> None:
        """Ends the transfer streams; what was recorded on them must not run any more."""


def steps_of(device: MetaDevice) -> Steps:
    """Who records steps of these devices."""
    if device.kind == "cuda":
        from numba_meta.schedule.record_cuda import CudaSteps

        return CudaSteps(device)
    from numba_meta.schedule.record_cpu import CpuSteps

    return CpuSteps(device)
