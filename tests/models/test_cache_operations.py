"""Operations on the cache of a model: what the next tokens see after them, and the same bytes wherever the rows lie."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models.cache_places import PLACES, ids
from models.edited_reference import Edit, EditedModel, removed, shifted, turned
from models.feeding import append
from models.numpy_reference import ReferenceModel
from synthetic import write_model

import numba_meta as nm
from numba_meta import dtypes
from numba_meta.dtypes import DType
from numba_meta.errors import NumbaMetaError, UsageError
from numba_meta.models.cache.operations import Rotation, rotate_keys
from numba_meta.models.model import Model
from numba_meta.quants import dequantize, quantize


@pytest.fixture(scope="module")
def llama(paths: dict[str, Path]) -> Iterator[Model]:
    with nm.load(paths["llama"], ctx_size=64, parallel=2) as model:
        yield model


def wanted_logits(path: Path, tokens: list[int], n_last: int, edits: tuple[Edit, ...]) -> Any:
    return _edited_logits(path, tuple(tokens), edits)[-n_last:]


@cache
def _edited_logits(path: Path, tokens: tuple[int, ...], edits: tuple[Edit, ...]) -> Any:
    """The same for every place of a cache."""
    plain = ReferenceModel.read(path)
    return EditedModel(**{f.name: getattr(plain, f.name) for f in fields(plain)}, edits=edits).logits(tokens)


# ---- rotation --------------------------------------------------------------------------------------------------------------------------

# Of a standard deviation of 1, twice rounded: rows of each type, then rotated rows.
BOUNDS = {dtypes.F32: 1e-5, dtypes.F16: 4e-3, dtypes.BF16: 4e-2, dtypes.Q8_0: 5e-2, dtypes.Q4_0: 0.9}


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@settings(deadline=None, max_examples=25)
@given(
    st.integers(0, 2**32),
    st.booleans(),
    st.sampled_from((64, 32, 6)),
    st.sampled_from((1.0, 0.125)),
    st.integers(0, 500),
    st.integers(1, 300),
)
def test_rotated_keys_are_those_of_their_new_positions(
    dtype: DType, seed: int, interleaved: bool, n_rotated: int, scale: float, position: int, drop: int
) -> None:
    """Keys at positions p..., stored, then moved down, against keys that were computed at p - drop..."""
    rng = np.random.default_rng(seed)
    plain = rng.standard_normal((5, 3, 64))
    frequencies = 10_000.0 ** (-2.0 * np.arange(n_rotated // 2) / n_rotated) / rng.uniform(1, 8, n_rotated // 2)
    at = position + drop + np.arange(5)
    stored = quantize(turned(plain, at, scale * frequencies, interleaved).reshape(5, -1), dtype)
    rotation = Rotation(tuple(scale * frequencies), interleaved, 64)
    got = dequantize(rotate_keys(stored, dtype, rotation, -drop), dtype).reshape(plain.shape)
    wanted = turned(plain, at - drop, scale * frequencies, interleaved)
    assert np.abs(got - wanted).max() < BOUNDS[dtype]
    if dtype is dtypes.F32:
        unmoved = dequantize(stored, dtype).reshape(plain.shape)
        assert np.abs(unmoved - wanted).max() > 100 * BOUNDS[dtype], "the test can tell"


def test_layers_are_found_with_the_rotation_of_their_graph(paths: dict[str, Path]) -> None:
    for name, places in (("llama", ("device", "host, two devices")), ("gemma3", ("device", "host but the first layer, two devices"))):
        for place in places:
            with nm.load(paths[name], ctx_size=64, **PLACES[place]) as model:
                layers, config = model.context.cache.layers, model.config
                assert [layer.window for layer in layers] == list(config.windows)
                for i, layer in enumerate(layers):
                    rope = config.layers[i].rope
                    rotation = Rotation(rope.inverse_frequencies, name == "llama", config.shape.head_dim_k)
                    assert (layer.k.name, layer.k.rotation) == (f"cache_k.{i}", rotation)
                    assert (layer.v.name, layer.v.rotation) == (f"cache_v.{i}", None)
    assert len({layer.rope for layer in config.layers}) == 2


# ---- what the next tokens see ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ("llama", "gemma3"))
def test_after_a_removal_and_a_shift_against_float64(name: str, place: str, paths: dict[str, Path]) -> None:
    """K and V keep what they were computed with; later tokens, by ones and in prompts, see what is left, at its new positions."""
    tokens = ids(1, 140)
    options = {"exact": True, "ctx_size": 400, "parallel": 2, "ubatch_size": 64, **PLACES[place]}
    with nm.load(paths[name], **options) as model:
        append(model, ids(2, 30), sequence=1)
        append(model, tokens[:90], sequence=0, step=64)
        model.cache.remove(0, 10, 35)
        got = [append(model, tokens[90:93], step=1), append(model, tokens[93:110], step=17)]
        model.cache.shift(0, 20, 60)
        got += [append(model, tokens[110:113], step=1), append(model, tokens[113:140], step=27)]
        others = append(model, ids(3, 4), sequence=1)
        assert (model.cache.length(0), model.cache.length(1)) == (80, 34)
        assert model.cache.tokens(0) == [*tokens[:10], *[-1] * 10, *tokens[80:]]
    hole = removed(90, 10, 35)
    second = [*hole.positions, *range(90, 110)]
    moved = tuple(None if p is None or 20 <= p < 80 else p if p < 20 else p - 60 for p in second)
    wanted = wanted_logits(paths[name], tokens, 50, (hole, Edit(110, moved, 50)))
    assert np.abs(np.concatenate(got) - wanted).max() < 3e-4
    wanted = ReferenceModel.read(paths[name]).logits(ids(2, 30) + ids(3, 4))[-4:]
    assert np.abs(others - wanted).max() < 3e-4, "the other sequence is as it was"


@pytest.mark.parametrize("place", ("device", "host, own cells", "host but the first layer, two devices"))
def test_a_hole_of_whole_chunks(place: str, paths: dict[str, Path]) -> None:
    """Attention walks chunks of 256 positions: one without any cell, and the first one."""
    tokens = ids(4, 630)
    with nm.load(paths["llama"], exact=True, ctx_size=1300, parallel=2, **PLACES[place]) as model:
        append(model, tokens[:600], step=512)
        model.cache.remove(0, 250, 520)
        got = [append(model, tokens[600:602], step=1), append(model, tokens[602:630], step=28)]
    wanted = wanted_logits(paths["llama"], tokens, 30, (removed(600, 250, 520),))
    assert np.abs(np.concatenate(got) - wanted).max() < 3e-4


@pytest.mark.parametrize("place", PLACES)
def test_a_shift_when_windows_have_gone_around(place: str, paths: dict[str, Path]) -> None:
    """300 tokens in rings of 256 cells: the window lies in what moved, or reaches kept tokens, some or all of which the ring has lost."""
    tokens = ids(5, 330)
    options = {"exact": True, "ctx_size": 800, "parallel": 2, "ubatch_size": 64, **PLACES[place]}
    with nm.load(paths["gemma3"], **options) as model:
        assert model.context.shape.n_window_cells == 256
        for keep, drop, lost in ((5, 200, ()), (60, 236, range(44)), (30, 266, range(30)), (0, 300, ())):
            model.cache.clear()
            append(model, tokens[:300], step=64)
            model.cache.shift(0, keep, drop)
            got = [append(model, tokens[300:303], step=1), append(model, tokens[303:330], step=27)]
            wanted = wanted_logits(paths["gemma3"], tokens, 30, (shifted(300, keep, drop, lost),))
            assert np.abs(np.concatenate(got) - wanted).max() < 3e-4, (keep, drop)


def test_holes_in_batches_of_several_sequences(paths: dict[str, Path]) -> None:
    """Windows of several streams lie one after the other in a slot, in the order of the batch: holes stay holes in each."""
    for path in paths.values():
        results = []
        for options in PLACES.values():
            with nm.load(path, exact=True, ctx_size=800, parallel=2, **{**options, "devices": "cpu:0", "tensor_split": None}) as model:
                for s in (0, 1):
                    append(model, ids(21 + s, 40), sequence=s)
                    model.cache.remove(s, 25, 33 + s)
                batches = [[int(i) for i in sequences] for sequences in ("10", "01", "1", "0", "10")]
                results.append([model.context.decode([7] * len(b), b, range(len(b))).copy() for b in batches])
        for other in results[1:]:
            for rows, wanted in zip(other, results[0], strict=True):
                np.testing.assert_array_equal(rows, wanted)


def test_one_layer_shifted_is_the_shorter_text(tmp_path: Path) -> None:
    """With one layer K and V depend on nothing but token and position, so that a shift is exact but for rounding."""
    path = write_model(tmp_path / "one.gguf", n_layer=1, types="q8_0", seed=43)
    tokens = ids(6, 100)
    with nm.load(path, exact=True, ctx_size=128) as model:
        append(model, tokens[:80])
        model.cache.shift(0, 7, 31)
        got = append(model, tokens[80:])
        wanted = model.logits(tokens[:7] + tokens[38:])[-20:]
    assert np.abs(got - wanted).max() < 1e-3


def test_many_shifts_lose_little(paths: dict[str, Path]) -> None:
    """Rows that are rotated and rounded 20 times stay near those that are rotated once."""
    tokens = ids(7, 100)
    for cache_type, bound in (("f32", 1e-3), ("f16", 0.05), ("q8_0", 1.0)):
        rows = []
        for n_shifts in (1, 20):
            with nm.load(paths["llama"], exact=True, ctx_size=128, cache_type_k=cache_type) as model:
                append(model, tokens)
                for _ in range(n_shifts):
                    model.cache.shift(0, 4, 40 // n_shifts)
                rows.append(append(model, [1])[0])
        assert np.abs(rows[0] - rows[1]).max() < bound


# ---- the same bytes everywhere ---------------------------------------------------------------------------------------------------------


def operate(model: Model) -> None:
    model.cache.remove(0, 12, 40)
    model.cache.copy(0, 1)
    model.cache.shift(0, 5, 60)
    model.cache.remove(1, 100)
    model.cache.copy(1, 0) if model.cache.length(0) < 20 else model.cache.shift(1, 0, 30)


@pytest.mark.parametrize("types", (("f16", "f16"), ("q8_0", "q4_0"), ("f32", "bf16")), ids=str)
@pytest.mark.parametrize("name", ("llama", "gemma3"))
def test_operations_give_the_same_bytes_on_every_split_and_place(
    name: str, types: tuple[str, str], paths: dict[str, Path], tmp_path: Path
) -> None:
    options = {"ctx_size": 700, "parallel": 2, "ubatch_size": 64, "cache_type_k": types[0], "cache_type_v": types[1]}
    first, saved = tmp_path / "first.state", []
    with nm.load(paths[name], **options) as model:
        append(model, ids(8, 320), step=64)
        model.save_state(first)
    for i, place in enumerate(PLACES):
        with nm.load(paths[name], **options, **PLACES[place]) as model:
            model.load_state(first)
            operate(model)
            model.save_state(tmp_path / f"{i}.state")
        saved.append((tmp_path / f"{i}.state").read_bytes())
    assert saved[0] != first.read_bytes()
    assert all(other == saved[0] for other in saved[1:])


@pytest.mark.parametrize("place", PLACES)
def test_a_copy_goes_on_like_its_source_and_alone(place: str, paths: dict[str, Path]) -> None:
    for name in paths:
        with nm.load(paths[name], ctx_size=700, parallel=2, ubatch_size=64, **PLACES[place]) as model:
            append(model, ids(9, 300), step=64)
            append(model, ids(10, 20), sequence=1)
            model.cache.copy(0, 1)
            assert model.cache.tokens(1) == ids(9, 300)
            one = append(model, ids(11, 30), sequence=1)
            two = append(model, ids(11, 30), sequence=0)
            np.testing.assert_array_equal(one, two)
            model.cache.clear(0)
            append(model, ids(12, 200), step=64)
            np.testing.assert_array_equal(append(model, [3], sequence=1), [model.logits(ids(9, 300) + ids(11, 30) + [3], last=True)])


# ---- how a user meets it ---------------------------------------------------------------------------------------------------------------


def test_clear_and_remove_at_the_end_are_as_if_the_tokens_had_not_come(llama: Model) -> None:
    tokens = ids(15, 30)
    wanted = llama.logits(tokens[:20], last=True)
    llama.cache.remove(0, 19)
    np.testing.assert_array_equal(append(llama, tokens[19:20])[0], wanted)
    append(llama, [1, 2, 3], sequence=1)
    llama.cache.clear(0)
    assert (llama.cache.length(0), llama.cache.length(1)) == (0, 3)
    np.testing.assert_array_equal(append(llama, tokens[:20])[-1], wanted)
    llama.cache.clear()
    assert (llama.cache.tokens(0), llama.cache.tokens(1)) == ([], [])


def test_a_prefix_is_kept_up_to_a_hole(llama: Model) -> None:
    tokens = ids(16, 30)
    wanted = llama.generate_ids(tokens, 5, ignore_eos=True)
    llama.cache.remove(0, 10, 12)
    assert llama.generate_ids(tokens, 5, ignore_eos=True, reuse_prefix=True) == wanted
    assert llama.timings.n_prompt == 20


def test_generation_goes_on_from_a_shifted_sequence(llama: Model) -> None:
    llama.generate_ids(ids(17, 30), 1, ignore_eos=True)
    llama.cache.shift(0, 4, 10)
    left = llama.cache.tokens()
    assert left == ids(17, 30)[:4] + ids(17, 30)[14:]
    assert len(llama.generate_ids([*left, 9], 4, ignore_eos=True, reuse_prefix=True)) == 4
    assert llama.timings.n_prompt == 1


def test_a_change_ends_a_generation_that_is_under_way(llama: Model) -> None:
    changes: list[Any] = [
        lambda: llama.cache.clear(),
        lambda: llama.cache.remove(0, 0, 1),
        lambda: llama.cache.copy(0, 1),
        lambda: llama.cache.shift(0, 1, 1),
    ]
    for change in changes:
        begun = llama._generated(ids(18, 5), 10, True, False, {})
        next(begun)
        change()
        with pytest.raises(UsageError, match="^another call has used the model since "):
            next(begun)


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda c: c.length(2), "sequence 2 is impossible; expected 0 to 1"),
        (lambda c: c.tokens(-1), "sequence -1 is impossible; expected 0 to 1"),
        (lambda c: c.clear(2), "sequence 2 is impossible; expected 0 to 1"),
        (lambda c: c.copy(0, 2), "sequence 2 is impossible; expected 0 to 1"),
        (lambda c: c.copy(5, 0), "sequence 5 is impossible; expected 0 to 1"),
        (lambda c: c.remove(0, 3, 2), "positions 3 to 2 of sequence 0 cannot be removed; expected 0 <= start <= stop <= 5"),
        (lambda c: c.remove(0, 0, 6), "positions 0 to 6 of sequence 0 cannot be removed; expected 0 <= start <= stop <= 5"),
        (lambda c: c.remove(0, -1), "positions -1 to 5 of sequence 0 cannot be removed; expected 0 <= start <= stop <= 5"),
        (lambda c: c.shift(0, 3, 3), "sequence 0 has 5 tokens: 3 cannot be kept and 3 dropped; expected 0 or more, 5 in all at most"),
        (lambda c: c.shift(0, -1, 3), "sequence 0 has 5 tokens: -1 cannot be kept and 3 dropped; expected 0 or more, 5 in all at most"),
        (lambda c: c.shift(0, 1, -1), "sequence 0 has 5 tokens: 1 cannot be kept and -1 dropped; expected 0 or more, 5 in all at most"),
    ],
)
def test_what_a_user_may_get_wrong(llama: Model, call: Any, line: str) -> None:
    llama.cache.clear()
    append(llama, [1, 2, 3, 4, 5])
    with pytest.raises(UsageError) as caught:
        call(llama.cache)
    assert str(caught.value) == line
    assert llama.cache.tokens() == [1, 2, 3, 4, 5]


def test_an_end_that_a_window_cannot_go_back_to(paths: dict[str, Path]) -> None:
    with nm.load(paths["gemma3"], ctx_size=700, ubatch_size=64) as model:
        append(model, ids(19, 500), step=64)
        with pytest.raises(UsageError, match="^sequence 0 cannot go back from 500 to 100 tokens: its sliding window keeps 240 more; clear"):
            model.cache.remove(0, 100)
        assert model.cache.tokens() == ids(19, 500)
        model.cache.remove(0, 100, 200)
        assert model.cache.length() == 500


def test_a_closed_model(paths: dict[str, Path]) -> None:
    model = nm.load(paths["llama"], ctx_size=64)
    cache = model.cache
    model.close()
    calls = (lambda: cache.remove(0, 0), lambda: cache.shift(0, 0, 0), lambda: model.save_state("x"), lambda: model.load_state("x"))
    for call in (cache.clear, *calls):
        with pytest.raises(NumbaMetaError, match="^the model was closed; load it again$"):
            call()


def test_rope_scale_and_factors_come_from_the_model(tmp_path: Path, paths: dict[str, Path]) -> None:
    """Linear scaling and Llama 3's factors: one layer, so that the shorter text is what a shift must give."""
    import gguf
    from models.rewriting import rewrite

    one = write_model(tmp_path / "plain.gguf", n_layer=1, types="q8_0", seed=44)
    factors = np.linspace(1, 8, 32, dtype=np.float32)
    scaled = rewrite(
        one,
        tmp_path / "scaled.gguf",
        {
            "llama.rope.scaling.type": ("linear", gguf.GGUFValueType.STRING),
            "llama.rope.scaling.factor": (4.0, gguf.GGUFValueType.FLOAT32),
            "llama.rope.dimension_count": (32, gguf.GGUFValueType.UINT32),
        },
    )
    factored = rewrite(one, tmp_path / "factored.gguf", tensors={"rope_freqs.weight": factors})
    tokens = ids(20, 90)
    for path in (scaled, factored):
        with nm.load(path, exact=True, ctx_size=100) as model:
            rotation = model.context.cache.layers[0].k.rotation
            assert rotation is not None
            slowest = 0.25 * 10_000.0 ** (-30 / 32) if path == scaled else 10_000.0 ** (-62 / 64) / 8
            assert math.isclose(rotation.inverse_frequencies[-1], slowest)
            append(model, tokens[:80])
            model.cache.shift(0, 3, 50)
            got = append(model, tokens[80:])
            wanted = model.logits(tokens[:3] + tokens[53:])[-10:]
        assert np.abs(got - wanted).max() < 1e-3
