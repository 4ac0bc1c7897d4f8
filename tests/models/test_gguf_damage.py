"""The GGUF reader on damaged files: every damage ends in one line."""

from __future__ import annotations

import os
import random
import struct
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import synthetic
from models.gguf_bytes import ARCHITECTURE, ARRAY, I32, STRING, U32, U64, build, failure, key, tensor, text

import numba_meta as nm
from numba_meta import dtypes
from numba_meta.errors import ModelFileError
from numba_meta.models.files.file_bytes import FileBytes
from numba_meta.models.files.gguf import GGUFFile, read_gguf

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


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small whole model, as bytes to damage."""
    path = tmp_path_factory.mktemp("small") / "small.gguf"
    synthetic.write_model(path, n_layer=1, n_embd=64, n_ff=64, n_vocab=300, types={"default": "q4_0", "ffn_down": "q8_0"})
    return path.read_bytes()


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


def test_a_file_that_shrinks_while_it_is_loaded(tmp_path: Path) -> None:
    """At any moment of a load, to any length: it loads, or ends in one line; a mapping would end the process."""
    path, rng = tmp_path / "model.gguf", random.Random(3)
    content = synthetic.write_model(tmp_path / "whole.gguf", n_layer=2, n_vocab=4000, types="q8_0").read_bytes()
    path.write_bytes(content)
    for _ in range(2):  # the first one may compile kernels
        start = time.perf_counter()
        nm.load(path, ctx_size=64, ubatch_size=16).close()
        seconds = time.perf_counter() - start
    for _ in range(30):
        path.write_bytes(content)
        timer = threading.Timer(rng.random() * seconds, os.truncate, (path, rng.randrange(len(content))))
        timer.start()
        try:
            with nm.load(path, ctx_size=64, ubatch_size=16) as model:
                assert model.generate_ids([5], 1)
                timer.join()
                assert model.generate_ids([5, 6], 2, ignore_eos=True)  # nothing of the file is needed any more
                model.tokenize("a")
        except ModelFileError as error:
            assert str(error).startswith(str(path)) and "\n" not in str(error)
        timer.join()


@pytest.mark.parametrize("part", ("the key", "tensor data"))
def test_a_file_that_shrinks_at_a_certain_place(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at its size and the reading of its header; between header and weights; before a state is saved."""
    path = synthetic.write_model(tmp_path / "model.gguf", n_layer=2, types="q8_0")
    n_bytes, read_into = path.stat().st_size, FileBytes.read_into

    def shrinking(file: FileBytes, offset: int, out: Any) -> None:
        if part == "the key" or offset > n_bytes // 2:
            os.truncate(path, min(os.stat(path).st_size, n_bytes // 3 if part == "tensor data" else 100))
        read_into(file, offset, out)

    monkeypatch.setattr(FileBytes, "read_into", shrinking)
    with pytest.raises(ModelFileError, match=f"model.gguf: ends before byte .*, it had {n_bytes} bytes when it was opened"):
        nm.load(path, ctx_size=64)


def test_a_file_that_shrinks_behind_a_loaded_model(tmp_path: Path) -> None:
    path = synthetic.write_model(tmp_path / "model.gguf", n_layer=2, types="q8_0")
    with nm.load(path, ctx_size=64) as model:
        os.truncate(path, 1000)
        model.generate_ids([5, 6], 2)
        with pytest.raises(ModelFileError, match="ends before byte"):
            model.save_state(tmp_path / "state")  # whose digest looks at the weights
