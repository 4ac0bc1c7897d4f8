"""The GGUF reader: what it reads equals what the `gguf` package wrote, of one file and of files in parts."""

from __future__ import annotations

import gc
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import synthetic
from models.gguf_bytes import ARCHITECTURE, ARRAY, BOOL, F32, STRING, U32, build, failure, failure_of_any, key, tensor, text

from numba_meta.errors import ModelFileError
from numba_meta.models.files.gguf import read_gguf, split_paths
from numba_meta.quants import dequantize

# --- what a sound file gives


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("type_name", synthetic.TYPE_NAMES)
def test_everything_equals_what_the_reference_reads(tmp_path: Path, architecture: str, type_name: str) -> None:
    path = synthetic.write_model(tmp_path / "m.gguf", architecture, n_layer=1, types=type_name, tied=False)
    reference = gguf.GGUFReader(path)
    with read_gguf(path) as file:
        assert file.architecture == architecture and file.path == path and file.paths == (path,)
        assert file.header_bytes == reference.data_offset
        expected = {name: field.contents() for name, field in reference.fields.items() if not name.startswith("GGUF.")}
        assert file.metadata == expected and list(file.metadata) == list(expected)
        assert [type(value) for value in file.metadata.values()] == [type(value) for value in expected.values()]
        assert list(file.tensors) == [entry.name for entry in reference.tensors]
        for entry in reference.tensors:
            ours = file.tensors[entry.name]
            assert ours.shape == tuple(entry.shape.tolist()) and ours.dtype.gguf_id == entry.tensor_type
            assert (ours.offset, ours.n_bytes, ours.n_elements) == (entry.data_offset, entry.n_bytes, entry.n_elements)
            raw = file.raw(entry.name)
            assert raw.shape == (ours.n_rows, ours.row_bytes)
            np.testing.assert_array_equal(raw.reshape(-1), entry.data.reshape(-1).view(np.uint8))
            with np.errstate(all="ignore"):
                expected_values = gguf.quants.dequantize(entry.data, entry.tensor_type)
            np.testing.assert_array_equal(dequantize(raw, ours.dtype).reshape(-1), expected_values.reshape(-1))


def test_every_kind_of_value(tmp_path: Path) -> None:
    path = tmp_path / "values.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    values: dict[str, Any] = {
        "u8": 255, "i8": -128, "u16": 65535, "i16": -32768, "u32": 2**32 - 1, "i32": -(2**31), "u64": 2**64 - 1, "i64": -(2**63),
        "f32": 0.1, "f64": 0.1, "yes": True, "no": False, "text": "größer 🙂\n\0", "ints": [1, -2, 3], "floats": [0.5, -1.0],
        "bools": [True, False], "texts": ["", "a", "ü\n"], "nested": [[1, 2], [3]],
    }  # fmt: skip
    adders = {
        "u8": writer.add_uint8, "i8": writer.add_int8, "u16": writer.add_uint16, "i16": writer.add_int16, "u32": writer.add_uint32,
        "i32": writer.add_int32, "u64": writer.add_uint64, "i64": writer.add_int64, "f32": writer.add_float32, "f64": writer.add_float64,
        "yes": writer.add_bool, "no": writer.add_bool, "text": writer.add_string,
    }  # fmt: skip
    for name, value in values.items():
        adders.get(name, writer.add_array)(name, value)
    writer.add_tensor("a", np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with read_gguf(path) as file:
        expected = {**values, "f32": float(np.float32(0.1))}
        found = {name: file.metadata[name] for name in values}
        assert found == expected
        assert [type(value) for value in found.values()] == [type(value) for value in expected.values()]


def test_empty_arrays_and_texts(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    empty = {"texts": (ARRAY, struct.pack("<IQ", STRING, 0)), "numbers": (ARRAY, struct.pack("<IQ", F32, 0)), "text": (STRING, text(""))}
    path.write_bytes(build([ARCHITECTURE, *(key(name, kind, value) for name, (kind, value) in empty.items())]))
    with read_gguf(path) as file:
        assert {name: file.metadata[name] for name in empty} == {"texts": [], "numbers": [], "text": ""}


def test_version_2_and_another_alignment(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    keys = [ARCHITECTURE, key("general.alignment", U32, struct.pack("<I", 512))]
    path.write_bytes(build(keys, [tensor("b", (8, 4), 0, 512), tensor("a", (16,), 1, 0)], version=2, alignment=512))
    with read_gguf(path) as file:
        assert file.version == 2 and file.header_bytes == 512 and list(file.tensors) == ["b", "a"]
        assert file.raw("b").tobytes() == bytes(range(128)) and file.raw("a").shape == (1, 32)


def test_required_and_optional_values(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    keys = [ARCHITECTURE, key("n", U32, struct.pack("<I", 7)), key("flag", BOOL, b"\x02"), key("x", F32, struct.pack("<f", 0.5))]
    path.write_bytes(build(keys))
    with read_gguf(path) as file:
        assert file.value("n", int) == 7 and file.value("flag", bool) is True and file.value("x", float) == 0.5
        as_float = file.value("n", float)
        assert as_float == 7.0 and isinstance(as_float, float)
        assert file.value("absent", int, None) is None and file.value("absent", str, "default") == "default"
        wrong: list[Callable[[], object]] = [
            lambda: file.value("absent", int),
            lambda: file.value("flag", int),
            lambda: file.value("n", bool),
            lambda: file.value("x", int),
            lambda: file.value("n", list, []),
            lambda: file.tensor("absent"),
            lambda: file.raw("absent"),
        ]
        for ask in wrong:
            with pytest.raises(ModelFileError, match="m.gguf"):
                ask()


def test_rows_are_read_into_memory_of_the_caller(tmp_path: Path) -> None:
    path = synthetic.write_model(tmp_path / "m.gguf", n_layer=1, types="f32")
    with read_gguf(path) as file:
        for name, tensor in file.tensors.items():
            whole, out = file.raw(name), np.zeros((tensor.n_rows - tensor.n_rows // 3, tensor.row_bytes), np.uint8)
            file.read_rows(tensor, tensor.n_rows // 3, out)
            np.testing.assert_array_equal(out, whole[tensor.n_rows // 3 :])
            assert file.sample(name, 5, 9) == whole.tobytes()[5:14]
            assert file.sample(name, tensor.n_bytes - 3, 9) == whole.tobytes()[-3:]


def test_a_closed_file_says_so_and_one_that_is_dropped_is_closed(tmp_path: Path) -> None:
    def n_open() -> int:
        return sum(os.path.realpath(f"/proc/self/fd/{number}") == str(path.resolve()) for number in os.listdir("/proc/self/fd"))

    path = synthetic.write_model(tmp_path / "m.gguf", n_layer=1)
    file = read_gguf(path)
    file.close()
    file.close()
    with pytest.raises(ModelFileError, match="was closed"):
        file.raw("token_embd.weight")
    gc.disable()
    try:
        file = read_gguf(path)
        assert n_open() == 1
        del file
        assert n_open() == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("use", ("raw", "read_rows", "sample"))
def test_a_file_that_has_become_shorter_says_so(use: str, tmp_path: Path) -> None:
    path = synthetic.write_model(tmp_path / "m.gguf", n_layer=1)
    with read_gguf(path) as file:
        last = max(file.tensors.values(), key=lambda tensor: tensor.offset)
        os.truncate(path, last.offset + last.n_bytes - 1)
        arguments = {"raw": (), "read_rows": (0, np.zeros((last.n_rows, last.row_bytes), np.uint8)), "sample": (0, last.n_bytes)}[use]
        with pytest.raises(ModelFileError, match=f"m.gguf: ends before byte {last.offset + last.n_bytes}, it had"):
            getattr(file, use)(last if use == "read_rows" else last.name, *arguments)


# --- split files


@pytest.fixture
def parts(tmp_path: Path) -> tuple[Path, ...]:
    first = synthetic.write_model(tmp_path / "whole.gguf", types="q8_0", split_max_tensors=7)
    return split_paths(first)


def test_a_split_model_loads_as_one(tmp_path: Path, parts: tuple[Path, ...]) -> None:
    whole = synthetic.write_model(tmp_path / "single.gguf", types="q8_0")
    assert len(parts) == 3
    with read_gguf(whole) as expected:
        for part in parts:  # any part stands for all
            with read_gguf(part) as file:
                assert file.paths == parts and list(file.tensors) == list(expected.tensors)
                assert {tensor.file_index for tensor in file.tensors.values()} == {0, 1, 2}
                assert file.metadata["tokenizer.ggml.tokens"] == expected.metadata["tokenizer.ggml.tokens"]
                for name in expected.tensors:
                    np.testing.assert_array_equal(file.raw(name), expected.raw(name))


def test_a_missing_part_is_named(parts: tuple[Path, ...]) -> None:
    parts[1].unlink()
    with pytest.raises(ModelFileError, match=r"whole-00002-of-00003.gguf: cannot be opened: No such file"):
        read_gguf(parts[0])


def test_parts_that_do_not_fit(parts: tuple[Path, ...], tmp_path: Path) -> None:
    second = parts[1].read_bytes()
    parts[1].write_bytes(parts[2].read_bytes())
    assert "part 2 (from 0) of 3, its name says 1 of 3" in failure_of_any(parts[0])
    parts[1].write_bytes(second)
    alone = tmp_path / "alone.gguf"
    alone.write_bytes(second)
    assert "part 1 (from 0) of 3, its name says 0 of 1" in failure(alone)


def split_keys(number: int, count: int, n_tensors: int) -> list[bytes]:
    numbers = {"split.no": number, "split.count": count, "split.tensors.count": n_tensors}
    return [ARCHITECTURE, *(key(name, U32, struct.pack("<I", value)) for name, value in numbers.items())]


@pytest.mark.parametrize(("second_name", "n_tensors", "expected"), [("a", 2, "is also in"), ("b", 3, "hold 2 tensors, expected 3")])
def test_parts_with_the_wrong_tensors(tmp_path: Path, second_name: str, n_tensors: int, expected: str) -> None:
    for i, name in enumerate(["a", second_name]):
        path = tmp_path / f"m-{i + 1:05}-of-00002.gguf"
        path.write_bytes(build(split_keys(i, 2, n_tensors), [tensor(name, (8,), 0, 0)]))
    assert expected in failure_of_any(path)


@pytest.mark.parametrize("count", [key("split.count", U32, struct.pack("<I", 0)), key("split.count", STRING, text("2"))])
def test_parts_that_do_not_say_they_are(tmp_path: Path, count: bytes) -> None:
    for i in range(2):
        path = tmp_path / f"m-{i + 1:05}-of-00002.gguf"
        path.write_bytes(build([ARCHITECTURE, count], [tensor(f"t{i}", (8,), 0, 0)]))
    assert "its name says 0 of 2" in failure_of_any(path) or "its name says 1 of 2" in failure_of_any(path)


def test_impossible_part_numbers(tmp_path: Path) -> None:
    for name in ("m-00003-of-00002.gguf", "m-00000-of-00002.gguf", "m-00001-of-00000.gguf"):
        assert "cannot be" in failure(tmp_path / name)
    assert split_paths("dir/m-00001-of-00001.gguf") == (Path("dir/m-00001-of-00001.gguf"),)
    assert split_paths("m-1-of-2.gguf") == (Path("m-1-of-2.gguf"),)


# --- the real files


def test_no_python_function_runs_for_every_token_of_gemmas_header(gemma3_path: Path) -> None:
    """So its 262,144 tokens are read in 0.12 s; the gguf package, which has one for every value, takes 14 s."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        with read_gguf(gemma3_path) as file:
            sys.setprofile(before)
            assert len(file.metadata["tokenizer.ggml.tokens"]) == 262_144 and len(file.tensors) == 236
    finally:
        sys.setprofile(before)
    assert 0 < calls < 20_000


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_real_headers_equal_the_reference(name: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(f"{name}_path")
    reference = gguf.GGUFReader(path)
    with read_gguf(path) as file:
        assert file.header_bytes == reference.data_offset
        assert list(file.metadata) == [field for field in reference.fields if not field.startswith("GGUF.")]
        for field in file.metadata:
            if not isinstance(file.metadata[field], list):
                assert file.metadata[field] == reference.fields[field].contents()
        tokens = reference.fields["tokenizer.ggml.tokens"]
        for i in (0, 1, 255, 256, len(tokens.data) - 1):
            assert file.metadata["tokenizer.ggml.tokens"][i] == tokens.contents(i)
        assert len(file.metadata["tokenizer.ggml.tokens"]) == len(tokens.data)
        assert list(file.tensors) == [entry.name for entry in reference.tensors]
        for entry in reference.tensors:
            ours = file.tensors[entry.name]
            assert (ours.shape, ours.offset, ours.n_bytes) == (tuple(entry.shape.tolist()), entry.data_offset, entry.n_bytes)
            first = min(ours.n_rows, 8)
            with np.errstate(all="ignore"):
                expected = gguf.quants.dequantize(entry.data.reshape(ours.n_rows, -1)[:first], entry.tensor_type)
            np.testing.assert_array_equal(dequantize(file.raw(entry.name)[:first], ours.dtype), expected)
