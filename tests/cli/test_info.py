"""`info`: a file's header for people and as JSON, whatever its texts hold."""

from __future__ import annotations

import json

import pytest
from synthetic import write_model

from numba_meta.cli.info import value_text


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("info") / "tiny.gguf"
    write_model(path, "llama", types="q8_0")
    return path


def test_overview(run, model_path):
    outcome = run("info", str(model_path))
    assert outcome.status == 0 and outcome.err == ""
    facts = {line[:20].rstrip(): line[20:] for line in outcome.out.splitlines()[1:]}
    assert facts["architecture"] == "llama" and facts["layers"] == "2" and facts["width"] == "256"
    assert " q8_0 (" in facts["tensors"] and " f32 (" in facts["tensors"]


def test_json_holds_all_of_the_header(run, model_path):
    data = json.loads(run("info", str(model_path), "--json").out)
    assert data["files"] == [str(model_path)]
    assert data["metadata"]["general.architecture"] == "llama"
    by_name = {tensor["name"]: tensor for tensor in data["tensors"]}
    assert by_name["blk.0.attn_q.weight"]["type"] == "q8_0"
    assert by_name["blk.0.attn_q.weight"]["n_bytes"] == by_name["blk.0.attn_q.weight"]["shape"][1] * 256 // 32 * 34


def test_lists_on_request(run, model_path):
    plain, listed = run("info", str(model_path)).out, run("info", str(model_path), "--tensors", "--metadata").out
    assert listed.startswith(plain)
    assert any(line.split()[:2] == ["blk.1.ffn_down.weight", "q8_0"] for line in listed.splitlines())
    assert "llama.block_count = 2" in listed.splitlines()


def test_a_file_that_is_no_model(run, tmp_path):
    path = tmp_path / "no.gguf"
    path.write_bytes(b"no model at all")
    outcome = run("info", str(path))
    assert (outcome.status, outcome.out, outcome.err.count("\n")) == (1, "", 1)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        ("plain", "plain"),
        ("two\nlines\x1b[2J", "two\\nlines\\x1b[2J"),
        (["a", "b\n"], "[a, b\\n]"),
        (list(range(1000)), "[0, 1, 2, 3, … 1,000 in all]"),
        ("x" * 200, "x" * 79 + "…"),
    ],
)
def test_values_stay_on_one_line(value, text):
    assert value_text(value) == text
