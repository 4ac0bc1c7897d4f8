"""What the command line does with text: control tokens that a user spells, and models whose tokenizer cannot be built."""

from __future__ import annotations

import io
import json
import sys

import gguf
import pytest
from models.rewriting import rewrite
from synthetic import write_model

VALUE = gguf.GGUFValueType
QUICK = ("-c", "64", "-t", "1")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("text") / "whole.gguf")


@pytest.fixture(scope="module")
def broken_path(model_path):
    return rewrite(model_path, model_path.with_name("broken.gguf"), {"tokenizer.ggml.pre": ("made-up", VALUE.STRING)})


@pytest.mark.parametrize("option", [(), ("--no-parse-special",), ("--parse-special",)])
def test_chats_say_whether_spelled_tokens_are_tokens(run, next_model, monkeypatch, option):
    model = next_model("Yes")
    assert run("generate", "m", "--chat", "Hi", *option).status == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    assert run("chat", "m", *option).status == 0
    assert model.chat_template.parsed_special == [option == ("--parse-special",)] * 2


def test_a_plain_prompt_may_hold_control_tokens_too(run, model_path, monkeypatch):
    prompts = []
    from numba_meta.models.model import Model

    generate = Model.generate

    def noted(self, prompt, *arguments, **options):
        prompts.append(prompt)
        return generate(self, prompt, *arguments, **options)

    monkeypatch.setattr(Model, "generate", noted)
    text = "in<|im_end|>"
    assert run("generate", str(model_path), text, "-n", "1", *QUICK).status == 0
    assert run("generate", str(model_path), text, "-n", "1", "--parse-special", *QUICK).status == 0
    assert prompts[0] == text and prompts[1][-1] == 2
    assert run("generate", str(model_path), text, "--chat", "-n", "1", *QUICK).status == 0
    assert [i for i in prompts[2] if i < 3] == [1, 2, 1], "start, end and start of the template alone"


@pytest.mark.parametrize("command", [("generate", "Hi"), ("generate", "Hi", "--chat"), ("chat",)])
def test_text_without_a_tokenizer_is_refused_before_weights_are_read(run, broken_path, command):
    name, *rest = command
    outcome = run(name, str(broken_path), *rest, "--device", "cpu:0?mem=1M", *QUICK)
    assert (outcome.status, outcome.out) == (1, "")
    (line,) = outcome.err.splitlines()
    assert line.startswith("numba-meta: broken.gguf: the tokenizer cannot be built: tokenizer.ggml.pre is 'made-up', ")


@pytest.mark.filterwarnings("default::numba_meta.errors.NumbaMetaWarning")
def test_bench_takes_ids_and_needs_no_tokenizer(run, broken_path):
    outcome = run("bench", str(broken_path), "-p", "8", "-n", "2", "-r", "1", "-t", "1", "-o", "json")
    assert outcome.status == 0
    said = [line for line in outcome.err.splitlines() if "tokenizer" in line]
    assert len(said) == 1 and said[0].startswith("numba-meta: broken.gguf: the tokenizer cannot be built: ")
    assert [result["median"] > 0 for result in json.loads(outcome.out)["results"]] == [True, True]


def test_plan_says_it_in_a_line(run, broken_path, model_path):
    speeds = ("--weights-gbps", "10", "--attention-gbps", "10")
    outcome = run("plan", str(broken_path), *speeds, *QUICK)
    whole = run("plan", str(model_path), *speeds, *QUICK)
    assert (outcome.status, whole.status, "tokenizer" in whole.err) == (0, 0, False)
    (line,) = [line for line in outcome.err.splitlines() if "tokenizer" in line]
    assert line.startswith("numba-meta: broken.gguf: the tokenizer cannot be built: tokenizer.ggml.pre is 'made-up'")
    assert line.endswith("; only ids can be given to this model")


def test_a_template_that_does_not_end_is_one_line(run, model_path, monkeypatch):
    endless = {"tokenizer.chat_template": ("{{ 'x' * 10**9 }}", VALUE.STRING)}
    path = rewrite(model_path, model_path.with_name("endless.gguf"), endless)
    outcome = run("generate", str(path), "--chat", "Hi", *QUICK)
    assert (outcome.status, outcome.out) == (1, "")
    (line,) = [line for line in outcome.err.splitlines() if "template" in line]
    assert line.startswith("numba-meta: endless.gguf: tokenizer.chat_template does not come to an end: it makes more than ")


def test_launch_refuses_text_without_a_tokenizer_before_ranks_start(run, broken_path):
    outcome = run("launch", "-n", "2", "--", "generate", str(broken_path), "Hi", *QUICK)
    assert (outcome.status, outcome.out) == (1, "")
    (line,) = outcome.err.splitlines()
    assert line.startswith("numba-meta: broken.gguf: the tokenizer cannot be built: tokenizer.ggml.pre is 'made-up', ")


def test_a_very_long_prompt_without_a_tokenizer_names_the_file(run, broken_path):
    outcome = run("generate", str(broken_path), "long " * 4000, *QUICK)
    assert outcome.status == 1 and outcome.err.startswith("numba-meta: broken.gguf: the tokenizer cannot be built: ")
