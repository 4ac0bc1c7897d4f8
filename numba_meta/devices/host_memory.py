"""Host memory: how much of it this machine still gives to this process, and memory for what devices copy from."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from numba_meta.errors import OutOfMemoryError

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """Bytes that can be taken without swapping, within the control group's limit; None where the system does not tell.

    Pages of files (a mapped model) count as available, since the system drops them when memory is asked for.
    """
    try:
        lines = meminfo.read_text().splitlines()
        available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None
    for limit_name, used_name, files in (
        ("memory.max", "memory.current", ("active_file", "inactive_file")),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
    ):
        try:
            limit, used = int((cgroup / limit_name).read_text()), int((cgroup / used_name).read_text())
            stat = dict(line.split()[:2] for line in ((cgroup / limit_name).parent / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # no such hierarchy, or "max": no limit
            continue
        available = min(available, max(0, limit - used + sum(int(stat.get(name, 0)) for name in files)))
    return available


class HostMemory:
    """Zeroed host memory whose pages are taken as they are filled: `data` uint8 `[n_bytes]`, page-aligned.

    `is_pinned`: whether devices can copy from it while they compute. CPU devices reach all memory; a simulated one may refuse, and a GPU
    reaches none of this.
    """

    def __init__(self, n_bytes: int, is_pinned: bool) -> None:
        self.is_pinned = is_pinned
        try:
            self._pages = np.frombuffer(mmap.mmap(-1, max(1, n_bytes)), np.uint8)  # never empty: no bytes have no address
        except (OSError, OverflowError, ValueError):
            what = f"a KV cache of {n_bytes} bytes is more than this machine gives"
            raise OutOfMemoryError(f"the host: {what}; use a smaller context") from None
        self.data = self._pages[:n_bytes]

    @property
    def address(self) -> int:
        return int(self._pages.ctypes.data)

    def read(self, offset: int, n_bytes: int) -> np.ndarray:
        """Some bytes, a view."""
        return self.data[offset : offset + n_bytes]

    @contextmanager
    def edit(self, offset: int, n_bytes: int) -> Iterator[np.ndarray]:
        """Some bytes to be changed."""
        yield self.data[offset : offset + n_bytes]
