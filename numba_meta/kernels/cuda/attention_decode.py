"""Attention for single steps on tensor cores: a block takes a chunk of positions for up to 8 query heads of one KV head.

Each warp walks every WARPS-th tile of 16 positions through a place for one tile in shared memory of its own, which asynchronous copies
fill: with the next keys as soon as there are scores, with the next values as soon as these ones are added. No barrier but at both ends.
Scores and weighted values are products of f16 (bf16 for that type) with float32 sums; Q and the weights come in two parts, so that they
are exact to 22 bits (16 in bf16). The warps' results are folded in order at the end.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from numba_meta.dtypes import BF16, F16, Q4_0, Q8_0, DType
from numba_meta.kernels.code_cache import shown_cap
from numba_meta.kernels.cuda.attention_intrinsics import pack_bf16x2, shared_word, transposed
from numba_meta.kernels.cuda.attention_steps import (
    LOG2_E,
    LOWEST,
    TILE_HEADS,
    cap_score,
    fold_factors,
    folded,
    head_tiles,
    record_bytes,
    row_chunks,
    tile_heads,
)
from numba_meta.kernels.cuda.attention_tiles import (
    QUERY_BYTES,
    TILE,
    add_tile,
    can_tile,
    copy_quarter,
    copy_rest,
    query_element,
    score_tile,
    staged_row,
    value_element,
)
from numba_meta.kernels.cuda.device import (
    add,
    async_commit,
    async_wait_1,
    async_wait_all,
    bits_float,
    cuda,
    device_function,
    exp2,
    high_bf16,
    high_f16,
    load_i32,
    load_i64,
    load_v4_f32,
    low_bf16,
    low_f16,
    maximum,
    mul,
    pack_f16,
    shared_address,
    shared_store_f32,
    shared_store_i32,
    shared_store_v4,
    store_f32,
    store_v4_f32,
    types,
)
from numba_meta.kernels.cuda.kernel import Capability, CudaKernel, Float, Gpu, Int, Launch, Ptr, cuda_kernel
from numba_meta.kernels.cuda.lanes import ALL_LANES

WARPS = 6
MOST_THREADS = 224  # as declared: where a kernel needs few registers, for 192 the assembler would spill some to make room for more blocks
SHARED_BYTES = 99 << 10  # that a block may have on every GPU from sm_80 on
RESERVED_BYTES, SHARED_UNIT = 1 << 10, 128  # what every block has besides; shared memory comes in units
HEADER_BYTES = 16  # of a tile in shared memory: which of its rows count


def tile_bytes(k_type: DType, v_type: DType, dim_k: int, dim_v: int) -> int:
    """Bytes of a tile in shared memory."""
    return HEADER_BYTES + TILE * (staged_row(k_type, dim_k).stride + staged_row(v_type, dim_v).stride)


def spreading_bytes(n_blocks: int, gpu: Gpu) -> int:
    """Shared memory with which no multiprocessor gets more than its part of so many blocks.

    Blocks come while the kernel before them ends: they would crowd where it ends first.
    """
    each = -(-n_blocks // gpu.n_multiprocessors)
    whole = gpu.max_shared_bytes + RESERVED_BYTES
    return max(0, min(gpu.max_shared_bytes, whole // (each + 1) - RESERVED_BYTES + SHARED_UNIT))


def can_decode(k_type: DType, v_type: DType, dim_k: int, dim_v: int) -> bool:
    """Whether there are tiles for these rows."""
    return can_tile(k_type, dim_k) and can_tile(v_type, dim_v)


@functools.cache
def split_pair(dtype: DType) -> Any:
    """A device function (x, y): both as a pair of halves (of bfloat16 for that type), and what that leaves as another one."""
    pack, low, high = (pack_bf16x2, low_bf16, high_bf16) if dtype is BF16 else (pack_f16, low_f16, high_f16)

    @device_function
    def split(x, y):  # type: ignore[no-untyped-def]
        pair = pack(x, y)
        return pair, pack(x - low(pair), y - high(pair))

    return split


@device_function
def _over_cells(x):  # type: ignore[no-untyped-def]
    """The largest value of the lanes that hold the same heads."""
    x = maximum(x, cuda.shfl_xor_sync(ALL_LANES, x, 4))
    x = maximum(x, cuda.shfl_xor_sync(ALL_LANES, x, 8))
    return maximum(x, cuda.shfl_xor_sync(ALL_LANES, x, 16))


@device_function
def _sum_over_cells(x):  # type: ignore[no-untyped-def]
    x = add(x, cuda.shfl_xor_sync(ALL_LANES, x, 4))
    x = add(x, cuda.shfl_xor_sync(ALL_LANES, x, 8))
    return add(x, cuda.shfl_xor_sync(ALL_LANES, x, 16))


@functools.cache
def decode_chunks(
    k_type: DType, v_type: DType, dim_k: int, dim_v: int, warps: int, capability: Capability = (8, 0), softcap: float = 0.0
) -> CudaKernel:
    """`attention_chunks` on tensor cores: grid (tile of heads, row, chunk), `warps` warps with a place for a tile each.

    Reads K and V once for all heads of a tile.
    """
    k_row, slot_bytes, record = staged_row(k_type, dim_k), tile_bytes(k_type, v_type, dim_k, dim_v), record_bytes(dim_v)
    parts_of_k, parts_of_v = copy_quarter(k_type, dim_k), copy_quarter(v_type, dim_v)
    ends_of_k, ends_of_v = copy_rest(k_type, dim_k), copy_rest(v_type, dim_v)
    score, add_values, element_of_q, element_of_v = (
        score_tile(k_type, dim_k), add_tile(v_type, dim_v), query_element(k_type), value_element(v_type)
    )  # fmt: skip
    split_q, split_p, cap, capped = split_pair(k_type), split_pair(v_type), cap_score(softcap), softcap > 0
    threads, steps_k, steps_v, n_out = 32 * warps, dim_k // 16, dim_v // 16, dim_v // 4
    most_threads = threads if v_type.is_quantized and dim_v > 128 else max(MOST_THREADS, threads)
    n_queries = -(-32 * steps_k // threads)  # quadruples of Q that a thread converts
    size_q = 4 * n_queries
    values_at, slots_at = HEADER_BYTES + TILE * k_row.stride, steps_k * QUERY_BYTES
    # A warp's results: floats from head to head (1 more than a multiple of 32, and one more for each 32 elements: no two lanes meet).
    head_floats = -(-(dim_v + dim_v // 32) // 32) * 32 + 1
    results, stats = 4 * TILE_HEADS * head_floats, 8 * TILE_HEADS  # bytes of weighted values; of largest scores and weights
    quads = dim_v // 4
    n_shared = max(slots_at + warps * slot_bytes, warps * (results + stats))
    name = f"attention_tiles_{k_type.name}_{v_type.name}_{dim_k}_{dim_v}_{warps}_sm{capability[0]}{capability[1]}{shown_cap(softcap)}"

    def launch(arguments: Any, n_rows: int, gpu: Gpu) -> Launch:
        grid = (head_tiles(arguments), n_rows, arguments["n_chunks"])  # chunks beyond the live ones come last
        return Launch(grid if all(grid) else (0, 0, 0), (threads, 1, 1), max(n_shared, spreading_bytes(math.prod(grid), gpu)))

    @device_function
    def cell_at(table, position, begin, end):  # type: ignore[no-untyped-def]
        cell = types.int32(-1)
        if position >= begin and position < end:
            cell = load_i32(table + 4 * types.int64(position))
        return cell

    @device_function
    def fetch_keys(slot, k, k_stride, cell, lane):  # type: ignore[no-untyped-def]
        rows = cuda.ballot_sync(ALL_LANES, cell >= 0)
        if lane == 0:
            shared_store_i32(slot, rows)
        for i in range(4):
            place = 4 * i + (lane >> 3)
            parts_of_k(slot + HEADER_BYTES, k, k_stride, cuda.shfl_sync(ALL_LANES, cell, place), place)
        ends_of_k(slot + HEADER_BYTES, k, k_stride, cell, lane)
        async_commit()

    @device_function
    def fetch_values(slot, v, v_stride, cell, lane):  # type: ignore[no-untyped-def]
        for i in range(4):
            place = 4 * i + (lane >> 3)
            parts_of_v(slot + values_at, v, v_stride, cuda.shfl_sync(ALL_LANES, cell, place), place)
        ends_of_v(slot + values_at, v, v_stride, cell, lane)
        async_commit()

    @device_function
    def load_queries(queries, q, q_head_stride, place, head_begin, head_end):  # type: ignore[no-untyped-def]
        """A thread's part of Q of 8 heads; zeros for heads that the device does not have."""
        for i in range(n_queries):
            at = threads * i + types.int32(cuda.threadIdx.x)
            head = place + (at >> 2 & 7)
            x0, x1, x2, x3 = np.float32(0.0), np.float32(0.0), np.float32(0.0), np.float32(0.0)
            if at < 32 * steps_k and head >= head_begin and head < head_end:
                x0, x1, x2, x3 = load_v4_f32(q + head * q_head_stride + 4 * element_of_q(at >> 5, at & 3))
            queries[4 * i], queries[4 * i + 1], queries[4 * i + 2], queries[4 * i + 3] = x0, x1, x2, x3

    @device_function
    def store_queries(shared, queries, scale):  # type: ignore[no-untyped-def]
        """Q times scale as fragments B in two parts."""
        for i in range(n_queries):
            at = threads * i + types.int32(cuda.threadIdx.x)
            high_0, low_0 = split_q(mul(queries[4 * i], scale), mul(queries[4 * i + 1], scale))
            high_1, low_1 = split_q(mul(queries[4 * i + 2], scale), mul(queries[4 * i + 3], scale))
            if at < 32 * steps_k:
                shared_store_v4(shared + 16 * at, high_0, high_1, low_0, low_1)

    @cuda_kernel(name=name, launch=launch, max_threads=most_threads, capability=capability, shared_bytes=n_shared)
    def kernel(  # type: ignore[no-untyped-def]
        q: Ptr, q_stride: Int, q_head_stride: Int, k: Ptr, k_stride: Int, k_head_stride: Int, v: Ptr, v_stride: Int, v_head_stride: Int,
        cell_table: Ptr, table_stride: Int, positions: Ptr, sequences: Ptr, window: Int, n_head: Int, first_head: Int, group: Int,
        first_kv: Int, scale: Float, partial: Ptr, n_chunks: Int, n_rows: Ptr,
    ):  # fmt: skip
        row, index = types.int64(cuda.blockIdx.y), types.int32(cuda.blockIdx.z)
        live, sequence = load_i64(n_rows), load_i32(sequences + 4 * row)
        first, stop, size, first_chunk = row_chunks(positions, row, window)
        base = types.int32((first_chunk + index) * size)
        begin, end = max(base, first), min(types.int32(base + size), stop)
        kv, place, head_begin, head_end = tile_heads(types.int32(cuda.blockIdx.x), first_head, n_head, group)
        # One condition, so that what it depends on is loaded at once.
        if (row >= live) | (sequence < 0) | (begin >= end) | (head_begin >= head_end):
            return
        queries = cuda.local.array(size_q, types.float32)
        load_queries(queries, q + row * q_stride, q_head_stride, place, head_begin, head_end)
        lane, warp = types.int32(cuda.threadIdx.x & 31), types.int32(cuda.threadIdx.x >> 5)
        shared = shared_address(cuda.shared.array(0, types.int32))
        slot = shared + slots_at + warp * slot_bytes
        table = cell_table + sequence * table_stride
        k, v = k + (kv - first_kv) * k_head_stride, v + (kv - first_kv) * v_head_stride

        # The warp's first tile: the first one attended that is congruent to the warp.
        low = types.int32((begin - base) >> 4)
        at = types.int32(base + TILE * (low + (warp - low) % warps))
        ahead_at = types.int32(at + (lane & 15))
        cell = cell_at(table, ahead_at, begin, end)
        ahead_at = types.int32(ahead_at + TILE * warps)
        then = cell_at(table, ahead_at, begin, end)
        fetch_keys(slot, k, k_stride, cell, lane)
        fetch_values(slot, v, v_stride, cell, lane)
        store_queries(shared, queries, mul(scale, LOG2_E))
        cuda.syncthreads()

        out = cuda.local.array(n_out, types.float32)
        for i in range(n_out):
            out[i] = np.float32(0.0)
        m0, m1, weight0, weight1 = LOWEST, LOWEST, np.float32(0.0), np.float32(0.0)
        while at < end:
            async_wait_1()  # all but the values
            cuda.syncwarp()
            rows = shared_word(slot) >> (lane >> 2)
            s0, s1, s2, s3 = score(slot + HEADER_BYTES, shared, lane)
            if capped:
                s0, s1, s2, s3 = cap(s0), cap(s1), cap(s2), cap(s3)
            cuda.syncwarp()
            cell = then
            has_more = types.int32(at + TILE * warps) < end
            if has_more:
                fetch_keys(slot, k, k_stride, cell, lane)
            else:
                async_commit()
            ahead_at = types.int32(ahead_at + TILE * warps)
            then = cell_at(table, ahead_at, begin, end)
            has_first, has_second = (rows & 1) != 0, (rows & 256) != 0
            s0, s1 = (s0, s1) if has_first else (LOWEST, LOWEST)
            s2, s3 = (s2, s3) if has_second else (LOWEST, LOWEST)
            largest0 = maximum(m0, _over_cells(maximum(s0, s2)))
            largest1 = maximum(m1, _over_cells(maximum(s1, s3)))
            if cuda.any_sync(ALL_LANES, largest0 != m0 or largest1 != m1):  # else the factors are 1
                by0, by1 = exp2(m0 - largest0), exp2(m1 - largest1)
                weight0, weight1 = mul(weight0, by0), mul(weight1, by1)
                for i in range(steps_v):
                    out[4 * i], out[4 * i + 1] = mul(out[4 * i], by0), mul(out[4 * i + 1], by1)
                    out[4 * i + 2], out[4 * i + 3] = mul(out[4 * i + 2], by0), mul(out[4 * i + 3], by1)
                m0, m1 = largest0, largest1
            p0, p1, p2, p3 = np.float32(0.0), np.float32(0.0), np.float32(0.0), np.float32(0.0)
            if has_first:
                p0, p1 = exp2(s0 - m0), exp2(s1 - m1)
            if has_second:
                p2, p3 = exp2(s2 - m0), exp2(s3 - m1)
            weight0, weight1 = add(weight0, add(p0, p2)), add(weight1, add(p1, p3))
            high_0, low_0 = split_p(p0, p1)
            high_1, low_1 = split_p(p2, p3)
            async_wait_1()  # all but the next keys
            cuda.syncwarp()
            add_values(slot + values_at, lane, transposed(high_0), transposed(high_1), transposed(low_0), transposed(low_1), out)
            cuda.syncwarp()
            if has_more:
                fetch_values(slot, v, v_stride, cell, lane)
            else:
                async_commit()
            at = types.int32(at + TILE * warps)

        weight0, weight1 = _sum_over_cells(weight0), _sum_over_cells(weight1)
        async_wait_all()  # a warp without a tile has asked for zeros in its place and waited for nothing
        cuda.syncthreads()  # the tiles are read: warps leave their results in their places
        g, head = lane >> 2, 2 * (lane & 3)
        own, sums = shared + warp * results, shared + warps * results
        for i in range(steps_v):
            element = element_of_v(i, g)  # even
            at_first = own + 4 * (head * head_floats + element + (element >> 5))
            shared_store_f32(at_first, out[4 * i])
            shared_store_f32(at_first + 4 * head_floats, out[4 * i + 1])
            shared_store_f32(at_first + 4, out[4 * i + 2])
            shared_store_f32(at_first + 4 * head_floats + 4, out[4 * i + 3])
        if g == 0:
            mine = sums + warp * stats + 8 * head
            shared_store_f32(mine, m0)
            shared_store_f32(mine + 4, weight0)
            shared_store_f32(mine + 8, m1)
            shared_store_f32(mine + 12, weight1)
        cuda.syncthreads()
        records = partial + ((row * n_chunks + index) * n_head + place) * record
        i = types.int32(cuda.threadIdx.x + (head_begin - place) * quads)  # 4 elements of a head each
        while i < (head_end - place) * quads:
            head = i // quads
            element = 4 * (i - head * quads)
            source, of_head = shared + 4 * (head * head_floats + element + (element >> 5)), sums + 8 * head
            m, weight = LOWEST, np.float32(0.0)
            x0, x1, x2, x3 = np.float32(0.0), np.float32(0.0), np.float32(0.0), np.float32(0.0)
            for w in range(warps):
                m, by_total, by_part = fold_factors(m, bits_float(shared_word(of_head + w * stats)))
                weight = folded(weight, bits_float(shared_word(of_head + w * stats + 4)), by_total, by_part)
                x0 = folded(x0, bits_float(shared_word(source + w * results)), by_total, by_part)
                x1 = folded(x1, bits_float(shared_word(source + w * results + 4)), by_total, by_part)
                x2 = folded(x2, bits_float(shared_word(source + w * results + 8)), by_total, by_part)
                x3 = folded(x3, bits_float(shared_word(source + w * results + 12)), by_total, by_part)
            target = records + head * record
            store_v4_f32(target + 4 * element, x0, x1, x2, x3)
            if element == 0:
                store_f32(target + 4 * dim_v, m)
                store_f32(target + 4 * dim_v + 4, weight)
            i = types.int32(i + threads)

    return kernel


def decode_variants(k_type: DType, v_type: DType, dim_k: int, dim_v: int, softcap: float = 0.0) -> list[CudaKernel]:
    """The best kernel first; the last one needs no more shared memory than every GPU from sm_80 on has.

    Not all GPUs from sm_90 on have room for the first one: a block of sm_120 has as much as one of sm_86.
    """
    slots = (SHARED_BYTES - dim_k // 16 * QUERY_BYTES) // tile_bytes(k_type, v_type, dim_k, dim_v)
    if slots >= WARPS:
        return [decode_chunks(k_type, v_type, dim_k, dim_v, WARPS, softcap=softcap)]
    large = decode_chunks(k_type, v_type, dim_k, dim_v, WARPS, (9, 0), softcap)
    return [large, decode_chunks(k_type, v_type, dim_k, dim_v, slots, softcap=softcap)]


def all_kernels() -> list[CudaKernel]:
    """Every type and the usual head sizes, once for K and once for V."""
    shapes = [(F16, F16, 64, 64), (F16, F16, 128, 128), (F16, F16, 256, 256), (BF16, BF16, 128, 128), (BF16, BF16, 256, 256)]
    shapes += [(Q8_0, Q8_0, 64, 64), (Q8_0, Q8_0, 128, 128), (Q8_0, Q4_0, 256, 256), (Q4_0, Q4_0, 128, 128), (Q4_0, Q4_0, 256, 256)]
    shapes += [(Q4_0, F16, 192, 64)]
    capped = [(F16, F16, 256, 256), (Q8_0, Q8_0, 128, 128)]
    kernels = [kernel for shape in shapes for kernel in decode_variants(*shape)]
    return kernels + [kernel for shape in capped for kernel in decode_variants(*shape, 50.0)]
