"""What a model's metadata says, and what real files leave out."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from models.rewriting import REMOVED, rewrite
from synthetic import write_model

from numba_meta.errors import ModelFileError
from numba_meta.models.config import ModelConfig, RopeConfig, read_config
from numba_meta.models.gguf import read_gguf

VALUE = gguf.GGUFValueType


def config_of(path: Path) -> ModelConfig:
    file = read_gguf(path)
    try:
        return read_config(file)
    finally:
        file.close()


def test_smollm2(smollm2_path: Path) -> None:
    """No key length: a head is as wide as width / heads."""
    config = config_of(smollm2_path)
    shape = config.shape
    assert (config.architecture, shape.n_layer, shape.n_embd, shape.n_ff, shape.n_vocab) == ("llama", 30, 576, 1536, 49152)
    assert (shape.n_head, shape.n_head_kv, shape.head_dim_k, shape.head_dim_v) == (9, 3, 64, 64)
    assert config.rope == config.rope_local == RopeConfig(64, 100_000.0, 1.0)
    assert config.window == 0 and config.embedding_scale == 1.0
    assert config.attention_scale == 0.125


def test_gemma3(gemma3_path: Path) -> None:
    """The file lacks the pattern, the local base and the rope dimension count: 5 local layers to a global one, 10,000, the head's width."""
    config = config_of(gemma3_path)
    shape = config.shape
    assert (config.architecture, shape.n_layer, shape.n_embd, shape.n_vocab) == ("gemma3", 18, 640, 262144)
    assert (shape.n_head, shape.n_head_kv, shape.head_dim_k, shape.head_dim_v) == (4, 1, 256, 256)
    assert config.rope == RopeConfig(256, 1_000_000.0) and config.rope_local == RopeConfig(256, 10_000.0)
    assert [i for i, window in enumerate(config.windows) if window == 0] == [5, 11, 17]
    assert {window for window in config.windows if window} == {512} == {config.window}
    assert config.embedding_scale == pytest.approx(640**0.5)


def test_what_is_left_out_has_the_usual_value(tmp_path: Path) -> None:
    source = write_model(tmp_path / "llama.gguf", n_head=4, n_head_kv=4)
    keys = ("rope.dimension_count", "rope.freq_base", "attention.head_count_kv")
    config = config_of(rewrite(source, tmp_path / "bare.gguf", {f"llama.{key}": REMOVED for key in keys}))
    assert config.rope == RopeConfig(64, 10_000.0) and config.shape.n_head_kv == 4


def test_a_pattern_of_the_file_is_followed(tmp_path: Path) -> None:
    source = write_model(tmp_path / "gemma3.gguf", "gemma3", n_layer=5, sliding_window=9)
    pattern = {"gemma3.attention.sliding_window_pattern": (2, VALUE.UINT32), "gemma3.rope.freq_base_swa": (500.0, VALUE.FLOAT32)}
    config = config_of(rewrite(source, tmp_path / "other.gguf", pattern))
    assert config.windows == (9, 0, 9, 0, 9) and config.rope_local.base == 500.0


def test_linear_rope_scaling_divides_positions(tmp_path: Path) -> None:
    source = write_model(tmp_path / "llama.gguf")
    scaled = {"llama.rope.scaling.type": ("linear", VALUE.STRING), "llama.rope.scaling.factor": (4.0, VALUE.FLOAT32)}
    assert config_of(rewrite(source, tmp_path / "scaled.gguf", scaled)).rope.scale == 0.25
    scaled["llama.rope.scaling.factor"] = (0.0, VALUE.FLOAT32)
    with pytest.raises(ModelFileError, match="scale inf"):
        config_of(rewrite(source, tmp_path / "wrong.gguf", scaled))


def test_inverse_frequencies_are_those_of_the_paper() -> None:
    np.testing.assert_allclose(RopeConfig(8, 10_000.0).inverse_frequencies(), [1, 0.1, 0.01, 0.001])
    np.testing.assert_allclose(RopeConfig(4, 100.0).inverse_frequencies((2.0, 5.0)), [0.5, 0.02])
    with pytest.raises(ModelFileError, match="holds 3 factors, expected 2"):
        RopeConfig(4, 100.0).inverse_frequencies((1.0, 1.0, 1.0))
