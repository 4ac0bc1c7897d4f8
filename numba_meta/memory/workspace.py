"""The workspace: memory for a graph's intermediate tensors, one layout and one allocation per device.

Planned by `plan_workspace` (pure), held by a `Workspace`, which knows buffers only through the two calls it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from numba_meta.errors import OutOfMemoryError, PlacementError
from numba_meta.memory.layout import Layout, Request, plan_layout

Buffer = TypeVar("Buffer")


@dataclass(frozen=True)
class WorkspacePlan:
    """One layout per device, each by the sizes that this device holds, so that memory is proportional by itself."""

    layouts: tuple[Layout, ...]

    @property
    def n_bytes(self) -> tuple[int, ...]:
        """Bytes that each device needs."""
        return tuple(layout.n_bytes for layout in self.layouts)


def plan_workspace(requests: Sequence[Sequence[Request]], alignments: Sequence[int]) -> WorkspacePlan:
    """A layout for every device: `requests[j]` are the tensors that device j holds (zero bytes where its piece is empty)."""
    if len(requests) != len(alignments):
        raise PlacementError(f"requests of {len(requests)} devices with {len(alignments)} alignments: expected one alignment per device")
    return WorkspacePlan(tuple(plan_layout(device, alignment) for device, alignment in zip(requests, alignments, strict=True)))


class Workspace(Generic[Buffer]):
    """One buffer per device, resized as a whole.

    `generation` grows with every resize: a recording that was made under an older one binds memory that is gone and must
    not be used again. `allocate(device, n_bytes)` makes a buffer, and raises `OutOfMemoryError` (which names the device and
    the bytes) or `MemoryError` where there is no room; `release(device, buffer)` gives one back.
    """

    def __init__(
        self,
        device_names: Sequence[str],
        allocate: Callable[[int, int], Buffer],
        release: Callable[[int, Buffer], None],
    ) -> None:
        self._names = tuple(device_names)
        self._allocate = allocate
        self._release = release
        self._n_bytes = (0,) * len(self._names)
        self._buffers: tuple[Buffer | None, ...] = (None,) * len(self._names)
        self._generation = 0

    @property
    def generation(self) -> int:
        """How often the memory has changed since the workspace was made."""
        return self._generation

    @property
    def n_bytes(self) -> tuple[int, ...]:
        """Bytes held on each device."""
        return self._n_bytes

    @property
    def buffers(self) -> tuple[Buffer | None, ...]:
        """The buffer on each device, None where it has no bytes."""
        return self._buffers

    def fits(self, plan: WorkspacePlan) -> bool:
        """Whether every device holds enough for `plan`."""
        return len(plan.layouts) == len(self._names) and all(
            need <= have for need, have in zip(plan.n_bytes, self._n_bytes, strict=True)
        )

    def resize(self, n_bytes: Sequence[int]) -> bool:
        """Gives every device exactly `n_bytes[j]` bytes; contents are lost. Says whether anything changed.

        New buffers are made before old ones are given back: if one cannot be made, what was made is given back, the
        workspace stays as it was (memory and generation), and `OutOfMemoryError` names the device and the bytes.
        """
        if len(n_bytes) != len(self._names) or min(n_bytes, default=0) < 0:
            raise PlacementError(f"a workspace of {tuple(n_bytes)} bytes: expected 0 or more for each of {len(self._names)} devices")
        wanted = tuple(n_bytes)
        if wanted == self._n_bytes:
            return False
        changed = [device for device, (new, old) in enumerate(zip(wanted, self._n_bytes, strict=True)) if new != old]
        buffers = list(self._buffers)
        made: list[tuple[int, Buffer]] = []
        try:
            for device in changed:
                buffers[device] = None
                if wanted[device]:
                    made.append((device, self._make(device, wanted[device])))
                    buffers[device] = made[-1][1]
        except BaseException:
            for device, buffer in made:
                self._release(device, buffer)
            raise
        old = self._buffers
        self._buffers, self._n_bytes = tuple(buffers), wanted
        self._generation += 1
        for device in changed:
            self._give_back(device, old[device])
        return True

    def close(self) -> None:
        """Gives all memory back; a later `resize` may take some again."""
        self.resize((0,) * len(self._names))

    def _make(self, device: int, n_bytes: int) -> Buffer:
        try:
            return self._allocate(device, n_bytes)
        except MemoryError:
            raise OutOfMemoryError(
                f"{self._names[device]}: no room for a workspace of {n_bytes} bytes; "
                "take a smaller batch or context, or give this device a smaller part"
            ) from None

    def _give_back(self, device: int, buffer: Buffer | None) -> None:
        if buffer is not None:
            self._release(device, buffer)
