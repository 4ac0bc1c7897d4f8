"""What a model's metadata says, and what real files leave out."""

from __future__ import annotations

import math
from pathlib import Path

import gguf
import numpy as np
import pytest
from models.rewriting import REMOVED, rewrite
from synthetic import write_model

import numba_meta as nm
from numba_meta.errors import ModelFileError
from numba_meta.models.architectures.config import LayerSpec, ModelConfig, RopeConfig, YarnConfig
from numba_meta.models.architectures.description import describe_model
from numba_meta.models.files.gguf import read_gguf

VALUE = gguf.GGUFValueType


def config_of(path: Path) -> ModelConfig:
    file = read_gguf(path)
    try:
        return describe_model(file).config
    finally:
        file.close()


def test_smollm2(smollm2_path: Path) -> None:
    """No key length: a head is as wide as width / heads."""
    config = config_of(smollm2_path)
    shape = config.shape
    assert (config.architecture, shape.n_layer, shape.n_embd, shape.n_ff, shape.n_vocab) == ("llama", 30, 576, 1536, 49152)
    assert (shape.n_head, shape.n_head_kv, shape.head_dim_k, shape.head_dim_v) == (9, 3, 64, 64)
    assert set(config.layers) == {LayerSpec(9, 3, 1536, RopeConfig(64, 100_000.0, interleaved=True), scale=0.125, window=0)}
    assert len(config.layers) == 30


def test_gemma3(gemma3_path: Path) -> None:
    """The file lacks the pattern, the local base and the rope dimension count: 5 local layers to a global one, 10,000, the head's width."""
    config = config_of(gemma3_path)
    shape = config.shape
    assert (config.architecture, shape.n_layer, shape.n_embd, shape.n_vocab) == ("gemma3", 18, 640, 262144)
    assert (shape.n_head, shape.n_head_kv, shape.head_dim_k, shape.head_dim_v) == (4, 1, 256, 256)
    assert {layer.rope for layer in config.layers if not layer.window} == {RopeConfig(256, 1_000_000.0)}
    assert {layer.rope for layer in config.layers if layer.window} == {RopeConfig(256, 10_000.0)}
    assert [i for i, window in enumerate(config.windows) if window == 0] == [5, 11, 17]
    assert {window for window in config.windows if window} == {512} == {config.window}


def llama_with(tmp_path: Path, keys: dict[str, object], **sizes: object) -> ModelConfig:
    source = write_model(tmp_path / "plain.gguf", **sizes)  # type: ignore[arg-type]
    return config_of(rewrite(source, tmp_path / "other.gguf", {f"llama.{key}": value for key, value in keys.items()}))


def gemma_with(tmp_path: Path, keys: dict[str, object], **sizes: object) -> ModelConfig:
    source = write_model(tmp_path / "plain.gguf", "gemma3", **sizes)  # type: ignore[arg-type]
    return config_of(rewrite(source, tmp_path / "other.gguf", {f"gemma3.{key}": value for key, value in keys.items()}))


def number(value: float) -> tuple[float, gguf.GGUFValueType]:
    return value, VALUE.FLOAT32


def whole(value: int) -> tuple[int, gguf.GGUFValueType]:
    return value, VALUE.UINT32


def array(values: list[object], kind: gguf.GGUFValueType) -> tuple[object, ...]:
    return values, VALUE.ARRAY, kind


def test_what_is_left_out_has_the_usual_value(tmp_path: Path) -> None:
    keys = ("rope.dimension_count", "rope.freq_base", "attention.head_count_kv")
    config = llama_with(tmp_path, dict.fromkeys(keys, REMOVED), n_head=4, n_head_kv=4)
    assert config.layers[0].rope == RopeConfig(64, 10_000.0, interleaved=True) and config.shape.n_head_kv == 4
    config = gemma_with(tmp_path, {"rope.freq_base": REMOVED}, n_layer=6)
    assert config.layers[5].rope.base == 10_000.0


# ---- rope scaling: what its absence means ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "scale"),
    [
        ({"rope.scaling.type": ("linear", VALUE.STRING), "rope.scaling.factor": number(4.0)}, 0.25),
        ({"rope.scaling.factor": number(4.0)}, 0.25),
        ({"rope.scale_linear": number(4.0)}, 0.25),
        ({"rope.scale_linear": number(4.0), "rope.scaling.factor": number(2.0)}, 0.5),
        ({"rope.scale_linear": number(4.0), "rope.scaling.factor": number(0.0)}, 1.0),
        ({"rope.scaling.type": ("none", VALUE.STRING), "rope.scaling.factor": number(4.0)}, 1.0),
        ({"rope.scaling.type": ("linear", VALUE.STRING)}, 1.0),
        ({"rope.scaling.factor": number(0.0)}, 1.0),
        ({"rope.scaling.factor": whole(8)}, 0.125),
    ],
)
def test_rope_scaling_is_linear_unless_told_otherwise(keys: dict[str, object], scale: float, tmp_path: Path) -> None:
    assert {layer.rope.scale for layer in llama_with(tmp_path, keys).layers} == {scale}
    layers = gemma_with(tmp_path, keys, n_layer=6).layers
    assert [layer.rope.scale for layer in layers] == [1.0] * 5 + [scale], "local layers are not scaled"


def test_yarn_and_magnitudes(tmp_path: Path) -> None:
    keys = {"rope.scaling.type": ("yarn", VALUE.STRING), "rope.scaling.factor": number(4.0)}
    rope = llama_with(tmp_path, keys, context_length=512).layers[0].rope
    assert (rope.scale, rope.yarn) == (0.25, YarnConfig(512)) and rope.magnitude == pytest.approx(1 + 0.1 * np.log(4))
    rope = llama_with(tmp_path, {**keys, "rope.scaling.original_context_length": whole(64), "rope.scaling.attn_factor": number(2.0)})
    assert rope.layers[0].rope.yarn == YarnConfig(64) and rope.layers[0].rope.magnitude == pytest.approx(2 + 0.2 * np.log(4))
    assert llama_with(tmp_path, {"rope.scaling.attn_factor": number(1.5)}).layers[0].rope.magnitude == 1.5


def test_impossible_rope_scaling_is_refused(tmp_path: Path) -> None:
    for keys, words in (
        ({"rope.scaling.type": ("longrope", VALUE.STRING)}, "rope scaling 'longrope' is not supported"),
        ({"rope.scaling.factor": number(-2.0)}, "rope.scaling.factor is -2.0, expected a positive number, or 0"),
        ({"rope.scaling.factor": number(float("nan"))}, "rope.scaling.factor is nan"),
        ({"rope.freq_base": number(1.0), "rope.scaling.type": ("yarn", VALUE.STRING), "rope.scaling.factor": number(2.0)}, "base 1.0"),
    ):
        with pytest.raises(ModelFileError, match=words):
            llama_with(tmp_path, keys)


def test_inverse_frequencies_are_those_of_the_papers() -> None:
    np.testing.assert_allclose(RopeConfig(8, 10_000.0).inverse_frequencies, [1, 0.1, 0.01, 0.001])
    np.testing.assert_allclose(RopeConfig(4, 100.0, factors=(2.0, 5.0)).inverse_frequencies, [0.5, 0.02])
    np.testing.assert_allclose(RopeConfig(4, 100.0, scale=0.5).inverse_frequencies, [0.5, 0.05])
    # YaRN of 8 dims, base 10,000, 1,000 tokens: pairs 0 to 0.69 turn 32 times or more, those from 2.20 on less than once.
    kept = [1, 2 / 3, 1 / 3, 0]  # a ramp from 0 to 3
    expected = [f * (0.25 * (1 - part) + part) for f, part in zip([1, 0.1, 0.01, 0.001], kept, strict=True)]
    np.testing.assert_allclose(RopeConfig(8, 10_000.0, scale=0.25, yarn=YarnConfig(1000)).inverse_frequencies, expected)
    with pytest.raises(ModelFileError, match="3 rope factors, expected 2"):
        RopeConfig(4, 100.0, factors=(1.0, 1.0, 1.0))


# ---- values per layer ------------------------------------------------------------------------------------------------------------------


def test_a_pattern_of_the_file_is_followed(tmp_path: Path) -> None:
    def windows(pattern: object, **more: object) -> tuple[int, ...]:
        keys = {"attention.sliding_window_pattern": pattern, **more}
        return gemma_with(tmp_path, keys, n_layer=5, sliding_window=9).windows

    assert windows(whole(2), **{"rope.freq_base_swa": number(500.0)}) == (9, 0, 9, 0, 9)
    assert windows(whole(1)) == (0,) * 5 and windows(whole(0)) == (9,) * 5
    assert windows(array([True, False, False, True, True], VALUE.BOOL)) == (9, 0, 0, 9, 9)
    assert windows(array([0, 1, 0, 1, 0], VALUE.UINT32)) == (0, 9, 0, 9, 0)
    assert windows(whole(2), **{"attention.sliding_window": REMOVED}) == (0,) * 5, "no window: all layers see everything"
    with pytest.raises(ModelFileError, match=r"sliding_window_pattern has 4 entries for 5 blocks"):
        windows(array([True] * 4, VALUE.BOOL))


def test_equal_entries_are_the_scalar_and_others_count_per_layer(tmp_path: Path) -> None:
    keys = {
        "attention.head_count": array([4, 4], VALUE.UINT32),
        "attention.head_count_kv": array([2, 2], VALUE.INT32),
        "feed_forward_length": array([512, 512], VALUE.UINT32),
    }
    assert llama_with(tmp_path, keys) == llama_with(tmp_path, {})
    for key, values, words in (
        ("attention.head_count", [4, 0], r"llama.attention.head_count\[1\] is 0, expected a positive number"),
        ("attention.head_count_kv", [2, 3], "layer 1 has 4 query heads over 3 KV heads"),
        ("feed_forward_length", [512, 512, 512], "feed_forward_length has 3 entries for 2 blocks"),
    ):
        with pytest.raises(ModelFileError, match=words):
            llama_with(tmp_path, {key: array(values, VALUE.UINT32)})
    with pytest.raises(ModelFileError, match="head_count holds 4.5"):
        llama_with(tmp_path, {"attention.head_count": array([4.5, 4.0], VALUE.FLOAT32)})


def test_the_largest_gemma3_scales_scores_by_its_width(tmp_path: Path) -> None:
    """62 layers: 1 / sqrt(width / heads); all others 1 / sqrt(width of a head)."""
    sizes = {"n_embd": 96, "n_head": 4, "n_head_kv": 2, "head_dim": 32, "n_ff": 32, "types": "f32"}
    assert {layer.scale for layer in gemma_with(tmp_path, {}, n_layer=62, **sizes).layers} == {1 / math.sqrt(24)}
    assert {layer.scale for layer in gemma_with(tmp_path, {}, n_layer=6, **sizes).layers} == {1 / math.sqrt(32)}


def test_layers_of_next_token_prediction_are_no_layers(tmp_path: Path) -> None:
    source = write_model(tmp_path / "plain.gguf", n_layer=3)
    with_one = {"llama.nextn_predict_layers": whole(1)}
    own = {"blk.2.nextn.eh_proj.weight": np.ones((256, 512), np.float32), "blk.2.nextn.hnorm.weight": np.ones(256, np.float32)}
    config = config_of(rewrite(source, tmp_path / "predicts.gguf", with_one, own))
    assert config.shape.n_layer == len(config.layers) == 2
    with pytest.raises(ModelFileError, match=r"blk\.2\.attn_norm\.weight \(and 8 more\) has no place"):  # a layer like the others
        config_of(rewrite(source, tmp_path / "not.gguf", with_one))
    with pytest.raises(ModelFileError, match="3 layers of next-token prediction among 3 blocks"):
        llama_with(tmp_path, {"nextn_predict_layers": whole(3)}, n_layer=3)


# ---- models of another kind ------------------------------------------------------------------------------------------------------------


def test_what_the_graph_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="8 experts per layer is not supported"):
        llama_with(tmp_path, {"expert_count": whole(8)})
    with pytest.raises(ModelFileError, match="llama.attention.causal is false"):
        llama_with(tmp_path, {"attention.causal": (False, VALUE.BOOL)})


@pytest.mark.parametrize(
    "name",
    [
        "blk.0.attn_q_norm.weight", "blk.1.attn_k_norm.weight", "output.bias", "blk.0.attn_sinks.weight", "blk.0.attn_sinks",
        "blk.0.post_attention_norm.weight", "blk.0.post_ffw_norm.weight", "output_norm.bias", "blk.0.attn_norm.bias",
        "blk.0.ffn_gate_inp.weight", "blk.0.attn_qkv.weight", "rope_factors_long.weight", "rope_factors_short.weight", "odd", "blk.0.odd",
    ],
)  # fmt: skip
def test_a_tensor_that_nobody_reads_is_an_error_that_names_it(name: str, tmp_path: Path) -> None:
    path = rewrite(write_model(tmp_path / "plain.gguf"), tmp_path / "more.gguf", tensors={name: np.ones(64, np.float32)})
    with pytest.raises(ModelFileError, match=f"more.gguf: the tensor {name} has no place in a llama model here"):
        config_of(path)


def test_gemma3_reads_no_factors_of_llama(tmp_path: Path) -> None:
    path = write_model(tmp_path / "plain.gguf", "gemma3")
    with pytest.raises(ModelFileError, match="the tensor rope_freqs.weight has no place in a gemma3 model"):
        config_of(rewrite(path, tmp_path / "more.gguf", tensors={"rope_freqs.weight": np.ones(32, np.float32)}))


def test_more_layers_than_block_count(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"blk\.2\.attn_norm\.weight \(and 17 more\) belongs to no layer: llama.block_count is 2"):
        llama_with(tmp_path, {"block_count": whole(2)}, n_layer=4)


def test_tensors_that_change_no_text_are_left_alone(tmp_path: Path) -> None:
    names = ("blk.0.attn_rot_embd.weight", "rope.freqs", "v.blk.0.attn_q.weight", "mm.input_projection.weight")
    source = write_model(tmp_path / "plain.gguf")
    path = rewrite(source, tmp_path / "more.gguf", tensors={name: np.ones(32, np.float32) for name in names})
    assert config_of(path) == config_of(source)


# ---- several tensors in one ------------------------------------------------------------------------------------------------------------


def test_heads_in_one_tensor_are_those_of_three(tmp_path: Path) -> None:
    """Rows of every weight type, and biases; the same tensors for a graph, and the same bits of logits over two devices."""
    plain = write_model(tmp_path / "plain.gguf", types="q4_k", n_head=4, n_head_kv=2)
    reader = gguf.GGUFReader(plain)
    stored, rng, apart, fused = {t.name: t for t in reader.tensors}, np.random.default_rng(1), {}, {}
    for i in range(2):
        names = [f"blk.{i}.attn_{part}" for part in "qkv"]
        biases = [rng.standard_normal(stored[f"{name}.weight"].data.shape[0]).astype(np.float32) for name in names]
        apart |= {f"{name}.bias": bias for name, bias in zip(names, biases, strict=True)}
        fused |= {f"{name}.weight": REMOVED for name in names}
        rows = np.concatenate([stored[f"{name}.weight"].data for name in names])
        fused[f"blk.{i}.attn_qkv.weight"] = (rows, stored[f"{names[0]}.weight"].tensor_type)
        fused[f"blk.{i}.attn_qkv.bias"] = np.concatenate(biases)
    paths = rewrite(plain, tmp_path / "apart.gguf", tensors=apart), rewrite(plain, tmp_path / "fused.gguf", tensors=fused)
    logits = []
    for path in paths:
        with nm.load(path, devices="cpu:0,cpu:0", tensor_split="1,2", ctx_size=64) as model:
            logits.append(model.logits([5, 6, 7, 8]))
    np.testing.assert_array_equal(logits[0], logits[1])
    short = rewrite(plain, tmp_path / "short.gguf", tensors={**fused, "blk.1.attn_qkv.bias": np.ones(7, np.float32)})
    with pytest.raises(ModelFileError, match=r"short.gguf: .* blk.1.attn_qkv.bias has the shape \[7\]"):
        config_of(short)


def test_factors_of_rope_follow_from_the_room_of_a_sequence() -> None:
    rope = RopeConfig(4, 100.0, factors=(1.0, 2.0), long_factors=(4.0, 8.0), original_context=128)
    assert rope.for_context(128) == RopeConfig(4, 100.0, factors=(1.0, 2.0))
    assert rope.for_context(129) == RopeConfig(4, 100.0, factors=(4.0, 8.0))
