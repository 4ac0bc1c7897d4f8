"""Bad files and bad options, through `nm.load`: one line of a NumbaMetaError, never a crash, a hang or a traceback from the depths."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from models import mutations
from models.rewriting import REMOVED, rewrite
from synthetic import write_model

import numba_meta as nm
from numba_meta.errors import DeviceError, ModelFileError, NumbaMetaError, UsageError

COUNT = 240  # of each architecture; a fourth of each kind
VALUE = gguf.GGUFValueType


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "llama.gguf")


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "gemma3.gguf", "gemma3", n_head_kv=1)


@pytest.mark.parametrize("which", ("llama", "gemma3"))
def test_every_mutation_generates_or_ends_in_one_line(which: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    source = request.getfixturevalue(which)
    command = [sys.executable, mutations.__file__, str(source), str(tmp_path), "20", str(COUNT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"after {outcomes[-1:]}: {done.stderr[-2000:]}"
    assert len(outcomes) >= 200
    wrong = [(label, text) for label, text in outcomes if text.startswith("failed") or "\n" in text]
    assert not wrong, f"{len(wrong)} mutations, first: {wrong[0][0]}\n{wrong[0][1]}"
    kinds = {text.split(":")[0] for _, text in outcomes}
    assert kinds == {"generated", "error"}, "some damage is harmless, most is not"
    assert sum(text.startswith("error") for _, text in outcomes) > COUNT // 2


def fails(path: Path, pattern: str, error: type[NumbaMetaError] = ModelFileError, **options: Any) -> None:
    """Loading or the first tokens end in one line that matches."""
    with pytest.raises(error, match=pattern) as caught, nm.load(path, **options) as model:
        model.generate_ids([1, 2, 3], 2, ignore_eos=True)
    assert len(str(caught.value).splitlines()) == 1


CASES: list[tuple[str, str, Any, str]] = [
    ("llama", "general.architecture", ("mamba9", VALUE.STRING), "architecture 'mamba9' is not supported; supported are cohere2, .* qwen3"),
    ("llama", "llama.attention.head_count", (0, VALUE.UINT32), "attention.head_count is 0, expected a positive number"),
    ("llama", "llama.attention.head_count", (7, VALUE.UINT32), "7 query heads over 2 KV heads; expected a multiple"),
    ("llama", "llama.attention.head_count_kv", (3, VALUE.UINT32), "4 query heads over 3 KV heads; expected a multiple"),
    ("llama", "llama.block_count", (1 << 30, VALUE.UINT32), "block_count is 1073741824, but the file has 20 tensors"),
    ("llama", "llama.block_count", (3, VALUE.UINT32), "blk.2.* is missing"),
    ("llama", "llama.block_count", (-2, VALUE.INT32), "block_count is -2, expected a positive number"),
    ("llama", "llama.embedding_length", (128, VALUE.UINT32), "token_embd.weight has the shape"),
    ("llama", "llama.context_length", (0, VALUE.UINT32), "context_length is 0, expected a positive number"),
    ("llama", "llama.attention.layer_norm_rms_epsilon", (float("nan"), VALUE.FLOAT32), "epsilon is nan, expected a finite number"),
    ("llama", "llama.attention.layer_norm_rms_epsilon", (-1e-5, VALUE.FLOAT32), "epsilon is -.*expected a small positive number"),
    ("llama", "llama.rope.freq_base", (float("inf"), VALUE.FLOAT32), "freq_base is inf, expected a finite number"),
    ("llama", "llama.rope.dimension_count", (63, VALUE.UINT32), "rope over 63 dims"),
    ("llama", "llama.rope.scaling.type", ("odd", VALUE.STRING), "rope scaling 'odd' is not supported"),
    ("gemma3", "gemma3.attention.sliding_window", (-1, VALUE.INT32), "sliding_window is -1, expected a number from 0 up"),
    ("gemma3", "gemma3.rope.freq_base_swa", (-1.0, VALUE.FLOAT32), "base -1.0"),
    ("gemma3", "gemma3.context_length", REMOVED, "gemma3.context_length"),
]


@pytest.mark.parametrize(("which", "key", "value", "pattern"), CASES)
def test_metadata_that_cannot_be(which: str, key: str, value: Any, pattern: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    fails(rewrite(request.getfixturevalue(which), tmp_path / "wrong.gguf", {key: value}), pattern)


def test_tensors_that_cannot_be(llama: Path, tmp_path: Path) -> None:
    def changed(name: str, value: Any) -> Path:
        return rewrite(llama, tmp_path / "wrong.gguf", tensors={name: value})

    fails(changed("blk.1.ffn_up.weight", REMOVED), "blk.1.ffn_up.weight .* is missing; a llama model needs it")
    fails(changed("token_embd.weight", REMOVED), "token_embd.weight .* is missing")
    fails(changed("blk.0.attn_q.weight", np.zeros((256, 512), np.float32)), "blk.0.attn_q.weight has the shape")
    fails(changed("output_norm.weight", np.zeros(255, np.float32)), "output_norm.weight has the shape .*255")
    wide = np.zeros((256, 256), np.float64)
    fails(changed("blk.0.attn_q.weight", wide), "blk.0.attn_q.weight has type 28 .f64., which numba_meta cannot read")
    nan = np.full((512, 256), np.nan, np.float32)
    fails(changed("blk.0.ffn_up.weight", nan), "no token can be chosen.*check the model file", NumbaMetaError)
    fails(changed("blk.0.unheard_of.weight", np.zeros((4, 4), np.float32)), "unheard_of", NumbaMetaError)


def test_a_huge_context_is_a_memory_error_or_costs_nothing(llama: Path, tmp_path: Path) -> None:
    path = rewrite(llama, tmp_path / "huge.gguf", {"llama.context_length": ((1 << 31) - 1, VALUE.UINT32)})
    fails(path, r"cpu:0: .* needs \d+ bytes", NumbaMetaError, devices="cpu:0?mem=4G")
    with nm.load(path, ctx_size=64) as model:
        assert len(model.generate_ids([1, 2, 3], 2, ignore_eos=True)) == 2


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"devices": "tpu:0"}, "unknown device 'tpu:0'"),
    ({"devices": ""}, "unknown device ''"),
    ({"devices": "cpu:0,,cpu:0"}, "unknown device ''"),
    ({"devices": []}, "device"),
    ({"devices": "cpu:0?mem=lots"}, "mem=lots"),
    ({"devices": "cpu:0?speed=2"}, "unknown option 'speed'"),
    ({"devices": "cpu:0,cpu:0", "tensor_split": "-1,2"}, "'-1' is negative"),
    ({"devices": "cpu:0,cpu:0", "tensor_split": "0,0"}, "every entry is 0"),
    ({"devices": "cpu:0,cpu:0", "tensor_split": "1,2,3"}, "3 entries for 2 devices"),
    ({"devices": "cpu:0,cpu:0", "tensor_split": "1"}, "1 entries for 2 devices"),
    ({"devices": "cpu:0,cpu:0", "tensor_split": "half,half"}, "'half' is not a number"),
    ({"devices": "cpu:0,cpu:0", "tensor_split": [float("nan"), 1]}, "not a number"),
    ({"devices": "cpu:0,cpu:0", "tensor_split": [1, float("inf")]}, "not a number"),
    ({"ctx_size": 0}, "ctx_size 0"),
    ({"ctx_size": -5}, "ctx_size -5"),
    ({"ctx_size": 3, "parallel": 4, "kv_unified": False}, r"3 tokens that kv_unified=False \(-no-kvu\) divides over 4 sequences leaves"),
    ({"ubatch_size": 0}, "ubatch_size 0"),
    ({"parallel": 0}, "parallel 0"),
    ({"threads": 0}, "threads 0"),
    ({"threads": 1 << 20}, "threads 1048576"),
    ({"cache_type_k": "q9_9"}, "cache_type_k q9_9 is unknown; use one of f32, f16, bf16, q8_0, q4_0"),
    ({"cache_type_v": "f64"}, "cache_type_v f64 is unknown"),
]


@pytest.mark.parametrize(("options", "pattern"), OPTIONS)
def test_options_that_cannot_be(options: dict[str, Any], pattern: str, llama: Path) -> None:
    fails(llama, pattern, UsageError, **options)


def test_a_gpu_that_is_not_there(llama: Path) -> None:
    """On a machine without a driver, and on one whose GPUs are numbered lower."""
    fails(llama, "CUDA devices need .*use cpu:N|there is no GPU cuda:99", DeviceError, devices="cuda:99")


def test_a_cache_type_whose_blocks_do_not_fit_the_heads(tmp_path: Path) -> None:
    path = write_model(tmp_path / "narrow.gguf", head_dim=16, types="f32")
    fails(path, "cache_type_k q8_0 does not fit heads of 16 elements", UsageError, cache_type_k="q8_0")


def test_paths_that_are_no_models(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("not a model\n" * 100)
    (tmp_path / "empty.gguf").write_bytes(b"")
    for path in (tmp_path / "text.gguf", tmp_path / "empty.gguf", tmp_path, tmp_path / "nothing.gguf"):
        fails(path, path.name, NumbaMetaError)
