"""CUDA devices on a driver without a GPU: accounts, limits, errors with the call's name, and that nothing is left behind."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from devices.fake_driver import INVALID_VALUE, OUT_OF_MEMORY, FakeDriver

from numba_meta.devices import cuda_driver
from numba_meta.devices.cuda import CudaDevice
from numba_meta.devices.meta import MetaDevice
from numba_meta.devices.parse import parse_devices
from numba_meta.errors import DeviceError, OutOfMemoryError


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """A fake driver with two GPUs of 1 MiB each; at the end nothing of it may be held but contexts."""
    fake = FakeDriver()
    monkeypatch.setattr(cuda_driver, "_bindings", lambda: fake)
    cuda_driver.open_gpu.cache_clear()
    yield fake
    cuda_driver.open_gpu.cache_clear()
    assert not fake.held and not fake.pinned and not any(fake.live.values()), (fake.held, fake.pinned, fake.live)


def open_devices(names: str) -> MetaDevice:
    specs = parse_devices(names)
    return MetaDevice.open(specs, [1] * len(specs))


def test_two_devices_on_one_gpu_share_its_memory(driver: FakeDriver) -> None:
    with open_devices("cuda:0,cuda:0") as device:
        assert device.names == ("cuda:0", "cuda:0#1") and device.kind == "cuda"
        buffer = device.allocate([300 << 10, 500 << 10], "weights")
        first, second = device.devices
        assert (first.allocated_bytes, second.allocated_bytes) == (300 << 10, 500 << 10)
        assert first.free_bytes == second.free_bytes == (1 << 20) - (800 << 10)
        with pytest.raises(OutOfMemoryError, match=r"cuda:0#1: the ring needs 400000 bytes .*, 228376 bytes of memory are free"):
            device.allocate([1000, 400000], "the ring")
        assert first.allocated_bytes == 300 << 10, "all or nothing"
        buffer.free()
        buffer.free()
        assert first.allocated_bytes == 0 and first.peak_bytes == (300 << 10) + 1000


def test_a_limit(driver: FakeDriver) -> None:
    with open_devices("cuda:1?mem=64K") as device:
        held = device.allocate([60 << 10], "weights")
        with pytest.raises(OutOfMemoryError, match="cuda:1: the KV cache needs 5000 bytes .*, 4096 of 65536 are free"):
            device.allocate([5000], "the KV cache")
        del held
        assert device[0].allocated_bytes == 0 and not driver.held, "nobody holds it any more"
        device.allocate([5000], "the KV cache")


def test_bytes_go_there_and_come_back(driver: FakeDriver) -> None:
    data = np.random.default_rng().integers(0, 256, 100, dtype=np.uint8)
    with open_devices("cuda:0") as device:
        piece = device.allocate([1000], "x").pieces[0]
        assert not piece.read(0, 1000).any(), "zeroed"
        with piece.edit(7, 100, keep=False) as out:
            out[:] = data
        with piece.edit(10, 2) as out:
            assert np.array_equal(out, data[3:5])
            out[0] = 9
        data[3] = 9
        assert np.array_equal(piece.read(7, 100), data) and not piece.read(107, 893).any()


CALLS = ("cuDevicePrimaryCtxRetain", "cuMemGetInfo", "cuMemsetD8", "cuStreamCreate", "cuMemHostAlloc", "cuMemcpyDtoH")


@pytest.mark.parametrize("call", CALLS)
def test_an_error_names_the_gpu_and_the_call(call: str, driver: FakeDriver) -> None:
    driver.fails[call] = INVALID_VALUE
    with pytest.raises(DeviceError, match=f"^cuda:1: {call} failed: CUDA_ERROR_INVALID_VALUE$"), open_devices("cuda:1") as meta:
        device = meta.devices[0]
        assert isinstance(device, CudaDevice)
        device.allocate(10, "x").read(0, 10)
        device.stream()
        device.pinned(10)


def test_memory_that_the_driver_does_not_give(driver: FakeDriver) -> None:
    """Free as it says, but in pieces: the error is the device's own."""
    driver.fails["cuMemAlloc"] = OUT_OF_MEMORY
    with open_devices("cuda:0") as device, pytest.raises(OutOfMemoryError, match="cuda:0: weights need 1000 bytes"):
        device.allocate([1000], "weights")


def test_a_gpu_that_is_not_there_or_too_old(driver: FakeDriver) -> None:
    with pytest.raises(DeviceError, match=r"there is no GPU cuda:2; this machine has 2"):
        open_devices("cuda:0,cuda:2")
    driver.attributes["major"] = 6
    with pytest.raises(DeviceError, match=r"cuda:1: A GPU has compute capability 6\.0; expected 7\.5 or newer"):
        open_devices("cuda:1")


def test_gpus_that_cannot_reach_each_other(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    def reads(names: str) -> list[bool]:
        with open_devices(names) as meta:
            gpus = [device.gpu for device in meta.devices if isinstance(device, CudaDevice)]
            return [mine.can_read(theirs) for mine in gpus for theirs in gpus]

    assert reads("cuda:0,cuda:1") == [True] * 4
    monkeypatch.setattr(FakeDriver, "cuDeviceCanAccessPeer", lambda self, device, other: (0, 0))
    cuda_driver.open_gpu.cache_clear()
    assert reads("cuda:0,cuda:1") == [True, False, False, True]
    assert reads("cuda:0,cuda:0") == [True] * 4


@pytest.mark.parametrize(("is_there", "said"), [(True, "driver is older than the package cuda-bindings"), (False, "this machine lacks")])
def test_a_driver_that_does_not_do(is_there: bool, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bindings = pytest.importorskip("cuda.bindings", reason="needs the package cuda-bindings")

    def fail(flags: int) -> None:
        raise RuntimeError("Failed to get cuGetProcAddress_v2\nand more")

    monkeypatch.setattr(bindings, "driver", SimpleNamespace(cuInit=fail), raising=False)
    monkeypatch.setattr(cuda_driver, "has_library", lambda name: is_there)
    with pytest.raises(DeviceError, match=f"{said} .Failed to get cuGetProcAddress_v2.; ") as caught:
        cuda_driver._bindings.__wrapped__()
    assert "\n" not in str(caught.value)


def test_no_more_peers_than_a_gpu_can_have(driver: FakeDriver) -> None:
    driver.fails["cuCtxEnablePeerAccess"] = 711  # CUDA_ERROR_TOO_MANY_PEERS
    with open_devices("cuda:0,cuda:1") as meta:
        mine, theirs = [device.gpu for device in meta.devices if isinstance(device, CudaDevice)]
        assert not mine.can_read(theirs)


def test_devices_of_two_kinds(driver: FakeDriver) -> None:
    for names in ("cpu:0,cuda:0", "cuda:0,cpu:0"):
        with pytest.raises(DeviceError, match="are of several kinds; one process computes on CPU devices or on CUDA devices") as caught:
            open_devices(names)
        assert str(caught.value).startswith(f"the devices {names.replace(',', ', ')} are")
    cpu, cuda = (open_devices(name) for name in ("cpu:0", "cuda:0"))
    with pytest.raises(DeviceError, match="the devices cpu:0, cuda:0 are of several kinds"):
        MetaDevice([*cpu, *cuda])


def test_closed_devices(driver: FakeDriver) -> None:
    meta = open_devices("cuda:0")
    device = meta.devices[0]
    assert isinstance(device, CudaDevice)
    held = device.allocate(10, "x"), device.pinned(10)
    device.stream()
    device.close()
    device.close()
    assert held[0].address == held[1].address == 0 and not driver.held and not driver.pinned
    with pytest.raises(DeviceError, match="the device was closed"):
        device.stream()
    with pytest.raises(DeviceError, match="the device was closed"):
        device.allocate(10, "x")


def test_closing_after_a_failure_tells_nothing_new(driver: FakeDriver) -> None:
    """After a kernel's failure the driver refuses all that follows; what it would still take is given back."""
    meta = open_devices("cuda:0")
    device = meta.devices[0]
    assert isinstance(device, CudaDevice)
    held = device.allocate(10, "x")
    device.stream()
    driver.fails["cuStreamSynchronize"] = 700
    device.close()
    assert held.address == 0 and not driver.held


def test_pinned_memory_stays_while_somebody_looks_at_it(driver: FakeDriver) -> None:
    with open_devices("cuda:0") as meta:
        device = meta.devices[0]
        assert isinstance(device, CudaDevice)
        memory = device.pinned(100)
        view = memory.data[10:20].view(np.int16)
        memory.free()
        view[:] = 7
        assert driver.pinned and (view == 7).all()
        del view
        assert not driver.pinned


@pytest.mark.parametrize("pinned", (True, False))
def test_host_memory_is_pinned_where_that_works(pinned: bool, driver: FakeDriver) -> None:
    if not pinned:
        driver.fails["cuMemHostAlloc"] = OUT_OF_MEMORY
    with open_devices("cuda:0") as meta:
        memory = meta.host_memory(1000, True)
        assert memory.is_pinned == pinned and memory.data.size == 1000 and not memory.data.any()
        device = meta.devices[0]
        assert isinstance(device, CudaDevice) and device.gpu.is_pinned(memory.address) == pinned
