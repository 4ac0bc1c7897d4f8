"""The GGUF reader: what it reads equals what the `gguf` package wrote, and every damage ends in one line."""

from __future__ import annotations

import os
import random
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import synthetic

from numba_meta import dtypes
from numba_meta.errors import ModelFileError
from numba_meta.models.gguf import GGUFFile, read_gguf, split_paths
from numba_meta.quants import dequantize

U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10


def text(value: str | bytes) -> bytes:
    encoded = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(encoded)) + encoded


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str | bytes, shape: tuple[int, ...], type_id: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, type_id, offset)


ARCHITECTURE = key("general.architecture", STRING, text("llama"))


def build(
    keys: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    n_data: int = 4096,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_keys: int | None = None,
    n_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A GGUF file made by hand, so that any part of it can be wrong."""
    keys = [ARCHITECTURE] if keys is None else keys
    tensors = [tensor("a", (8, 4), 0, 0)] if tensors is None else tensors
    head = magic + struct.pack("<IQQ", version, len(tensors) if n_tensors is None else n_tensors, len(keys) if n_keys is None else n_keys)
    head += b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + bytes(range(256)) * (n_data // 256) + bytes(n_data % 256)


def failure(path: Path) -> str:
    """The one line in which reading `path` ends."""
    with pytest.raises(ModelFileError) as error:
        read_gguf(path)
    message = str(error.value)
    assert "\n" not in message and path.name in message
    return message


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small whole model, as bytes to damage."""
    path = tmp_path_factory.mktemp("small") / "small.gguf"
    synthetic.write_model(path, n_layer=1, n_embd=64, n_ff=64, n_vocab=300, types={"default": "q4_0", "ffn_down": "q8_0"})
    return path.read_bytes()


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
            assert raw.shape == (ours.n_rows, ours.row_bytes) and not raw.flags.writeable
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


def test_release_keeps_the_content(tmp_path: Path) -> None:
    path = synthetic.write_model(tmp_path / "m.gguf", n_layer=1, types="f32")
    with read_gguf(path) as file:
        for name in file.tensors:
            before = file.raw(name).copy()
            file.release(name)
            np.testing.assert_array_equal(file.raw(name), before)


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="resident pages are counted through Linux's /proc")
def test_release_gives_pages_back(tmp_path: Path) -> None:
    def resident_bytes() -> int:
        lines = Path("/proc/self/smaps").read_text().splitlines()
        at = next(i for i, line in enumerate(lines) if line.endswith(str(path)))
        return 1024 * next(int(line.split()[1]) for line in lines[at:] if line.startswith("Rss:"))

    path = synthetic.write_model(tmp_path / "m.gguf", n_layer=1, n_vocab=8000, types="f32")
    with read_gguf(path) as file:
        name = "token_embd.weight"
        n_bytes = file.tensors[name].n_bytes
        assert file.raw(name).sum(dtype=np.int64) > 0
        loaded = resident_bytes()
        assert loaded >= n_bytes
        file.release(name)
        assert resident_bytes() <= loaded - n_bytes + 2 * 4096


def test_views_outlive_close_and_a_closed_file_says_so(tmp_path: Path) -> None:
    path = synthetic.write_model(tmp_path / "m.gguf", n_layer=1)
    file = read_gguf(path)
    view, before = file.raw("token_embd.weight"), file.raw("token_embd.weight").copy()
    file.close()
    file.close()
    np.testing.assert_array_equal(view, before)
    with pytest.raises(ModelFileError, match="was closed"):
        file.raw("token_embd.weight")
    with pytest.raises(ModelFileError, match="was closed"):
        file.release("token_embd.weight")


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


def failure_of_any(path: Path) -> str:
    with pytest.raises(ModelFileError) as error:
        read_gguf(path)
    assert "\n" not in str(error.value)
    return str(error.value)


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


# --- damage

HUGE = 2**63 - 1
DAMAGES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "short": (b"GGUF\x03\0\0\0", "8 bytes"),
    "magic": (build(magic=b"GGML"), "b'GGML'"),
    "version 1": (build(version=1), "version 1"),
    "version 4": (build(version=4), "version 4"),
    "big-endian": (build(version=3 << 24), "big-endian"),
    "tensor count": (build(n_tensors=HUGE), f"tensor count is {HUGE}"),
    "key count": (build(n_keys=HUGE), f"key count is {HUGE}"),
    "more keys than there are": (build(n_keys=3), "damaged"),
    "fewer keys than there are": (build(n_keys=0), "damaged"),
    "key length": (build([struct.pack("<Q", HUGE) + b"name"]), "the length of the name of key 0"),
    "long key": (build([key("k" * 70_000, U32, b"\0" * 4)], n_data=80_000), "expected at most 65535"),
    "key not UTF-8": (build([key(b"\xff\xfe", U32, b"\0" * 4)]), "not UTF-8"),
    "text not UTF-8": (build([key("k", STRING, text(b"a\xff"))]), "the key k is not UTF-8"),
    "text in a list not UTF-8": (build([key("k", ARRAY, struct.pack("<IQ", STRING, 2) + text("a") + text(b"\xff"))]), "k[1] is not UTF-8"),
    "text length": (build([key("k", STRING, struct.pack("<Q", HUGE))]), "the length of the key k"),
    "value type": (build([key("k", 13, b"\0" * 8)]), "unknown value type 13"),
    "element type": (build([key("k", ARRAY, struct.pack("<IQ", 77, 1))]), "unknown element type 77"),
    "array length": (build([key("k", ARRAY, struct.pack("<IQ", I32, HUGE))]), f"the length of the key k is {HUGE}"),
    "array of texts": (build([key("k", ARRAY, struct.pack("<IQ", STRING, 3) + text("a") + struct.pack("<Q", HUGE))]), "k[1] is"),
    "deep arrays": (build([key("k", ARRAY, struct.pack("<IQ", ARRAY, 1) * 5 + struct.pack("<IQ", U32, 0))]), "nests arrays"),
    "key twice": (build([ARCHITECTURE, ARCHITECTURE]), "general.architecture appears twice"),
    "no architecture": (build([]), "general.architecture is missing"),
    "architecture a number": (build([key("general.architecture", U32, b"\1\0\0\0")]), "holds 1, expected text"),
    "alignment 0": (build([ARCHITECTURE, key("general.alignment", U32, b"\0" * 4)]), "general.alignment is 0"),
    "alignment 24": (build([ARCHITECTURE, key("general.alignment", U32, struct.pack("<I", 24))]), "general.alignment is 24"),
    "alignment huge": (build([ARCHITECTURE, key("general.alignment", U64, struct.pack("<Q", 1 << 62))]), "power of two up to"),
    "alignment a text": (build([ARCHITECTURE, key("general.alignment", STRING, text("32"))]), "general.alignment is 32"),
    "tensor twice": (build(tensors=[tensor("a", (8,), 0, 0), tensor("a", (8,), 0, 32)]), "tensor a appears twice"),
    "tensor name not UTF-8": (build(tensors=[tensor(b"\xc3", (8,), 0, 0)]), "name of tensor 0 of 1 is not UTF-8"),
    "no axes": (build(tensors=[tensor("a", (), 0, 0)]), "tensor a has 0 axes"),
    "many axes": (build(tensors=[tensor("a", (1, 1, 1, 1, 1), 0, 0)]), "tensor a has 5 axes"),
    "absurd axes": (build(tensors=[text("a") + struct.pack("<I", 2**32 - 1)]), "axes, expected 1 to 4"),
    "unknown type": (build(tensors=[tensor("blk.0.attn_q.weight", (8,), 99, 0)]), "tensor blk.0.attn_q.weight has type 99, which"),
    "unsupported type": (build(tensors=[tensor("a", (256,), 16, 0)]), "tensor a has type 16 (iq2_xxs)"),
    "no extent": (build(tensors=[tensor("a", (8, 0), 0, 0)]), "[8, 0]"),
    "overflowing extents": (build(tensors=[tensor("a", (2**32, 2**32, 2), 0, 0)]), "2^63 - 1 elements"),
    "extents that wrap to a small size": (build(tensors=[tensor("a", (2**63, 2), 0, 0)]), "2^63 - 1 elements"),
    "bytes past 64 bits": (build(tensors=[tensor("a", (2**62,), 0, 0)]), "the file has"),
    "blocks not filled": (build(tensors=[tensor("a", (48, 2), 2, 0)]), "rows of 48 elements, which do not fill blocks of q4_0"),
    "offset outside": (build(tensors=[tensor("a", (8,), 0, 1 << 40)]), "tensor a lies in bytes"),
    "offset wraps": (build(tensors=[tensor("a", (8,), 0, 2**64 - 32)]), "tensor a lies in bytes"),
    "last byte outside": (build(tensors=[tensor("a", (32, 33), 0, 0)], n_data=32 * 33 * 4 - 1), "tensor a lies in bytes"),
    "misaligned": (build(tensors=[tensor("a", (8,), 0, 16)]), "tensor a lies at offset 16, expected a multiple of 32"),
    "overlap": (build(tensors=[tensor("a", (8, 2), 0, 0), tensor("b", (8,), 0, 32)]), "tensor b at byte 192 overlaps tensor a,"),
    "one on the other": (build(tensors=[tensor("a", (8,), 0, 0), tensor("b", (8,), 0, 0)]), "overlaps"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_each_damage_ends_in_one_line_that_names_it(tmp_path: Path, damage: str) -> None:
    content, expected = DAMAGES[damage]
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    assert expected in failure(path)


def test_the_sound_file_behind_the_damages_loads(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(build())
    with read_gguf(path) as file:
        assert file.tensors["a"].dtype == dtypes.F32 and file.raw("a").tobytes() == bytes(range(128))


def test_names_with_control_characters_stay_on_one_line(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(build(tensors=[tensor("two\nlines\x1b[31m" + "x" * 1000, (8,), 99, 0)]))
    message = failure(path)
    assert message.isprintable() and "two\\nlines" in message and len(message) < 600
    bad_name = tmp_path / "new\nline.gguf"
    bad_name.write_bytes(b"no")
    with pytest.raises(ModelFileError) as error:
        read_gguf(bad_name)
    assert str(error.value).isprintable() and "new\\nline.gguf" in str(error.value)


def test_system_errors_end_in_one_line(tmp_path: Path) -> None:
    assert "No such file" in failure(tmp_path / "absent.gguf")
    assert "directory" in failure(tmp_path) or "regular" in failure(tmp_path)
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "not a regular file" in failure(tmp_path / "pipe.gguf")
    with pytest.raises(ModelFileError, match="null"):
        read_gguf(str(tmp_path / "a\0b"))
    with pytest.raises(ModelFileError, match="too long"):
        read_gguf("x" * 5000)
    locked = tmp_path / "locked.gguf"
    locked.write_bytes(build())
    locked.chmod(0)
    if not os.access(locked, os.R_OK):  # a superuser reads everything
        assert "Permission denied" in failure(locked)


# --- mutations of a small model: each loads or ends in one line


def outcome(path: Path, content: bytes) -> str | None:
    """`None` where the file loads and all of its tensors can be read, else the message."""
    path.write_bytes(content)
    try:
        with read_gguf(path) as file:
            read_all(file)
    except ModelFileError as error:
        message = str(error)
        assert "\n" not in message and path.name in message and len(message) < 1000
        return message
    return None


def read_all(file: GGUFFile) -> None:
    for name, info in file.tensors.items():
        assert file.raw(name).shape == (info.n_rows, info.row_bytes)
        assert file.raw(name)[-1, -1] >= 0  # touches the last page


def header_length(content: bytes, tmp_path: Path) -> int:
    path = tmp_path / "sound.gguf"
    path.write_bytes(content)
    with read_gguf(path) as file:
        return file.header_bytes


def test_every_truncation_is_an_error(small: bytes, tmp_path: Path) -> None:
    n_header = header_length(small, tmp_path)
    rng = random.Random(1)
    lengths = {*range(0, 200), n_header - 1, n_header, n_header + 1, len(small) - 1}
    lengths |= {rng.randrange(n_header) for _ in range(150)} | {rng.randrange(n_header, len(small)) for _ in range(50)}
    with read_gguf(tmp_path / "sound.gguf") as file:
        last = max(tensor.offset + tensor.n_bytes for tensor in file.tensors.values())
    for length in sorted(lengths):
        message = outcome(tmp_path / "short.gguf", small[:length])
        assert (message is not None) == (length < last), f"{length=}"


def test_bit_flips_in_the_header(small: bytes, tmp_path: Path) -> None:
    n_header = header_length(small, tmp_path)
    rng = random.Random(2)
    refused = 0
    for trial in range(300):
        damaged = bytearray(small)
        # half of them in the tensor descriptions and the first keys, where the structure is densest
        for _ in range(rng.choice((1, 1, 4))):
            at = rng.choice((rng.randrange(n_header), rng.randrange(400), rng.randrange(n_header - 800, n_header)))
            damaged[at] ^= 1 << rng.randrange(8)
        refused += outcome(tmp_path / f"flip{trial % 3}.gguf", bytes(damaged)) is not None
    assert 50 < refused < 300


def test_corrupted_counts_allocate_little(small: bytes, tmp_path: Path) -> None:
    n_header = header_length(small, tmp_path)
    rng = random.Random(3)
    values = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1]
    refused = 0
    tracemalloc.start()
    try:
        for _ in range(200):
            damaged = bytearray(small)
            at = rng.choice((rng.randrange(8, 24), rng.randrange(24, 600), rng.randrange(24, n_header - 8)))
            damaged[at : at + 8] = struct.pack("<Q", rng.choice(values))
            refused += outcome(tmp_path / "count.gguf", bytes(damaged)) is not None
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert refused > 150
    assert peak < 3 * len(small) + (4 << 20)


def test_random_bytes_behind_a_right_start(tmp_path: Path) -> None:
    rng = random.Random(4)
    for _ in range(100):
        content = b"GGUF" + struct.pack("<IQQ", 3, rng.randrange(4), rng.randrange(1, 4)) + rng.randbytes(rng.randrange(2000))
        assert outcome(tmp_path / "noise.gguf", content) is not None


# --- the real files


def test_gemmas_header_is_read_fast(gemma3_path: Path) -> None:
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        with read_gguf(gemma3_path) as file:
            seconds.append(time.perf_counter() - start)
            assert len(file.metadata["tokenizer.ggml.tokens"]) == 262_144 and len(file.tensors) == 236
    assert min(seconds) < 1.0  # 0.12 s on a quiet machine; the gguf package takes 14 s


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
