"""The communicator `ipc`: CUDA ranks of one host read each other's memory, through handles that the driver exports (CUDA IPC).

Kernels do all of it (`kernels/cuda/ipc.py`), from recorded steps as from `all_reduce`: float32, summed in rank order at every size, with
the same bits on all ranks.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from numba_meta.comm.errors import RankError, UnsuitedError
from numba_meta.comm.join import join_timeout
from numba_meta.comm.world import World
from numba_meta.errors import DeviceError

if TYPE_CHECKING:
    from numba_meta.devices.cuda_driver import GpuContext
    from numba_meta.kernels.cuda.kernel import CudaKernel

HALF_BYTES = 4 << 20  # of a buffer, which has two; what is larger goes in several rounds
SPLIT_BYTES = 256 << 10  # three ranks and more: from here each adds its own part
_BLOCK_BYTES = 2 << 20  # the driver gives memory of this size and more in blocks of its own: nothing else is exported with it
_FLAGS_AT = 2 * HALF_BYTES  # behind both halves
_PATIENCE = 10.0  # times the join timeout that a kernel waits: the watchdog judges before
_OFFER = struct.Struct("<16s32s64s")


@dataclass(frozen=True)
class IpcOffer:
    """What a rank tells the others: its host, its GPU's uuid (hex digits), the handle of its memory."""

    host_key: str
    uuid: str
    handle: bytes

    def encode(self) -> bytes:
        """As many bytes as every other one."""
        return _OFFER.pack(self.host_key.encode(), self.uuid.encode(), self.handle)

    @classmethod
    def decode(cls, data: bytes) -> IpcOffer:
        """What `encode` made."""
        host_key, uuid, handle = _OFFER.unpack(data)
        return cls(host_key.rstrip(b"\0").decode(), uuid.rstrip(b"\0").decode(), handle)


def check_offers(offers: Sequence[IpcOffer], rank: int, reaches: Callable[[str], bool]) -> None:
    """Raises `UnsuitedError` where `rank` cannot reach the memory of all, `RankError` where one has none to share.

    `offers` in rank order; `reaches(uuid)`: whether this rank's GPU reaches that one.
    """
    for other, offer in enumerate(offers):
        if offer.host_key != offers[rank].host_key:
            raise UnsuitedError(f"ranks {min(rank, other)} and {max(rank, other)} are on different hosts; ipc joins ranks of one host")
        if not any(offer.handle):
            raise RankError(f"rank {other} could not share its memory")
        if not reaches(offer.uuid):
            raise UnsuitedError(f"the GPU of rank {rank} cannot reach that of rank {other} (no peer access, or hidden from this process)")


class IpcMemory:
    """What this rank shares and what it was given: its buffer and flags, those of the others, two words in host memory, the table."""

    def __init__(self, gpu: GpuContext, rank: int, size: int, limit_seconds: float) -> None:
        from numba_meta.devices.cuda_driver import PinnedMemory
        from numba_meta.kernels.cuda import ipc as words

        self.gpu = gpu
        self.rank, self.size = rank, size
        self._words = words
        self._limit_ns = int(limit_seconds * 1e9)
        self._imported: list[int] = []
        self._allocated: list[int] = []
        n_bytes = -(-(_FLAGS_AT + words.flag_bytes(size)) // _BLOCK_BYTES) * _BLOCK_BYTES
        self._host = PinnedMemory(gpu, 16)
        self.host_words: np.ndarray = self._host.data.view(np.int64)  # [abort, error]
        try:
            self.shared = self._allocate(n_bytes)
            self.table = self._allocate(words.table_bytes(size))
            self.staging = self._allocate(HALF_BYTES)
        except BaseException:
            self.free()
            raise

    def _allocate(self, n_bytes: int) -> int:
        address = self.gpu.allocate(n_bytes)
        self._allocated.append(address)
        self.gpu.fill_zero(address, n_bytes)
        return address

    def import_all(self, handles: Mapping[int, bytes]) -> None:
        """Maps the other ranks' memory and fills the table in. Raises `DeviceError`."""
        shared = {self.rank: self.shared}
        for rank, handle in handles.items():
            shared[rank] = self.gpu.import_memory(handle)
            self._imported.append(shared[rank])
        self.fill_table([shared[rank] for rank in range(self.size)])

    def fill_table(self, shared: Sequence[int]) -> None:
        """`shared`: where every rank's memory lies here."""
        words = self._words
        table = np.zeros(words.table_bytes(self.size) // 8, np.int64)
        values = {
            words.RANK: self.rank, words.SIZE: self.size, words.HALF_UNITS: HALF_BYTES // words.UNIT_BYTES,
            words.SPLIT_UNITS: SPLIT_BYTES // words.UNIT_BYTES, words.LIMIT_NS: self._limit_ns, words.ABORT: self._host.address,
            words.ERROR: self._host.address + 8,
        }  # fmt: skip
        for word, value in values.items():
            table[word // 8] = value
        table[words.PEERS // 8 :: 2] = shared
        table[words.PEERS // 8 + 1 :: 2] = [address + _FLAGS_AT for address in shared]
        self.gpu.write(self.table, table)

    def free(self) -> None:
        """Gives everything back. Twice is once."""
        for address in self._imported:
            self.gpu.forget_memory(address)
        for address in self._allocated:
            self.gpu.free(address)
        self._imported, self._allocated = [], []
        self.host_words = np.zeros(2, np.int64)
        self._host.free()


class IpcTable:
    """What recorded steps need of it (`schedule.ranks.ReductionTable`)."""

    def __init__(self, memory: IpcMemory) -> None:
        from numba_meta.kernels.cuda.ipc import ipc_all_reduce, ipc_gather_columns

        self.all_reduce: CudaKernel = ipc_all_reduce
        self.gather_columns: CudaKernel = ipc_gather_columns
        self._memory = memory

    @property
    def address(self) -> int:
        """Of its words, in device memory."""
        return self._memory.table

    def reduce_scratch_bytes(self, n_elements: int) -> int:
        """None: the ranks' buffers are used."""
        return 0

    def gather_scratch_bytes(self, widths: Sequence[int], n_rows: int) -> int:
        """None: the ranks' buffers are used."""
        return 0

    def check(self) -> None:
        """Raises `RankError` where a kernel gave up waiting for another rank. One look at one word."""
        code = int(self._memory.host_words[1])
        if code:
            raise RankError(describe_error(code, self._memory.rank, self._memory._limit_ns / 1e9))


def describe_error(code: int, rank: int, limit_seconds: float) -> str:
    """What the error word of `kernels/cuda/ipc.py` says."""
    from numba_meta.kernels.cuda.ipc import ABORTED

    if code & 0xFF == ABORTED:
        return f"rank {rank} stopped waiting for rank {code >> 8} in a reduction: the launch ends"
    return f"rank {code >> 8} did not come to a reduction within {limit_seconds:g} s that rank {rank} waited for it; see what holds it up"


class IpcCommunicator:
    """Sums over the ranks of one host by kernels that read all ranks' memory."""

    name = "ipc"

    def __init__(self, memory: IpcMemory) -> None:
        self._memory = memory
        self.table = IpcTable(memory)
        self._gpu = memory.gpu
        self._stream = self._gpu.create_stream()
        self._closed = False

    def accepts(self, n_elements: int) -> bool:
        """Every size."""
        return True

    def all_reduce(self, x: np.ndarray) -> None:
        """x float32, contiguous, any shape: summed over all ranks in place. Raises `RankError` for another type, or from `check`."""
        if x.dtype != np.float32 or not x.flags.c_contiguous:
            raise RankError(f"a reduction of {x.dtype} {list(x.shape)}; expected contiguous float32")
        flat, step = x.reshape(-1), HALF_BYTES // 8  # half of the staging memory: the row count lies behind
        for start in range(0, flat.size, step):
            self._reduce(flat[start : start + step])

    def _reduce(self, x: np.ndarray) -> None:
        from numba_meta.kernels.cuda.kernel import Gpu

        staging, kernel, facts = self._memory.staging, self.table.all_reduce, self._gpu.facts
        n_rows = staging + HALF_BYTES // 2
        self._gpu.write(staging, x)
        self._gpu.write(n_rows, np.ones(1, np.int64))
        values: dict[str, Any] = {
            "table": self.table.address, "part": staging, "part_stride": x.nbytes, "out": staging, "out_stride": x.nbytes, "scratch": 0,
            "n": x.size, "n_rows": n_rows,
        }  # fmt: skip
        launch = kernel.launch(values, 1, Gpu(facts.capability, facts.n_multiprocessors, facts.max_shared_bytes))
        packed = kernel.pack(**values)
        self._gpu.launch(self._function(), launch.grid, launch.block, 0, self._stream, int(packed.addresses.ctypes.data))
        self._gpu.synchronize(self._stream)
        self.table.check()
        self._gpu.read(staging, x)

    def _function(self) -> Any:
        entry, cubin = self.table.all_reduce.binary(self._gpu.facts.capability)
        return self._gpu.function(cubin, entry)

    def abort(self) -> None:
        """Ends every wait of a kernel, from any thread; sums are garbage from now on."""
        self._memory.host_words[0] = 1

    def close(self) -> None:
        """Ranks close when all of them are done: nobody reads this one's memory any more. Twice is once."""
        if not self._closed:
            self._closed = True
            self._gpu.synchronize(self._stream)
            self._gpu.destroy_stream(self._stream)
            self._memory.free()


class IpcFactory:
    """Makes `ipc` for the first CUDA device of each rank."""

    name = "ipc"

    def __init__(self, gpu: GpuContext) -> None:
        self._gpu = gpu

    def obstacle(self, world: World) -> str:
        """Only a number of ranks that is too large; whether GPUs reach each other is seen when they are known."""
        from numba_meta.kernels.cuda.ipc import MAX_RANKS

        return f"{world.size} ranks; expected at most {MAX_RANKS}" if world.size > MAX_RANKS else ""

    def prepare(self, world: World) -> None:
        """Compiles the kernels, or loads them from the cache."""
        from numba_meta.kernels.cuda.ipc import all_kernels

        for kernel in all_kernels():
            kernel.binary(self._gpu.facts.capability)

    def build(self, world: World) -> IpcCommunicator:
        """Exchanges handles and maps the others' memory. Raises `RankError` where this rank cannot reach another, `DeviceError`."""
        memory, handle, problem = None, b"", None
        try:  # all ranks come to the exchange, whatever happens here
            memory = IpcMemory(self._gpu, world.rank, world.size, _PATIENCE * join_timeout())
            handle = self._gpu.export_memory(memory.shared)
        except DeviceError as error:
            problem = error
        try:
            own = IpcOffer(world.host_key, self._gpu.facts.uuid, handle)
            offers = [IpcOffer.decode(each) for each in world.exchange(own.encode(), "ipc: offers")]
            if problem is not None or memory is None:
                raise problem or DeviceError("no memory to share")
            check_offers(offers, world.rank, self._gpu.reaches)
            memory.import_all({rank: offer.handle for rank, offer in enumerate(offers) if rank != world.rank})
            return IpcCommunicator(memory)
        except BaseException:
            if memory is not None:
                memory.free()
            raise
