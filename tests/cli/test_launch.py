"""`numba-meta launch`, and the command line as a rank."""

from __future__ import annotations

import subprocess
import sys

import pytest
from child_processes import environment
from mpirun import needs_mpi
from synthetic import write_model

from numba_meta.cli.launch import find_mpirun, launch_environment, mpirun_version, output_options
from numba_meta.errors import UsageError


def test_the_environment_of_a_launch() -> None:
    plain, root = launch_environment({"A": "b"}, False), launch_environment({"A": "b"}, True)
    assert plain["A"] == "b" and plain["PRTE_MCA_rmaps_default_mapping_policy"] == ":oversubscribe"
    assert root.keys() - plain.keys() == {"OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"}
    own = {"PRTE_MCA_hwloc_default_binding_policy": "core"}
    assert launch_environment(own, True)["PRTE_MCA_hwloc_default_binding_policy"] == "core"  # what the user sets stays


def test_mpirun_that_is_missing(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(UsageError, match=r"no mpirun .* install numba-meta\[mpi\]"):
        find_mpirun({"PATH": str(tmp_path)})
    own = tmp_path / "mpirun"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    assert find_mpirun({"PATH": ""}) == str(own)


def test_texts_are_passed_on_as_they_grow() -> None:
    assert output_options("mpirun (Open MPI) 5.0.11\n\nReport bugs to ...") == ["--output", ":raw"]
    assert output_options("mpirun (Open MPI) 4.1.6") == output_options("HYDRA build details:\n  Version: 4.2.0") == []


def test_an_mpirun_that_does_not_run(tmp_path) -> None:
    broken = tmp_path / "mpirun"
    broken.write_text("#!/bin/sh\necho 'libevent is missing' >&2; exit 127\n")
    broken.chmod(0o755)
    with pytest.raises(UsageError, match=r"mpirun does not run \(libevent is missing\); install numba-meta\[mpi\]"):
        mpirun_version(str(broken))
    with pytest.raises(UsageError, match="does not run"):
        mpirun_version(str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (("-n", "0", "--", "info"), "0 is not in the range"),
        (("-n", "65", "--", "info"), "65 is not in the range 1<=x<=64"),
        (("-n", "2"), "Missing argument"),
        (("--", "info"), "'--ranks'"),
    ],
)
def test_wrong_use(run, arguments, pattern) -> None:
    outcome = run("launch", *arguments)
    assert outcome.status == 2 and pattern in outcome.err


def launched(n: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "numba_meta", "launch", "-n", str(n), "--", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment())


@needs_mpi
def test_rank_0_speaks_alone(run, tmp_path) -> None:
    path = str(write_model(tmp_path / "model.gguf"))
    arguments = ["generate", path, "the in on", "-n", "8", "--exact", "-c", "64", "--ignore-eos"]
    process = launched(2, *arguments, "-vv")
    assert process.returncode == 0, process.stderr
    assert process.stdout == run(*arguments).out
    assert process.stderr.count("generation 7 tokens") == 1


@needs_mpi
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "status", "pattern"),
    [
        (("generate", "missing.gguf", "x"), 1, "no model missing.gguf"),
        (("generate", "missing.gguf"), 2, "no prompt was given"),
        (("generate", "missing.gguf", "--file", "-"), 2, "--file - is not there yet for 2 ranks"),
        (("chat", "missing.gguf"), 2, "chat is not there yet for 2 ranks"),
        (("launch", "-n", "2", "--", "info", "missing.gguf"), 2, "numba-meta: this process is one of 2 ranks already, started by Open MPI"),
    ],
)
def test_one_reason_and_the_status_of_the_command(arguments, status, pattern) -> None:
    process = launched(2, *arguments)
    said = [line for line in process.stderr.splitlines() if line.startswith("numba-meta: ")]
    assert process.returncode == status and len(said) == 1 and pattern in said[0], process.stderr
