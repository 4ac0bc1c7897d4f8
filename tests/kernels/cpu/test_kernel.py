"""Kernels: argument blocks, what does not fit them, and machine code on disk."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from numba_meta.errors import NumbaMetaError, NumbaMetaWarning
from numba_meta.kernels.code_cache import cache_folder
from numba_meta.kernels.cpu import kernel as kernel_module
from numba_meta.kernels.cpu.kernel import CpuKernel, Float, Int, Ptr, cpu_kernel, on_compile
from numba_meta.kernels.cpu.simd import store_f32, store_i64
from numba_meta.models.files.pull import cache_dir


@cpu_kernel
def write_all(thread, n_threads, out: Ptr, whole: Int, broken: Float):
    store_i64(out + 32 * thread, whole)
    store_f32(out + 32 * thread + 8, broken)
    store_i64(out + 32 * thread + 16, thread)
    store_i64(out + 32 * thread + 24, n_threads)


@given(out=st.integers(0, 2**63 - 1), whole=st.integers(-(2**63), 2**63 - 1), broken=st.floats(width=32, allow_nan=False))
def test_a_block_has_one_word_per_parameter(out: int, whole: int, broken: float) -> None:
    block = write_all.pack(broken=broken, whole=np.int64(whole), out=out)
    assert block.dtype == np.int64 and block.shape == (3,)
    assert block[:2].tolist() == [out, whole]
    assert struct.unpack("<f4x", block[2:].tobytes())[0] == broken


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"whole": 1.5}, "whole=1.5 does not fit; expected an integer"),
        ({"whole": 1 << 63}, "whole=9223372036854775808 does not fit; expected an integer within int64"),
        ({"out": None}, "out=None does not fit"),
        ({"broken": 1e39}, "broken=1e.39 does not fit; expected a number within float32"),
        ({"broken": "1"}, "broken='1' does not fit"),
        ({"extra": 1}, r"arguments \['extra'\] do not fit its parameters \['out', 'whole', 'broken'\]"),
    ],
)
def test_wrong_arguments(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(NumbaMetaError, match=words) as caught:
        write_all.pack(**{"out": 0, "whole": 1, "broken": 2.0, **wrong})
    assert "\n" not in str(caught.value)


def test_a_missing_argument() -> None:
    with pytest.raises(NumbaMetaError, match=r"\['broken', 'out'\]"):
        write_all.pack(whole=1)


def test_parameters_that_cannot_be() -> None:
    with pytest.raises(TypeError, match="annotate parameter x"):
        cpu_kernel(lambda thread, n_threads, x: None)
    with pytest.raises(TypeError, match="first parameters must be thread, n_threads"):
        cpu_kernel(lambda n_threads, thread: None)


def test_a_call_runs_every_share() -> None:
    out = np.full((3, 4), -77, np.int64)
    write_all(threads=3, out=out, whole=-5, broken=0.5)
    assert out[:, 0].tolist() == [-5] * 3
    assert out[:, 1].copy().view(np.float32)[::2].tolist() == [0.5] * 3
    assert out[:, 2:].tolist() == [[0, 3], [1, 3], [2, 3]]


# ---- the cache -------------------------------------------------------------------------------------------------------------------------


def make(value: int, name: str = "answer") -> CpuKernel:
    """A kernel that writes `value`: equal names, different code."""

    @cpu_kernel(name=name)
    def answer(thread, n_threads, out: Ptr):
        store_i64(out, value)

    return answer


def result(kernel: CpuKernel) -> int:
    out = np.full(1, -1, np.int64)
    kernel(out=out)
    return int(out[0])


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NUMBA_META_CACHE", str(tmp_path))
    return tmp_path / "kernels"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that were compiled, in order."""
    names: list[str] = []
    monkeypatch.setattr(kernel_module, "on_compile", [*on_compile, names.append])
    return names


def test_compiled_once_then_loaded(cache: Path, compiled: list[str]) -> None:
    assert result(make(5)) == 5
    (path,) = cache.glob("*/answer-*.bin")
    before = path.read_bytes()
    assert result(make(5)) == 5
    assert compiled == ["answer"] and path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # nothing half-written stays behind


def test_equal_names_with_different_code_stay_apart(cache: Path, compiled: list[str]) -> None:
    assert [result(make(5)), result(make(6)), result(make(5))] == [5, 6, 5]
    assert compiled == ["answer", "answer"]


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:-100], lambda data: data[:400] + b"\xff" + data[401:]])
def test_a_damaged_file_is_compiled_again(cache: Path, compiled: list[str], damage) -> None:
    assert result(make(7)) == 7
    (path,) = cache.glob("*/answer-*.bin")
    good = path.read_bytes()
    path.write_bytes(damage(good))
    assert path.read_bytes() != good
    assert result(make(7)) == 7
    assert result(make(7)) == 7
    assert compiled == ["answer", "answer"]


def test_a_tilde_is_the_home_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where no shell has replaced it: models and kernels lie in one folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NUMBA_META_CACHE", "~/own")
    assert cache_folder() == tmp_path / "own" / "kernels" and cache_dir() == tmp_path / "own" / "models"
    monkeypatch.delenv("NUMBA_META_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "~/shared")
    assert cache_folder().parent == tmp_path / "shared" / "numba_meta" == cache_dir().parent


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[str]) -> None:
    blocked = tmp_path / "a file, not a folder"
    blocked.write_text("stays")
    monkeypatch.setenv("NUMBA_META_CACHE", str(blocked))
    with pytest.warns(NumbaMetaWarning, match=r"^compiled kernels cannot be kept in .*kernels \(Not a directory\), so each start") as told:
        assert [result(make(8)), result(make(8))] == [8, 8]
    assert len(told) == 1
    assert compiled == ["answer", "answer"] and blocked.read_text() == "stays"


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind the superuser")
def test_a_read_only_cache(cache: Path, compiled: list[str]) -> None:
    cache.mkdir()
    cache.chmod(0o500)
    assert [result(make(8)), result(make(8))] == [8, 8]
    assert compiled == ["answer", "answer"] and not list(cache.iterdir())


PROGRAM = """
import numpy as np
from numba_meta.kernels.cpu import isa
from numba_meta.kernels.cpu.copy import copy_2d
from numba_meta.kernels.cpu.kernel import on_compile

compiled = []
on_compile.append(compiled.append)
source, target = np.arange(200, dtype=np.uint8), np.zeros(200, np.uint8)
copy_2d(source=source, source_pitch=200, destination=target, destination_pitch=200, width=200, height=1)
assert (source == target).all()
print(isa.detect().name, *compiled)
"""


def run_alone(cache: Path, **environment: str) -> str:
    """What a fresh interpreter prints."""
    settings = {**os.environ, "NUMBA_META_CACHE": str(cache.parent), **environment}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=settings, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_another_process_loads_and_another_level_compiles(cache: Path) -> None:
    first = run_alone(cache)
    assert first.endswith(" copy_2d")
    assert f"{run_alone(cache)} copy_2d" == first  # the second process compiled nothing
    assert len(list(cache.iterdir())) == 1
    if first != "PORTABLE copy_2d":
        assert run_alone(cache, NUMBA_META_ISA="portable") == "PORTABLE copy_2d"
        assert len(list(cache.iterdir())) == 2
