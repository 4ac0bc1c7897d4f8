"""How fast this machine is, measured with the kernels that a step runs, and remembered for the next time.

In: the kinds of work that a step has (`predict.needs_of`). Out: `DeviceSpeeds`. Each measurement takes some ten milliseconds.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from numba_meta.devices.meta import MetaDevice
from numba_meta.devices.parse import DeviceSpec
from numba_meta.dtypes import BY_NAME
from numba_meta.schedule.predict import AttentionKind, DeviceSpeeds, Needs, WeightKind

Array = np.ndarray
_WEIGHT_BYTES = 96 << 20  # of all devices: beyond the caches that they share, as a model's weights are
_ATTENTION_CELLS = 4096
_CACHE_SETS = 3  # as many as a ring has slots: what is read was copied a short while ago
_COPY_BYTES = 2 << 20
_SMALL = 576  # elements of a small activation
_CALLS, _MEETINGS = 400, 100
_RUNS = 15
_TIME = "measured at"  # the oldest of them
_TIMES = ("step", "call", "meeting")
_BASE = (*_TIMES, "copies")
_BEYOND_ALL = 1e18  # bytes per second, or seconds
Record = Callable[[int, Any], None]  # (device, recorder): adds the calls that are timed


class Bench:
    """Several equal devices on which calls are recorded and timed; all do the same at the same time. A context manager."""

    def __init__(self, n_devices: int, n_threads: int) -> None:
        self.n_devices, self.n_threads = n_devices, n_threads
        self._device = MetaDevice.open([DeviceSpec("cpu", j) for j in range(n_devices)], [n_threads] * n_devices)
        self._streams = self._device.compute_streams()
        self._counter = np.zeros(8, np.int64)
        self._random = np.random.default_rng(1)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._device.close()

    def seconds(self, record: Record, n_runs: int = _RUNS) -> float:
        """The time of a step with these calls on every device: the best run, what the machine does undisturbed."""
        from numba_meta.devices.cpu import CpuStep
        from numba_meta.devices.cpu_record import CpuRecorder

        recorders = [CpuRecorder(stream) for stream in self._streams]
        for device, recorder in enumerate(recorders):
            record(device, recorder)
        step = CpuStep(self._streams, [recorder.program() for recorder in recorders])
        times = []
        for _ in range(n_runs + 2):
            begin = time.perf_counter()
            step.run()
            times.append(time.perf_counter() - begin)
        return min(times[2:])

    def bytes(self, n_bytes: int) -> Array:
        """Bytes that are positive, small numbers in every type: nothing overflows."""
        return np.resize(self._random.integers(1, 0x38, min(n_bytes, 1 << 20), dtype=np.uint8), n_bytes)

    # ---- what is measured --------------------------------------------------------------------------------------------------------------

    def step_and_call(self) -> tuple[float, float]:
        """Seconds of a step without work, and of one small call in it, with the barrier before it."""
        empty = self.seconds(lambda device, recorder: self._small_calls(recorder, 1), 5 * _RUNS)
        full = self.seconds(lambda device, recorder: self._small_calls(recorder, _CALLS + 1))
        return empty, max(0.0, full - empty) / _CALLS

    def _small_calls(self, recorder: Any, n: int) -> None:
        from numba_meta.kernels.cpu.norm import rms_norm

        x, weight, y = (np.ones(_SMALL, np.float32) for _ in range(3))
        for _ in range(n):
            recorder.call(
                rms_norm, x=x, x_stride=4 * _SMALL, weight=weight, y=y, y_stride=4 * _SMALL, n=_SMALL, rows_per_token=1,
                n_rows=np.ones(1, np.int64), eps=1e-5,
            )  # fmt: skip

    def meeting(self, call_seconds: float, step_seconds: float) -> float:
        """Seconds that devices lose at a meeting, beside what they wait for each other's work; 0 for one device."""
        from numba_meta.kernels.cpu import program

        if self.n_devices == 1:
            return 0.0

        def record(device: int, recorder: Any) -> None:
            for _ in range(_MEETINGS):
                self._small_calls(recorder, 4)
                recorder.call(program.meet, barrier=False, counter=self._counter, total=self.n_devices * self.n_threads)

        own = step_seconds + 4 * _MEETINGS * call_seconds
        return max(0.0, self.seconds(record) - own) / _MEETINGS

    def weights(self, kind: WeightKind, call_seconds: float, step_seconds: float) -> float:
        """Packed bytes per second of products with one row: matrices of 1,024 by 1,024, one after the other."""
        from numba_meta.kernels.cpu.matmul import matmul_kernel
        from numba_meta.kernels.cpu.packed import activation_format, activation_row_bytes, packed_bytes

        dtype, n = BY_NAME[kind.dtype], 1024
        kernel = matmul_kernel(dtype, kind.exact, 1)
        x_bytes = activation_row_bytes(activation_format(dtype, kind.exact), n)
        n_bytes = packed_bytes(dtype, n, n)
        n_matrices = max(4, _WEIGHT_BYTES // self.n_devices // n_bytes)
        packed = [self.bytes(n_matrices * n_bytes) for _ in range(self.n_devices)]

        def record(device: int, recorder: Any) -> None:
            x, y, rows = self.bytes(x_bytes), np.zeros(n, np.float32), np.ones(1, np.int64)
            for i in range(n_matrices):
                w = packed[device][i * n_bytes :]
                recorder.call(kernel, w=w, x=x, x_stride=x_bytes, y=y, y_stride=4 * n, n_out=n, k=n, n_rows=rows)

        seconds = self.seconds(record) - step_seconds - n_matrices * call_seconds
        return n_matrices * n_bytes / max(seconds, 1e-9)

    def attention(self, kind: AttentionKind, call_seconds: float, step_seconds: float) -> float:
        """Bytes of K and V per second that the attention of one token reads, over 4,096 cells."""
        from numba_meta.kernels.cpu import attention as kernels

        k_type, v_type, cells = BY_NAME[kind.k_type], BY_NAME[kind.v_type], _ATTENTION_CELLS
        k_row, v_row = k_type.row_bytes(kind.head_dim_k), v_type.row_bytes(kind.head_dim_v)
        n_head, n_chunks = kind.n_kv_heads * kind.group, kernels.chunks_needed(cells)
        kernel = kernels.attention_chunks(k_type, v_type, kind.head_dim_k, kind.head_dim_v)
        rows = [cells * kind.n_kv_heads * row for _ in range(_CACHE_SETS) for row in (k_row, v_row)]
        caches = [[self.bytes(n_bytes) for n_bytes in rows] for _ in range(self.n_devices)]

        def record(device: int, recorder: Any) -> None:
            one, zero = np.ones(1, np.int64), np.zeros(1, np.int32)
            q = np.full(n_head * kind.head_dim_k, 0.01, np.float32)
            partial = np.zeros(kernels.attention_scratch_bytes(1, n_head, kind.head_dim_v, n_chunks), np.uint8)
            for i in range(_CACHE_SETS):
                k, v = caches[device][2 * i : 2 * i + 2]
                recorder.call(
                    kernel, q=q, q_stride=4 * q.size, q_head_stride=4 * kind.head_dim_k, k=k, k_stride=kind.n_kv_heads * k_row,
                    k_head_stride=k_row, v=v, v_stride=kind.n_kv_heads * v_row, v_head_stride=v_row,
                    cell_table=np.arange(cells, dtype=np.int32), table_stride=4 * cells, positions=np.full(1, cells - 1, np.int32),
                    sequences=zero, window=0, n_head=n_head, first_head=0, group=kind.group, first_kv=0, scale=0.1, partial=partial,
                    n_chunks=n_chunks, n_rows=one,
                )  # fmt: skip

        seconds = self.seconds(record) - step_seconds - _CACHE_SETS * call_seconds
        return _CACHE_SETS * cells * kind.n_kv_heads * (k_row + v_row) / max(seconds, 1e-9)

    def copies(self, step_seconds: float) -> float:
        """Bytes per second of copies from memory to a slot, by one thread of each device."""
        from numba_meta.kernels.cpu.copy import copy_2d

        n, n_windows = _COPY_BYTES, 12
        host = [self.bytes(n * n_windows) for _ in range(self.n_devices)]
        slots = [np.ones(3 * n, np.uint8) for _ in range(self.n_devices)]

        def record(device: int, recorder: Any) -> None:
            for i in range(n_windows):
                source, slot = host[device][i * n :], slots[device][i % 3 * n :]
                width = 384
                recorder.call(
                    copy_2d, source=source, source_pitch=width, destination=slot, destination_pitch=width, width=width, height=n // width
                )

        return n * n_windows / max(self.seconds(record) - step_seconds, 1e-9)


def calibrate(needs: Sequence[Needs], n_threads: Sequence[int], renew: bool = False) -> tuple[DeviceSpeeds, ...]:
    """Speeds for what each device needs: from the user's cache, and measured where they are not there (or `renew`)."""
    speeds, renewed = [], set[int]()
    for need, threads in zip(needs, n_threads, strict=True):
        speeds.append(_device_speeds(need, threads, _together(len(needs), threads), renew and threads not in renewed))
        renewed.add(threads)
    return tuple(speeds)


def measured_at(n_threads: Sequence[int]) -> float | None:
    """When the oldest of the remembered speeds of devices with so many threads was measured (s of `time.time`); None: nobody knows."""
    known = _read(speeds_file())
    times = [known.get(_where(threads, _together(len(n_threads), threads)), {}).get(_TIME, -1.0) for threads in n_threads]
    return min(times) if times and min(times) >= 0 else None


def is_known(needs: Sequence[Needs], n_threads: Sequence[int]) -> bool:
    """Whether everything that is needed was measured before."""
    known = _read(speeds_file())
    places = [_where(threads, _together(len(needs), threads)) for threads in n_threads]
    return not any(_missing(need, known.get(where, {})) for need, where in zip(needs, places, strict=True))


def given_speeds(needs: Sequence[Needs], weights: float, attention: float, measured: Sequence[DeviceSpeeds]) -> tuple[DeviceSpeeds, ...]:
    """`measured` with one speed for all weights and one for all attention in their place, in bytes per second; 0 keeps the measured one."""
    out = []
    for need, speeds in zip(needs, measured, strict=True):
        if weights:
            speeds = replace(speeds, weights=dict.fromkeys(need.weights, weights))
        if attention:
            speeds = replace(speeds, attention=dict.fromkeys(need.attention, attention))
        out.append(speeds)
    return tuple(out)


# ---- what is remembered ----------------------------------------------------------------------------------------------------------------


def speeds_file() -> Path:
    """Where measured speeds are kept: beside the compiled kernels."""
    from numba_meta.kernels.cpu.kernel import cache_folder

    return cache_folder().parent / "speeds.json"


def measure_speeds(needs: Sequence[Needs], n_threads: Sequence[int]) -> tuple[DeviceSpeeds, ...]:
    """Speeds as they are now: nothing is remembered."""
    speeds = []
    for need, threads in zip(needs, n_threads, strict=True):
        speeds.append(_as_speeds(need, _measure(need, {}, threads, _together(len(needs), threads))))
    return tuple(speeds)


def _together(n_devices: int, n_threads: int) -> int:
    """How many devices with so many threads are measured at the same time: they share the machine's memory."""
    return max(1, min(n_devices, (os.cpu_count() or 1) // n_threads))


def _where(n_threads: int, n_devices: int) -> str:
    from numba_meta.kernels.cpu.isa import detect

    return f"{_machine()} {detect().name.lower()} {n_devices}x{n_threads}"


def _missing(need: Needs, known: Mapping[str, float]) -> bool:
    wanted = [*(_name("weights", kind) for kind in need.weights), *(_name("attention", kind) for kind in need.attention), *_BASE]
    return not all(name in known for name in wanted)


def _device_speeds(need: Needs, n_threads: int, n_devices: int, renew: bool) -> DeviceSpeeds:
    where = _where(n_threads, n_devices)
    known = _read(speeds_file()).get(where, {})
    found: dict[str, float] = {}
    if renew or _missing(need, known):
        known = {} if renew else known
        found = _measure(need, known, n_threads, n_devices)
        if not known:
            found[_TIME] = time.time()
        _remember(where, {**known, **found})
    return _as_speeds(need, {**known, **found})


def _as_speeds(need: Needs, every: Mapping[str, float]) -> DeviceSpeeds:
    return DeviceSpeeds(
        {kind: every[_name("weights", kind)] for kind in need.weights},
        {kind: every[_name("attention", kind)] for kind in need.attention},
        every["copies"],
        every["call"],
        every["meeting"],
        every["step"],
    )


def _measure(need: Needs, known: Mapping[str, float], n_threads: int, n_devices: int) -> dict[str, float]:
    found: dict[str, float] = {}
    with Bench(n_devices, n_threads) as bench:
        if not all(name in known for name in _BASE):
            found["step"], found["call"] = bench.step_and_call()
            found["meeting"] = bench.meeting(found["call"], found["step"])
            found["copies"] = bench.copies(found["step"])
        step, call = ({**known, **found}[name] for name in ("step", "call"))
        for weight in need.weights:
            if _name("weights", weight) not in known:
                found[_name("weights", weight)] = bench.weights(weight, call, step)
        for attention in need.attention:
            if _name("attention", attention) not in known:
                found[_name("attention", attention)] = bench.attention(attention, call, step)
    return found


def _name(what: str, kind: WeightKind | AttentionKind) -> str:
    return " ".join([what, *map(str, kind)])


def _machine() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "cpu")
    return f"{model} {os.cpu_count()} cores"


def _read(path: Path) -> dict[str, dict[str, float]]:
    """What is remembered; nothing where the file is missing or damaged."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(data, dict) or not all(isinstance(speeds, dict) for speeds in data.values()):
        return {}
    return {
        str(where): {str(name): float(value) for name, value in speeds.items() if _is_plausible(str(name), value)}
        for where, speeds in data.items()
    }


def _is_plausible(name: str, value: object) -> bool:
    """Times may be 0, a speed may not; neither is beyond all machines."""
    if not isinstance(value, (int, float)) or not value < _BEYOND_ALL:
        return False
    return value > 0 or (value == 0 and name in _TIMES)


def _remember(where: str, found: Mapping[str, float]) -> None:
    """Writes what is known of such devices to the file, in one piece; a folder that cannot be written is no failure."""
    path = speeds_file()
    data = _read(path)
    data[where] = dict(found)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
            json.dump(data, file, indent=1)
        os.replace(file.name, path)
    except OSError:
        pass
