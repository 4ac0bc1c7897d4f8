"""State files: another split goes on where one was saved; a damaged, foreign or oversized file changes nothing and says why in one line."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from models.conftest import MODEL_NAMES
from models.feeding import append, continue_greedily
from models.rewriting import rewrite
from synthetic import write_model

import numba_meta as nm
from numba_meta.errors import ContextFullError, NumbaMetaError, UsageError
from numba_meta.models.cache import state_file
from numba_meta.models.model import Model

N_VOCAB = 397
PLACES: dict[str, dict[str, Any]] = {
    "device": {},
    "three devices, own cells": {"devices": "cpu:0,cpu:0,cpu:0", "tensor_split": "1,0,1", "kv_unified": False},
    "host, two devices": {"kv": "host", "devices": "cpu:0,cpu:0", "tensor_split": "30,70"},
    "host but the first layer, own cells": {"kv": "host", "kv_gpu_layers": 1, "kv_unified": False},
}


def ids(seed: int, n: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, N_VOCAB, n)]


TINY: dict[str, Any] = {"n_layer": 1, "n_embd": 32, "n_head": 1, "n_head_kv": 1, "n_ff": 32, "n_vocab": N_VOCAB, "types": "q8_0"}


@pytest.fixture(scope="module")
def paths(paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Those of all tests, and one whose rows are few bytes."""
    return {**paths, "tiny": write_model(tmp_path_factory.mktemp("models") / "tiny.gguf", seed=53, **TINY)}


@pytest.fixture(scope="module")
def tiny(paths: dict[str, Path]) -> Iterator[Model]:
    """One layer, one head of 32, q4_0: 36 bytes for each token."""
    with nm.load(paths["tiny"], ctx_size=16, parallel=2, cache_type_k="q4_0", cache_type_v="q4_0") as model:
        yield model


@pytest.fixture
def saved(tiny: Model, tmp_path: Path) -> Path:
    """Three tokens in sequence 1, of which the middle one is removed."""
    tiny.cache.clear()
    append(tiny, [5, 6, 7], sequence=1)
    tiny.cache.remove(1, 1, 2)
    tiny.save_state(tmp_path / "tiny.state")
    return tmp_path / "tiny.state"


def with_something_else(model: Model) -> None:
    model.cache.clear()
    append(model, [1, 2, 3, 4])


def refuses(model: Model, path: Path, kind: type[NumbaMetaError] = NumbaMetaError) -> str:
    """The one line of an error; the cache is as it was, the next logits too."""
    before = [model.cache.tokens(s) for s in range(model.context.shape.n_sequences)]
    with pytest.raises(kind) as caught:
        model.load_state(path)
    line = str(caught.value)
    assert len(line.splitlines()) == 1 and line.startswith(f"{path}: ") or kind is ContextFullError
    assert [model.cache.tokens(s) for s in range(model.context.shape.n_sequences)] == before
    return line


def signed(header: Any, payload: bytes, version: int = 1) -> bytes:
    """A file with right digests, whatever is in it: written from the description of the format."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    start = struct.pack("<8sII", b"nmstate\n", version, len(text)) + text
    start += hashlib.blake2b(start, digest_size=16).digest()
    whole = start + payload
    return whole + hashlib.blake2b(whole, digest_size=16).digest()


# ---- going on --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ("llama", "gemma3"))
def test_what_is_restored_goes_on_as_if_nothing_had_happened(name: str, place: str, paths: dict[str, Path], tmp_path: Path) -> None:
    """The same place: the bits. Sequence 0 of 300 tokens has gone around its windows; sequence 1 has a hole."""
    options = {"ctx_size": 1000, "parallel": 2, "ubatch_size": 64, **PLACES[place]}
    with nm.load(paths[name], **options) as model:
        append(model, ids(1, 300), step=64)
        append(model, ids(2, 40), sequence=1)
        model.cache.remove(1, 10, 20)
        model.save_state(tmp_path / "a.state")
        wanted = [append(model, ids(3, 5), s) for s in (0, 1)]
    with nm.load(paths[name], **options) as model:
        append(model, ids(4, 50))  # is forgotten
        model.load_state(tmp_path / "a.state")
        assert model.cache.tokens(0) == ids(1, 300) and model.cache.length(1) == 40
        model.save_state(tmp_path / "b.state")
        for s in (0, 1):
            np.testing.assert_array_equal(append(model, ids(3, 5), s), wanted[s])
    assert (tmp_path / "a.state").read_bytes() == (tmp_path / "b.state").read_bytes()


@pytest.mark.parametrize("name", ("llama", "gemma3"))
def test_every_split_and_place_goes_on_with_the_same_tokens(name: str, paths: dict[str, Path], tmp_path: Path) -> None:
    """Saved by each, loaded by each: the prompt is not computed again, and greedy tokens are those of a run that was not interrupted."""
    fresh = {"ignore_eos": True, "repetition_penalty": 1e6, "repetition_last_n": -1}
    prompt = ids(5, 60)
    for i, place in enumerate(PLACES):
        with nm.load(paths[name], exact=True, ctx_size=400, parallel=2, **PLACES[place]) as model:
            wanted = model.generate_ids(prompt, 20, **fresh)
            model.generate_ids(prompt, 1)
            model.save_state(tmp_path / f"{i}.state")
    for place in PLACES:
        with nm.load(paths[name], exact=True, ctx_size=300, parallel=3, ubatch_size=100, **PLACES[place]) as model:
            for i in range(len(PLACES)):
                model.load_state(tmp_path / f"{i}.state")
                assert model.generate_ids(prompt, 20, reuse_prefix=True, **fresh) == wanted
                assert model.timings.n_prompt == 1


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_real_models_go_on_in_another_split(name: str, real_paths: Callable[[str], Path], references: Any, tmp_path: Path) -> None:
    reference = references(name)["english"]
    with nm.load(real_paths(name), exact=True, ctx_size=512, cache_type_k="f32", cache_type_v="f32") as model:
        model.generate_ids(reference["ids"], 1)
        model.save_state(tmp_path / "real.state")
    with nm.load(real_paths(name), exact=True, ctx_size=512, devices="cpu:0,cpu:0", tensor_split="70,30", kv="host") as model:
        model.load_state(tmp_path / "real.state")
        got = model.generate_ids(reference["ids"], 12, ignore_eos=True, reuse_prefix=True)
        assert model.timings.n_prompt == 1
    assert got == reference["exact"]["greedy_ids"][:12]


def test_windows_of_other_sizes(paths: dict[str, Path], tmp_path: Path) -> None:
    """A ring of 512 cells is saved; one of 256 takes its last rows; back in one of 512, the rows of 256 are enough to go on."""
    tokens, path = ids(6, 600), tmp_path / "a.state"
    with nm.load(paths["gemma3"], exact=True, ctx_size=700, ubatch_size=300) as model:
        assert model.context.shape.n_window_cells == 512
        wanted = model.logits(tokens + [1, 2], last=True)
        model.logits(tokens, last=True)
        model.save_state(path)
    for ubatch_size, n_window_cells in ((64, 256), (300, 512)):
        with nm.load(paths["gemma3"], exact=True, ctx_size=700, ubatch_size=ubatch_size) as model:
            assert model.context.shape.n_window_cells == n_window_cells
            model.load_state(path)
            with pytest.raises(UsageError, match="its sliding window keeps 240 more; clear it instead"):
                model.cache.remove(0, 300)
            model.save_state(path)
            np.testing.assert_array_equal(append(model, [1, 2])[-1], wanted)


def test_a_state_of_nothing(tiny: Model, tmp_path: Path) -> None:
    tiny.cache.clear()
    tiny.save_state(tmp_path / "empty.state")
    with_something_else(tiny)
    tiny.load_state(tmp_path / "empty.state")
    assert [tiny.cache.length(s) for s in (0, 1)] == [0, 0]


def test_the_bytes_are_those_of_the_description(tiny: Model, saved: Path) -> None:
    data = saved.read_bytes()
    n_header = struct.unpack_from("<8sII", data)[2]
    header = json.loads(data[16 : 16 + n_header])
    assert header["cache_types"] == ["q4_0", "q4_0"] and header["layers"] == [[18, 18, 0]]
    assert header["sequences"] == [{"sequence": 1, "n_tokens": 3, "n_rows": 2, "n_window_rows": 0, "window_start": 0, "shortest": 0}]
    payload = data[16 + n_header + 16 : -16]
    assert payload[:13] == struct.pack("<3i", 5, -1, 7) + bytes([0b10100000])
    assert len(payload) == 13 + 2 * 36
    assert signed(header, payload) == data


# ---- damaged files ---------------------------------------------------------------------------------------------------------------------


def test_a_file_that_was_cut_short_anywhere(tiny: Model, saved: Path) -> None:
    data, cut = saved.read_bytes(), saved.with_name("cut.state")
    with_something_else(tiny)
    for n in range(len(data)):
        cut.write_bytes(data[:n])
        line = refuses(tiny, cut)
        assert ("truncated: " + str(n) in line) if n else ("no state file" in line)
    cut.write_bytes(data + b"\0")
    assert f"corrupted: it has {len(data) + 1} bytes, expected {len(data)};" in refuses(tiny, cut)
    cut.write_bytes(data)
    tiny.load_state(cut)
    assert tiny.cache.tokens(1) == [5, -1, 7]


def test_every_flipped_bit_is_found(tiny: Model, saved: Path) -> None:
    data, flipped = bytearray(saved.read_bytes()), saved.with_name("flipped.state")
    with_something_else(tiny)
    rng = np.random.default_rng(7)
    for i in range(len(data)):
        bit = 1 << int(rng.integers(8))
        data[i] ^= bit
        flipped.write_bytes(data)
        line = refuses(tiny, flipped)
        assert any(word in line for word in ("corrupted", "truncated", "no state file", "of version"))
        data[i] ^= bit


def changed(header: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**header, "sequences": [{**header["sequences"][0], **changes}]}


def test_headers_that_make_no_sense(tiny: Model, saved: Path) -> None:
    """Their digests are right: what is in them must not be trusted all the same."""
    data = saved.read_bytes()
    n_header = struct.unpack_from("<8sII", data)[2]
    header, payload = json.loads(data[16 : 16 + n_header]), data[16 + n_header + 16 : -16]
    with_something_else(tiny)
    bad = saved.with_name("bad.state")
    headers: list[Any] = [
        b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 5000, {}, {**header, "model": {}}, {**header, "model": None},
        {**header, "sequences": 3}, {**header, "sequences": [{}]},
        {**header, "sequences": header["sequences"] * 2}, {**header, "layers": [[18]]},
        {**header, "layers": [[-18, 18, 0]]}, {**header, "layers": []}, {**header, "layers": [[1 << 60, 18, 0]]},
        changed(header, n_tokens=-1), changed(header, sequence=-1), changed(header, n_rows=4), changed(header, n_rows=1),
        changed(header, n_tokens="x"),
        changed(header, n_window_rows=3), changed(header, window_start=4), changed(header, shortest=9), changed(header, n_tokens=1 << 62),
        changed(header, n_tokens=float("inf")), changed(header, more=1),
    ]  # fmt: skip
    for one in headers:
        bad.write_bytes(signed(one, payload))
        assert any(word in refuses(tiny, bad) for word in ("corrupted", "truncated"))
    payloads = [
        struct.pack("<i", N_VOCAB) + payload[4:],
        struct.pack("<i", -2) + payload[4:],
        payload[:12] + bytes([0b11100000]) + payload[13:],
    ]
    for one in payloads:
        bad.write_bytes(signed(header, one))
        assert "corrupted: sequence 1 makes no sense;" in refuses(tiny, bad)
    bad.write_bytes(signed(header, payload, version=2))
    assert refuses(tiny, bad) == f"{bad}: is a state file of version 2, expected 1; save it again with this version"


def test_files_of_other_kinds(tiny: Model, paths: dict[str, Path], tmp_path: Path) -> None:
    with_something_else(tiny)
    assert "is no state file (it begins with b'GGUF" in refuses(tiny, paths["tiny"])
    assert "the state cannot be read (No such file or directory); check the path" in refuses(tiny, tmp_path / "none.state")
    assert "is no regular file; expected a state file" in refuses(tiny, tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "is no regular file; expected a state file" in refuses(tiny, tmp_path / "pipe")


# ---- files of others -------------------------------------------------------------------------------------------------------------------


def test_states_of_other_models_and_types(tiny: Model, saved: Path, paths: dict[str, Path], tmp_path: Path) -> None:
    other_weights = write_model(tmp_path / "weights.gguf", seed=54, **TINY)
    other_base = rewrite(paths["tiny"], tmp_path / "base.gguf", {"llama.rope.freq_base": (5000.0, gguf.GGUFValueType.FLOAT32)})
    for path in (other_weights, other_base, paths["llama"], paths["gemma3"]):
        with nm.load(path, ctx_size=16, parallel=2, cache_type_k="q4_0", cache_type_v="q4_0") as model:
            with_something_else(model)
            line = refuses(model, saved, UsageError)
            assert "is the state of another model (llama, 1 layers, 397 tokens, " in line
            assert line.endswith("; load the model that saved it")
    with nm.load(paths["tiny"], ctx_size=16, parallel=2) as model:
        with_something_else(model)
        line = refuses(model, saved, UsageError)
    assert line.startswith(f"{saved}: holds K and V as q4_0, q4_0, the cache as f16, f16; ")
    assert line.endswith("load the model with the same (cache_type_k, --cache-type-k q4_0; cache_type_v, --cache-type-v q4_0)")


def test_the_same_model_in_another_file(saved: Path, paths: dict[str, Path], tmp_path: Path) -> None:
    """Cut into parts, or with another name and chat template: the rows are the same."""
    parts = write_model(tmp_path / "parts.gguf", split_max_tensors=4, seed=53, **TINY)
    renamed = rewrite(paths["tiny"], tmp_path / "renamed.gguf", {"general.name": ("other", gguf.GGUFValueType.STRING)})
    for path in (parts, renamed):
        with nm.load(path, ctx_size=16, parallel=2, cache_type_k="q4_0", cache_type_v="q4_0") as model:
            model.load_state(saved)
            assert model.cache.tokens(1) == [5, -1, 7]


def test_states_that_do_not_fit(saved: Path, paths: dict[str, Path]) -> None:
    types = {"cache_type_k": "q4_0", "cache_type_v": "q4_0"}
    with nm.load(paths["tiny"], ctx_size=16, parallel=1, **types) as model:
        with_something_else(model)
        line = refuses(model, saved, ContextFullError)
        assert line == "sequence 1 does not fit a context of 1 sequence; use more sequences (parallel, --parallel)"
    with nm.load(paths["tiny"], ctx_size=4, parallel=2, kv_unified=False, **types) as model:
        line = refuses(model, saved, ContextFullError)
        assert line == "a sequence of 3 tokens does not fit the 2 of the context; use a larger context (ctx_size, --ctx-size)"


# ---- writing ---------------------------------------------------------------------------------------------------------------------------


def test_a_save_that_fails_leaves_the_old_file(tiny: Model, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with_something_else(tiny)
    monkeypatch.setattr(state_file.os, "fsync", full)
    with pytest.raises(NumbaMetaError, match=r": the state cannot be saved \(No space left on device\); choose another path or make room$"):
        tiny.save_state(saved)
    monkeypatch.undo()
    assert saved.read_bytes() == before and os.listdir(saved.parent) == [saved.name]
    tiny.save_state(saved)
    assert saved.read_bytes() != before and os.listdir(saved.parent) == [saved.name]


def test_paths_that_cannot_be_written(tiny: Model, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    none, pipe = tmp_path / "none" / "a.state", tmp_path / "pipe"
    for path, reason in ((none, "cannot be saved"), (tmp_path, "no regular file"), (pipe, "no regular file")):
        with pytest.raises(NumbaMetaError, match=reason):
            tiny.save_state(path)
    assert os.listdir(tmp_path) == ["pipe"]


def test_a_link_stays_a_link(tiny: Model, tmp_path: Path) -> None:
    with_something_else(tiny)
    (tmp_path / "link").symlink_to(tmp_path / "real.state")
    tiny.save_state(str(tmp_path / "link"))
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real.state").is_file()
    tiny.cache.clear()
    tiny.load_state(str(tmp_path / "link"))
    assert tiny.cache.tokens() == [1, 2, 3, 4]


def test_a_disk_that_fails_midway_leaves_an_empty_cache(tiny: Model, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes were right when they were checked and are not there when they are needed: rather nothing than half of it."""

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with_something_else(tiny)
    monkeypatch.setattr(state_file._StateFile, "read_rows", fail)
    with pytest.raises(NumbaMetaError, match=r": the state cannot be read \(Input/output error\); check the path$"):
        tiny.load_state(saved)
    assert [tiny.cache.length(s) for s in (0, 1)] == [0, 0]
    assert len(continue_greedily(tiny, append(tiny, [1, 2])[-1], 2)) == 2
