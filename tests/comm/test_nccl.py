"""The communicator `nccl`: how ranks agree on it, and what recorded steps enqueue, with a fake of the bindings; on a GPU, alone."""

from __future__ import annotations

import ctypes
import importlib
import threading
from typing import Any

import numpy as np
import pytest
from fake_gpu import FakeGpu
from fake_ranks import FakeFactory, run_ranks

from numba_meta.comm.communicators import negotiate, offered_names
from numba_meta.comm.errors import RankError
from numba_meta.comm.join import JoinRequest, join
from numba_meta.comm.nccl import NcclCommunicator, NcclFactory, NcclOffer, check_offers, import_nccl
from numba_meta.comm.world import SoloWorld
from numba_meta.schedule.ranks import StreamCall, StreamWork

ID = bytes(range(1, 129))


class FakeNccl:
    """Bindings of one rank. What ranks hand in is gathered in `meetings`, which all ranks share; addresses are the host's."""

    class NCCLError(Exception):
        pass

    class DataType:
        Float32 = 7

    class RedOp:
        Sum = 0

    def __init__(self, size: int, meetings: dict[str, Any], fails: tuple[str, ...] = ()) -> None:
        self.size, self.meetings, self.fails = size, meetings, fails
        self.rank = -1
        self.code = 0
        self.destroyed: list[str] = []
        self._n_calls = 0

    def _call(self, name: str) -> None:
        if name in self.fails:
            raise self.NCCLError(f"NCCL_ERROR ({name}): unhandled\nsystem error")

    def get_version(self) -> int:
        return 23203

    def get_unique_id(self) -> bytes:
        self._call("get_unique_id")
        return ID

    def comm_init_rank(self, size: int, unique_id: bytearray, rank: int) -> str:
        self._call("comm_init_rank")
        assert not memoryview(unique_id).readonly, "the bindings refuse it"
        assert size == self.size and unique_id == ID
        self.rank = rank
        return f"comm {rank}"

    def _swap(self, own: Any) -> list[Any]:
        """What every rank brought to this call."""
        key = f"call {self._n_calls}"
        self._n_calls += 1
        self.meetings.setdefault(key, [None] * self.size)[self.rank] = own
        self.meetings["barrier"].wait(10)
        return list(self.meetings[key])

    def all_reduce(self, source: int, target: int, n: int, kind: int, operation: int, handle: str, stream: int) -> None:
        self._call("all_reduce")
        assert (kind, operation, handle) == (7, 0, f"comm {self.rank}")
        parts = self._swap(floats(source, n).copy())
        floats(target, n)[:] = sum(parts[1:], parts[0])

    def broadcast(self, source: int, target: int, n: int, kind: int, root: int, handle: str, stream: int) -> None:
        floats(target, n)[:] = self._swap(floats(source, n).copy() if root == self.rank else None)[root]

    def group_start(self) -> None:
        self.destroyed.append("group")

    def group_end(self) -> None:
        assert self.destroyed.pop() == "group"

    def comm_get_async_error(self, handle: str) -> int:
        return self.code

    def get_error_string(self, code: int) -> str:
        return f"error {code}"

    def comm_destroy(self, handle: str) -> None:
        self.destroyed.append(handle)

    def comm_abort(self, handle: str) -> None:
        self.destroyed.append(f"abort {handle}")


def floats(address: int, n: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_float * n).from_address(address))


def bindings(size: int, fails: dict[int, tuple[str, ...]] | None = None) -> list[FakeNccl]:
    meetings = {"barrier": threading.Barrier(size)}
    return [FakeNccl(size, meetings, (fails or {}).get(rank, ())) for rank in range(size)]


def uuids(*letters: str) -> list[FakeGpu]:
    return [FakeGpu(letter * 32) for letter in letters]


def agree(gpus: list[FakeGpu], nccls: list[FakeNccl]) -> tuple[list[Any], list[str]]:
    """Each rank joins and negotiates, with `mpi` behind: its reduction or error; all warnings."""
    warnings: list[str] = []
    behind = FakeFactory("mpi")

    def work(world: Any) -> Any:
        factories = [NcclFactory(gpus[world.rank], lambda: nccls[world.rank]), behind]  # type: ignore[arg-type]
        request = JoinRequest(offers=offered_names(world, factories))
        return negotiate(world, join(world, lambda: request, timeout=10), factories, warn=warnings.append)

    return [outcome.error or outcome.value for outcome in run_ranks(len(gpus), work)], warnings


def test_ranks_with_a_gpu_each_take_it() -> None:
    """Probes of all sizes came out right, or it would not be taken."""
    gpus, nccls = uuids("a", "b", "c"), bindings(3)
    reductions, warnings = agree(gpus, nccls)
    assert [reduction.name for reduction in reductions] == ["nccl"] * 3 and not warnings
    for reduction, gpu, nccl in zip(reductions, gpus, nccls, strict=True):
        communicator = reduction.communicators[0]
        communicator.table.check()
        nccl.code = 3
        with pytest.raises(RankError, match=f"NCCL failed on rank {nccl.rank}: error 3"):
            communicator.table.check()
        reduction.close()
        communicator.close()
        assert nccl.destroyed == [f"comm {nccl.rank}"] and gpu.is_clean


@pytest.mark.parametrize(
    ("gpus", "fails", "reason"),
    [
        (uuids("a", "b", "a"), {}, "nccl: rank 0: ranks 0 and 2 share one GPU; NCCL needs a GPU for each rank"),
        (uuids("a", "b", "c"), {0: ("get_unique_id",)}, "nccl: rank 0: rank 0 could not make NCCL's unique id"),
        (uuids("a", "b", "c"), dict.fromkeys(range(3), ("comm_init_rank",)), "NCCL's comm_init_rank failed on rank 0: NCCL_ERROR"),
        (uuids("a", "b", "c"), dict.fromkeys(range(3), ("all_reduce",)), "NCCL's all_reduce failed on rank 0: NCCL_ERROR (all_reduce)"),
    ],
    ids=["one GPU", "id", "init", "probe"],
)
def test_what_it_refuses_sends_all_to_the_next(gpus: list[FakeGpu], fails: dict[int, tuple[str, ...]], reason: str) -> None:
    reductions, warnings = agree(gpus, bindings(3, fails))
    assert [reduction.name for reduction in reductions] == ["mpi"] * 3
    assert all(len(reduction.notes) == 1 and reason in reduction.notes[0] for reduction in reductions)
    assert warnings == ([] if "share one GPU" in reason else [f"the ranks reduce with mpi, after {reductions[0].notes[0]}"])
    assert "\n" not in reductions[0].notes[0] and all(not gpu.memory for gpu in gpus)


def test_offers_have_one_size() -> None:
    offers = [NcclOffer("k", "ab" * 16, ID), NcclOffer("0123456789abcdef", "cd" * 16)]
    assert [NcclOffer.decode(offer.encode()) for offer in offers] == [offers[0], NcclOffer("0123456789abcdef", "cd" * 16, bytes(128))]
    assert len({len(offer.encode()) for offer in offers}) == 1
    check_offers(offers)


def test_without_the_packages_it_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", absent)
    obstacle = NcclFactory(FakeGpu()).obstacle(SoloWorld())  # type: ignore[arg-type]
    assert obstacle == "NCCL is not installed (No module named 'nccl.bindings.nccl'); install numba-meta[nccl13], or [nccl12] beside cuda12"


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("widths", [(5, 3, 7), (0, 4, 1), (6, 0, 0)])
def test_recorded_calls(rows: int, widths: tuple[int, ...]) -> None:
    """Sums and gathers as a step enqueues them: pieces of unequal widths, into rows with gaps."""
    gpus, nccls = uuids("a", "b", "c"), bindings(3)
    n, total = 9, sum(widths)
    parts = np.random.default_rng().standard_normal((3, rows, n), np.float32)
    pieces = [np.random.default_rng().standard_normal((rows, width), np.float32) for width in widths]

    def work(world: Any) -> tuple[np.ndarray, np.ndarray]:
        rank = world.rank
        communicator = NcclFactory(gpus[rank], lambda: nccls[rank]).build(world)  # type: ignore[arg-type]
        table = communicator.table
        own, piece, out = parts[rank].copy(), pieces[rank].copy(), np.full((rows, total + 2), np.nan, np.float32)
        scratch = np.zeros(max(1, table.gather_scratch_bytes(widths, rows)), np.uint8)
        place = own.ctypes.data
        sums = {"table": 0, "part": place, "part_stride": 4 * n, "out": place, "out_stride": 4 * n, "scratch": 0, "n": n, "n_rows": 0}
        gathers = {
            "table": 0, "part": piece.ctypes.data, "part_stride": piece.strides[0], "widths": 0, "out": out.ctypes.data,
            "out_stride": out.strides[0], "scratch": scratch.ctypes.data, "n_rows": 0,
        }  # fmt: skip
        for kernel, arguments in ((table.all_reduce, sums), (table.gather_columns, gathers)):
            assert isinstance(kernel, StreamCall)
            prepared = kernel.prepare(arguments, {"widths": np.array(widths)}, rows)
            assert isinstance(prepared, StreamWork)
            prepared.enqueue(5)
            prepared.free()
        return own, out

    for outcome in run_ranks(3, work):
        assert outcome.error is None
        own, out = outcome.value
        assert own.tobytes() == ((parts[0] + parts[1]) + parts[2]).tobytes()
        assert out[:, :total].tobytes() == np.concatenate(pieces, axis=1).tobytes() and np.isnan(out[:, total:]).all()


def test_abort_instead_of_close() -> None:
    (nccl,) = bindings(1)
    gpu = FakeGpu()
    communicator = NcclFactory(gpu, lambda: nccl).build(SoloWorld())  # type: ignore[arg-type]
    communicator.abort()
    communicator.close()
    assert nccl.destroyed == ["abort comm 0"]


@pytest.mark.parametrize("error", (ImportError("no module"), OSError("libnccl.so.2:\ncannot open"), AttributeError(), ValueError("new")))
def test_a_package_that_does_not_load(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise error

    monkeypatch.setattr("numba_meta.comm.nccl.importlib.import_module", fail)
    with pytest.raises(RankError, match=r"NCCL is not installed \(.+\); install numba-meta\[nccl13\]") as caught:
        import_nccl()
    assert "\n" not in str(caught.value)


@pytest.mark.gpu
def test_alone_on_a_gpu() -> None:
    """A communicator of one rank: sums from Python, and sums and gathers in a graph that runs twice."""
    from numba_meta.devices.cuda_driver import open_gpu
    from numba_meta.devices.cuda_graph import capture

    try:
        import_nccl()
    except RankError as error:
        pytest.skip(str(error))
    gpu = open_gpu(0)
    communicator: NcclCommunicator = NcclFactory(gpu).build(SoloWorld())
    memory, stream = gpu.allocate(8 * 4096), gpu.create_stream()
    try:
        x = np.random.default_rng().standard_normal(5000).astype(np.float32)
        y = x.copy()
        communicator.all_reduce(y)
        assert y.tobytes() == x.tobytes()
        gpu.write(memory, x[:1000])
        places = {"table": 0, "part": memory, "out": memory + 8192, "scratch": memory + 16384, "n_rows": 0}
        sums = communicator.table.all_reduce.prepare(places | {"part_stride": 2000, "out_stride": 2000, "n": 500}, {}, 2)
        gathers = communicator.table.gather_columns.prepare(
            places | {"part": memory + 8192, "part_stride": 2000, "widths": 0, "out": memory + 24576, "out_stride": 2048},
            {"widths": np.array([500])}, 2,
        )  # fmt: skip
        with capture(gpu, stream) as recorded:
            sums.enqueue(stream)
            gathers.enqueue(stream)
        for _ in range(2):
            gpu.write(memory + 24576, np.full(2048, np.nan, np.float32))
            recorded.graph.launch(stream)
            gpu.synchronize(stream)
        communicator.table.check()
        out = np.empty((2, 512), np.float32)
        gpu.read(memory + 24576, out)
        assert out[:, :500].tobytes() == x[:1000].tobytes() and np.isnan(out[:, 500:]).all()
        recorded.graph.destroy()
    finally:
        gpu.destroy_stream(stream)
        gpu.free(memory)
        communicator.close()
