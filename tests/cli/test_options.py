"""What help and documentation say of options is what is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from numba_meta.comm.communicators import NAMES

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("command", ["generate", "chat", "plan", "bench"])
def test_help_knows_both_kinds_of_devices(run, command):
    words = " ".join(run(command, "--help").out.split())
    assert "cuda:0" in words and "cuda:0,cuda:1" in words and "cpu:0,cpu:0" in words


def test_help_says_which_negative_numbers_there_are(run):
    words = " ".join(run("generate", "--help").out.split())
    assert "[default: 128; -2, -1, x>=0]" in words and "or -1: all. [-1, x>=0]" in words


def test_every_communicator_is_documented():
    (row,) = [line for line in (ROOT / "docs" / "cli.md").read_text().splitlines() if line.startswith("| `NUMBA_META_COMM`")]
    assert all(f"`{name}`" in row for name in (*NAMES, "none"))
