"""How much memory this machine still gives to this process: what a CPU device may take where nobody set a limit."""

from __future__ import annotations

from pathlib import Path

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
