"""`numba-meta launch`, and the command line as a rank."""

from __future__ import annotations

import subprocess
import sys

import pytest
from child_processes import environment
from mpirun import needs_mpi
from synthetic import write_model

from numba_meta.cli import launch
from numba_meta.cli.as_rank import _silent
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


@pytest.fixture
def started(monkeypatch) -> list[list[str]]:
    """The commands that a launcher would have been started with; none is."""
    commands: list[list[str]] = []
    monkeypatch.setattr(launch, "find_mpirun", lambda environ: "mpirun")
    monkeypatch.setattr(launch, "mpirun_version", lambda program: "mpirun (Open MPI) 5.0.11")
    monkeypatch.setattr("os.execve", lambda program, arguments, environ: commands.append(arguments))
    return commands


@pytest.mark.parametrize(
    ("command", "status", "line"),
    [
        (["chat", "MODEL"], 2, "chat is not there yet for 2 ranks"),
        (["generate", "MODEL", "--file", "-"], 2, "--file - is not there yet for 2 ranks"),
        (["generate", "MODEL", "--file", "/dev/null"], 2, "--file /dev/null is not there yet for 2 ranks: it can be read once"),
        (["generate", "MODEL", "--file", "missing.txt"], 2, "File 'missing.txt' does not exist"),
        (["generate", "MODEL", "p", "--prompt-cache", "state"], 2, "--prompt-cache is not there yet for 2 ranks"),
        (["generate", "MODEL"], 2, "no prompt was given"),
        (["generate", "MODEL", "p", "--frobnicate"], 2, "No such option: --frobnicate"),
        (["generate", "MODEL", "p", "-ngl", "9"], 2, "-ngl (layers on the GPU)"),
        (["generate", "MODEL", "p", "--stop", ""], 2, "a stop text is ''"),
        (["generate", "MODEL", "p", "-dev", "cpu:0;cpu:0;cpu:0"], 2, "those of 3 ranks, and 2 ranks run"),
        (["generate", "MODEL", "p", "-ts", "1"], 2, "1 entries for 2 devices"),
        (["generate", "MODEL", "p", "-nkvo", "--kv-gpu-layers", "99"], 2, "kv_gpu_layers 99 is impossible: the model has 2 layers"),
        (["generate", "missing.gguf", "p"], 1, "no model missing.gguf"),
        (["generate", __file__, "p"], 1, "test_launch.py"),
        (["bench", "MODEL", "-dev", "cpu:0", "-dev", "cpu:0,cpu:0", "-ts", "1,1"], 2, "2 entries for 4 devices"),
        (["info", "missing.gguf"], 1, "no model missing.gguf"),
        (["info"], 2, "Missing argument 'MODEL'"),
        (["nonsense"], 2, "No such command 'nonsense'"),
        (["--"], 2, "No such command ''"),
        (["--debug", "chat", "MODEL"], 2, "chat is not there yet for 2 ranks"),
    ],
)
def test_what_needs_no_rank_is_refused_before_the_launcher_starts(run, started, tmp_path, command, status, line) -> None:
    path = str(write_model(tmp_path / "model.gguf", n_layer=2))
    outcome = run("launch", "-n", "2", "--", *[path if word == "MODEL" else word for word in command])
    assert (outcome.status, outcome.out, outcome.err.count("\n")) == (status, "", 1) and line in outcome.err
    assert started == []


def test_a_command_that_can_be_is_handed_to_the_launcher(run, started, tmp_path) -> None:
    path = str(write_model(tmp_path / "model.gguf"))
    for words in (["generate", path, "-n", "3", "--", "-x"], ["bench", path, "-p", "9"], ["info", path], ["devices"]):
        assert run("launch", "-np", "2", "--", *words).status == 0
        assert started.pop() == ["mpirun", "--output", ":raw", "-n", "2", sys.executable, "-m", "numba_meta", *words]


def test_help_and_version_need_no_rank(run, started) -> None:
    assert run("launch", "-n", "2", "--", "generate", "--help").out.startswith("Usage: numba-meta generate")
    assert run("launch", "-n", "2", "--", "--version").out.startswith("numba-meta ")
    assert started == []


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


def test_a_silent_rank_may_print_any_text(capsys) -> None:
    with _silent():
        print("é \udcff", "☃", file=sys.stderr)
        print("é \udcff", "☃")
        assert sys.stdout.encoding == "utf-8"
    assert capsys.readouterr() == ("", "")


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
