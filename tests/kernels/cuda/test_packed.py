"""Packed weights hold exactly what the file's rows hold, for every type, wherever the rows lie: looked up bit for bit by the simulator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels.cpu.packed_weights import random_raw
from kernels.cuda.weights import make_weights, pack_weights

from numba_meta import dtypes
from numba_meta.dtypes import DType
from numba_meta.errors import ShapeError
from numba_meta.kernels.cuda import packed, packing
from numba_meta.kernels.cuda.packed import QUANT_LAYOUTS

SCRIPT = Path(__file__).with_name("simulated_get_rows.py")
WEIGHT_TYPES = dtypes.WEIGHT_TYPES


@pytest.fixture(scope="module")
def looked_up() -> dict[str, str]:
    """What the simulator found of each type; the simulator is a matter of a whole process."""
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}
    done = subprocess.run([sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("dtype", WEIGHT_TYPES, ids=repr)
def test_packed_rows_are_the_dequantized_ones_bit_for_bit(dtype: DType, looked_up: dict[str, str]) -> None:
    assert looked_up[dtype.name] == ""


@pytest.mark.parametrize("dtype", WEIGHT_TYPES, ids=repr)
def test_packs_a_column_slice_of_wider_read_only_rows(dtype: DType) -> None:
    raw = random_raw(dtype, 19, 1024, np.random.default_rng())
    raw.flags.writeable = False
    begin, end = dtype.row_bytes(256), dtype.row_bytes(768)
    piece = pack_weights(dtype, 19, 512, raw[:, begin:end])
    np.testing.assert_array_equal(piece.planes, pack_weights(dtype, 19, 512, raw[:, begin:end].copy()).planes)


@pytest.mark.parametrize("dtype", list(packing._SHORT), ids=repr)
def test_the_short_way_packs_the_same_bytes(dtype: DType) -> None:
    weights = make_weights(dtype, 7, 768, np.random.default_rng())
    out = np.zeros_like(weights.planes)
    packing._pack_fields(weights.raw, dtype, packing.plane_arrays(out, QUANT_LAYOUTS[dtype], 7, 768))
    np.testing.assert_array_equal(out, weights.planes)


@pytest.mark.parametrize("dtype", [dtypes.Q5_1, dtypes.Q8_0, dtypes.Q6_K], ids=repr)
def test_rows_are_packed_the_same_in_chunks(dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = make_weights(dtype, 13, 256, np.random.default_rng())
    monkeypatch.setattr(packing, "_CHUNK_ELEMENTS", 1024)
    np.testing.assert_array_equal(pack_weights(dtype, 13, 256, weights.raw).planes, weights.planes)


@given(st.sampled_from(list(QUANT_LAYOUTS)), st.integers(0, 10_000), st.integers(0, 40))
def test_planes_follow_each_other_aligned_and_near_the_file(dtype: DType, n_out: int, n_super_blocks: int) -> None:
    k = 256 * n_super_blocks
    layout, n_bytes = QUANT_LAYOUTS[dtype], packed.packed_bytes(dtype, n_out, k)
    places = packed.planes(layout, n_out, k)
    assert 0 <= places.high <= places.scales <= places.heads <= places.end == n_bytes
    assert all(place % 16 == 0 for place in (places.high, places.scales, places.heads, places.end))
    n_blocks = n_out * k // 32
    assert places.scales - places.high >= n_blocks * layout.high_bytes
    assert places.heads - places.scales >= n_blocks * layout.scale_bytes
    assert places.end - places.heads >= n_blocks // layout.super_blocks * layout.head_bytes
    repacked = dtype in (dtypes.Q2_K, dtypes.Q3_K, dtypes.IQ4_NL, dtypes.IQ4_XS)
    assert n_out * dtype.row_bytes(k) <= n_bytes <= n_out * dtype.row_bytes(k) * (2 if repacked else 1.03) + 64


@given(st.integers(0, 500), st.sampled_from([dtypes.F32, dtypes.F16, dtypes.BF16]))
def test_float_rows_begin_at_multiples_of_16_bytes_padded_with_zeros(k: int, dtype: DType) -> None:
    weights = make_weights(dtype, 3, k, np.random.default_rng())
    rows = weights.planes.reshape(3, packed.round_up_16(k * dtype.block_bytes))
    np.testing.assert_array_equal(rows[:, : k * dtype.block_bytes], weights.raw)
    assert not rows[:, k * dtype.block_bytes :].any()


def test_types_of_one_layout_share_it() -> None:
    assert packed.same_layout(dtypes.IQ4_NL) == dtypes.Q8_0
    assert packed.same_layout(dtypes.Q3_K) == packed.same_layout(dtypes.Q6_K) == dtypes.Q6_K
    assert packed.same_layout(dtypes.F16) == dtypes.F16


@pytest.mark.parametrize("dtype", WEIGHT_TYPES, ids=repr)
def test_activations_take_the_form_that_the_product_reads(dtype: DType) -> None:
    few = "q8" if dtype.is_quantized else "f32"
    assert [packed.activation_format(dtype, False, n) for n in (1, 16)] == [few, few]
    assert packed.activation_format(dtype, False, 17) == ("f32" if dtype == dtypes.F32 else "f16")
    assert {packed.activation_format(dtype, True, n) for n in (1, 16, 512)} == {"f32"}


@given(st.integers(0, 2000))
def test_rows_of_activations_begin_at_multiples_of_16_bytes(n_blocks: int) -> None:
    k = 32 * n_blocks
    q8, f16 = packed.activation_row_bytes("q8", k), packed.activation_row_bytes("f16", k)
    assert q8 % 16 == f16 % 16 == 0
    assert k + 8 * n_blocks <= q8 < k + 8 * n_blocks + 16
    assert f16 == 2 * k + 16 and packed.activation_row_bytes("f32", k) == 4 * k


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: packed.packed_bytes(dtypes.Q4_K, 16, 288), "288 elements do not fill blocks of q4_k"),
        (lambda: packed.packed_bytes(dtypes.I32, 16, 32), "i32 is no type of weights"),
        (lambda: packed.activation_row_bytes("q8", 33), "33 activations cannot be quantized"),
        (lambda: packing.pack(np.zeros((2, 35), np.uint8), dtypes.Q8_0, np.zeros(9999, np.uint8)), "expected uint8"),
        (lambda: packing.pack(np.zeros((2, 34), np.uint8), dtypes.Q8_0, np.zeros(79, np.uint8)), "expected 80"),
        (lambda: packing.pack(np.zeros((2, 68), np.uint8)[:, ::2], dtypes.Q8_0, np.zeros(544, np.uint8)), "expected uint8"),
    ],
)
def test_wrong_shapes_are_one_clear_line(call, words: str) -> None:
    with pytest.raises(ShapeError) as caught:
        call()
    assert words in str(caught.value) and "\n" not in str(caught.value)
