"""The communicator `ipc`: its kernels between simulated GPUs of several processes, and how ranks agree on it; on a GPU, between streams."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from child_processes import environment
from fake_gpu import FakeGpu, FakePinnedMemory
from fake_ranks import run_ranks
from ipc_cases import CASES, expected
from schedule.model_graphs import ModelGraph

from numba_meta.comm import ipc
from numba_meta.comm.ending import Ending, Event
from numba_meta.comm.errors import RankError
from numba_meta.comm.ipc import HALF_BYTES, IpcCommunicator, IpcFactory, IpcMemory, IpcOffer, check_offers, describe_error
from numba_meta.comm.watchdog import Watchdog
from numba_meta.devices.cuda_driver import n_gpus
from numba_meta.devices.parse import DeviceSpec
from numba_meta.errors import DeviceError
from numba_meta.kernels import kernel_set
from numba_meta.kernels.cuda import ipc as words
from numba_meta.kernels.cuda.kernel import Gpu
from numba_meta.models.loading.load_ranks import factories_for
from numba_meta.schedule.infer import infer_splits
from numba_meta.schedule.plan import plan_step
from numba_meta.schedule.ranks import Ranks, device_ranges

TESTS = Path(__file__).parents[1]
PROGRAM = TESTS / "comm" / "programs" / "simulated_ipc.py"
GPU = Gpu((9, 0), 132)


# ---- kernels ---------------------------------------------------------------------------------------------------------------------------


def simulate(size: int, name: str, folder: Path) -> list[dict[str, np.ndarray]]:
    """What every rank left."""
    commands = [[sys.executable, str(PROGRAM), str(folder), str(size), name, str(rank)] for rank in range(size)]
    simulated = environment(NUMBA_ENABLE_CUDASIM="1")
    processes = [subprocess.Popen(command, env=simulated, stderr=subprocess.PIPE, text=True) for command in commands]
    try:
        for process in processes:
            _, said = process.communicate(timeout=120)
            assert process.returncode == 0, said
    finally:
        for process in processes:
            process.kill()
    return [dict(np.load(folder / f"result.{rank}.npz")) for rank in range(size)]


@pytest.mark.parametrize(
    ("size", "name"), [(2, "mixed"), (3, "split"), pytest.param(4, "split", marks=pytest.mark.slow), pytest.param(1, "mixed")]
)
def test_sums_and_gathers_have_the_bits_of_the_ordered_ones(size: int, name: str, tmp_path: Path) -> None:
    """Launches of different sizes in turns, more rounds than one, gaps, dead rows, pieces without columns."""
    for rank, left in enumerate(simulate(size, name, tmp_path)):
        assert left["error"] == 0
        assert len(set(left["rounds"].tolist())) == 1 and left["rounds"][0] > len(CASES[name].calls)
        for index, call in enumerate(CASES[name].calls):
            assert left[f"arr_{index}"].tobytes() == expected(call, size, rank, index).tobytes(), (rank, call)


@pytest.mark.parametrize(("name", "reason"), [("late", words.LATE), ("aborted", words.ABORTED)])
def test_a_rank_that_does_not_come_is_not_waited_for_for_ever(name: str, reason: int, tmp_path: Path) -> None:
    """Rank 1 leaves two of three calls out. Rank 0 notes whom it waited for, once, and runs on without waiting."""
    alone, other = simulate(2, name, tmp_path)
    assert alone["error"] == 1 << 8 | reason and other["error"] == 0
    assert alone["arr_0"].tobytes() == other["arr_0"].tobytes() and len(alone["seconds"]) == 3
    assert alone["seconds"][2] < (1.5 if name == "late" else 5)


def test_launches_depend_on_nothing_that_differs_between_ranks() -> None:
    same = {"table": 64, "scratch": 0, "n_rows": 64}
    for n, rows, blocks in ((1, 1, 1), (1024, 1, 1), (4096, 1, 4), (4096, 16, 64), (1 << 20, 4, 64), (0, 1, 1)):
        sums = same | {"part": 256, "part_stride": 4 * n, "out": 256, "out_stride": 4 * n, "n": n}
        launches = {words.ipc_all_reduce.launch(sums, rows, gpu) for gpu in (GPU, Gpu((7, 5), 14))}
        assert {launch.grid for launch in launches} == {(blocks, 1, 1)}
        for width in (0, n):
            gathers = same | {"part": 256, "part_stride": 4 * width, "out": 512, "out_stride": 4 * n, "widths": 1024}
            assert words.ipc_gather_columns.launch(gathers, rows, GPU).grid == (blocks, 1, 1)
    with pytest.raises(DeviceError, match="rows of 5 float32 that are .24. bytes apart; expected rows without gaps"):
        words.ipc_all_reduce.launch(same | {"part": 256, "part_stride": 24, "out": 256, "out_stride": 24, "n": 5}, 2, GPU)


class Table:
    """What a plan asks of `IpcTable`."""

    address = 4096
    all_reduce, gather_columns = words.ipc_all_reduce, words.ipc_gather_columns

    def reduce_scratch_bytes(self, n_elements: int) -> int:
        return 0

    def gather_scratch_bytes(self, widths: Sequence[int], n_rows: int) -> int:
        return 0

    def check(self) -> None:
        raise AssertionError("no step is run here")


@pytest.mark.parametrize("counts", [(1, 1), (2, 1), (1, 2, 1)], ids=str)
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_plans_of_cuda_devices_call_them(architecture: str, counts: tuple[int, ...]) -> None:
    """With their arguments and a launch that is the same on every rank, once for each collective, from the rank's first device."""
    n = sum(counts)
    model = ModelGraph(architecture, [1] * n, n_rows=3, n_outputs=3)
    split = infer_splits(model.graph, model.leaf_state, n)
    kernels, devices = kernel_set("cuda"), device_ranges(counts)
    launches = []
    for rank, own in enumerate(counts):
        ranks = Ranks(rank, devices, Table())
        plan = plan_step(split, [1] * own, True, 256, ranks=ranks, kernels=kernels)
        over_ranks = [[c for c in device.calls if c.kernel in (words.ipc_all_reduce, words.ipc_gather_columns)] for device in plan.devices]
        assert not any(over_ranks[1:]) and [call.node for call in over_ranks[0]] == [node.name for node in split.collectives]
        grids = []
        for call in over_ranks[0]:
            values = {name: value if isinstance(value, int) else 256 for name, value in call.arguments.items()}
            call.kernel.pack(**values)  # type: ignore[union-attr]
            grids.append(call.kernel.launch(values, call.max_rows, Gpu((9, 0), 100 + rank)).grid)  # type: ignore[union-attr]
            assert call.max_rows == 3
        launches.append(grids)
    assert launches[0] and all(grids == launches[0] for grids in launches)


# ---- how ranks agree on it -------------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def pinned_memory(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr("numba_meta.devices.cuda_driver.PinnedMemory", FakePinnedMemory)


def build(gpus: list[FakeGpu], keys: list[str] | None = None) -> list[IpcCommunicator | BaseException]:
    """Every rank's communicator, or what it raised."""

    def work(world: object) -> IpcCommunicator:
        rank = world.rank  # type: ignore[attr-defined]
        world.host_key = keys[rank] if keys else "one host"  # type: ignore[attr-defined]
        return IpcFactory(gpus[rank]).build(world)  # type: ignore[arg-type]

    return [outcome.error or outcome.value for outcome in run_ranks(len(gpus), work)]


def test_tables_name_all_buffers_and_everything_is_given_back() -> None:
    gpus = [FakeGpu(), FakeGpu(), FakeGpu("cd" * 16)]
    made = build(gpus)
    shared = [each._memory.shared for each in made]  # type: ignore[union-attr]
    for rank, (gpu, communicator) in enumerate(zip(gpus, made, strict=True)):
        assert isinstance(communicator, IpcCommunicator)
        table = np.zeros(words.table_bytes(3) // 8, np.int64)
        gpu.read(communicator.table.address, table)
        assert table[words.RANK // 8] == rank and table[words.SIZE // 8] == 3 and not table[words.FAILED // 8]
        assert table[words.PEERS // 8 :: 2].tolist() == shared
        assert table[words.PEERS // 8 + 1 :: 2].tolist() == [address + 2 * HALF_BYTES for address in shared]
        assert not table[words.ROUNDS // 8 : words.PEERS // 8].any() and not gpu.memory[shared[rank]].any()
        assert len(gpu.memory[shared[rank]]) >= 2 * HALF_BYTES + words.flag_bytes(3) and len(gpu.memory[shared[rank]]) % (2 << 20) == 0
        assert communicator.accepts(1 << 40) and communicator.table.reduce_scratch_bytes(99) == 0
        communicator.close()
        communicator.close()
        assert gpu.is_clean


@pytest.mark.parametrize(
    ("gpus", "keys", "reasons"),
    [
        ([FakeGpu(), FakeGpu()], ["a", "b"], ["ranks 0 and 1 are on different hosts"] * 2),
        ([FakeGpu(), FakeGpu("cd" * 16, hidden=("ab" * 16,))], None, ["", "the GPU of rank 1 cannot reach that of rank 0"]),
        ([FakeGpu(), FakeGpu(fails=("allocate",))], None, ["rank 1 could not share its memory", "allocate failed"]),
        ([FakeGpu(fails=("export",)), FakeGpu()], None, ["export failed", "rank 0 could not share its memory"]),
        ([FakeGpu(), FakeGpu(fails=("import",))], None, ["", "import failed"]),
    ],
    ids=["hosts", "peers", "memory", "export", "import"],
)
def test_what_one_rank_cannot_do_is_said_and_leaves_nothing(gpus: list[FakeGpu], keys: list[str] | None, reasons: list[str]) -> None:
    """Every rank comes to the exchange; who can go on waits for the others' word, and closes."""
    for gpu, made, reason in zip(gpus, build(gpus, keys), reasons, strict=True):
        if reason:
            assert isinstance(made, (RankError, DeviceError)) and str(made).startswith(reason)
        else:
            assert isinstance(made, IpcCommunicator)
            made.close()
        assert gpu.is_clean


def test_offers_have_one_size() -> None:
    offers = [IpcOffer("k", "ab" * 16, bytes(64)), IpcOffer("0123456789abcdef", "cd" * 16, bytes(range(64)))]
    assert [IpcOffer.decode(offer.encode()) for offer in offers] == offers
    assert len({len(offer.encode()) for offer in offers}) == 1
    with pytest.raises(RankError, match="rank 0 could not share"):
        check_offers(offers[:1], 0, lambda uuid: True)


def test_errors_and_abort() -> None:
    (communicator,) = build([FakeGpu()])
    assert isinstance(communicator, IpcCommunicator)
    communicator.table.check()
    communicator.abort()
    assert communicator._memory.host_words.tolist() == [1, 0]
    communicator._memory.host_words[1] = 3 << 8 | words.LATE
    with pytest.raises(RankError, match="rank 3 did not come to a reduction within 600 s that rank 0 waited for it"):
        communicator.table.check()
    assert describe_error(2 << 8 | words.ABORTED, 5, 1) == "rank 5 stopped waiting for rank 2 in a reduction: the launch ends"
    with pytest.raises(RankError, match="a reduction of float64 .3.; expected contiguous float32"):
        communicator.all_reduce(np.zeros(3))


def test_kernels_are_told_before_a_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the watchdog; what fails or hangs then holds nothing up."""
    done: list[object] = []
    (communicator,) = build([FakeGpu()])
    watching = Watchdog(1, "here")
    held = threading.Event()
    watching.before_exit += [lambda: done.append(1 / 0), communicator.abort, lambda: held.wait(20)]  # type: ignore[union-attr, list-item]
    monkeypatch.setattr(os, "_exit", done.append)
    begin = time.monotonic()
    watching._end(Ending(Event("raised", 0, "there", "why"), "why", 7, speaks=False))
    assert done == [7] and time.monotonic() - begin < 5
    assert communicator._memory.host_words[0] == 1  # type: ignore[union-attr]
    held.set()
    watching.stop()


def test_devices_say_how_ranks_can_reduce() -> None:
    assert [factory.name for factory in factories_for(DeviceSpec("cpu", 0))] == ["mpi", "pairwise"]
    if n_gpus():
        assert [factory.name for factory in factories_for(DeviceSpec("cuda", 0))] == ["ipc", "nccl", "mpi", "pairwise"]
    else:
        with pytest.raises(DeviceError):
            factories_for(DeviceSpec("cuda", 0))


# ---- on a GPU: ranks of one process, each with a stream of its own, that run at the same time ------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 3])
def test_kernels_on_a_gpu(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same graphs again and again, sums and gathers of all sizes in turns: the bits of ordered sums, and no rank waits in vain."""
    from streams_of_ranks import StreamsOfRanks

    monkeypatch.setattr(ipc, "SPLIT_BYTES", 64 << 10)
    ranks = StreamsOfRanks(size)
    rng = np.random.default_rng()
    try:
        for n, rows in ((1, 1), (61, 3), (4096, 1), (4096, 16), (30_001, 1), (4096, 700)):
            parts = rng.standard_normal((size, rows, n), np.float32)
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            for outs in (ranks.sums(parts), ranks.sums(parts, in_place=True)):
                assert all(out.tobytes() == total.tobytes() for out in outs), (n, rows)
            widths = [0 if rank == 1 else n + 3 * rank for rank in range(size)]
            pieces = [rng.standard_normal((rows, width), np.float32) for width in widths]
            whole = np.concatenate(pieces, axis=1)
            assert all(out.tobytes() == whole.tobytes() for out in ranks.gathers(pieces)), (n, rows)
        assert ranks.errors() == [0] * size
    finally:
        ranks.close()


def test_memory_that_fails_halfway_is_given_back() -> None:
    gpu = FakeGpu()
    taken: list[int] = []

    def allocate(n_bytes: int) -> int:
        if taken:
            raise DeviceError("allocate failed")
        taken.append(FakeGpu.allocate(gpu, n_bytes))
        return taken[0]

    gpu.allocate = allocate  # type: ignore[method-assign]
    with pytest.raises(DeviceError):
        IpcMemory(gpu, 0, 2, 1.0)  # type: ignore[arg-type]
    assert gpu.is_clean
