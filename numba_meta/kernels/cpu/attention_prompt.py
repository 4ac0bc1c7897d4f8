"""Attention for prompts: blocks of rows over one KV head, K and V of a chunk converted once for all of them."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from numba_meta.dtypes import F32, DType
from numba_meta.kernels.code_cache import shown_cap
from numba_meta.kernels.cpu.attention_io import check_cache_row, n_vectors
from numba_meta.kernels.cpu.attention_steps import (
    CHUNK,
    IOTA_BYTES,
    any_hole,
    cap_scores,
    fill_iota,
    first_attended,
    fold,
    hide_scores,
    weigh,
    with_sink,
    write_result,
)
from numba_meta.kernels.cpu.attention_tiles import add_values, convert_row, score_tile, tile_pairs, transpose_keys
from numba_meta.kernels.cpu.kernel import CpuKernel, Float, Int, Ptr, cpu_kernel
from numba_meta.kernels.cpu.simd import load_f32, load_i32, load_i64, store_f32, store_i32, store_i64, vf_store, vf_zero
from numba_meta.kernels.cpu.simd_math import device_function, stack_buffer

MAX_PAIRS = 128  # (row, head) pairs of a block
PAIR_BYTES = 32  # query address, first and last attended position as int64; m and weight as float32

_iota_buffer, _prefix_buffer = stack_buffer(IOTA_BYTES), stack_buffer(IOTA_BYTES)
_cells_buffer, _slots_buffer, _addresses_buffer = stack_buffer(4 * CHUNK), stack_buffer(4 * CHUNK), stack_buffer(8 * 16)
_begins_buffer, _ends_buffer, _sums_buffer, _scores_buffer = stack_buffer(32), stack_buffer(32), stack_buffer(32), stack_buffer(1024 * 4)


def attention_rows_scratch_bytes(head_dim_k: int, head_dim_v: int) -> int:
    """Bytes of scratch for each thread of `attention_rows`: a chunk of K and V in float32, a block's results, a row of zeros."""
    keys, values = 64 * n_vectors(head_dim_k) * CHUNK, 64 * n_vectors(head_dim_v) * CHUNK
    results = (MAX_PAIRS + tile_pairs()) * (64 * n_vectors(head_dim_v) + PAIR_BYTES)
    return keys + values + results + tile_pairs() * 64 * n_vectors(head_dim_v) + 64 * n_vectors(head_dim_k)


@functools.cache
def _load_chunk(k_type: DType, v_type: DType, dim_k: int, dim_v: int) -> Any:
    """A device function: K of the slots begin..end transposed by 16 (zeros for slots without a cell), V as rows by slot."""
    transpose, convert = transpose_keys(k_type, dim_k), convert_row(v_type, dim_v)
    block_bytes, row_bytes = 64 * dim_k, 64 * n_vectors(dim_v)
    convert_values = v_type is not F32

    @device_function
    def load(k, k_stride, v, v_stride, table, begin, end, keys, values, zeros):  # type: ignore[no-untyped-def]
        addresses = _addresses_buffer()
        for block in range(begin // 16, (end + 15) // 16):
            for slot in range(16 * block, 16 * block + 16):
                address = zeros
                if slot >= begin and slot < end:
                    cell = load_i32(table + 4 * slot)
                    if cell >= 0:
                        address = k + cell * k_stride
                store_i64(addresses + 8 * (slot - 16 * block), address)
            transpose(addresses, keys + block * block_bytes)
        if convert_values:
            for slot in range(begin, end):
                cell = load_i32(table + 4 * slot)
                if cell >= 0:
                    convert(v + cell * v_stride, values + slot * row_bytes)

    return load


@device_function
def _list_cells(table, begin, end, by_slot, cells, slots, prefix):  # type: ignore[no-untyped-def]
    """Lists the slots of begin..end that have a cell, and what to read for them; prefix[s]: how many are listed before slot s."""
    n = 0
    for slot in range(begin, end):
        store_i32(prefix + 4 * slot, np.int32(n))
        cell = load_i32(table + 4 * slot)
        if cell >= 0:
            store_i32(cells + 4 * n, np.int32(slot) if by_slot else cell)
            store_i32(slots + 4 * n, np.int32(slot))
            n += 1
    store_i32(prefix + 4 * end, np.int32(n))


@functools.cache
def _tile(dim_k: int, dim_v: int, softcap: float) -> Any:
    """A device function: one chunk for a tile of pairs; folds what it gives into their totals.

    begins, ends: each pair's slots; queries: their addresses; sums: their m and weight (float32 each). Values that all pairs of the tile
    attend to are read once for all, those before and behind for each pair alone: in order of position for each.
    """
    n = tile_pairs()
    score, add_tile, add_one = score_tile(dim_k, n), add_values(F32, dim_v, n), add_values(F32, dim_v, 1)
    vectors, block_bytes = n_vectors(dim_v), 64 * dim_k
    row_bytes, cap = 64 * vectors, cap_scores(softcap)

    @device_function
    def tile(queries, begins, ends, keys, values, value_stride, table, cells, slots, prefix, holes, scale, parts, totals, sums):  # type: ignore[no-untyped-def]
        scores, part_sums = _scores_buffer(), _sums_buffer()
        low, high, common_low, common_high = CHUNK, 0, 0, CHUNK
        for r in range(n):
            begin, end = load_i64(begins + 8 * r), load_i64(ends + 8 * r)
            if begin < end:
                low, high = min(low, begin), max(high, end)
                common_low = max(common_low, np.int64(load_i32(prefix + 4 * begin)))
                common_high = min(common_high, np.int64(load_i32(prefix + 4 * end)))
            else:
                common_high = 0
        for block in range(low // 16, (high + 15) // 16):
            score(queries, keys + block * block_bytes, scores + 64 * block, 1024, scale)
        for r in range(n):
            begin, end = load_i64(begins + 8 * r), load_i64(ends + 8 * r)
            m, weight, part = np.float32(-np.inf), np.float32(0.0), parts + r * row_bytes
            for i in range(vectors):
                vf_store(part + 64 * i, vf_zero())
            if begin < end:
                first, last = np.int64(load_i32(prefix + 4 * begin)), np.int64(load_i32(prefix + 4 * end))
                if first < last:
                    cap(scores + 1024 * r, begin, end)
                    hide_scores(scores + 1024 * r, table, begin, end, holes)
                    m, weight = weigh(scores + 1024 * r, begin, end)
                    stop = common_low if common_low < common_high else last
                    add_one(cells, slots, first, stop, values, value_stride, scores + 1024 * r, 1024, part, row_bytes)
            store_f32(part_sums + 8 * r, m)
            store_f32(part_sums + 8 * r + 4, weight)
        if common_low < common_high:
            add_tile(cells, slots, common_low, common_high, values, value_stride, scores, 1024, parts, row_bytes)
            for r in range(n):
                last = np.int64(load_i32(prefix + 4 * load_i64(ends + 8 * r)))
                add_one(cells, slots, common_high, last, values, value_stride, scores + 1024 * r, 1024, parts + r * row_bytes, row_bytes)
        for r in range(n):
            own, part_own = sums + 8 * r, part_sums + 8 * r
            m, weight = fold(
                vectors, parts + r * row_bytes, load_f32(part_own), load_f32(part_own + 4), totals + r * row_bytes, load_f32(own),
                load_f32(own + 4),
            )  # fmt: skip
            store_f32(own, m)
            store_f32(own + 4, weight)

    return tile


def attention_rows(
    k_type: DType, v_type: DType, head_dim_k: int, head_dim_v: int, exact: bool = False, softcap: float = 0.0
) -> CpuKernel:
    """The kernel of prompts: y[row][head] (float32, strides in bytes) for any rows; quick where neighbouring rows are of one sequence.

    `scratch` holds `scratch_bytes` for each thread (`attention_rows_scratch_bytes`). An item of work is a block of rows with the heads of
    one KV head; blocks get smaller where there are many threads. Gives the bits of `attention_chunks` and `attention_combine`, whether
    `exact` or not.
    """
    return _rows_kernel(k_type, v_type, head_dim_k, head_dim_v, softcap)


@functools.cache
def _rows_kernel(k_type: DType, v_type: DType, head_dim_k: int, head_dim_v: int, softcap: float) -> CpuKernel:
    check_cache_row(k_type, head_dim_k)
    check_cache_row(v_type, head_dim_v)
    load_chunk, write = _load_chunk(k_type, v_type, head_dim_k, head_dim_v), write_result(head_dim_v)
    tile = _tile(head_dim_k, head_dim_v, softcap)
    n_tile, row_bytes, by_slot = tile_pairs(), 64 * n_vectors(head_dim_v), v_type is not F32
    keys_bytes, values_bytes, zero_bytes = 64 * n_vectors(head_dim_k) * CHUNK, row_bytes * CHUNK, 64 * n_vectors(head_dim_k)
    most = MAX_PAIRS + n_tile

    @device_function
    def block(  # type: ignore[no-untyped-def]
        q, q_stride, q_head_stride, n_heads, k, k_stride, v, v_stride, table, positions, n_block, window, scale, sinks, first_sink, y,
        y_stride, y_head_stride, memory, iota,
    ):  # fmt: skip
        """Rows of one sequence over the heads of one KV head; addresses but `sinks` are those of the first row and head."""
        keys, values = memory, memory + keys_bytes
        zeros = values + values_bytes
        parts = zeros + zero_bytes
        totals = parts + n_tile * row_bytes
        queries = totals + most * row_bytes
        firsts, ends_all = queries + 8 * most, queries + 16 * most
        sums = queries + 24 * most
        cell_list, slot_list, prefix_list = _cells_buffer(), _slots_buffer(), _prefix_buffer()
        begins, ends = _begins_buffer(), _ends_buffer()
        pairs = n_block * n_heads
        padded = (pairs + n_tile - 1) // n_tile * n_tile
        lowest, highest = 1 << 40, 0
        for pair in range(padded):
            row = min(pair, pairs - 1) // n_heads
            head = min(pair, pairs - 1) - row * n_heads
            position = np.int64(load_i32(positions + 4 * row))
            first = first_attended(position, window)
            store_i64(queries + 8 * pair, q + row * q_stride + head * q_head_stride)
            store_i64(firsts + 8 * pair, first)
            store_i64(ends_all + 8 * pair, position + 1)
            store_f32(sums + 8 * pair, np.float32(-np.inf))
            store_f32(sums + 8 * pair + 4, np.float32(0.0))
            if first <= position:
                lowest, highest = min(lowest, first), max(highest, position + 1)
            for i in range(row_bytes // 64):
                vf_store(totals + pair * row_bytes + 64 * i, vf_zero())
        for chunk in range(lowest // CHUNK, (highest + CHUNK - 1) // CHUNK):
            base = chunk * CHUNK
            begin, end = max(0, lowest - base), min(CHUNK, highest - base)
            here = table + 4 * base
            load_chunk(k, k_stride, v, v_stride, here, begin, end, keys, values, zeros)
            holes = any_hole(here, begin, end)
            cells, slots, prefix = iota if by_slot else here, iota, iota
            if holes:
                _list_cells(here, begin, end, by_slot, cell_list, slot_list, prefix_list)
                cells, slots, prefix = cell_list, slot_list, prefix_list
            for pair in range(0, padded, n_tile):
                for r in range(n_tile):
                    store_i64(begins + 8 * r, max(begin, load_i64(firsts + 8 * (pair + r)) - base))
                    store_i64(ends + 8 * r, min(end, load_i64(ends_all + 8 * (pair + r)) - base))
                tile(
                    queries + 8 * pair, begins, ends, keys, values if by_slot else v, row_bytes if by_slot else v_stride, here, cells,
                    slots, prefix, holes, scale, parts, totals + pair * row_bytes, sums + 8 * pair,
                )  # fmt: skip
        for pair in range(pairs):
            row = pair // n_heads
            head = pair - row * n_heads
            weight = with_sink(load_f32(sums + 8 * pair + 4), load_f32(sums + 8 * pair), sinks, first_sink + head)
            write(totals + pair * row_bytes, weight, y + row * y_stride + head * y_head_stride)

    @cpu_kernel(name=f"attention_rows_{k_type.name}_{v_type.name}_{head_dim_k}_{head_dim_v}{shown_cap(softcap)}")
    def kernel(  # type: ignore[no-untyped-def]
        thread, n_threads, q: Ptr, q_stride: Int, q_head_stride: Int, k: Ptr, k_stride: Int, k_head_stride: Int,
        v: Ptr, v_stride: Int, v_head_stride: Int, cell_table: Ptr, table_stride: Int, positions: Ptr, sequences: Ptr,
        window: Int, n_head: Int, first_head: Int, group: Int, first_kv: Int, scale: Float, sinks: Ptr,
        y: Ptr, y_stride: Int, y_head_stride: Int, scratch: Ptr, scratch_bytes: Int, n_rows: Ptr,
    ):  # fmt: skip
        rows = load_i64(n_rows)
        memory = scratch + thread * scratch_bytes
        for i in range(zero_bytes // 64):
            vf_store(memory + keys_bytes + values_bytes + 64 * i, vf_zero())
        iota = _iota_buffer()
        fill_iota(iota)
        kv_begin, kv_end = first_head // group, (first_head + n_head - 1) // group + 1
        heads_shared = max(1, min(group, n_head, MAX_PAIRS))
        n_block = max(1, min(MAX_PAIRS // heads_shared, rows * (kv_end - kv_begin) // (4 * n_threads)))
        n_blocks = (rows + n_block - 1) // n_block
        for item in range(n_blocks * (kv_end - kv_begin)):
            turn, place = item // n_threads, item % n_threads  # to and fro, the longest first: equal work
            if thread != (place if turn % 2 == 0 else n_threads - 1 - place):
                continue
            row = (n_blocks - 1 - item // (kv_end - kv_begin)) * n_block
            kv = kv_begin + item % (kv_end - kv_begin)
            last_row = min(rows, row + n_block)
            head_begin, head_end = max(0, kv * group - first_head), min(n_head, (kv + 1) * group - first_head)
            while row < last_row:
                sequence, stop = load_i32(sequences + 4 * row), row + 1
                while stop < last_row and load_i32(sequences + 4 * stop) == sequence:
                    stop += 1
                head = head_begin
                while head < head_end:
                    n_heads = min(head_end - head, heads_shared)
                    block(
                        q + row * q_stride + head * q_head_stride, q_stride, q_head_stride, n_heads,
                        k + (kv - first_kv) * k_head_stride, k_stride, v + (kv - first_kv) * v_head_stride, v_stride,
                        cell_table + sequence * table_stride, positions + 4 * row, stop - row, window, scale, sinks, head,
                        y + row * y_stride + head * y_head_stride, y_stride, y_head_stride, memory, iota,
                    )  # fmt: skip
                    head += n_heads
                row = stop

    return kernel  # type: ignore[no-any-return]
