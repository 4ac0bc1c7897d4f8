"""Random small models of every weight type and odd sizes: exact mode against float64, split against whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from models.numpy_reference import ReferenceModel
from models.rewriting import rewrite
from synthetic import TYPE_NAMES, write_model

import numba_meta as nm

N_VOCAB = 397
MIXED = {"default": "q5_0", "attn_v": "q6_k", "ffn_down": "q4_1", "token_embd": "q8_0", "attn_output": "f16"}


def ids(seed: int, n: int = 40) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, N_VOCAB, n)]


def exact_logits(path: Path, tokens: list[int], **options: Any) -> np.ndarray:
    with nm.load(path, exact=True, **options) as model:
        return model.logits(tokens)


def agrees_with_reference(path: Path, seed: int) -> None:
    tokens = ids(seed)
    wanted = ReferenceModel.read(path).logits(tokens)
    assert wanted.std() > 1, "logits that say something"
    assert np.abs(exact_logits(path, tokens) - wanted).max() < 2e-4


@pytest.mark.parametrize("type_name", TYPE_NAMES)
def test_every_weight_type_agrees_with_float64(type_name: str, tmp_path: Path) -> None:
    tied = TYPE_NAMES.index(type_name) % 2 == 0
    agrees_with_reference(write_model(tmp_path / "tiny.gguf", types=type_name, tied=tied, seed=1), 1)


@pytest.mark.parametrize("tied", (True, False))
@pytest.mark.parametrize("types", ("f32", "q4_k", MIXED), ids=("f32", "q4_k", "mixed"))
def test_gemma3_agrees_with_float64(types: Any, tied: bool, tmp_path: Path) -> None:
    """Six layers: five of a window of 16, which the 40 tokens pass, and a global one."""
    agrees_with_reference(write_model(tmp_path / "tiny.gguf", "gemma3", n_layer=6, types=types, tied=tied, seed=2), 2)


@pytest.mark.parametrize(("head_dim", "n_head", "n_head_kv"), ((16, 6, 2), (32, 5, 1), (64, 3, 3), (80, 4, 2), (128, 2, 1), (256, 2, 1)))
@pytest.mark.parametrize("architecture", ("llama", "gemma3"))
def test_every_width_of_a_head_agrees_with_float64(architecture: str, head_dim: int, n_head: int, n_head_kv: int, tmp_path: Path) -> None:
    sizes = {"head_dim": head_dim, "n_head": n_head, "n_head_kv": n_head_kv, "n_embd": 96, "n_ff": 160}
    agrees_with_reference(write_model(tmp_path / "tiny.gguf", architecture, n_layer=2, types="f32", seed=3, **sizes), 3)


@pytest.mark.parametrize("architecture", ("llama", "gemma3"))
def test_biases_agree_with_float64_on_one_device_and_on_three(architecture: str, tmp_path: Path) -> None:
    plain = write_model(tmp_path / "plain.gguf", architecture, n_head=6, n_head_kv=3, head_dim=32)
    rng = np.random.default_rng(4)
    widths = {"attn_q": 192, "attn_k": 96, "attn_v": 96, "attn_output": 256, "ffn_gate": 512, "ffn_up": 512, "ffn_down": 256}
    biases = {f"blk.{i}.{part}.bias": rng.standard_normal(n).astype(np.float32) for i in range(2) for part, n in widths.items()}
    path = rewrite(plain, tmp_path / "biased.gguf", tensors=biases)
    agrees_with_reference(path, 4)
    assert np.abs(exact_logits(path, ids(4)) - exact_logits(plain, ids(4))).max() > 0.1, "the biases count"
    split = exact_logits(path, ids(4), devices="cpu:0,cpu:0,cpu:0", tensor_split="2,0.5,1")
    assert np.abs(split - ReferenceModel.read(path).logits(ids(4))).max() < 2e-4


def test_gemma3_of_62_layers_agrees_with_float64(tmp_path: Path) -> None:
    """The one size whose scores are scaled by the model's width, over two devices."""
    sizes = {"n_layer": 62, "n_embd": 96, "n_head": 4, "n_head_kv": 2, "head_dim": 32, "n_ff": 32, "types": "f32"}
    path = write_model(tmp_path / "tiny.gguf", "gemma3", seed=5, **sizes)
    wanted = ReferenceModel.read(path).logits(ids(5, 24))
    split = exact_logits(path, ids(5, 24), devices="cpu:0,cpu:0", tensor_split="1,2", ctx_size=64)
    assert wanted.std() > 1 and np.abs(split - wanted).max() < 2e-3


def test_layers_of_different_sizes_agree_with_float64(tmp_path: Path) -> None:
    """Heads, KV heads and the width of the feed-forward part by layer, on one device and on three, with the cache on either side."""
    heads, kv_heads, widths, n_embd, head_dim = (6, 4, 8), (3, 1, 8), (160, 64, 96), 96, 32
    plain = write_model(tmp_path / "plain.gguf", n_layer=3, n_embd=n_embd, n_head=6, n_head_kv=3, head_dim=head_dim, n_ff=64, types="f32")
    rng, tensors = np.random.default_rng(7), {}
    for i, (n_q, n_kv, n_ff) in enumerate(zip(heads, kv_heads, widths, strict=True)):
        shapes = {"attn_q": (n_q * head_dim, n_embd), "attn_k": (n_kv * head_dim, n_embd), "attn_v": (n_kv * head_dim, n_embd)}
        shapes |= dict.fromkeys(("ffn_gate", "ffn_up"), (n_ff, n_embd))
        shapes |= {"attn_output": (n_embd, n_q * head_dim), "ffn_down": (n_embd, n_ff)}
        for part, shape in shapes.items():
            tensors[f"blk.{i}.{part}.weight"] = (rng.standard_normal(shape) * shape[1] ** -0.5).astype(np.float32)
    keys = {"attention.head_count": heads, "attention.head_count_kv": kv_heads, "feed_forward_length": widths}
    uint32 = gguf.GGUFValueType.UINT32
    arrays = {f"llama.{key}": (list(values), gguf.GGUFValueType.ARRAY, uint32) for key, values in keys.items()}
    path = rewrite(plain, tmp_path / "varied.gguf", {**arrays, "llama.rope.dimension_count": (head_dim, uint32)}, tensors)
    agrees_with_reference(path, 7)
    wanted = ReferenceModel.read(path).logits(ids(7))
    for kv in ("device", "host"):
        split = exact_logits(path, ids(7), devices="cpu:0,cpu:0,cpu:0", tensor_split="2,0.5,1", kv=kv)
        assert np.abs(split - wanted).max() < 2e-4


def test_a_file_in_parts_loads_as_one(tmp_path: Path) -> None:
    whole = write_model(tmp_path / "whole.gguf")
    first = write_model(tmp_path / "parts.gguf", split_max_tensors=5)
    assert first.name.startswith("parts-00001-of-") and first != whole
    np.testing.assert_array_equal(exact_logits(first, ids(5)), exact_logits(whole, ids(5)))


SHAPES: dict[str, dict[str, Any]] = {
    "llama-untied": {"architecture": "llama", "n_head": 4, "n_head_kv": 2, "tied": False, "types": "q4_0"},
    "llama-odd": {"architecture": "llama", "n_head": 9, "n_head_kv": 3, "head_dim": 32, "n_embd": 288, "n_ff": 352, "types": "q8_0"},
    "llama-mixed": {"architecture": "llama", "n_head": 8, "n_head_kv": 8, "types": MIXED},
    "gemma3-one-kv-head": {"architecture": "gemma3", "n_layer": 6, "n_head": 4, "n_head_kv": 1, "types": "q4_k"},
    "gemma3-untied": {"architecture": "gemma3", "n_layer": 6, "n_head": 4, "n_head_kv": 2, "tied": False, "types": "q5_0"},
}
SPLITS = (
    *((n, None) for n in (2, 3, 4, 6)),
    *((2, text) for text in ("70,30", "1,0", "0,1")),
    *((text.count(",") + 1, text) for text in ("5,0,2", "1,2,3,4", "0,1,0,3,1,0")),
)


@pytest.mark.parametrize("shape", SHAPES)
def test_any_split_gives_the_logits_of_one_device(shape: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf", seed=6, **SHAPES[shape])
    tokens = ids(6)
    whole = exact_logits(path, tokens, ctx_size=64)
    for n, tensor_split in SPLITS:
        split = exact_logits(path, tokens, ctx_size=64, devices=["cpu:0"] * n, tensor_split=tensor_split)
        assert np.abs(split - whole).max() < 5e-4, f"{n} devices, {tensor_split}"


def test_one_device_is_not_compared_with_itself(tmp_path: Path) -> None:
    """A split does compute in another order: what the test above compares is not the same program."""
    path = write_model(tmp_path / "tiny.gguf", seed=6, **SHAPES["llama-mixed"])
    with nm.load(path, exact=True, devices="cpu:0,cpu:0") as model:
        held = [device.weight_bytes for device in model.plan.devices]
        assert max(held) < 0.8 * sum(held) and model.plan.collectives_per_step > 0
