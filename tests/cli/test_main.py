"""Whatever happens, a run of the command line ends with the right status and at most one line about what was wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import click
import pytest
from child_processes import environment

from numba_meta import __version__
from numba_meta.cli.app import app
from numba_meta.errors import ModelFileError, NumbaMetaError, UsageError

# Generates for ever from a fake model, in a process of its own.
ENDLESS = """
import itertools, sys, time
import numba_meta
from cli.fake_model import FakeModel
from numba_meta.cli import main

class Endless(FakeModel):
    def generate(self, prompt, max_tokens, **arguments):
        for i in itertools.count():
            time.sleep(0.001)
            yield f"word{i} "

vars(numba_meta)["load"] = lambda *_, **__: Endless()
sys.exit(main(["generate", "fake", "prompt"]))
"""


def start_endless() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", ENDLESS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())


def test_help_teaches_by_example(run):
    outcome = run("--help")
    assert outcome.status == 0
    assert "numba-meta generate smollm2" in outcome.out
    assert run().out == outcome.out


@pytest.mark.parametrize("command", sorted(app.commands))
def test_every_command_has_examples_and_one_line_in_the_overview(run, command):
    outcome = run(command, "--help")
    assert outcome.status == 0
    assert f"Examples:\n    numba-meta {command}" in outcome.out
    assert app.commands[command].get_short_help_str(60) in run("--help").out
    assert "..." not in app.commands[command].get_short_help_str(60)


def test_version(run):
    assert run("--version").out == f"numba-meta {__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["generate"],
        ["generate", "m"],
        ["generate", "m", "p", "--frobnicate"],
        ["generate", "m", "p", "-n", "-3"],
        ["chat", "m", "-n", "0"],
        ["generate", "m", "p", "-n", "many"],
        ["generate", "m", "p", "--temp", "nan"],
        ["generate", "m", "p", "--temp", "inf"],
        ["generate", "m", "p", "--top-p", "1.5"],
        ["generate", "m", "p", "--repeat-penalty", "0"],
        ["generate", "m", "p", "--seed", "-3"],
        ["generate", "m", "p", "--threads", "0"],
        ["generate", "m", "p", "--cache-type-k", "q3_k"],
        ["generate", "m", "--file", "no/such/file"],
        ["generate", "m", "--file", "."],
        ["generate", "m", "p", "--file", __file__],
        ["chat"],
        ["bench", "m", "--n-prompt", "12,x"],
        ["bench", "m", "--n-prompt", "0", "--n-gen", "0"],
        ["bench", "m", "--cache-type-v", "f16,f12"],
        ["bench", "m", "--threads", "0"],
        ["bench", "m", "--output", "xml"],
        ["pull"],
    ],
)
def test_wrong_use_is_one_line_and_status_2(run, models, arguments):
    outcome = run(*arguments)
    assert outcome.status == 2
    assert outcome.out == ""
    assert outcome.err.startswith("numba-meta: ") and outcome.err.count("\n") == 1
    assert models == []


@pytest.mark.parametrize(
    "option",
    ["--kv-pipeline-depth=1", "--kv-gpu-layers=0", "--kv-ring=whole", "--kv-cpu-pinned=on", "--spec-type=x"],
)
def test_an_option_that_would_do_nothing_is_refused(run, models, option):
    outcome = run("generate", "m", "p", option)
    assert outcome.status == 2
    assert option.split("=")[0] in outcome.err


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (ModelFileError("m.gguf: 3 bytes, expected a header"), 1, "m.gguf: 3 bytes, expected a header"),
        (UsageError("split 1,-1: negative"), 2, "split 1,-1: negative"),
        (NumbaMetaError("two\n  lines"), 1, r"two\n lines"),
        (FileNotFoundError(2, "No such file or directory", "m.gguf"), 1, "m.gguf: No such file or directory"),
        (MemoryError(), 1, "this machine is out of memory; use a smaller context or a smaller model"),
    ],
)
def test_a_failure_is_one_line_with_its_status(run, failing_load, error, status, line):
    failing_load(error)
    outcome = run("generate", "m", "p")
    assert (outcome.status, outcome.out, outcome.err) == (status, "", f"numba-meta: {line}\n")


def test_an_unexpected_failure_shows_its_traceback_only_on_request(run, failing_load, monkeypatch):
    failing_load(ZeroDivisionError("division by zero"))
    quiet = run("generate", "m", "p")
    assert quiet.status == 1
    assert "ZeroDivisionError: division by zero" in quiet.err and quiet.err.count("\n") == 1
    for arguments in (["--debug", "generate", "m", "p"], ["generate", "m", "p", "--debug"]):
        loud = run(*arguments)
        assert loud.status == 1
        assert "Traceback" in loud.err and loud.err.endswith(quiet.err)
    monkeypatch.setenv("NUMBA_META_DEBUG", "1")
    assert "Traceback" in run("generate", "m", "p").err


def test_a_failure_in_the_middle_closes_the_model(run, next_model):
    model = next_model("one ", NumbaMetaError("the device failed"))
    outcome = run("generate", "m", "p")
    assert (outcome.status, outcome.out, outcome.err) == (1, "one ", "numba-meta: the device failed\n")
    assert model.closed


def test_ctrl_c_ends_quietly(run, next_model):
    model = next_model("one ", KeyboardInterrupt())
    outcome = run("generate", "m", "p")
    assert (outcome.status, outcome.out, outcome.err) == (130, "one ", "")
    assert model.closed


def test_an_interrupt_signal_ends_quietly():
    process = start_endless()
    try:
        assert process.stdout.read(5) == b"word0"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, err) == (130, b"")


def test_a_closed_pipe_ends_quietly():
    process = start_endless()
    try:
        assert process.stdout.read(5) == b"word0"
        process.stdout.close()
        err = process.stderr.read()
        process.wait(timeout=30)
    finally:
        process.kill()
        process.stderr.close()
    assert (process.returncode, err) == (141, b"")


def test_output_that_cannot_show_a_character_gets_a_replacement():
    code = "import sys; from numba_meta.cli import main; status = main(['--version']); print('caf\\u00e9'); sys.exit(status)"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii"}, timeout=60)
    assert process.returncode == 0
    assert process.stdout.endswith(b"caf?\n")


def test_python_dash_m_is_the_command():
    process = subprocess.run([sys.executable, "-m", "numba_meta", "--version"], capture_output=True, text=True, timeout=60)
    assert process.stdout == f"numba-meta {__version__}\n"


def test_options_of_commands_have_help():
    unexplained = [
        f"{name} {parameter.name}"
        for name, command in app.commands.items()
        for parameter in command.params
        if isinstance(parameter, click.Option) and not parameter.help
    ]
    assert unexplained == ["bench output"]


@pytest.mark.parametrize("arguments", [["generate", "no-such-model", "p"], ["--version"], ["launch", "-n", "2", "--", "info", "m"]])
def test_closed_standard_output_is_one_line(arguments):
    command = 'exec "$@" >&-'
    process = subprocess.run(
        ["sh", "-c", command, "sh", sys.executable, "-m", "numba_meta", *arguments], capture_output=True, text=True, timeout=60
    )
    line = "numba-meta: standard output is closed, and what a command prints goes there; send it to a file or to /dev/null\n"
    assert (process.returncode, process.stderr) == (1, line)


@pytest.mark.parametrize("at", ["numba_meta.cli", "numba_meta.cli.terminal", "numba_meta.models.loading.load_plan"])
def test_ctrl_c_while_the_command_starts_ends_quietly(at):
    code = f"""
import sys
class Interrupt:
    def find_spec(self, name, *_):
        if name == {at!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
sys.argv[1:] = ["generate", "missing.gguf", "p"]
from numba_meta.__main__ import run
run()
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment(), timeout=60)
    assert (process.returncode, process.stdout, process.stderr) == (130, b"", b"")
