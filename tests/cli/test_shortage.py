"""Too little memory is told as that, however a library words it."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from numba_meta.cli import describe_failure, shortage

GIB = 1 << 30


def limited(monkeypatch: pytest.MonkeyPatch, limit: int, used: int) -> None:
    monkeypatch.setattr(shortage.resource, "getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr(shortage, "address_space", lambda: used)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory"), RuntimeError("LLVM ERROR: out of memory"),
        ImportError("libx.so: failed to map segment from shared object"), ImportError("cannot allocate memory in static TLS block"),
    ],
    ids=str,
)  # fmt: skip
def test_a_lack_of_memory(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, resource.RLIM_INFINITY, 0)
    assert describe_failure(error) == ("this machine is out of memory; use a smaller context or a smaller model", 1)
    wrapped = ValueError("while loading")
    wrapped.__cause__ = error
    assert describe_failure(wrapped)[0].startswith("this machine is out of memory")
    limited(monkeypatch, GIB, GIB // 2)
    told, status = describe_failure(error)
    assert "may have 1.0 GiB of addresses, 512.0 MiB of it are in use; raise that limit (ulimit -v)" in told and status == 1


def test_vague_errors_mean_memory_only_near_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    vague = SystemError("error return without exception set")
    limited(monkeypatch, GIB, GIB - (100 << 20))
    assert describe_failure(vague)[0].startswith("out of memory: this process may have 1.0 GiB")
    limited(monkeypatch, 100 * GIB, GIB)
    assert "this is a fault of numba-meta" in describe_failure(vague)[0]
    limited(monkeypatch, GIB, GIB - (100 << 20))
    assert "No such file" in describe_failure(FileNotFoundError(errno.ENOENT, "No such file", "x.gguf"))[0]
    assert "this is a fault of numba-meta" in describe_failure(KeyError("x"))[0]


def test_a_thread_that_the_system_refuses() -> None:
    told = describe_failure(RuntimeError("can't start new thread"))
    assert told == ("the system refused another thread; use fewer threads, or allow more processes (ulimit -u) and memory (ulimit -v)", 1)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits the address space")
def test_a_command_with_too_few_addresses(llama_path: Path) -> None:
    command = f"ulimit -v {170 << 10}; exec {sys.executable} -m numba_meta generate {llama_path} a -n 1"
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and "fault of numba-meta" not in done.stderr, done.stderr
