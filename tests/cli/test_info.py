"""`info`: a file's header for people and as JSON, whatever its texts hold."""

from __future__ import annotations

import json
import struct

import gguf
import pytest
from models.rewriting import rewrite
from synthetic import write_model

import numba_meta as nm
from numba_meta.cli.info import value_text

VALUE = gguf.GGUFValueType


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


# ---- files that do not load ------------------------------------------------------------------------------------------------------------


def facts_of(outcome) -> dict[str, str]:
    return {line[:20].rstrip(): line[20:] for line in outcome.out.splitlines()[1:]}


def test_an_unknown_architecture_is_shown(run, model_path, tmp_path):
    path = rewrite(model_path, tmp_path / "other.gguf", {"general.architecture": ("mamba9", VALUE.STRING)})
    outcome = run("info", str(path))
    assert outcome.status == 0 and facts_of(outcome)["architecture"] == "mamba9"
    assert "'mamba9' is not supported; supported are cohere2, gemma2," in facts_of(outcome)["does not load"]
    assert "mamba9" in json.loads(run("info", str(path), "--json").out)["problems"][0]


def test_unknown_tensor_types_are_shown(run, model_path, tmp_path):
    data = model_path.read_bytes()
    for type_id, name in ((16, "iq2_xxs"), (99, "type 99")):
        path = tmp_path / f"{type_id}.gguf"
        path.write_bytes(with_tensor_type(data, b"blk.1.attn_q.weight", type_id))
        outcome = run("info", str(path), "--tensors")
        assert outcome.status == 1 and outcome.err == "" and facts_of(outcome)["layers"] == "2"
        assert f"1 {name} (" in facts_of(outcome)["tensors"]
        assert f"tensor blk.1.attn_q.weight has type {type_id}" in facts_of(outcome)["does not load"]
        assert any(line.startswith("blk.1.ffn_down.weight ") for line in outcome.out.splitlines())


def with_tensor_type(data: bytes, tensor: bytes, type_id: int) -> bytes:
    """The file with another type for a tensor of two axes."""
    at = data.index(struct.pack("<Q", len(tensor)) + tensor) + 8 + len(tensor) + 4 + 16
    return data[:at] + struct.pack("<I", type_id) + data[at + 4 :]


def test_texts_that_are_no_utf8_are_shown_escaped(run, model_path, tmp_path):
    """A name of the model decides nothing, so the file loads; what tokens mean would be guessed."""
    path = tmp_path / "name.gguf"
    path.write_bytes(model_path.read_bytes().replace(b"synthetic", b"synth\xfftic"))
    outcome = run("info", str(path))
    assert outcome.status == 0 and facts_of(outcome)["name"] == "synth\\xfftic" and "does not load" not in facts_of(outcome)
    with nm.load(path, ctx_size=16) as model:
        assert model.generate_ids([5], max_tokens=1, ignore_eos=True)
    tags = rewrite(
        model_path,
        tmp_path / "tags.gguf",
        {
            "general.tags": (["text", "caf_", "x"], VALUE.ARRAY, VALUE.STRING),
            "quantize.imatrix.file": ("/home/caf_/imatrix.dat", VALUE.STRING),
        },
    )
    tags.write_bytes(tags.read_bytes().replace(b"caf_", b"caf\xe9"))
    assert run("info", str(tags)).status == 0 and "does not load" not in run("info", str(tags)).out
    path.write_bytes(model_path.read_bytes().replace(b"<|im_start|>", b"<|im_st\xffrt|>"))
    outcome = run("info", str(path))
    assert outcome.status == 1 and "tokenizer.ggml.tokens[1] is not UTF-8" in outcome.out
    assert facts_of(outcome)["vocabulary"] == "397"


def test_a_tokenizer_that_cannot_be_built(run, model_path, tmp_path):
    path = rewrite(model_path, tmp_path / "odd.gguf", {"tokenizer.ggml.pre": ("odd9", VALUE.STRING)})
    outcome = run("info", str(path))
    assert outcome.status == 0 and facts_of(outcome)["vocabulary"] == "397"
    assert facts_of(outcome)["does not load"].startswith("odd.gguf: with prompts of text, which need a tokenizer (ids need none)")
    assert "'odd9'" in facts_of(outcome)["does not load"]


def test_a_cut_file_shows_what_is_left(run, model_path, tmp_path):
    data, path = model_path.read_bytes(), tmp_path / "cut.gguf"
    path.write_bytes(data[:-5000])
    outcome = run("info", str(path))
    assert outcome.status == 1 and facts_of(outcome)["architecture"] == "llama" and "the file has" in facts_of(outcome)["does not load"]
    path.write_bytes(data[:1000])  # within the metadata
    outcome = run("info", str(path))
    assert outcome.status == 1 and facts_of(outcome)["architecture"] == "llama" and facts_of(outcome)["tensors"].startswith("0")


def test_a_part_that_is_missing(run, tmp_path):
    first = write_model(tmp_path / "parts.gguf", split_max_tensors=5)
    (tmp_path / first.name.replace("00001-of", "00002-of")).unlink()
    outcome = run("info", str(first))
    assert outcome.status == 1 and "00002-of-00004.gguf: cannot be opened" in facts_of(outcome)["does not load"]
    assert facts_of(outcome)["layers"] == "2"


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
