"""`devices`: what is measured, and what is said to be missing."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace

import pytest
from devices.fake_driver import FakeDriver

from numba_meta.cli import machine
from numba_meta.cli.devices import gpu_lines, missing_lines
from numba_meta.devices import cuda_driver
from numba_meta.errors import DeviceError


def test_the_report_as_json_and_as_lines(run, monkeypatch):
    monkeypatch.setattr(machine, "COPY_BYTES", 4 << 20)
    data = json.loads(run("devices", "--json").out)
    cpu = data["cpu:0"]
    assert cpu["n_usable_cores"] == len(os.sched_getaffinity(0))
    assert cpu["kernels"] in ("portable", "avx2", "avx512_vnni")
    assert 0 < cpu["free_bytes"] <= cpu["memory_bytes"]
    assert cpu["copy_bandwidth"] > 1e8
    lines = run("devices").out.splitlines()
    assert lines[0] == f"cpu:0  {cpu['name']}"
    assert {"cuda", "mpi"} <= {line.split()[0] for line in lines}


def test_gpus_as_lines():
    report = machine.GpuReport("A GPU", "9.0", 132, 8 << 30, 6 << 30)
    lines = list(gpu_lines([report, replace(report, peers=(0, 2)), replace(report, peers=(1,))]))
    assert [line.split()[0] for line in lines if line[0] != " "] == ["cuda:0", "cuda:1", "cuda:2"]
    assert [line.split(maxsplit=1)[1] for line in lines if line.split()[0] == "peers"] == [
        "cuda:1, cuda:2 through host memory",
        "reads the memory of cuda:0, cuda:2",
        "reads the memory of cuda:1",
        "cuda:0 through host memory",
    ]
    assert [line for line in gpu_lines([report]) if "peers" in line] == []
    assert lines[1].split(maxsplit=1)[1] == "capability 9.0, 132 multiprocessors"
    assert lines[2].split(maxsplit=1)[1] == "6.0 GiB free of 8.0 GiB"
    broken = machine.GpuReport("GPU 1", problem="cuDevicePrimaryCtxRetain failed: CUDA_ERROR_ECC_UNCORRECTABLE")
    assert list(gpu_lines([report, broken]))[-2:] == ["cuda:1 GPU 1", f"       {broken.problem}"]
    assert [line for line in gpu_lines([report, broken]) if "peers" in line] == []


def test_a_gpu_that_does_not_open_leaves_the_others(monkeypatch):
    """Three GPUs of a driver without a GPU, of which the second one does not open."""
    fake = FakeDriver(n_gpus=3)
    monkeypatch.setattr(cuda_driver, "_bindings", lambda: fake)
    monkeypatch.setattr(fake, "cuDevicePrimaryCtxRetain", lambda device: (1,) if device == 1 else (0, 100 + device), raising=False)
    cuda_driver.open_gpu.cache_clear()
    try:
        first, second, third = machine.gpu_reports()
    finally:
        cuda_driver.open_gpu.cache_clear()
    assert "cuDevicePrimaryCtxRetain failed" in second.problem and not first.problem and not third.problem
    assert (first.capability, third.n_multiprocessors) == ("8.0", 10)


@pytest.mark.parametrize(("error", "found"), [(None, "found"), (DeviceError("the CUDA driver does not start (X)"), "missing: the CUDA")])
def test_a_driver_is_there_when_it_starts(monkeypatch, error, found):
    def start():
        if error:
            raise error

    monkeypatch.setattr("numba_meta.devices.cuda_driver.has_library", lambda name: True)
    monkeypatch.setattr("numba_meta.devices.cuda_driver.start", start)
    monkeypatch.setattr(machine, "_has_package", lambda name: True)
    lines = list(missing_lines("cuda", machine.cuda_requirements()))
    assert len(lines) == 4 and lines[0].split() == ["cuda", *(["needs", "more"] if error else ["all", "there"])]
    assert found in lines[1]


def test_mpirun_is_found_where_launch_finds_it(monkeypatch, tmp_path):
    """Beside this Python, in an environment that is not activated."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))

    def requirement():
        return machine.mpi_requirements()[1]

    assert not requirement().present and "no mpirun beside this Python" in requirement().remedy
    (tmp_path / "mpirun").write_text("#!/bin/sh\necho broken >&2; exit 1\n")
    (tmp_path / "mpirun").chmod(0o755)
    assert not requirement().present and "does not run (broken)" in requirement().remedy
    (tmp_path / "mpirun").write_text("#!/bin/sh\n")
    assert requirement().present


def test_what_is_missing_comes_with_what_to_do():
    requirements = [machine.Requirement("a driver", False, "install it"), machine.Requirement("a package", True, "pip install it")]
    lines = list(missing_lines("cuda", requirements))
    assert lines[1].split(maxsplit=2)[2] == "missing: install it"
    assert lines[2].split(maxsplit=2)[2] == "found"


@pytest.mark.parametrize("n_threads", [1, 3])
def test_copies_are_counted_read_and_written(monkeypatch, n_threads):
    clock = iter(range(100))
    monkeypatch.setattr(machine.time, "perf_counter", lambda: float(next(clock)))  # each round takes one second
    assert machine.copy_bandwidth(n_threads, 3000) == 6000.0
