"""`generate`: what it hands to the model, what it writes where."""

from __future__ import annotations

import io
import sys

import pytest


def test_text_to_standard_output_and_the_summary_to_standard_error(run, models):
    outcome = run("generate", "m", "The lamp", "-n", "2")
    assert outcome.status == 0
    assert outcome.out == " is lit\n"
    assert outcome.err == "prompt 8 tokens at 16.0 t/s; generation 2 tokens at 8.0 t/s; KV cache on the device; memory cpu:0 3.0 MiB\n"
    assert models[0].closed


def test_options_left_out_keep_the_defaults_of_python(run, models):
    run("generate", "m", "The lamp")
    arguments = dict(models[0].load_arguments)
    assert callable(arguments.pop("progress")) and arguments.pop("needs_text") is True and arguments.pop("needs_chat") is False
    assert arguments == {
        "name": "m", "devices": "cpu:0", "tensor_split": None, "cache_type_k": None, "cache_type_v": None, "ctx_size": None,
        "ubatch_size": 512, "parallel": 1, "kv_unified": True, "exact": False, "threads": None, "deterministic": False, "kv": "device",
    }  # fmt: skip
    assert models[0].calls == [("The lamp", {"max_tokens": 128, "temperature": 0.0, "stop": (), "ignore_eos": False})]


@pytest.mark.parametrize("short", [True, False])
def test_options_reach_the_model(run, models, short):
    values = {
        ("-dev", "--device"): "cpu:0,cpu:0", ("-ts", "--tensor-split"): "55,45.5", ("-ctk", "--cache-type-k"): "q8_0",
        ("-ctv", "--cache-type-v"): "q4_0", ("-c", "--ctx-size"): "256", ("-ub", "--ubatch-size"): "64", ("-np", "--parallel"): "3",
        ("-t", "--threads"): "2", ("-n", "--predict"): "5", ("-s", "--seed"): "7",
    }  # fmt: skip
    options = [part for names, value in values.items() for part in (names[0 if short else 1], value)]
    sampling = "--temp 0.5 --top-k 40 --top-p 0.9 --min-p 0.1 --repeat-penalty 1.1 --stop x --stop y".split()
    assert run("generate", "m", "p", *options, *sampling, "--ignore-eos", "--exact", "--no-kv-unified").status == 0
    arguments = models[0].load_arguments
    assert (arguments["devices"], arguments["tensor_split"], arguments["cache_type_k"], arguments["cache_type_v"]) == (
        "cpu:0,cpu:0", "55,45.5", "q8_0", "q4_0",
    )  # fmt: skip
    assert (arguments["ctx_size"], arguments["ubatch_size"], arguments["parallel"], arguments["threads"]) == (256, 64, 3, 2)
    assert arguments["exact"] is True and arguments["kv_unified"] is False
    assert models[0].calls[0][1] == {
        "max_tokens": 5, "temperature": 0.5, "top_k": 40, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1, "seed": 7,
        "stop": ("x", "y"), "ignore_eos": True,
    }  # fmt: skip


def test_the_batch_size_limits_the_ubatch_size(run, models):
    run("generate", "m", "p", "-b", "100")
    run("generate", "m", "p", "-b", "100", "-ub", "64")
    assert [model.load_arguments["ubatch_size"] for model in models] == [100, 64]


def test_a_context_of_0_is_that_of_the_model(run, models):
    run("generate", "m", "p", "--ctx-size", "0")
    assert models[0].load_arguments["ctx_size"] is None


@pytest.mark.parametrize(("content", "prompt"), [("A lamp.\n", "A lamp."), ("A lamp.\n\n", "A lamp.\n"), ("é ☃", "é ☃"), ("", "")])
def test_prompt_from_a_file_or_standard_input(run, models, tmp_path, monkeypatch, content, prompt):
    path = tmp_path / "prompt.txt"
    path.write_bytes(content.encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content.encode())))
    assert run("generate", "m", "--file", str(path)).status == 0
    assert run("generate", "m", "-f", "-").status == 0
    assert [model.calls[0][0] for model in models] == [prompt, prompt]


def test_a_prompt_that_is_no_text_is_refused(run, models, tmp_path):
    path = tmp_path / "prompt.bin"
    path.write_bytes(b"lamp\xff")
    from_file, from_argument = run("generate", "m", "-f", str(path)), run("generate", "m", "lamp\udcff")
    assert from_file.status == from_argument.status == 2
    assert "byte 0xff at 4" in from_file.err and "UTF-8" in from_argument.err
    assert models == []


def test_several_prompts_are_sequences_of_one_batch(run, models):
    outcome = run("generate", "m", "one", "two", "-n", "3")
    assert outcome.out == "one!\n---\ntwo!\n"
    assert models[0].load_arguments["parallel"] == 2
    assert models[0].calls[0][0] == ["one", "two"]


def test_chat_puts_the_prompt_into_the_template(run, models):
    run("generate", "m", "--chat", "Why?")
    assert models[0].detokenize(models[0].calls[0][0]) == "user:Why?;"


def test_chat_without_a_template_says_so(run, next_model):
    model = next_model("x")
    model.chat_template = None
    outcome = run("generate", "m", "--chat", "Why?")
    assert outcome.status == 2
    assert "no chat template" in outcome.err
    assert model.closed


def test_decisions_are_printed_on_request(run, models):
    plain, verbose = run("generate", "m", "p"), run("generate", "m", "p", "-v")
    assert verbose.out == plain.out
    assert verbose.err == "device  part\ncpu:0   100%\n" + plain.err
