"""The workspace: resized as a whole or not at all, and every change is a new generation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from numba_meta.errors import OutOfMemoryError, PlacementError
from numba_meta.memory.layout import Request
from numba_meta.memory.workspace import Workspace, plan_workspace


class Pool:
    """Memory of devices with limits: buffers are dictionaries, so that two of one size are still told apart."""

    def __init__(self, limits: list[int]) -> None:
        self.limits = limits
        self.live: list[tuple[int, int, object]] = []

    def allocate(self, device: int, n_bytes: int) -> dict[str, int]:
        if self.held(device) + n_bytes > self.limits[device]:
            raise MemoryError
        buffer = {"n_bytes": n_bytes}
        self.live.append((device, n_bytes, buffer))
        return buffer

    def release(self, device: int, buffer: object) -> None:
        found = [i for i, (of, _, other) in enumerate(self.live) if of == device and other is buffer]
        assert len(found) == 1, "released twice, or on another device"
        del self.live[found[0]]

    def held(self, device: int) -> int:
        return sum(n_bytes for of, n_bytes, _ in self.live if of == device)


def make(limits: list[int]) -> tuple[Workspace[dict[str, int]], Pool]:
    pool = Pool(limits)
    return Workspace([f"cpu:{i}" for i in range(len(limits))], pool.allocate, pool.release), pool


def test_every_resize_is_a_new_generation() -> None:
    workspace, pool = make([1000, 1000])
    assert workspace.generation == 0 and workspace.buffers == (None, None)
    assert workspace.resize((100, 0))
    assert workspace.generation == 1 and workspace.n_bytes == (100, 0)
    assert workspace.buffers == ({"n_bytes": 100}, None)
    assert not workspace.resize((100, 0))
    assert workspace.generation == 1
    kept = workspace.buffers[0]
    assert workspace.resize([100, 50])
    assert workspace.generation == 2 and workspace.buffers[0] is kept
    workspace.close()
    assert workspace.generation == 3 and pool.live == []
    assert workspace.resize((10, 10))
    assert workspace.generation == 4


def test_growth_that_fails_leaves_the_old_state_and_can_be_retried() -> None:
    workspace, pool = make([1000, 150])
    workspace.resize((100, 100))
    before = (workspace.buffers, workspace.n_bytes, workspace.generation, list(pool.live))
    with pytest.raises(OutOfMemoryError, match="cpu:1: no room for a workspace of 200 bytes") as caught:
        workspace.resize((300, 200))
    assert "\n" not in str(caught.value)
    assert (workspace.buffers, workspace.n_bytes, workspace.generation, pool.live) == before
    assert workspace.buffers[0] is before[0][0]
    pool.limits[1] = 1000
    assert workspace.resize((300, 200))
    assert workspace.generation == before[2] + 1 and pool.held(1) == 200


def test_the_allocators_own_error_passes_unchanged() -> None:
    def refuse(device: int, n_bytes: int) -> dict[str, int]:
        raise OutOfMemoryError(f"cuda:{device}: needs {n_bytes} bytes, 3 are free")

    workspace: Workspace[dict[str, int]] = Workspace(["cuda:0"], refuse, lambda device, buffer: None)
    with pytest.raises(OutOfMemoryError, match="cuda:0: needs 8 bytes, 3 are free"):
        workspace.resize((8,))
    assert workspace.generation == 0


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 200)), max_size=12))
def test_memory_is_exactly_what_was_asked_for_last(sizes: list[tuple[int, int]]) -> None:
    workspace, pool = make([300, 250])
    for wanted in sizes:
        before = (workspace.n_bytes, workspace.generation)
        try:
            changed = workspace.resize(wanted)
        except OutOfMemoryError:
            assert (workspace.n_bytes, workspace.generation) == before
        else:
            assert workspace.n_bytes == wanted
            assert workspace.generation == before[1] + changed and changed == (wanted != before[0])
        assert tuple(pool.held(device) for device in (0, 1)) == workspace.n_bytes
        assert tuple(0 if buffer is None else buffer["n_bytes"] for buffer in workspace.buffers) == workspace.n_bytes


def test_each_device_has_a_layout_of_its_own_sizes() -> None:
    def of(n_bytes: int) -> list[Request]:
        return [Request("a", n_bytes, 0, 1), Request("b", n_bytes, 1, 2), Request("c", n_bytes, 2, 3)]

    plan = plan_workspace([of(100), of(300), of(0)], [64, 128, 64])
    assert plan.n_bytes == (256, 768, 0)
    workspace, _ = make([2000, 2000, 2000])
    assert not workspace.fits(plan)
    workspace.resize(plan.n_bytes)
    assert workspace.fits(plan)
    workspace.resize((256, 767, 0))
    assert not workspace.fits(plan)


def test_wrong_counts_are_errors() -> None:
    workspace, _ = make([10, 10])
    with pytest.raises(PlacementError, match="each of 2 devices"):
        workspace.resize((1,))
    with pytest.raises(PlacementError, match="each of 2 devices"):
        workspace.resize((1, -1))
    with pytest.raises(PlacementError, match="one alignment per device"):
        plan_workspace([[]], [1, 1])
