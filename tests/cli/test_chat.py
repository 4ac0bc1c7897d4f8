"""`chat`: the conversation that the model sees, and how it is steered."""

from __future__ import annotations

import io
import sys

import gguf
import pytest
from models.rewriting import REMOVED, rewrite
from synthetic import write_model

from numba_meta.errors import ContextFullError

VALUE = gguf.GGUFValueType


@pytest.fixture
def typed(monkeypatch):
    """Set what the user types."""
    return lambda text: monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def prompts(model) -> list[str]:
    return [model.detokenize(prompt) for prompt, _ in model.calls]


def test_answers_join_the_conversation(run, next_model, typed):
    model = next_model("Yes", ".")
    typed("Hello\n\nAgain\n")
    outcome = run("chat", "m", "--system", "Be brief.")
    assert outcome.status == 0
    assert outcome.out == "Yes.\nYes.\n"
    assert prompts(model) == ["system:Be brief.;user:Hello;", "system:Be brief.;user:Hello;assistant:Yes.;user:Again;"]
    assert model.closed


def test_reset_forgets_and_exit_ends(run, next_model, typed):
    model = next_model("Yes")
    typed("Hello\n/reset\nAgain\n/exit\nNever\n")
    assert run("chat", "m").out == "Yes\nYes\n"
    assert prompts(model) == ["user:Hello;", "user:Again;"]


def test_an_unknown_command_is_no_message(run, next_model, typed):
    model = next_model("Yes")
    typed("/quit now\n")
    outcome = run("chat", "m")
    assert "/quit is no command: /reset forgets" in outcome.err
    assert model.calls == []


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(run, next_model, typed):
    model = next_model("Ye", KeyboardInterrupt())
    typed("Hello\nAgain\n")
    assert run("chat", "m").status == 0
    assert prompts(model)[1] == "user:Hello;assistant:Ye;user:Again;"


def test_a_full_context_is_said_and_the_conversation_goes_on(run, next_model, typed):
    model = next_model(ContextFullError("the prompt has 90 tokens, the cache 64 cells"))
    typed("Hello\n/reset\nAgain\n")
    outcome = run("chat", "m")
    assert outcome.status == 0
    assert outcome.err.count("numba-meta: the prompt has 90 tokens, the cache 64 cells; /reset makes room\n") == 2
    assert prompts(model) == ["user:Hello;", "user:Again;"]


@pytest.mark.parametrize(
    ("template", "line"),
    [
        (REMOVED, "base.gguf has no chat template (a base model continues text): use `generate` without --chat"),
        (("{% if %}", VALUE.STRING), "base.gguf: tokenizer.chat_template is not a valid Jinja template: Expected an expression, got"),
        ((7, VALUE.UINT32), "base.gguf: tokenizer.chat_template is of type int, expected a string"),
    ],
    ids=["none", "no-jinja", "no-text"],
)
def test_a_file_without_a_template_is_refused_before_weights_are_read(run, typed, tmp_path, template, line):
    """A device without room shows the order: the weights would complain. `info` says it, too; text that is no chat needs none."""
    path = rewrite(write_model(tmp_path / "plain.gguf"), tmp_path / "base.gguf", {"tokenizer.chat_template": template})
    typed("Hello\n")
    for command in (("chat", str(path)), ("generate", str(path), "--chat", "Hello")):
        outcome = run(*command, "--device", "cpu:0?mem=1K")
        assert outcome.status in (1, 2) and outcome.err.startswith(f"numba-meta: {line}") and outcome.err.count("\n") == 1
    told = run("info", str(path)).out
    assert ("does not load" in told) == (template is not REMOVED)
    assert "weights need" in run("generate", str(path), "Hello", "--device", "cpu:0?mem=1K").err
