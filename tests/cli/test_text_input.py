"""Text from files, pipes and arguments: byte-order marks, bytes that are no UTF-8, locales that cannot read it."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
from child_processes import environment

# Says what the model was asked, in UTF-8 whatever the locale.
ECHO = """
import sys
import numba_meta
from cli.fake_model import FakeModel
from numba_meta.cli import main

model = FakeModel()
vars(numba_meta)["load"] = lambda *_, **__: model
status = main()
sys.stdout.flush()
sys.stdout.buffer.write(repr(model.calls).encode("utf-8", "surrogateescape"))
sys.exit(status)
"""


@pytest.fixture
def typed(monkeypatch):
    """Set the bytes of standard input."""
    return lambda data: monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


@pytest.mark.parametrize(
    ("data", "prompt"),
    [
        (b"\xef\xbb\xbfA lamp.\n", "A lamp."),
        (b"\xef\xbb\xbf", ""),
        (b"A lamp.\r\n", "A lamp."),
        (b"A lamp.\n\n", "A lamp.\n"),
        ("A \ufefflamp".encode(), "A \ufefflamp"),  # not at the start: a character of the text
    ],
)
def test_a_byte_order_mark_is_no_text(run, models, typed, tmp_path, data, prompt):
    (tmp_path / "prompt.txt").write_bytes(data)
    typed(data)
    assert run("generate", "m", "-f", str(tmp_path / "prompt.txt")).status == 0
    assert run("generate", "m", "-f", "-").status == 0
    assert [model.calls[0][0] for model in models] == [prompt, prompt]


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"lamp\xff", "byte 0xff at 4"),
        (b"\xef\xbb\xbflamp\xc3(", "byte 0xc3 at 7"),
        ("lamp".encode("utf-16"), "is UTF-16 text, expected UTF-8"),
    ],
)
def test_the_byte_that_the_user_wrote_is_named(run, models, typed, data, line):
    typed(data)
    outcome = run("generate", "m", "-f", "-")
    assert outcome.status == 2 and f"standard input {'' if 'UTF-16' in line else 'is not UTF-8 text: '}{line}" in outcome.err
    assert models == []


def test_a_bad_line_of_a_conversation_is_left_out(run, next_model, typed):
    model = next_model("Yes")
    typed(b"\xef\xbb\xbfHello\n" + b"x" * 9000 + b"\n\nbad \xff line\nAgain \xe2\x98\x83\n\xc3")
    outcome = run("chat", "m")
    assert (outcome.status, outcome.out) == (0, "Yes\nYes\nYes\n")
    said = [line for line in outcome.err.splitlines() if "UTF-8" in line]
    assert said == [
        "numba-meta: line 4 of standard input is not UTF-8 text: byte 0xff at 4; it is left out",
        "numba-meta: line 6 of standard input is not UTF-8 text: byte 0xc3 at 0; it is left out",
    ]
    assert model.detokenize(model.calls[0][0]) == "user:Hello;"
    assert model.detokenize(model.calls[2][0]).endswith("user:Again ☃;")


def test_a_chat_in_utf_16_is_refused(run, next_model, typed):
    """Its later lines would be taken for text with zeros between the letters."""
    model = next_model("Yes")
    typed("Hello\nAgain\n".encode("utf-16"))
    outcome = run("chat", "m")
    assert outcome.status == 2 and "standard input is UTF-16 text, expected UTF-8" in outcome.err and not model.calls


@pytest.mark.parametrize("variables", [{"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}, {"LC_ALL": "C.UTF-8"}])
def test_arguments_are_utf_8_in_any_locale(variables):
    def call(*arguments: bytes) -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable.encode(), b"-c", ECHO.encode(), *arguments]
        return subprocess.run(command, capture_output=True, env=environment(**variables), timeout=60)

    good = call(b"generate", b"m", "Où ☃".encode(), b"-p", "é".encode(), b"--stop", "à".encode())
    assert good.returncode == 0, good.stderr
    assert "(['Où ☃', 'é']".encode() in good.stdout.replace(b"\\u2603", "☃".encode()) and "('à',)".encode() in good.stdout
    bad = call(b"generate", b"m", b"caf\xe9")
    assert bad.returncode == 2 and b"not valid UTF-8 text: byte 0xe9 at 3" in bad.stderr and bad.stderr.count(b"\n") == 1
