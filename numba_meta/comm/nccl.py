"""The communicator `nccl`: NVIDIA's library through nccl4py, for ranks that have a GPU each; its unique id travels through the exchange.

A reduction is recorded where it runs: NCCL's kernels become part of a step's graph. Its order of addition is its own, the same on all
ranks. The packages (`numba-meta[nccl13]`, `numba-meta[nccl12]`) are imported at first use.
"""

from __future__ import annotations

import importlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from numba_meta.comm.errors import RankError, UnsuitedError
from numba_meta.comm.world import World

if TYPE_CHECKING:
    from numba_meta.devices.cuda_driver import GpuContext

_ID_BYTES = 128
_OFFER = struct.Struct(f"<16s32s{_ID_BYTES}s")


@dataclass(frozen=True)
class NcclOffer:
    """What a rank tells the others: its host, its GPU's uuid (hex digits), and rank 0 the unique id."""

    host_key: str
    uuid: str
    unique_id: bytes = b""

    def encode(self) -> bytes:
        """As many bytes as every other one."""
        return _OFFER.pack(self.host_key.encode(), self.uuid.encode(), self.unique_id)

    @classmethod
    def decode(cls, data: bytes) -> NcclOffer:
        """What `encode` made."""
        host_key, uuid, unique_id = _OFFER.unpack(data)
        return cls(host_key.rstrip(b"\0").decode(), uuid.rstrip(b"\0").decode(), unique_id)


def check_offers(offers: Sequence[NcclOffer]) -> None:
    """Raises the same error on every rank: `UnsuitedError` where two share a GPU, `RankError` where rank 0 has no unique id."""
    first: dict[str, int] = {}
    for rank, offer in enumerate(offers):
        other = first.setdefault(offer.uuid, rank)
        if other != rank:
            raise UnsuitedError(f"ranks {other} and {rank} share one GPU; NCCL needs a GPU for each rank")
    if not any(offers[0].unique_id):
        raise RankError("rank 0 could not make NCCL's unique id")


def import_nccl() -> Any:
    """nccl4py's bindings, with the library loaded. Raises `RankError`."""
    try:
        nccl = importlib.import_module("nccl.bindings.nccl")
        nccl.get_version()
    except Exception as error:  # of the package, its binary or the library: whatever it is, ranks reduce with something else
        told = " ".join(str(error).split()) or type(error).__name__
        raise RankError(f"NCCL is not installed ({told}); install numba-meta[nccl13], or [nccl12] beside cuda12") from None
    return nccl


class NcclHandle:
    """One NCCL communicator on one GPU. Every call names what failed in a `RankError`."""

    def __init__(self, nccl: Any, gpu: GpuContext, size: int, rank: int, unique_id: bytes) -> None:
        self.nccl, self.gpu, self.size, self.rank = nccl, gpu, size, rank
        self._handle = self.call("comm_init_rank", size, bytearray(unique_id), rank)  # the bindings want a buffer that can be written

    def call(self, function: str, *arguments: Any) -> Any:
        """A function of the bindings, on this GPU."""
        try:
            with self.gpu.current():
                return getattr(self.nccl, function)(*arguments)
        except self.nccl.NCCLError as error:
            raise RankError(f"NCCL's {function} failed on rank {self.rank}: {' '.join(str(error).split())}") from None

    def all_reduce(self, source: int, target: int, n_elements: int, stream: int) -> None:
        """Enqueues a float32 sum; both addresses may be one."""
        kind, operation = int(self.nccl.DataType.Float32), int(self.nccl.RedOp.Sum)
        self.call("all_reduce", source, target, n_elements, kind, operation, self._handle, stream)

    def gather(self, source: int, targets: Sequence[int], counts: Sequence[int], stream: int) -> None:
        """Enqueues that every rank gets rank r's `counts[r]` float32 at `targets[r]`; pieces may differ in size."""
        kind = int(self.nccl.DataType.Float32)
        self.call("group_start")
        try:
            for root, (target, count) in enumerate(zip(targets, counts, strict=True)):
                if count:
                    self.call("broadcast", source if root == self.rank else target, target, count, kind, root, self._handle, stream)
        finally:
            self.call("group_end")

    def check(self) -> None:
        """Raises where something went wrong since the last look."""
        code = int(self.call("comm_get_async_error", self._handle))
        if code:
            raise RankError(f"NCCL failed on rank {self.rank}: {self.nccl.get_error_string(code)}")

    def destroy(self) -> None:
        """Together with the other ranks."""
        self.call("comm_destroy", self._handle)

    def abort(self) -> None:
        """Ends what is under way, from any thread."""
        self.call("comm_abort", self._handle)


@dataclass(frozen=True)
class NcclWork:
    """One reduction or gather of a recorded step (`schedule.ranks.StreamWork`)."""

    enqueue: Callable[[int], None]

    def free(self) -> None:
        """NCCL's own memory stays with the communicator."""


class NcclAllReduce:
    """A sum over the ranks as part of a recorded step (`schedule.ranks.StreamCall`). All rows that could be live travel."""

    name = "nccl_all_reduce"

    def __init__(self, handle: NcclHandle) -> None:
        self._handle = handle

    def prepare(self, arguments: Mapping[str, int], data: Mapping[str, np.ndarray], max_rows: int) -> NcclWork:
        """Arguments as of the kernel `mpi_all_reduce`; rows lie without gaps."""
        n = arguments["n"] * max_rows
        if max_rows > 1 and {arguments["part_stride"], arguments["out_stride"]} != {4 * arguments["n"]}:
            raise RankError(f"{self.name}: expected rows of {arguments['n']} float32 without gaps")
        return NcclWork(lambda stream: self._handle.all_reduce(arguments["part"], arguments["out"], n, stream) if n else None)


class NcclGatherColumns:
    """Rows of all ranks' parts side by side, as part of a recorded step: pieces come whole, then their rows are put in place."""

    name = "nccl_gather_columns"

    def __init__(self, handle: NcclHandle) -> None:
        self._handle = handle

    def prepare(self, arguments: Mapping[str, int], data: Mapping[str, np.ndarray], max_rows: int) -> NcclWork:
        """Arguments as of the kernel `mpi_gather_columns`; the part's rows lie without gaps. `data["widths"]`: columns of each rank."""
        widths = [int(width) for width in data["widths"]]
        columns = [sum(widths[:rank]) for rank in range(len(widths))]
        base = arguments["out"] if max_rows == 1 else arguments["scratch"]
        pieces = [base + 4 * max_rows * column for column in columns]

        def enqueue(stream: int) -> None:
            self._handle.gather(arguments["part"], pieces, [width * max_rows for width in widths], stream)
            for piece, column, width in zip(pieces, columns, widths, strict=True):
                if width and max_rows > 1:
                    target = arguments["out"] + 4 * column
                    self._handle.gpu.copy_2d_async(target, arguments["out_stride"], piece, 4 * width, 4 * width, max_rows, stream)

        return NcclWork(enqueue)


class NcclTable:
    """What recorded steps need of it (`schedule.ranks.ReductionTable`)."""

    address = 0  # nothing is read from memory

    def __init__(self, handle: NcclHandle) -> None:
        self.all_reduce = NcclAllReduce(handle)
        self.gather_columns = NcclGatherColumns(handle)
        self.check: Callable[[], None] = handle.check

    def reduce_scratch_bytes(self, n_elements: int) -> int:
        """None."""
        return 0

    def gather_scratch_bytes(self, widths: Sequence[int], n_rows: int) -> int:
        """Room for whole pieces; one row's go to their places at once."""
        return 4 * n_rows * sum(widths) if n_rows > 1 else 0


class NcclCommunicator:
    """Sums over ranks by NCCL."""

    name = "nccl"

    def __init__(self, handle: NcclHandle) -> None:
        self._handle = handle
        self.table = NcclTable(handle)
        self._stream = handle.gpu.create_stream()
        self._closed = False

    def accepts(self, n_elements: int) -> bool:
        """Every size."""
        return True

    def all_reduce(self, x: np.ndarray) -> None:
        """x float32, contiguous, any shape: summed over all ranks in place. Raises `RankError`."""
        if x.dtype != np.float32 or not x.flags.c_contiguous:
            raise RankError(f"a reduction of {x.dtype} {list(x.shape)}; expected contiguous float32")
        if not x.size:
            return
        gpu = self._handle.gpu
        memory = gpu.allocate(x.nbytes)
        try:
            gpu.write(memory, x)
            self._handle.all_reduce(memory, memory, x.size, self._stream)
            gpu.synchronize(self._stream)
            self._handle.check()
            gpu.read(memory, x)
        finally:
            gpu.free(memory)

    def abort(self) -> None:
        """Ends what is under way, from any thread; nothing may be summed any more."""
        if not self._closed:
            self._closed = True
            self._handle.abort()

    def close(self) -> None:
        """Together with all other ranks, after the work that uses it. Twice is once."""
        if not self._closed:
            self._closed = True
            self._handle.gpu.synchronize(self._stream)
            self._handle.destroy()
            self._handle.gpu.destroy_stream(self._stream)


class NcclFactory:
    """Makes `nccl` for the first CUDA device of each rank."""

    name = "nccl"

    def __init__(self, gpu: GpuContext, load: Callable[[], Any] = import_nccl) -> None:
        self._gpu = gpu
        self._load = load

    def obstacle(self, world: World) -> str:
        """Whether the packages are there."""
        try:
            self._load()
        except RankError as error:
            return str(error)
        return ""

    def prepare(self, world: World) -> None:
        """Nothing of its own."""

    def build(self, world: World) -> NcclCommunicator:
        """Exchanges GPUs and the unique id, then all ranks enter NCCL. Raises `RankError`."""
        nccl, unique_id = self._load(), b""
        if world.rank == 0:
            try:
                unique_id = bytes(nccl.get_unique_id())
            except (nccl.NCCLError, RuntimeError):  # all ranks come to the exchange, and see that there is none
                unique_id = b""
        own = NcclOffer(world.host_key, self._gpu.facts.uuid, unique_id)
        offers = [NcclOffer.decode(each) for each in world.exchange(own.encode(), "nccl: offers")]
        check_offers(offers)
        return NcclCommunicator(NcclHandle(nccl, self._gpu, world.size, world.rank, offers[0].unique_id))
