"""The parts of attention that single steps and prompts share: weights of a chunk, its fold into the total, lists of cells."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from numba_meta.dtypes import DType
from numba_meta.kernels.cpu.attention_io import n_vectors
from numba_meta.kernels.cpu.attention_tiles import MAX_SHARED_HEADS, add_values, dot_keys, prefetch_row, sum_lanes
from numba_meta.kernels.cpu.simd import (
    fma,
    load_f32,
    load_i32,
    store_f32,
    store_i32,
    vf_load,
    vf_max,
    vf_reduce_max,
    vf_splat,
    vf_store,
    vf_sum,
    vf_zero,
    vi_splat,
    vi_store,
)
from numba_meta.kernels.cpu.simd_math import device_function, exp_f32, stack_buffer, vf_exp, vf_store_part, vf_tanh, vi_iota

CHUNK = 256  # positions; chunks begin at its multiples
HEADS_AT_ONCE = 32  # query heads whose scores of a chunk are kept
SLOTS_AT_ONCE = 32  # slots whose values are added for all heads before the next ones
IOTA_BYTES = 4 * CHUNK + 64


@device_function
def first_attended(position, window):  # type: ignore[no-untyped-def]
    """The lowest position that a row attends to."""
    return max(0, position - window + 1) if window > 0 else 0


@device_function
def fill_iota(buffer):  # type: ignore[no-untyped-def]
    """0 .. 256 as int32 (and more: IOTA_BYTES are written)."""
    lanes = vi_iota()
    for i in range(CHUNK // 16 + 1):
        vi_store(buffer + 64 * i, lanes)
        lanes = lanes + vi_splat(np.int32(16))


@device_function
def any_hole(table, begin, end):  # type: ignore[no-untyped-def]
    """Whether a slot of begin..end has no cell."""
    lowest = np.int32(0)
    for slot in range(begin, end):
        lowest = min(lowest, load_i32(table + 4 * slot))
    return lowest < 0


@device_function
def list_cells(table, begin, end, cells, slots):  # type: ignore[no-untyped-def]
    """Lists the slots of begin..end that have a cell, and their cells; gives how many."""
    n = 0
    for slot in range(begin, end):
        cell = load_i32(table + 4 * slot)
        if cell >= 0:
            store_i32(cells + 4 * n, cell)
            store_i32(slots + 4 * n, np.int32(slot))
            n += 1
    return n


@device_function
def hide_scores(scores, table, begin, end, holes):  # type: ignore[no-untyped-def]
    """-inf to the scores outside begin..end, in the vectors that these slots touch, and to slots without a cell."""
    hidden = np.float32(-np.inf)
    for slot in range(begin // 16 * 16, begin):
        store_f32(scores + 4 * slot, hidden)
    for slot in range(end, (end + 15) // 16 * 16):
        store_f32(scores + 4 * slot, hidden)
    if holes:
        for slot in range(begin, end):
            if load_i32(table + 4 * slot) < 0:
                store_f32(scores + 4 * slot, hidden)


@functools.cache
def cap_scores(softcap: float) -> Any:
    """A device function (scores, begin, end): scores of these slots become softcap * tanh(score / softcap); 0: they stay."""
    capped = softcap > 0

    @device_function
    def cap(scores, begin, end):  # type: ignore[no-untyped-def]
        if capped:
            most = vf_splat(np.float32(softcap))
            for i in range(begin // 16, (end + 15) // 16):
                vf_store(scores + 64 * i, most * vf_tanh(vf_load(scores + 64 * i) / most))

    return cap


@device_function
def weigh(scores, begin, end):  # type: ignore[no-untyped-def]
    """Scores become e^(score - m) in place; gives their maximum m and sum: lanes by position, then halves. Some slot must be attended."""
    low, high = begin // 16, (end + 15) // 16
    largest = vf_splat(np.float32(-np.inf))
    for i in range(low, high):
        largest = vf_max(largest, vf_load(scores + 64 * i))
    m = vf_reduce_max(largest)
    top, total = vf_splat(m), vf_zero()
    for i in range(low, high):
        weight = vf_exp(vf_load(scores + 64 * i) - top)
        vf_store(scores + 64 * i, weight)
        total = total + weight
    return m, vf_sum(total)


@device_function
def fold(vectors, part, part_m, part_weight, total, m, weight):  # type: ignore[no-untyped-def]
    """Adds a chunk's weighted values and weight to the total, both brought to the larger maximum; gives the new maximum and weight."""
    if part_weight == np.float32(0.0):  # nothing attended
        return m, weight
    if weight == np.float32(0.0):
        for i in range(vectors):
            vf_store(total + 64 * i, vf_load(part + 64 * i))
        return part_m, part_weight
    largest = max(m, part_m)
    old, new = exp_f32(m - largest), exp_f32(part_m - largest)
    by_old, by_new = vf_splat(old), vf_splat(new)
    for i in range(vectors):
        vf_store(total + 64 * i, fma(vf_load(part + 64 * i), by_new, vf_load(total + 64 * i) * by_old))
    return largest, fma(part_weight, new, weight * old)


@device_function
def with_sink(weight, m, sinks, head):  # type: ignore[no-untyped-def]
    """A row's sum of weights with that of the head's sink, which has no value; 0 stays where nothing was attended to."""
    if sinks == 0 or weight == np.float32(0.0):
        return weight
    return weight + exp_f32(load_f32(sinks + 4 * head) - m)


@functools.cache
def write_result(dim: int) -> Any:
    """A device function (total, weight, y): y = total / weight, or zeros where the weight is 0; `dim` float32."""
    vectors, rest = dim // 16, dim % 16

    @device_function
    def write(total, weight, y):  # type: ignore[no-untyped-def]
        divisor = vf_splat(weight if weight != np.float32(0.0) else np.float32(1.0))
        for i in range(vectors):
            vf_store(y + 64 * i, vf_load(total + 64 * i) / divisor)
        if rest > 0:
            vf_store_part(y + 64 * vectors, vf_load(total + 64 * vectors) / divisor, rest)

    return write


_sums_buffer = stack_buffer(1024 * MAX_SHARED_HEADS)
_scores_buffer = stack_buffer(1024 * HEADS_AT_ONCE)
_cells_buffer, _slots_buffer = stack_buffer(4 * CHUNK), stack_buffer(4 * CHUNK)


@functools.cache
def chunk_heads(k_type: DType, v_type: DType, dim_k: int, dim_v: int, softcap: float) -> Any:
    """A device function: one row's heads head_begin..head_end (at most HEADS_AT_ONCE) over the slots begin..end of a chunk.

    q, records: of the row's head 0; k, v: of the cache's KV head 0. Cells are walked once, all KV heads of some cells together, so that
    memory is read in one stream; query heads of a KV head share each load.
    """
    dot_1, dot_2, dot_3, dot_4 = (dot_keys(k_type, dim_k, n) for n in range(1, MAX_SHARED_HEADS + 1))
    add_1, add_2, add_3, add_4 = (add_values(v_type, dim_v, n) for n in range(1, MAX_SHARED_HEADS + 1))
    cap = cap_scores(softcap)
    fetch_key, fetch_value = prefetch_row(k_type.row_bytes(dim_k)), prefetch_row(v_type.row_bytes(dim_v))
    vectors = n_vectors(dim_v)
    record = 64 * vectors + 64

    @device_function
    def score_block(n, q, q_head_stride, k, k_stride, table, begin, end, last, sums, scores, by):  # type: ignore[no-untyped-def]
        """Scores of n heads for the slots begin..end, which lie in one block of 16; asks for the same heads of the next block."""
        for slot in range(begin, end):
            cell = load_i32(table + 4 * slot)
            fetch_key(k + load_i32(table + 4 * min(slot + 16, last)) * k_stride)
            if cell >= 0:
                key, place = k + cell * k_stride, sums + 64 * (slot % 16)
                if n == 1:
                    dot_1(q, q_head_stride, key, place)
                elif n == 2:
                    dot_2(q, q_head_stride, key, place)
                elif n == 3:
                    dot_3(q, q_head_stride, key, place)
                else:
                    dot_4(q, q_head_stride, key, place)
        for head in range(n):
            vf_store(scores + 1024 * head, sum_lanes(sums + 1024 * head) * by)

    @device_function
    def heads(  # type: ignore[no-untyped-def]
        head_begin, head_end, first_head, group, first_kv, q, q_head_stride, k, k_stride, k_head_stride, v, v_stride, v_head_stride, table,
        begin, end, scale, records, iota,
    ):  # fmt: skip
        sums, scores = _sums_buffer(), _scores_buffer()
        by = vf_splat(scale)
        kv_begin = (first_head + head_begin) // group
        for block in range(begin // 16, (end + 15) // 16):
            head, kv = head_begin, kv_begin
            while head < head_end:
                last_head = min(head_end, (kv + 1) * group - first_head)
                n = min(last_head - head, MAX_SHARED_HEADS)
                score_block(
                    n, q + head * q_head_stride, q_head_stride, k + (kv - first_kv) * k_head_stride, k_stride, table,
                    max(begin, 16 * block), min(end, 16 * block + 16), end - 1, sums, scores + 1024 * (head - head_begin) + 64 * block, by,
                )  # fmt: skip
                head += n
                if head == last_head:
                    kv += 1
        cells, slots, first, last = table, iota, begin, end
        holes = any_hole(table, begin, end)
        if holes:
            cells, slots = _cells_buffer(), _slots_buffer()
            first, last = 0, list_cells(table, begin, end, cells, slots)
        for head in range(head_begin, head_end):
            m, weight = np.float32(-np.inf), np.float32(0.0)
            if first < last:
                own = scores + 1024 * (head - head_begin)
                cap(own, begin, end)
                hide_scores(own, table, begin, end, holes)
                m, weight = weigh(own, begin, end)
            out = records + head * record
            for i in range(vectors):
                vf_store(out + 64 * i, vf_zero())
            store_f32(out + 64 * vectors, m)
            store_f32(out + 64 * vectors + 4, weight)
        for low in range(first, last, SLOTS_AT_ONCE):
            high = min(last, low + SLOTS_AT_ONCE)
            head, kv = head_begin, kv_begin
            while head < head_end:
                last_head = min(head_end, (kv + 1) * group - first_head)
                n = min(last_head - head, MAX_SHARED_HEADS)
                values, own, out = v + (kv - first_kv) * v_head_stride, scores + 1024 * (head - head_begin), records + head * record
                for slot in range(high, min(last, high + SLOTS_AT_ONCE)):
                    fetch_value(values + load_i32(cells + 4 * slot) * v_stride)
                if n == 1:
                    add_1(cells, slots, low, high, values, v_stride, own, 1024, out, record)
                elif n == 2:
                    add_2(cells, slots, low, high, values, v_stride, own, 1024, out, record)
                elif n == 3:
                    add_3(cells, slots, low, high, values, v_stride, own, 1024, out, record)
                else:
                    add_4(cells, slots, low, high, values, v_stride, own, 1024, out, record)
                head += n
                if head == last_head:
                    kv += 1

    return heads
