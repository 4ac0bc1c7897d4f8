"""Causal attention over a paged KV cache, for single steps (`attention_chunks`, `attention_combine`) and for prompts (`attention_rows`).

A row at position p of sequence s attends to the positions max(0, p - window + 1) .. p (window 0: from 0 on) that have a cell in
`cell_table[s]`. Positions are walked in chunks; how many positions a chunk has depends on how many the row attends to, on nothing else. A
chunk gives the largest score m, the sum l of e^(score - m), and the values weighted by e^(score - m); chunks are added up in an order of
their indices. So the bits of a row do not depend on the rows and heads beside it, on the capacity of a recording, or on where cells lie
(those of a prompt on tensor cores may). Cells that no row attends to are never multiplied by anything. With a `softcap` a score is
softcap * tanh(score / softcap).

Parameters are those of the CPU's kernels: `q` float32, a row (token) every `q_stride` bytes, a head every `q_head_stride`, all of them
multiples of 16; `k`, `v`: cells every `k_stride`, `v_stride` bytes, KV heads every `k_head_stride`, `v_head_stride`; `cell_table` int32
`[sequence][position]`, a sequence every `table_stride` bytes, -1: no cell; `positions`, `sequences` int32 `[row]`; `n_head` query heads, of
which head h is head first_head + h of the model and reads KV head (first_head + h) // group - first_kv of the cache; `sinks` float32
`[n_head]` (0: none), scores that take part in a row's sum of weights and have no value.
"""

from __future__ import annotations

import functools

from numba_meta.dtypes import F32, DType
from numba_meta.kernels.cuda import attention_combine as combining
from numba_meta.kernels.cuda.attention_decode import can_decode, decode_variants
from numba_meta.kernels.cuda.attention_in_order import combine_in_order
from numba_meta.kernels.cuda.attention_io import check_cache_row
from numba_meta.kernels.cuda.attention_plain import plain_chunks, plain_rows
from numba_meta.kernels.cuda.attention_prompt import can_prompt, prompt_rows
from numba_meta.kernels.cuda.attention_steps import MIN_CHUNK, MOST_CHUNKS, record_bytes
from numba_meta.kernels.cuda.kernel import CudaKernel
from numba_meta.kernels.cuda.variants import VariantKernel

__all__ = [
    "attention_chunks", "attention_combine", "attention_combine_quantize", "attention_rows", "attention_rows_scratch_bytes",
    "attention_scratch_bytes", "chunks_needed",
]  # fmt: skip


def chunks_needed(n_positions: int, window: int = 0) -> int:
    """Chunks that a row at a position below n_positions may touch: the `n_chunks` of its scratch."""
    if 0 < window < n_positions:  # begins anywhere in a chunk
        return min(-(-window // MIN_CHUNK), MOST_CHUNKS) + 1
    return min(-(-n_positions // MIN_CHUNK), MOST_CHUNKS)


def attention_scratch_bytes(max_rows: int, n_head: int, head_dim_v: int, n_chunks: int) -> int:
    """Bytes of `partial` for `attention_chunks`: rows x chunks x heads."""
    return max_rows * n_chunks * n_head * record_bytes(head_dim_v)


def attention_rows_scratch_bytes(head_dim_k: int, head_dim_v: int) -> int:
    """Bytes of scratch for `attention_rows`: none."""
    return 0


@functools.cache
def attention_chunks(
    k_type: DType, v_type: DType, head_dim_k: int, head_dim_v: int, exact: bool = False, softcap: float = 0.0
) -> CudaKernel | VariantKernel:
    """The kernel of single steps: every (row, chunk, head) gives its record to `partial` `[row][chunk from the row's first][head]`.

    `n_chunks` is the extent of `partial`: at least the chunks that any row touches. Caches in f32 are read in float32 throughout; others by
    tensor cores, unless `exact`, which gives the bits of the exact `attention_rows`.
    """
    dims = (head_dim_k, head_dim_v)
    check_cache_row(k_type, head_dim_k)
    check_cache_row(v_type, head_dim_v)
    plain = plain_chunks(k_type, v_type, *dims, softcap)
    if exact or not can_decode(k_type, v_type, *dims):
        return plain
    return VariantKernel(plain.name, [*decode_variants(k_type, v_type, *dims, softcap), plain])


def attention_combine(head_dim_v: int, exact: bool = False) -> CudaKernel:
    """The kernel that makes y[row][head] of a row's records: weighted values / sum of weights, float32, zeros where there is nothing.

    y: a row every `y_stride` bytes, a head every `y_head_stride`.
    """
    check_cache_row(F32, head_dim_v)
    return combine_in_order(head_dim_v) if exact else combining.attention_combine(head_dim_v)


def attention_combine_quantize(head_dim_v: int) -> CudaKernel:
    """`attention_combine`, then `quantize_rows`: y are `q8` rows of all heads, whose results lie one behind the other."""
    return combining.attention_combine(head_dim_v, quantized=True)


@functools.cache
def attention_rows(
    k_type: DType, v_type: DType, head_dim_k: int, head_dim_v: int, exact: bool = False, softcap: float = 0.0
) -> CudaKernel | VariantKernel:
    """The kernel of prompts: y[row][head] (float32, strides in bytes) for any rows; quick where neighbouring rows are of one sequence.

    `scratch` is not used. Caches in f32 are read in float32 throughout, and others if `exact`; the bits are those of the exact
    `attention_chunks` with the exact `attention_combine`. Others are read by tensor cores as f16.
    """
    dims = (head_dim_k, head_dim_v)
    check_cache_row(k_type, head_dim_k)
    check_cache_row(v_type, head_dim_v)
    plain = plain_rows(k_type, v_type, *dims, softcap)
    if exact or not can_prompt(k_type, v_type, *dims):
        return plain
    return VariantKernel(plain.name, [prompt_rows(k_type, v_type, *dims, softcap=softcap), plain])
