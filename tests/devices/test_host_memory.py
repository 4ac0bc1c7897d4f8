"""What the machine still gives: from the files in which the system tells it."""

from __future__ import annotations

from pathlib import Path

import pytest

from numba_meta.devices.host_memory import available_bytes

MEMINFO = "MemTotal:       8000 kB\nMemFree:         100 kB\nMemAvailable:    4000 kB\n"


def write(folder: Path, files: dict[str, str]) -> tuple[Path, Path]:
    for name, text in {"meminfo": MEMINFO, **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder / "meminfo", folder / "cgroup"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 4000 << 10),
        ({"cgroup/memory.max": "max\n", "cgroup/memory.current": "5\n", "cgroup/memory.stat": ""}, 4000 << 10),
        # pages of files are given up when memory is needed
        (
            {
                "cgroup/memory.max": "100000",
                "cgroup/memory.current": "90000",
                "cgroup/memory.stat": "anon 5\nactive_file 3000\ninactive_file 400\n",
            },
            13_400,
        ),
        ({"cgroup/memory.max": "100000", "cgroup/memory.current": "190000", "cgroup/memory.stat": "anon 5\n"}, 0),
        (
            {
                "cgroup/memory/memory.limit_in_bytes": "100000",
                "cgroup/memory/memory.usage_in_bytes": "90000",
                "cgroup/memory/memory.stat": "total_inactive_file 7\n",
            },
            10_007,
        ),
    ],
)
def test_available(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert available_bytes(*write(tmp_path, files)) == expected


@pytest.mark.parametrize("text", ["", "MemAvailable:", "MemAvailable: many kB"])
def test_a_system_that_does_not_tell(tmp_path: Path, text: str) -> None:
    assert available_bytes(*write(tmp_path, {"meminfo": text})) is None
    assert available_bytes(tmp_path / "missing", tmp_path) is None


def test_this_machine() -> None:
    n_bytes = available_bytes()
    assert n_bytes is not None and 1 << 20 < n_bytes < 1 << 50
