"""Architectures whose reference files have heads too narrow for a GPU's kernels: the same files with wider heads, GPU against CPU."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import numpy as np
import pytest
from models.rewriting import rewrite
from models.test_architectures import CTX_SIZE, FOLDER, GPU_SPLITS, NAMES, ON_GPU

import numba_meta as nm

VALUE = gguf.GGUFValueType
NARROW = [name for name in NAMES if name not in ON_GPU and name.endswith("-f32")]
WIDER = 2


def with_wider_heads(name: str, path: Path) -> Path:
    """A reference file with heads of 32 elements in place of 16, and other random weights where they are read or written."""
    source, rng = FOLDER / f"{name}.gguf", np.random.default_rng(9)
    reader = gguf.GGUFReader(source)
    architecture = reader.get_field("general.architecture").contents()
    tensors = {}
    for tensor in reader.tensors:
        shape = list(tensor.data.shape)  # [out, in]
        if re.search(r"attn_(q|k|v|qkv)\.", tensor.name):
            shape[0] *= WIDER
        elif "attn_output.weight" in tensor.name:
            shape[1] *= WIDER
        elif "rope_f" in tensor.name:
            tensors[tensor.name] = np.linspace(1, 4, WIDER * shape[0], dtype=np.float32)
            continue
        else:
            continue
        tensors[tensor.name] = (rng.standard_normal(shape) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.1)).astype(np.float32)
    keys = {f"{architecture}.attention.{part}_length": (32, VALUE.UINT32) for part in ("key", "value")}
    rotated = reader.get_field(f"{architecture}.rope.dimension_count")
    if rotated is not None:
        keys[f"{architecture}.rope.dimension_count"] = (WIDER * rotated.contents(), VALUE.UINT32)
    return rewrite(source, path, keys, tensors)


def test_there_are_such_files(tmp_path: Path) -> None:
    """What a GPU would be asked runs on the CPU, and says something."""
    assert {name.partition("-")[0] for name in NARROW} >= {"llama", "qwen2", "phi3", "granite", "cohere2"}
    with nm.load(with_wider_heads("phi3-f32", tmp_path / "wide.gguf"), exact=True, ctx_size=64, devices="cpu:0,cpu:0") as model:
        assert model.config.shape.head_dim_k == 32 and model.logits([5, 6, 7])[-1].std() > 0.5


@pytest.mark.gpu
@pytest.mark.parametrize("split", GPU_SPLITS)
@pytest.mark.parametrize("name", NARROW)
def test_logits_and_greedy_ids_are_those_of_the_cpu(name: str, split: str, tmp_path: Path) -> None:
    path, ids = with_wider_heads(name, tmp_path / "wide.gguf"), [int(i) for i in np.random.default_rng(3).integers(0, 256, 120)]
    with nm.load(path, exact=True, ctx_size=CTX_SIZE) as model:
        wanted, text = model.logits(ids), model.generate_ids(ids[:20], max_tokens=12, ignore_eos=True)
    with nm.load(path, exact=True, ctx_size=CTX_SIZE, **GPU_SPLITS[split]) as model:
        assert np.abs(model.logits(ids) - wanted).max() < 1e-4 * max(1.0, float(wanted.std()))
        assert model.generate_ids(ids[:20], max_tokens=12, ignore_eos=True) == text


@pytest.mark.gpu
@pytest.mark.parametrize("name", NARROW)
def test_fast_steps_say_nearly_the_same(name: str, tmp_path: Path) -> None:
    path, ids = with_wider_heads(name, tmp_path / "wide.gguf"), [int(i) for i in np.random.default_rng(4).integers(0, 256, 60)]
    with nm.load(path, exact=True, ctx_size=CTX_SIZE) as model:
        wanted = model.logits(ids)
    with nm.load(path, ctx_size=CTX_SIZE, devices="cuda:0") as model:
        assert np.abs(model.logits(ids) - wanted).max() < 0.05 * wanted.std() + 0.05
        assert np.abs(model.logits(ids[:5]) - wanted[:5]).max() < 0.05 * wanted.std() + 0.05
