"""Kernels that begin before the one in front of them has ended (sm_90 on) touch nothing of a step's before they have waited for it."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from kernels.cuda.assembly import kernels_by_module
from kernels.cuda.ptx_paths import accesses

from numba_meta import dtypes
from numba_meta.kernels.cuda import attention_plain, attention_prompt, matmul_several, matmul_vector, norm, norm_rope_store, reduce_norm
from numba_meta.kernels.cuda.device import load_i64, load_v4_nc, start_next_kernel, store_i32, store_i64, wait_for_previous_kernel
from numba_meta.kernels.cuda.kernel import EARLY, CudaKernel, Launch, Ptr, cuda_kernel

F16, BF16, Q4_0, Q6_K = dtypes.F16, dtypes.BF16, dtypes.Q4_0, dtypes.Q6_K

# Those that say themselves where they wait, or read what may not be read through `.nc`; `slow` has all.
SOME = [
    *norm.all_kernels(), *reduce_norm.all_kernels(), matmul_vector.vector_kernel(Q4_0, False, 1), matmul_vector.vector_kernel(F16, True, 8),
    matmul_several.several_kernel(Q6_K, False, 4), attention_plain.plain_chunks(F16, BF16, 128, 64),
    attention_prompt.prompt_rows(BF16, BF16, 128, 128), norm_rope_store.norm_rope_store_kernel(dtypes.Q8_0, False),
]  # fmt: skip


def faults(kernels: Iterable[CudaKernel]) -> list[str]:
    """What kernels do too early, and what they read through `.nc` though a step writes it."""
    found = []
    for kernel in kernels:
        own = accesses(kernel, kernel.ptx(EARLY))
        assert any(access.text.startswith("st") for access in own), f"{kernel.name} writes nothing: its PTX was not understood"
        for access in own:
            if not access.is_constant_load and (access.is_early or ".nc." in access.text):
                found.append(f"{kernel.name}: {access.text} of {sorted(access.pointers)}{', early' if access.is_early else ''}")
    return found


@pytest.mark.parametrize("kernel", SOME, ids=lambda kernel: kernel.name)
def test_nothing_of_a_step_is_touched_before_waiting(kernel: CudaKernel) -> None:
    assert faults([kernel]) == []


@pytest.mark.slow
@pytest.mark.parametrize("module", kernels_by_module())
def test_nothing_of_a_step_is_touched_before_waiting_by_any_kernel(module: str) -> None:
    assert faults(kernel for kernel in kernels_by_module()[module] if kernel not in SOME) == []


def _one(arguments: object, n_rows: int, gpu: object) -> Launch:
    return Launch((1, 1, 1), (1, 1, 1))


@cuda_kernel(launch=_one, max_threads=1)
def reads_early(x: Ptr, y: Ptr, n_rows: Ptr):  # type: ignore[no-untyped-def]
    start_next_kernel()
    value = load_i64(x + 8 * load_i64(n_rows))
    wait_for_previous_kernel()
    store_i64(y, value)


@cuda_kernel(launch=_one, max_threads=1)
def writes_and_ends_early(y: Ptr, n_rows: Ptr):  # type: ignore[no-untyped-def]
    start_next_kernel()
    if load_i64(n_rows) > 3:
        return
    store_i64(y, 1)
    wait_for_previous_kernel()


@cuda_kernel(launch=_one, max_threads=1)
def reads_what_may_be_old(x: Ptr, weight: Ptr, y: Ptr):  # type: ignore[no-untyped-def]
    a, b = load_v4_nc(x), load_v4_nc(weight)
    store_i32(y, a[0] + b[0])


def test_what_is_wrong_is_found() -> None:
    """The readers of PTX see what the tests above are for."""
    (found,) = faults([reads_early])
    assert "ld.global" in found and found.endswith("of ['x'], early")
    ends = faults([writes_and_ends_early])
    assert len(ends) == 2 and any("st.global" in each and "of ['y']" in each for each in ends) and any(": ret " in each for each in ends)
    (found,) = faults([reads_what_may_be_old])
    assert ".nc." in found and found.endswith("of ['x']")
