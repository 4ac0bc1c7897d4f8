"""Which instructions the CPU kernels may use.

Read at run time from what Numba compiles for (`NUMBA_CPU_NAME` and `NUMBA_CPU_FEATURES` included). `NUMBA_META_ISA` chooses a
lower level than the machine has, to compare or to test: `avx2` or `portable`.
"""

from __future__ import annotations

import functools
import os
from enum import IntEnum

from numba_meta.errors import UsageError


class Isa(IntEnum):
    """Levels of integer dot products, each including the ones below."""

    PORTABLE = 0
    AVX2 = 1
    AVX512_VNNI = 2


@functools.cache
def target_features() -> frozenset[str]:
    """The features that Numba's code generator is told to use, by LLVM's names."""
    from numba.core.registry import cpu_target

    features = cpu_target.target_context.codegen()._tm_features
    return frozenset(part[1:] for part in features.split(",") if part.startswith("+"))


@functools.cache
def detect() -> Isa:
    """The best level that this machine has, or the lower one that `NUMBA_META_ISA` asks for."""
    features = target_features()
    best = Isa.PORTABLE
    if {"avx2", "fma", "f16c"} <= features:
        best = Isa.AVX2
        if {"avx512f", "avx512bw", "avx512vl", "avx512vnni"} <= features:
            best = Isa.AVX512_VNNI
    wanted = os.environ.get("NUMBA_META_ISA", "").strip().upper().replace("-", "_")
    if not wanted:
        return best
    if wanted not in Isa.__members__:
        names = ", ".join(name.lower() for name in Isa.__members__)
        raise UsageError(f"NUMBA_META_ISA={wanted.lower()} is unknown; use one of {names}")
    return min(best, Isa[wanted])
