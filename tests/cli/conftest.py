"""The command line in this process, with a fake model in place of `numba_meta.load`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from cli.fake_model import FakeModel

import numba_meta
from numba_meta.cli import main


@dataclass(frozen=True)
class Outcome:
    """What a run of the command line left: its exit status, standard output and standard error."""

    status: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Call the command line with the given arguments."""

    def call(*arguments: str) -> Outcome:
        status = main(arguments)
        return Outcome(status, *capsys.readouterr())

    return call


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> list[FakeModel]:
    """The models that were loaded, each a `FakeModel`."""
    loaded: list[FakeModel] = []

    def load(name: str, **arguments: Any) -> FakeModel:
        loaded.append(FakeModel(name=name, **arguments))
        return loaded[-1]

    monkeypatch.setitem(vars(numba_meta), "load", load)
    return loaded


@pytest.fixture
def failing_load(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Make every load raise the given error."""

    def fail_with(error: BaseException) -> None:
        def load(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setitem(vars(numba_meta), "load", load)

    return fail_with


@pytest.fixture
def next_model(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeModel]:
    """Make every load return a fake model with the given pieces."""

    def prepare(*pieces: str | BaseException) -> FakeModel:
        model = FakeModel(pieces)
        monkeypatch.setitem(vars(numba_meta), "load", lambda *_, **__: model)
        return model

    return prepare
