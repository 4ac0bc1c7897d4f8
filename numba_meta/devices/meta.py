"""The meta device: several simple devices used as one. What is done for all of them is done here, all or nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from numba_meta.devices.cpu import CpuBuffer, CpuDevice, CpuStream
from numba_meta.devices.parse import DeviceSpec
from numba_meta.errors import DeviceError


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

    pieces: tuple[CpuBuffer, ...]

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


class MetaDevice(Sequence[CpuDevice]):
    """Several simple devices used as one; as a sequence, those devices. A context manager; `close` gives everything back."""

    def __init__(self, devices: Sequence[CpuDevice]) -> None:
        names = [device.name for device in devices]
        if not names or len(set(names)) != len(names):
            raise DeviceError(f"a meta device of {names}: expected one or more devices of different names")
        self.devices = tuple(devices)

    @classmethod
    def open(cls, specs: Sequence[DeviceSpec], n_threads: Sequence[int]) -> MetaDevice:
        """The devices that `parse_devices` read, device j with `n_threads[j]` threads. Takes neither memory nor threads yet."""
        if len(specs) != len(n_threads):
            raise DeviceError(f"{len(specs)} devices with {len(n_threads)} numbers of threads; expected one for each")
        return cls([CpuDevice(spec, name, n) for spec, name, n in zip(specs, name_devices(specs), n_threads, strict=True)])

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
        pieces: list[CpuBuffer] = []
        try:
            for device, size in zip(self.devices, n_bytes, strict=True):
                pieces.append(device.allocate(size, label, sparse))
        except BaseException:
            for piece in pieces:
                piece.free()
            raise
        return MetaBuffer(tuple(pieces))

    def compute_streams(self) -> list[CpuStream]:
        """A compute stream on every device, for one `CpuStep`: its caller is the first thread of the first device."""
        return [device.stream(caller_joins=index == 0) for index, device in enumerate(self.devices)]

    def memory(self) -> tuple[DeviceMemory, ...]:
        """What each device holds, as data."""
        return tuple(DeviceMemory(d.name, d.allocated_bytes, d.peak_bytes, d.memory_limit, d.bytes_by_label()) for d in self.devices)

    def close(self) -> None:
        """Ends the threads of all devices, then gives all memory back. Twice is once."""
        for device in self.devices:
            device.close()

    def __len__(self) -> int:
        return len(self.devices)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self.devices[index]

    def __iter__(self) -> Iterator[CpuDevice]:
        return iter(self.devices)

    def __enter__(self) -> MetaDevice:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<meta device of {', '.join(self.names)}>"
