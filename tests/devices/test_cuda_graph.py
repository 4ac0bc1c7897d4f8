"""Recorded graphs on a driver without a GPU: copies belong to their GPU, failures leave nothing, functions keep their shared memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from devices.fake_driver import INVALID_VALUE, GraphDriver

from numba_meta.devices import cuda_driver, cuda_graph
from numba_meta.devices.cuda_driver import open_gpu
from numba_meta.devices.cuda_graph import Copy2D, CudaGraph, capture
from numba_meta.errors import DeviceError


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[GraphDriver]:
    fake = GraphDriver()
    monkeypatch.setattr(cuda_driver, "_bindings", lambda: fake)
    monkeypatch.setattr(cuda_graph, "bindings", lambda: fake)
    open_gpu.cache_clear()
    yield fake
    open_gpu.cache_clear()
    assert not any(fake.live.values()), fake.live


def test_a_copy_is_set_for_the_gpu_that_it_was_recorded_for(driver: GraphDriver) -> None:
    first, second = open_gpu(0), open_gpu(1)
    with capture(first, 7) as recorded:
        pass
    recorded.graph.set_copy(second, "node", Copy2D(1000, 48, 2000, 48, 48, 10))
    recorded.graph.set_copy(second, "node", Copy2D(1000, 48, 2000, 48, 48, 0))
    assert driver.told == [("node", 1), ("node", 480, 1, "context 1", "context 1"), ("node", 0)]
    recorded.graph.destroy()
    recorded.graph.destroy()


@pytest.mark.parametrize("is_joined", (True, False))
def test_what_fails_while_a_stream_is_captured_leaves_no_graph(is_joined: bool, driver: GraphDriver) -> None:
    if not is_joined:
        driver.fails["cuStreamEndCapture"] = 904  # other streams have not come back
    with pytest.raises(DeviceError, match="^what failed first$"), capture(open_gpu(0), 7):
        raise DeviceError("what failed first")
    assert driver.calls["cuGraphDestroy"] == int(is_joined)


def test_a_graph_that_cannot_be_made_is_given_back(driver: GraphDriver) -> None:
    driver.fails["cuGraphInstantiate"] = INVALID_VALUE
    with pytest.raises(DeviceError, match="cuGraphInstantiate failed: CUDA_ERROR_INVALID_VALUE"), capture(open_gpu(0), 7):
        pass
    assert driver.calls["cuGraphDestroy"] == 1
    del driver.fails["cuGraphInstantiate"]
    CudaGraph(open_gpu(0), driver.cuStreamEndCapture(7)[1]).destroy()


@pytest.mark.parametrize(("capability", "version", "expected"), [(9, 12030, True), (12, 13000, True), (9, 12020, False), (8, 13000, False)])
def test_launches_are_recorded_early_where_graphs_keep_it(capability: int, version: int, expected: bool, driver: GraphDriver) -> None:
    driver.attributes["major"], driver.version = capability, version
    assert open_gpu(0).records_early_launches == expected


def test_a_function_keeps_the_shared_memory_that_it_was_given(driver: GraphDriver) -> None:
    gpu = open_gpu(0)
    for kib in (40, 60, 50, 60, 64):
        assert gpu.function(b"code", "kernel", kib << 10) == b"kernel"
    assert [value for _, _, value in driver.told] == [60 << 10, 64 << 10]
