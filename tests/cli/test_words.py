"""Words that begin with `-`: options of llama.cpp, of other commands, prompts, values that are joined to their option."""

from __future__ import annotations

import click
import pytest

from numba_meta.cli.app import app
from numba_meta.cli.llama_options import LLAMA_OPTIONS, hint


def names_of(command: str) -> set[str]:
    options = [each for each in app.commands[command].params if isinstance(each, click.Option)]
    return {name for option in options for name in (*option.opts, *option.secondary_opts)}


def refused(run, *arguments: str) -> str:
    outcome = run(*arguments)
    assert (outcome.status, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    return outcome.err


@pytest.mark.parametrize(
    ("words", "name", "instead"),
    [
        (["-ngl", "99"], "-ngl (layers on the GPU)", "all layers are on the devices of --device"),
        (["-ngl99"], "-ngl (layers on the GPU)", "leave it out"),
        (["--n-gpu-layers=33"], "--n-gpu-layers (layers on the GPU)", "leave it out"),
        (["-fa"], "-fa (flash attention)", "leave it out"),
        (["-fa", "on"], "-fa (flash attention)", "leave it out"),
        (["-sm", "row"], "-sm (how a model is divided)", "--tensor-split"),
        (["-mg", "0"], "-mg (the main GPU)", "no device is the main one"),
        (["-cb"], "-cb (batches)", "decoded together"),
        (["-m", "model.gguf"], "-m (the model)", "first argument"),
        (["-hf", "owner/repo"], "-hf (a model on Hugging Face)", "hf:owner/repo/file.gguf"),
        (["-md", "draft.gguf"], "-md (a draft model)", "no speculative decoding"),
        (["--draft-max", "8"], "--draft-max (drafting)", "no speculative decoding"),
        (["--draft", "8"], "--draft (drafting)", "no speculative decoding"),
        (["-cnv"], "-cnv (a conversation)", "numba-meta chat"),
        (["-i"], "-i (a conversation)", "numba-meta chat"),
        (["-r", "User:"], "-r (a text that stops)", "--stop"),
        (["--mirostat", "2"], "--mirostat (other temperatures)", "--top-p"),
        (["--port", "8080"], "--port (a server)", "no server"),
        (["-e"], "-e (escapes in prompts)", "--file"),
        (["--no-mmap"], "--no-mmap (how weights are read)", "leave it out"),
    ],
)
def test_an_option_of_llama_cpp_is_named_with_what_there_is_here(run, models, words, name, instead):
    line = refused(run, "generate", "m", "p", *words)
    assert line.startswith(f"numba-meta: {name} is an option of llama.cpp that is not here: ") and instead in line
    assert models == []


def test_what_is_here_is_not_said_to_be_missing():
    assert LLAMA_OPTIONS.keys() & (names_of("generate") | names_of("chat") | {"-h", "--help", "--version"}) == set()
    assert all(name.startswith("-") and (name.startswith("--") or len(name) < 10) for name in LLAMA_OPTIONS)
    assert all(each.what and each.instead for each in LLAMA_OPTIONS.values())
    assert hint("--frobnicate") is None


@pytest.mark.parametrize("words", [["-m", "x.gguf", "-p", "text"], ["--model", "x.gguf"]])
def test_llama_cpp_options_without_a_command(run, words):
    assert "the model is the first argument, as in: generate" in refused(run, *words)


def test_an_option_in_front_of_its_command(run):
    assert "-n comes after a command, as in: numba-meta generate MODEL -n" in refused(run, "-n", "5", "generate", "m", "p")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["chat", "m", "--file", "x"], "--file is an option of generate, not of chat."),
        (["bench", "m", "--temp", "1"], "--temp is an option of generate and chat, not of bench."),
        (["info", "m", "-ngl", "1"], "-ngl (layers on the GPU)"),
        (["pull", "-foo"], "No such option: -foo. (see 'numba-meta pull --help')"),
    ],
)
def test_options_of_other_commands(run, arguments, line):
    assert line in refused(run, *arguments)


@pytest.mark.parametrize("prompt", ["- item", "-5 degrees", "-1", "-n is a letter", "--- a line", "-vv is loud", "-\nitem", "-☃"])
def test_a_prompt_that_begins_with_a_dash(run, models, prompt):
    assert "a prompt that does goes behind --" in refused(run, "generate", "m", prompt)
    assert models == []
    assert run("generate", "m", "-n", "2", "--", prompt).status == 0
    assert run("generate", "m", "-p", prompt).status == 0
    assert [model.calls[0][0] for model in models] == [prompt, prompt]


def test_a_word_that_could_be_both(run, models):
    assert "No such option: -hello (a prompt that begins with - goes behind --)." in refused(run, "generate", "m", "-hello")
    line = refused(run, "generate", "m", "p", "--top")
    assert "No such option: --top. " in line and "--top-k" in line and "goes behind" not in line


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("-np4", "-np4: an option and its value have a space between them: -np 4"),
        ("-ub64", "-ub64: an option and its value have a space between them: -ub 64"),
        ("-n=5", "-n=5: a short option and its value have a space between them: -n 5"),
        ("-nx", "No such option: -nx"),
        ("-vx", "No such option: -vx"),
    ],
)
def test_values_that_are_joined_wrongly(run, models, word, line):
    assert line in refused(run, "generate", "m", "p", word)


def test_values_that_are_joined_rightly(run, models):
    assert run("generate", "m", "p", "-n5", "-c64", "-t2", "-vv", "-ts=1", "--top-k=3").status == 0
    assert models[0].load_arguments["ctx_size"] == 64 and models[0].load_arguments["tensor_split"] == "1"
    assert models[0].calls[0][1]["max_tokens"] == 5 and models[0].calls[0][1]["top_k"] == 3
    assert run("generate", "m", "p", "-vn", "5").status == 0
    assert run("generate", "m", "p", "--stop", "-fa", "--stop=-ngl").status == 0  # values, whatever they look like
    assert models[2].calls[0][1]["stop"] == ("-fa", "-ngl")
