"""`--prompt-cache` where a text ends early: what is right so far is saved, or a line says that it is not."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from child_processes import environment
from cli.fake_model import FakeModel
from synthetic import write_model

import numba_meta as nm
from numba_meta.errors import ContextFullError, NumbaMetaError

PROMPT = "the in on"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("model") / "model.gguf", context_length=1 << 16))


def check_goes_on(path: str, state: Path, text: str) -> None:
    """The state holds what was generated from the prompt, and goes on from there as if it had never ended."""
    with nm.load(path, ctx_size=1 << 16, exact=True, deterministic=True) as model:
        model.load_state(state)
        held = list(model.cache.tokens(0))
        prompt = model.tokenize(PROMPT)
        assert held[: len(prompt)] == prompt and len(held) > len(prompt)
        assert model.detokenize(held[len(prompt) :]).startswith(text[:-40])
        fresh = model.generate_ids(held, max_tokens=4, ignore_eos=True)
        model.load_state(state)
        assert model.generate_ids(held, max_tokens=4, ignore_eos=True, reuse_prefix=True) == fresh


def endless(path: str, state: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "numba_meta", "generate", path, PROMPT, "--exact", "--deterministic", "--ignore-eos", "-n", "-1"]
    command += ["--prompt-cache", str(state)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (None, 141)])
def test_a_signal_or_a_closed_pipe_saves_what_is_right_so_far(path, tmp_path, number, status):
    process = endless(path, tmp_path / "state")
    try:
        text = process.stdout.read(64)
        if number is None:
            process.stdout.close()
            err = process.stderr.read()
            process.wait(timeout=60)
        else:
            process.send_signal(number)
            _, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.stderr.close()
    assert (process.returncode, err.decode()) == (status, "")
    check_goes_on(path, tmp_path / "state", text.decode(errors="ignore"))


@pytest.mark.parametrize(("predict", "status"), [("100000", 1), ("-1", 0)])
def test_a_full_context_saves_what_it_holds(run, path, tmp_path, predict, status):
    state = tmp_path / "state"
    options = ["--exact", "--deterministic", "-c", "48", "--ignore-eos", "-n", predict, "--prompt-cache", str(state)]
    outcome = run("generate", path, PROMPT, *options)
    assert outcome.status == status
    check_goes_on(path, state, outcome.out)
    with nm.load(path, ctx_size=48, exact=True, deterministic=True) as model:
        model.load_state(state)
        assert len(model.cache.tokens(0)) == 48


class Stateful(FakeModel):
    """Counts what was saved; `failure`: what a save raises."""

    failure: Exception | None = None
    saved = 0

    def save_state(self, path: Path) -> None:
        if self.failure:
            raise self.failure
        self.saved += 1


@pytest.fixture
def stateful(monkeypatch):
    def prepare(*pieces: str | BaseException) -> Stateful:
        model = Stateful(pieces)
        monkeypatch.setitem(vars(nm), "load", lambda *_, **__: model)
        return model

    return prepare


@pytest.mark.parametrize(
    ("pieces", "status", "saved"),
    [
        (["one"], 0, 1),
        (["one", ContextFullError("full")], 1, 1),
        ([ContextFullError("the prompt does not fit")], 1, 0),
        (["one", KeyboardInterrupt()], 130, 0),  # in the middle of a step: a second Ctrl-C
        (["one", NumbaMetaError("the device failed")], 1, 0),
        (["one", MemoryError()], 1, 0),
    ],
)
def test_what_is_not_saved_is_said(run, stateful, tmp_path, pieces, status, saved):
    model = stateful(*pieces)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    outcome = run("generate", "m", "p", "--prompt-cache", str(tmp_path / "state"))
    assert (outcome.status, model.saved) == (status, saved)
    assert outcome.err.count(f"the state was not saved; {tmp_path / 'state'} is what it was before") == 1 - saved
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_save_that_fails_behind_an_early_end_is_said_beside_the_reason(run, stateful, tmp_path):
    stateful("one", ContextFullError("full")).failure = NumbaMetaError("no room on the disk")
    outcome = run("generate", "m", "p", "--prompt-cache", str(tmp_path / "state"))
    assert (outcome.status, outcome.err) == (1, "numba-meta: no room on the disk\nnumba-meta: full\n")
    stateful("one").failure = NumbaMetaError("no room on the disk")
    outcome = run("generate", "m", "p", "--prompt-cache", str(tmp_path / "state"))
    assert (outcome.status, outcome.out, outcome.err) == (1, "one\n", "numba-meta: no room on the disk\n")
