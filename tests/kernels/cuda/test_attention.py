"""Attention kernels without a GPU: chunks and scratch, which kernel a GPU takes, launches, errors, registers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("numba_meta.kernels.cuda.api", reason="numba-cuda is not installed", exc_type=Exception)

from kernels.cuda.assembly import ptxas, resources  # noqa: E402

from numba_meta.dtypes import BF16, F16, F32, Q4_0, Q4_K, Q8_0  # noqa: E402
from numba_meta.errors import ShapeError  # noqa: E402
from numba_meta.kernels.cuda.attention import (  # noqa: E402
    attention_chunks,
    attention_combine,
    attention_combine_quantize,
    attention_rows,
    attention_rows_scratch_bytes,
    attention_scratch_bytes,
    chunks_needed,
)
from numba_meta.kernels.cuda.attention_decode import spreading_bytes  # noqa: E402
from numba_meta.kernels.cuda.attention_steps import CHUNK_STEP, MIN_CHUNK, MOST_CHUNKS, chunk_positions  # noqa: E402
from numba_meta.kernels.cuda.kernel import CudaKernel, Gpu  # noqa: E402
from numba_meta.kernels.cuda.variants import VariantKernel  # noqa: E402

HOPPER, AMPERE, TURING = Gpu((9, 0), 132, 227 << 10), Gpu((8, 6), 68, 99 << 10), Gpu((7, 5), 40, 64 << 10)
A100 = Gpu((8, 0), 108, 163 << 10)
BLACKWELL = Gpu((12, 0), 170, 99 << 10)  # a newer capability than Hopper's, with less shared memory
POSITIONS = st.integers(0, 200_000)


@given(position=POSITIONS, later=POSITIONS, window=st.integers(0, 70_000))
def test_scratch_holds_the_chunks_of_every_row(position: int, later: int, window: int) -> None:
    first = max(0, position - window + 1) if window else 0
    size = chunk_positions(position + 1 - first)
    n_chunks = position // size - first // size + 1
    assert n_chunks <= chunks_needed(position + 1 + later, window) <= MOST_CHUNKS + 1
    assert size % CHUNK_STEP == 0 and size >= MIN_CHUNK
    assert size == MIN_CHUNK or position + 1 - first > MOST_CHUNKS * (size - CHUNK_STEP), "no larger than it must be"


def test_sizes_of_scratch() -> None:
    assert [chunks_needed(n) for n in (1, 128, 129, 2048, 4096, 4097, 100_000)] == [1, 1, 2, 16, 32, 32, 32]
    assert [chunks_needed(4096, window) for window in (1, 128, 129, 4096, 10_000)] == [2, 2, 3, 32, 32]
    assert attention_scratch_bytes(2, 9, 64, 3) == 2 * 9 * 3 * (64 * 4 + 16)
    assert attention_rows_scratch_bytes(128, 128) == 0


def arguments(**changes: int) -> dict[str, Any]:
    return {"n_chunks": 3, "n_head": 9, "first_head": 0, "group": 3, **changes}


@pytest.mark.parametrize("gpu", [HOPPER, AMPERE, TURING, BLACKWELL, A100], ids=lambda g: "sm_{}{}".format(*g.capability))
@pytest.mark.parametrize("make", [attention_chunks, attention_rows])
def test_every_gpu_has_a_kernel_that_fits_it(make: Any, gpu: Gpu) -> None:
    types = (F32, F16, BF16, Q8_0, Q4_0)
    for k_type in types:
        for v_type in types:
            for dims in ((32, 32), (64, 64), (128, 128), (256, 256), (192, 128), (96, 64)):
                kernel = make(k_type, v_type, *dims)
                launch = kernel.launch(arguments(), 5, gpu)  # raises where the capability or the shared memory do not do
                assert all(launch.grid) and launch.block[0] <= kernel.max_threads
                chosen = kernel.for_gpu(gpu)
                assert chosen.capability <= gpu.capability and launch == chosen.launch(arguments(), 5, gpu)
                assert chosen.binary.__func__ is CudaKernel.binary, "it has machine code of its own"


def test_exact_kernels_use_no_tensor_cores() -> None:
    for make in (attention_chunks, attention_rows):
        assert not isinstance(make(F16, F16, 128, 128, exact=True), VariantKernel)
        assert isinstance(make(F16, F16, 128, 128), VariantKernel)
        assert make(F32, F32, 128, 128) is make(F32, F32, 128, 128, exact=True) or make(F32, F32, 128, 128).name == make(
            F32, F32, 128, 128, exact=True
        ).name


@pytest.mark.parametrize(
    ("changes", "tiles"),
    [({}, 3), ({"first_head": 2, "n_head": 2}, 2), ({"group": 16, "n_head": 32}, 4), ({"group": 9, "n_head": 9}, 2), ({"n_head": 1}, 1)],
)
def test_a_block_for_each_chunk_tile_of_heads_and_row(changes: dict[str, int], tiles: int) -> None:
    for kernel in (attention_chunks(F16, F16, 128, 128), attention_chunks(F32, F32, 128, 128)):
        assert kernel.launch(arguments(**changes), 5, HOPPER).grid in ((3, tiles, 5), (tiles, 5, 3))


@given(st.integers(1, 1000), st.sampled_from([HOPPER, AMPERE, A100]))
def test_blocks_spread_over_all_multiprocessors(n_blocks: int, gpu: Gpu) -> None:
    """Shared memory has room for a multiprocessor's part of the blocks and no more. Each block has 1 KiB more than it asks for."""
    shared, part = spreading_bytes(n_blocks, gpu), -(-n_blocks // gpu.n_multiprocessors)
    rounded, whole = -(-shared // 128) * 128 + 1024, gpu.max_shared_bytes + 1024
    assert shared <= gpu.max_shared_bytes and rounded * part <= whole < rounded * (part + 1)


@pytest.mark.parametrize("nothing", [{"n_head": 0}, {}])
def test_nothing_to_do_launches_no_blocks(nothing: dict[str, int]) -> None:
    kernels = [attention_combine(128), attention_combine(128, exact=True), attention_combine_quantize(128)]
    kernels += [make(dtype, dtype, 128, 128) for make in (attention_chunks, attention_rows) for dtype in (F32, F16)]
    for kernel in kernels:
        assert not all(kernel.launch(arguments(**nothing), 5 if nothing else 0, HOPPER).grid)


@pytest.mark.parametrize("make", [attention_chunks, attention_rows])
def test_heads_and_types_that_do_not_fit_are_an_error(make: Any) -> None:
    with pytest.raises(ShapeError, match="heads of 40 elements.*multiple of 32"):
        make(F16, Q8_0, 64, 40)
    with pytest.raises(ShapeError, match="heads of 48 elements.*multiple of 32"):
        attention_combine(48)
    with pytest.raises(ShapeError, match="multiple of 32 up to 256"):
        make(F16, F16, 288, 64)
    with pytest.raises(ShapeError, match="q4_k"):
        make(Q4_K, F16, 256, 64)


@pytest.mark.skipif(ptxas() is None, reason="needs ptxas (package nvidia-cuda-nvcc)")
def test_registers_leave_room_for_several_blocks() -> None:
    """2 blocks of 192 threads on a multiprocessor for single steps, 2 of 128 for prompts."""
    bounds: list[tuple[CudaKernel, int]] = [
        (attention_chunks(F16, F16, 128, 128), 168),
        (attention_chunks(Q8_0, Q8_0, 128, 128), 168),
        (attention_rows(F16, F16, 128, 128), 255),
    ]
    for kernel, most in bounds:
        need = resources(kernel.for_gpu(HOPPER), (9, 0))
        assert need.registers <= most and need.spill_bytes == 0, (kernel, need)
