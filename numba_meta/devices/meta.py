"""The meta device: several simple devices used as one. What is done for all of them is done here, all or nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from numba_meta.devices.cpu import CpuDevice, CpuStream
from numba_meta.devices.parse import DeviceSpec
from numba_meta.devices.simple import Buffer, SimpleDevice
from numba_meta.errors import DeviceError

if TYPE_CHECKING:
    from numba_meta.devices.cuda_driver import PinnedMemory
    from numba_meta.devices.host_memory import HostMemory


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of one simple device in bytes: in use, the most that was in use, its limit (None: the machine's), in use by label."""

    name: str
    allocated_bytes: int
    peak_bytes: int
    memory_limit: int | None
    by_label: dict[str, int]


@dataclass(frozen=True)
class MetaBuffer:
    """One buffer per simple device, also where it has no bytes."""

    pieces: tuple[Buffer, ...]

    @property
    def n_bytes(self) -> tuple[int, ...]:
        """Bytes on each device."""
        return tuple(piece.n_bytes for piece in self.pieces)

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where each device's piece begins."""
        return tuple(piece.address for piece in self.pieces)

    def free(self) -> None:
        """Gives all pieces back. Twice is once."""
        for piece in self.pieces:
            piece.free()


def name_devices(specs: Sequence[DeviceSpec]) -> tuple[str, ...]:
    """`cpu:0`, and `cpu:0#1`, `cpu:0#2` for further devices on the same place."""
    seen: dict[str, int] = {}
    names = []
    for spec in specs:
        n = seen[spec.name] = seen.get(spec.name, -1) + 1
        names.append(spec.name if n == 0 else f"{spec.name}#{n}")
    return tuple(names)


def _check_kinds(devices: Sequence[SimpleDevice] | Sequence[DeviceSpec], names: Sequence[str]) -> None:
    if len({device.kind for device in devices}) > 1:
        raise DeviceError(
            f"the devices {', '.join(names)} are of several kinds; one process computes on CPU devices or on CUDA devices "
            "(ranks may differ: see `numba-meta launch`)"
        )


class MetaDevice(Sequence[SimpleDevice]):
    """Several simple devices of one kind used as one; as a sequence, those devices. A context manager; `close` gives everything back."""

    def __init__(self, devices: Sequence[SimpleDevice]) -> None:
        names = [device.name for device in devices]
        if not names or len(set(names)) != len(names):
            raise DeviceError(f"a meta device of {names}: expected one or more devices of different names")
        _check_kinds(devices, names)
        self.devices = tuple(devices)
        for device in devices:
            device.is_one_of_several = len(devices) > 1

    @property
    def kind(self) -> str:
        """`cpu` or `cuda`, of all devices."""
        return self.devices[0].kind

    @property
    def alignment(self) -> int:
        """Bytes at whose multiples tensors begin."""
        return self.devices[0].alignment

    @classmethod
    def open(cls, specs: Sequence[DeviceSpec], n_threads: Sequence[int]) -> MetaDevice:
        """The devices that `parse_devices` read, device j with `n_threads[j]` threads. Takes neither memory nor threads yet."""
        if len(specs) != len(n_threads):
            raise DeviceError(f"{len(specs)} devices with {len(n_threads)} numbers of threads; expected one for each")
        names = name_devices(specs)
        _check_kinds(specs, names)  # before any of them is opened
        if specs and specs[0].kind == "cuda":
            from numba_meta.devices.cuda import open_cuda

            return cls(open_cuda(specs, names))
        return cls([CpuDevice(spec, name, n) for spec, name, n in zip(specs, names, n_threads, strict=True)])

    @property
    def names(self) -> tuple[str, ...]:
        """The simple devices' names, all different."""
        return tuple(device.name for device in self.devices)

    @property
    def n_threads(self) -> tuple[int, ...]:
        """Compute threads of each device; their sum is how many meet in a reduction."""
        return tuple(device.n_threads for device in self.devices)

    def allocate(self, n_bytes: Sequence[int], label: str, sparse: bool = False) -> MetaBuffer:
        """Zeroed memory, `n_bytes[j]` on device j: on all devices or on none. Raises `OutOfMemoryError`, which names the device.

        `sparse`: filled bit by bit, so that only the pages that are used should take memory.
        """
        if len(n_bytes) != len(self.devices):
            raise DeviceError(f"{label} for {len(n_bytes)} devices on a meta device of {len(self.devices)}; expected one size for each")
        pieces: list[Buffer] = []
        try:
            for device, size in zip(self.devices, n_bytes, strict=True):
                pieces.append(device.allocate(size, label, sparse))
        except BaseException:
            for piece in pieces:
                piece.free()
            raise
        return MetaBuffer(tuple(pieces))

    def compute_streams(self) -> list[CpuStream]:
        """A compute stream on every CPU device, for one `CpuStep`: its caller is the first thread of the first device."""
        cpus = [device for device in self.devices if isinstance(device, CpuDevice)]
        return [device.stream(caller_joins=index == 0) for index, device in enumerate(cpus)]

    def host_memory(self, n_bytes: int, pinned: bool) -> HostMemory | PinnedMemory:
        """Zeroed memory of the host for what devices copy from; `pinned` is a wish: what came of it, `is_pinned` of the result says."""
        from numba_meta.devices.host_memory import HostMemory

        if pinned and self.kind == "cuda":
            try:
                return self.devices[0].pinned(n_bytes)  # type: ignore[attr-defined, no-any-return]
            except DeviceError:
                pinned = False
        return HostMemory(n_bytes, pinned)

    def compile(self, kernels: Iterable[Any]) -> None:
        """Compiles kernels of these devices' kind, or loads them from the cache of kernels."""
        for kernel in kernels:
            for device in self.devices:
                device.compile(kernel)

    def memory(self) -> tuple[DeviceMemory, ...]:
        """What each device holds, as data."""
        return tuple(DeviceMemory(d.name, d.allocated_bytes, d.peak_bytes, d.memory_limit, dict(d.bytes_by_label())) for d in self.devices)

    def close(self) -> None:
        """Ends the threads of all devices, then gives all memory back. Twice is once."""
        for device in self.devices:
            device.close()

    def __len__(self) -> int:
        return len(self.devices)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self.devices[index]

    def __iter__(self) -> Iterator[SimpleDevice]:
        return iter(self.devices)

    def __enter__(self) -> MetaDevice:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<meta device of {', '.join(self.names)}>"
