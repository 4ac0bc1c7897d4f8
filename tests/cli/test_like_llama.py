"""Values that mean here what they mean in llama.cpp."""

from __future__ import annotations

import io
import re
import sys

import pytest
from synthetic import write_model

from numba_meta.cli.session import CONTEXT_FULL, UNLIMITED
from numba_meta.errors import ContextFullError


def asked(models) -> dict:
    return models[-1].calls[-1][1]


def test_minus_one_is_no_limit(run, models):
    run("generate", "m", "p", "-n", "-1", "--top-k", "-1", "--seed", "-1", "-t", "-1", "-np", "-1", "-c", "0")
    assert asked(models)["max_tokens"] == UNLIMITED and asked(models)["top_k"] == 0 and "seed" not in asked(models)
    arguments = models[0].load_arguments
    assert (arguments["threads"], arguments["parallel"], arguments["ctx_size"]) == (None, 1, None)


@pytest.mark.parametrize(("predict", "shifts"), [("-1", True), ("-2", False)])
def test_minus_two_ends_where_the_context_is_full(run, models, predict, shifts):
    run("generate", "m", "p", "--n-predict", predict, "--context-shift", "--keep", "-1")
    assert asked(models)["max_tokens"] == UNLIMITED
    assert ("context_shift" in asked(models), "keep" in asked(models)) == (shifts, shifts)


@pytest.mark.parametrize(("predict", "status", "line"), [("-1", 0, CONTEXT_FULL), ("-2", 0, CONTEXT_FULL), ("9", 1, "numba-meta: 1 more")])
def test_a_full_context_ends_the_text(run, next_model, predict, status, line):
    model = next_model("one", " two", ContextFullError("1 more token does not fit"))
    outcome = run("generate", "m", "p", "-n", predict)
    assert (outcome.status, outcome.out) == (status, "one two\n" if status == 0 else "one two")
    assert outcome.err.startswith(line) and model.closed


def test_a_prompt_that_does_not_fit_is_an_error_all_the_same(run, next_model):
    next_model(ContextFullError("the prompt has 9 tokens"))
    outcome = run("generate", "m", "p", "-n", "-1")
    assert (outcome.status, outcome.out, outcome.err) == (1, "", "numba-meta: the prompt has 9 tokens\n")


def test_several_prompts_share_the_context_equally(run, next_model):
    model = next_model()
    model.plan.n_cells, model.plan.n_sequences = 20, 2
    outcome = run("generate", "m", "one", "four", "-n", "-1")
    assert outcome.status == 0 and outcome.out == "one!\n---\nfour!\n"
    assert model.calls[0][1]["max_tokens"] == 7 and CONTEXT_FULL not in outcome.err
    model.plan.n_cells = 6
    outcome = run("generate", "m", "one", "four", "-n", "-1")
    assert outcome.status == 1 and "a prompt has 4 tokens, its part of the context has room for 3" in outcome.err


@pytest.mark.parametrize(("options", "n"), [((), 2), (("-no-kvu",), 2), (("-np", "1"), 1)])
def test_several_prompts_that_fill_the_context_leave_their_texts(run, tmp_path, options, n):
    """What the longest prompt would be continued with alone, in as much room, and as many tokens of the others; then the error."""
    path = str(write_model(tmp_path / "model.gguf"))
    room = 24 // n if "-no-kvu" in options else 24
    alone = [run("generate", path, prompt, "--exact", "-c", str(room), "-n", "99", "--ignore-eos") for prompt in ("the in on", "in on the")]
    both = run("generate", path, "the in on", "in on the", "--exact", "-c", "24", "-n", "99", "--ignore-eos", *options)
    assert [each.status for each in (*alone, both)] == [1, 1, 1]
    longest, other = both.out.removesuffix("\n").split("\n---\n")
    assert longest == alone[0].out and alone[1].out.startswith(other) and other
    assert both.err == "numba-meta: the context was full before 99 tokens; use fewer, or a larger --ctx-size\n"
    shared = run("generate", path, "the in on", "in on the", "--exact", "-c", "24", "-n", "-1", "--ignore-eos", *options)
    assert shared.status == 0 and CONTEXT_FULL in shared.err


def test_a_conversation_goes_on_behind_a_full_context(run, next_model, monkeypatch):
    model = next_model("one", ContextFullError("1 more token does not fit"))
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\nAgain\n"))
    outcome = run("chat", "m", "-n", "-1")
    assert outcome.status == 0 and outcome.out == "one\none\n" and outcome.err.count(CONTEXT_FULL) == 2
    assert model.detokenize(model.calls[1][0]) == "user:Hello;assistant:one;user:Again;"


def test_other_values(run, models):
    run("generate", "m", "p", "--temperature", "-1", "--repeat-penalty", "1.1", "--repeat-last-n", "-1")
    assert asked(models)["temperature"] == 0 and asked(models)["repetition_last_n"] == -1
    assert run("generate", "m", "-p", "one").status == 0 and models[-1].calls[0][0] == "one"
    assert run("generate", "m", "one", "--prompt", "two").out == "one!\n---\ntwo!\n"
    assert run("generate", "m", "-p", "one", "-f", __file__).status == 2


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--repeat-last-n", "64"], "--repeat-last-n says what --repeat-penalty looks at"),
        (["--seed", "-2"], "-2 is not a whole number of 0 or more, or -1."),
        (["--seed", str(1 << 64)], "seed is 18446744073709551616"),
        (["--stop", ""], "a stop text is ''"),
        (["--keep", "-1"], "--keep says what a shift keeps"),
        (["-ts", "1,1"], "2 entries for 1 devices"),
        (["-dev", "gpu:0"], "gpu"),
        (["-t", "5000"], "threads 5000 is impossible"),
        (["-c", "3", "-np", "4", "-no-kvu"], "leaves none for each"),
        (["--prompt-cache", "/dev/null"], "/dev/null"),
        (["--prompt-cache", "no/such/folder/state"], "no file can be written there"),
        (["--prompt-cache", __file__], "is no state file"),
    ],
)
def test_arguments_that_cannot_be_are_refused_before_a_model_is_opened(run, models, words, line):
    outcome = run("generate", "m", "p", *words)
    assert outcome.status in (1, 2) and line in outcome.err and outcome.err.count("\n") == 1
    assert models == []


def test_a_list_of_bench_that_is_given_again_is_longer(run, models):
    outcome = run("bench", "m", "-p", "8,9", "-p", "10", "-n", "0", "-r", "1", "-ctk", "f16", "-ctk", "q8_0", "-t", "1", "-t", "2")
    assert outcome.status == 0 and len(models) == 4 and len(outcome.out.splitlines()) == 1 + 4 * 3
    assert "[default: 512]" in run("bench", "--help").out and "[default: 0]" in run("bench", "--help").out


def test_every_configuration_of_bench_is_checked_before_the_first_is_loaded(run, models):
    outcome = run("bench", "m", "-dev", "cpu:0", "-dev", "cpu:0,cpu:0", "-ts", "1,1")
    assert outcome.status == 2 and "2 entries for 1 devices" in outcome.err and models == []


def test_a_prompt_that_is_far_too_long_is_refused_before_weights_are_read(run, models, tmp_path):
    path = str(write_model(tmp_path / "model.gguf"))
    long = tmp_path / "long.txt"
    long.write_text("the in on " * 600)
    line = r"^numba-meta: the prompt has \d+ tokens, the context has room for {}; shorten it or use a larger context .*\n$"
    for options, room in ((("-c", "64"), 64), ((), 512)):
        outcome = run("generate", path, "-f", str(long), *options)
        assert outcome.status == 1 and re.fullmatch(line.format(room), outcome.err)
    outcome = run("launch", "-n", "2", "--", "generate", path, "-f", str(long))
    assert outcome.status == 1 and "has room for 512" in outcome.err
    assert models == []
    assert run("generate", "m", "the in on " * 60).status == 0  # may fit: nobody looks before the load
    assert len(models) == 1
