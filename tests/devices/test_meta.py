"""The meta device: names, memory on all devices or none, a step over all of them."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from numba_meta.devices.cpu import CpuDevice
from numba_meta.devices.cpu_record import CpuRecorder, Rows
from numba_meta.devices.cpu_stream import CpuStep
from numba_meta.devices.meta import MetaDevice, name_devices
from numba_meta.devices.parse import DeviceSpec, parse_devices
from numba_meta.errors import DeviceError, OutOfMemoryError


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_names_tell_devices_apart(indices: list[int]) -> None:
    names = name_devices([DeviceSpec("cpu", i) for i in indices])
    assert len(set(names)) == len(indices)
    for at, (name, index) in enumerate(zip(names, indices, strict=True)):
        n = indices[:at].count(index)
        assert name == (f"cpu:{index}" if n == 0 else f"cpu:{index}#{n}")


def test_a_sequence_of_devices() -> None:
    meta = MetaDevice.open(parse_devices("cpu:0,cpu:0?mem=1K,cpu:1"), (2, 1, 1))
    assert meta.names == ("cpu:0", "cpu:0#1", "cpu:1") and meta.n_threads == (2, 1, 1)
    assert len(meta) == 3 and list(meta) == [meta[0], meta[1], meta[2]] and meta[-1].name == "cpu:1"
    assert [d.memory_limit for d in meta] == [None, 1024, None]
    assert repr(meta) == "<meta device of cpu:0, cpu:0#1, cpu:1>"


def test_memory_on_all_devices_or_on_none() -> None:
    meta = MetaDevice.open(parse_devices("cpu:0,cpu:0?mem=1K"), (1, 1))
    weights = meta.allocate((5000, 0), "weights")
    assert weights.n_bytes == (5000, 0) and all(address % 64 == 0 for address in weights.addresses)
    cache = meta.allocate((10, 1000), "the KV cache")
    with pytest.raises(OutOfMemoryError, match="cpu:0#1: the workspace needs 25 bytes .*, 24 of 1024 are free"):
        meta.allocate((70, 25), "the workspace")
    first, second = meta.memory()
    assert first.by_label == {"weights": 5000, "the KV cache": 10} and first.allocated_bytes == 5010 and first.peak_bytes == 5080
    assert second.by_label == {"the KV cache": 1000, "weights": 0} and (second.allocated_bytes, second.memory_limit) == (1000, 1024)
    cache.free()
    cache.free()
    assert [device.allocated_bytes for device in meta] == [5000, 0] and cache.n_bytes == (0, 0)


def test_a_step_over_all_devices() -> None:
    before = threading.enumerate()
    with MetaDevice.open(parse_devices("cpu:0,cpu:0,cpu:0"), (2, 1, 2)) as meta:
        host = np.random.default_rng(0).integers(0, 256, 3000, dtype=np.uint8)
        copies = meta.allocate((1000, 900, 1100), "piece")
        streams = meta.compute_streams()
        programs, at = [], 0
        for stream, piece in zip(streams, copies.pieces, strict=True):
            recorder = CpuRecorder(stream)
            recorder.copy_2d(Rows(host, at, 0), Rows(piece.data, 0, 0), width=piece.n_bytes, height=1)
            programs.append(recorder.program())
            at += piece.n_bytes
        CpuStep(streams, programs).run()
        np.testing.assert_array_equal(np.concatenate([piece.data for piece in copies.pieces]), host)
        assert len(threading.enumerate()) == len(before) + 4
    meta.close()
    assert threading.enumerate() == before and [device.allocated_bytes for device in meta] == [0, 0, 0]


def test_what_cannot_be() -> None:
    specs = parse_devices("cpu:0,cpu:0")
    with pytest.raises(DeviceError, match="2 devices with 1 numbers of threads"):
        MetaDevice.open(specs, (1,))
    with pytest.raises(DeviceError, match="expected one or more devices"):
        MetaDevice([])
    with pytest.raises(DeviceError, match="devices of different names"):
        MetaDevice([CpuDevice(spec, "cpu:0", 1) for spec in specs])
    with pytest.raises(DeviceError, match="weights for 3 devices on a meta device of 2"):
        MetaDevice.open(specs, (1, 1)).allocate((1, 2, 3), "weights")
