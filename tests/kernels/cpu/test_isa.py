"""The level of instructions: read from what Numba compiles for, lowered by NUMBA_META_ISA."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from numba_meta.errors import UsageError
from numba_meta.kernels.cpu import isa
from numba_meta.kernels.cpu.isa import Isa

AVX2 = {"avx2", "fma", "f16c"}
VNNI = AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512vnni"}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Each test reads anew, and leaves nothing remembered."""
    isa.detect.cache_clear()
    yield
    isa.detect.cache_clear()


@pytest.mark.parametrize(
    ("features", "level"),
    [(set(), Isa.PORTABLE), (VNNI - {"f16c"}, Isa.PORTABLE), (AVX2, Isa.AVX2), (VNNI - {"avx512vl"}, Isa.AVX2), (VNNI, Isa.AVX512_VNNI)],
)
def test_the_best_level_that_features_allow(features: set[str], level: Isa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa, "target_features", lambda: frozenset(features))
    assert isa.detect() == level


@pytest.mark.parametrize(
    ("wanted", "level"), [("portable", Isa.PORTABLE), (" AVX2 ", Isa.AVX2), ("avx512-vnni", Isa.AVX512_VNNI), ("", Isa.AVX512_VNNI)]
)
def test_a_lower_level_by_choice(wanted: str, level: Isa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa, "target_features", lambda: frozenset(VNNI))
    monkeypatch.setenv("NUMBA_META_ISA", wanted)
    assert isa.detect() == level


def test_never_more_than_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa, "target_features", lambda: frozenset(AVX2))
    monkeypatch.setenv("NUMBA_META_ISA", "avx512_vnni")
    assert isa.detect() == Isa.AVX2


def test_an_unknown_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_META_ISA", "sse9")
    with pytest.raises(UsageError, match="NUMBA_META_ISA=sse9 is unknown; use one of portable, avx2, avx512_vnni"):
        isa.detect()


@pytest.mark.parametrize(
    ("environment", "level"),
    [
        ({"NUMBA_CPU_NAME": "generic"}, "PORTABLE"),
        ({"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c,-avx512f"}, "AVX2"),
    ],
)
def test_what_numba_is_told_to_compile_for(environment: dict[str, str], level: str) -> None:
    code = "from numba_meta.kernels.cpu.isa import detect; print(detect().name)"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, level), done.stderr
