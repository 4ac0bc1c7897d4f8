"""A CPU device: buffers, the account of its memory, limits, its end."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from numba_meta.devices import cpu
from numba_meta.devices.cpu import ALIGNMENT, CpuBuffer, CpuDevice
from numba_meta.devices.cpu_record import CpuRecorder
from numba_meta.devices.cpu_stream import CpuStep
from numba_meta.devices.meta import MetaDevice
from numba_meta.devices.parse import DeviceSpec, parse_devices
from numba_meta.errors import DeviceError, OutOfMemoryError


def device(limit: int | None = None, n_threads: int = 1) -> CpuDevice:
    return CpuDevice(DeviceSpec("cpu", 0, limit), "cpu:0", n_threads)


@given(st.lists(st.integers(0, 5000), max_size=8), st.randoms())
def test_the_account(sizes: list[int], random) -> None:
    one = device()
    buffers: list[CpuBuffer] = []
    for i, n_bytes in enumerate(sizes):
        buffer = one.allocate(n_bytes, f"part {i % 2}")
        assert buffer.n_bytes == n_bytes and buffer.address % ALIGNMENT == 0 and not buffer.data.any()
        assert buffer.data.dtype == np.uint8 and buffer.data.shape == (n_bytes,)
        buffer.data[:] = i + 1
        buffers.append(buffer)
    for i, buffer in enumerate(buffers):
        assert (buffer.data == i + 1).all()  # no other buffer lies over it
    assert one.allocated_bytes == one.peak_bytes == sum(sizes)
    assert one.bytes_by_label() == {f"part {j}": sum(sizes[j::2]) for j in range(2) if sizes[j::2]}
    random.shuffle(buffers)
    left = sum(sizes)
    for buffer in buffers:
        left -= buffer.n_bytes
        buffer.free()
        buffer.free()
        assert one.allocated_bytes == left and buffer.n_bytes == 0
    assert one.peak_bytes == sum(sizes) and one.bytes_by_label() == {}


def test_a_limit_names_device_need_and_free() -> None:
    one = device(limit=1000)
    held = one.allocate(600, "weights")
    with pytest.raises(OutOfMemoryError) as caught:
        one.allocate(401, "the KV cache")
    assert str(caught.value) == (
        "cpu:0: the KV cache needs 401 bytes (401 B), 400 of 1000 are free; "
        "use a smaller context or batch, or more devices"
    )
    assert one.allocated_bytes == one.peak_bytes == 600 and one.free_bytes == 400
    cache = one.allocate(400, "the KV cache")
    held.free()
    again = one.allocate(600, "again")
    assert one.free_bytes == 0
    del cache, again
    assert one.free_bytes == 1000, "nobody holds them any more"


def test_more_than_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system would promise the memory and end the process later."""
    monkeypatch.setattr(cpu, "available_bytes", lambda: 100 << 20)
    one = device()
    one.allocate(70 << 20, "weights").free()
    with pytest.raises(OutOfMemoryError, match=r"cpu:0: weights need 104857601 bytes \(100.0 MiB\), 104857600 bytes of memory are free"):
        one.allocate((100 << 20) + 1, "weights")
    assert one.allocated_bytes == 0


@pytest.mark.parametrize("n_bytes", [1 << 60, 1 << 80])
def test_more_than_an_address_space(n_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "available_bytes", lambda: None)
    with pytest.raises(OutOfMemoryError, match=f"cpu:0: weights need {n_bytes} bytes .*, more than this machine gives"):
        device().allocate(n_bytes, "weights")


def test_what_cannot_be() -> None:
    with pytest.raises(DeviceError, match="weights cannot have -1 bytes; expected 0 or more"):
        device().allocate(-1, "weights")
    with pytest.raises(DeviceError, match="cpu:0: a device needs at least one thread, not 0"):
        device(n_threads=0)
    with pytest.raises(DeviceError, match="cpu:0 transfer: a stream needs at least one thread, not 0"):
        device().stream("transfer", n_threads=0)


def test_advice_helps() -> None:
    """A smaller context does nothing for weights, and another division nothing where there is one device."""
    for label, n_devices, told in (
        ("weights", 1, "weights need 60 bytes (60 B), 50 of 50 are free; use a smaller model or one of fewer bits, or more devices"),
        ("the KV cache", 2, "the KV cache needs 60 bytes (60 B), 50 of 50 are free; use a smaller context or batch, another"),
        ("the workspace", 1, "needs 60 bytes (60 B), 50 of 50 are free; use a smaller context or batch, or more devices"),
        ("weights", 2, "use a smaller model or one of fewer bits, another split, or more devices"),
    ):
        meta = MetaDevice.open(parse_devices(",".join(["cpu:0?mem=50"] * n_devices)), (1,) * n_devices)
        with pytest.raises(OutOfMemoryError) as caught:
            meta.allocate((60,) * n_devices, label)
        assert told in str(caught.value)


def test_close_ends_threads_and_gives_memory_back() -> None:
    before = threading.enumerate()
    with device(n_threads=2) as one:
        streams = [one.stream(caller_joins=True), one.stream("transfer", n_threads=1)]
        held = one.allocate(100, "weights")
        CpuStep(streams, [CpuRecorder(stream).program() for stream in streams]).run()
        assert sorted(thread.name for thread in threading.enumerate() if thread not in before) == ["cpu:0 compute-1", "cpu:0 transfer-0"]
    assert threading.enumerate() == before
    one.close()
    assert one.allocated_bytes == held.n_bytes == 0 and one.peak_bytes == 100
    assert all(stream.closed for stream in streams)
    with pytest.raises(DeviceError, match="cpu:0: weights cannot have 1 bytes; the device was closed"):
        one.allocate(1, "weights")
    with pytest.raises(DeviceError, match="cpu:0: the device was closed"):
        one.stream()
