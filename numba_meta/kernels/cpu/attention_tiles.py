"""The inner loops of attention as intrinsics, made per cache type, head size and number of query heads (or rows) that share a load.

Two ways to the same bits. A score is the sum over 16 lanes of sum_i q[16 i + lane] k[16 i + lane], the lanes added in halves. With one or a
few queries, keys are read as they lie (`dot_keys`, then `sum_lanes` of 16 keys at once). For prompts, 16 keys are transposed once
(`transpose_keys`), a vector holds one element of 16 keys, and the same sum runs down the elements (`score_tile`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from numba_meta.dtypes import F32, DType
from numba_meta.kernels.cpu import isa
from numba_meta.kernels.cpu.attention_io import load_lanes_ir, n_vectors, offset_ir
from numba_meta.kernels.cpu.simd import LANES, VF, declare_ir, pointer_ir, splat_ir
from numba_meta.kernels.cpu.simd_math import I8, I32, I64, fma_ir, lanes_ir

MAX_SHARED_HEADS = 4  # query heads that share a load of K or V


def wide_registers() -> bool:
    """Whether there are 32 registers of 16 lanes."""
    return "avx512f" in isa.target_features()


def tile_pairs() -> int:
    """(row, head) pairs of a prompt that share a load of K or V."""
    return 4 if wide_registers() else 2


def _broadcast(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return splat_ir(b, b.load(pointer_ir(b, address, VF.llvm.element), align=4))


def _store(b: ir.IRBuilder, value: ir.Value, address: ir.Value) -> None:
    b.store(value, pointer_ir(b, address, value.type), align=4)


def _strided(b: ir.IRBuilder, base: ir.Value, stride: ir.Value, n: int) -> list[ir.Value]:
    addresses = [base]
    for _ in range(n - 1):
        addresses.append(b.add(addresses[-1], stride))
    return addresses


def _prefetch(b: ir.IRBuilder, address: ir.Value, n_bytes: int) -> None:
    """IR: asks for the lines of n_bytes to be in the second-level cache soon. Any address is allowed."""
    for line in range(0, n_bytes, 64):
        pointer = pointer_ir(b, offset_ir(b, address, line), I8)
        fetch = declare_ir(b, "llvm.prefetch.p0", ir.VoidType(), [pointer.type, I32, I32, I32])
        b.call(fetch, [pointer, ir.Constant(I32, 0), ir.Constant(I32, 2), ir.Constant(I32, 1)])


@functools.cache
def prefetch_row(n_bytes: int) -> Any:
    """Intrinsic (address): asks for the lines of a row of n_bytes."""

    def fetch(typingctx, address):  # type: ignore[no-untyped-def]
        def codegen(c, b, s, a):  # type: ignore[no-untyped-def]
            _prefetch(b, a[0], n_bytes)
            return c.get_dummy_value()

        return types.void(types.int64), codegen

    return intrinsic(fetch)


Body = Callable[[ir.IRBuilder, ir.Value, list[ir.Value]], list[ir.Value]]


def _loop(b: ir.IRBuilder, begin: ir.Value, end: ir.Value, carried: list[ir.Value], body: Body) -> list[ir.Value]:
    """IR: `carried = body(i, carried)` for i in begin..end; gives the last values."""
    before = b.block
    head, inside, after = (b.append_basic_block(name) for name in ("loop", "body", "after"))
    b.branch(head)
    b.position_at_end(head)
    i = b.phi(I64)
    i.add_incoming(begin, before)
    values = [b.phi(value.type) for value in carried]
    for phi, value in zip(values, carried, strict=True):
        phi.add_incoming(value, before)
    b.cbranch(b.icmp_signed("<", i, end), inside, after)
    b.position_at_end(inside)
    updated = body(b, i, values)
    i.add_incoming(b.add(i, ir.Constant(I64, 1)), b.block)
    for phi, value in zip(values, updated, strict=True):
        phi.add_incoming(value, b.block)
    b.branch(head)
    b.position_at_end(after)
    return values


@functools.cache
def dot_keys(dtype: DType, dim: int, n_heads: int) -> Any:
    """Intrinsic (q, q_head_stride, key, out): 16 partial sums of q . key for each head, at out + 1024 * head."""

    def dot(typingctx, q, q_head_stride, key, out):  # type: ignore[no-untyped-def]
        def codegen(c, b, s, a):  # type: ignore[no-untyped-def]
            queries = _strided(b, a[0], a[1], n_heads)
            sums: list[Any] = [None] * n_heads
            for i in range(n_vectors(dim)):
                k = load_lanes_ir(b, dtype, a[2], i, dim)
                for head, query in enumerate(queries):
                    q_i = load_lanes_ir(b, F32, query, i, dim)
                    sums[head] = fma_ir(b, q_i, k, sums[head]) if i else b.fmul(q_i, k)
            for head, total in enumerate(sums):
                _store(b, total, offset_ir(b, a[3], 1024 * head))
            return c.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64, types.int64), codegen

    return intrinsic(dot)


@intrinsic
def sum_lanes(typingctx, address):  # type: ignore[no-untyped-def]
    """Lane j: the sum of the lanes of vector j of 16 at an address, added in halves as `vf_sum` does."""

    def codegen(c, b, s, a):  # type: ignore[no-untyped-def]
        vectors = [b.load(pointer_ir(b, offset_ir(b, a[0], 64 * j), VF.llvm), align=4) for j in range(LANES)]
        size = LANES
        while size > 1:
            half, count = size // 2, len(vectors) // 2
            starts = range(0, LANES, size)
            low = [lane + part for g in starts for part in (0, LANES) for lane in range(g, g + half)]
            masks = [ir.Constant(lanes_ir(I32), [lane + shift for lane in low]) for shift in (0, half)]
            joined = []
            for j in range(count):
                lows, highs = (b.shuffle_vector(vectors[j], vectors[j + count], mask) for mask in masks)
                joined.append(b.fadd(lows, highs))
            vectors, size = joined, half
        return vectors[0]

    return VF(types.int64), codegen


@functools.cache
def transpose_keys(dtype: DType, dim: int) -> Any:
    """Intrinsic (addresses, out): 16 keys (their int64 addresses lie at `addresses`) as float32, element d of all at out + 64 * d."""

    def transpose(typingctx, addresses, out):  # type: ignore[no-untyped-def]
        def columns(b: ir.IRBuilder, keys: list[ir.Value], vector: int, n: int, out: ir.Value) -> None:
            rows = [load_lanes_ir(b, dtype, key, vector, n) for key in keys]
            low = ir.Constant(lanes_ir(I32), [i // 2 + LANES * (i % 2) for i in range(LANES)])
            high = ir.Constant(lanes_ir(I32), [LANES // 2 + i // 2 + LANES * (i % 2) for i in range(LANES)])
            for _ in range(4):  # each step interleaves rows j and j + 8
                rows = [b.shuffle_vector(rows[j], rows[j + 8], mask) for j in range(8) for mask in (low, high)]
            for lane in range(min(LANES, n - LANES * vector)):
                _store(b, rows[lane], offset_ir(b, out, 64 * (LANES * vector + lane)))

        def codegen(c, b, s, a):  # type: ignore[no-untyped-def]
            keys = [b.load(pointer_ir(b, offset_ir(b, a[0], 8 * j), I64), align=8) for j in range(LANES)]
            unit_bytes = dtype.row_bytes(2 * LANES)

            def unit(b: ir.IRBuilder, i: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
                step = b.mul(i, ir.Constant(I64, unit_bytes))
                here, place = [b.add(key, step) for key in keys], b.add(a[1], b.mul(i, ir.Constant(I64, 64 * 2 * LANES)))
                for vector in (0, 1):
                    columns(b, here, vector, 2 * LANES, place)
                return carried

            n_units = dim // (2 * LANES)
            _loop(b, ir.Constant(I64, 0), ir.Constant(I64, n_units), [], unit)
            for vector in range(2 * n_units, n_vectors(dim)):
                columns(b, keys, vector, dim, a[1])
            return c.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return intrinsic(transpose)


@functools.cache
def score_tile(dim: int, n_pairs: int) -> Any:
    """Intrinsic (queries, keys, out, out_stride, scale): scale * q . k for n_pairs queries (int64 addresses at `queries`) and 16
    transposed keys; 16 scores for each pair at out + pair * out_stride."""

    def tile(typingctx, queries, keys, out, out_stride, scale):  # type: ignore[no-untyped-def]
        def codegen(c, b, s, a):  # type: ignore[no-untyped-def]
            q = [b.load(pointer_ir(b, offset_ir(b, a[0], 8 * r), I64), align=8) for r in range(n_pairs)]

            def lane_sum(lane: int) -> list[ir.Value]:
                sums: list[Any] = [None] * n_pairs
                for d in range(lane, dim, LANES):
                    k = b.load(pointer_ir(b, offset_ir(b, a[1], 64 * d), VF.llvm), align=4)
                    for r in range(n_pairs):
                        q_d = _broadcast(b, offset_ir(b, q[r], 4 * d))
                        sums[r] = b.fmul(q_d, k) if sums[r] is None else fma_ir(b, q_d, k, sums[r])
                return [ir.Constant(VF.llvm, [0.0] * LANES) if total is None else total for total in sums]

            def halves(lane: int, size: int) -> list[ir.Value]:
                """The sums of lanes lane, lane + size, ...: what `vf_sum` has in this lane when `size` lanes are left."""
                if size == LANES:
                    return lane_sum(lane)
                low, high = halves(lane, 2 * size), halves(lane + size, 2 * size)
                return [b.fadd(x, y) for x, y in zip(low, high, strict=True)]

            scale = splat_ir(b, a[4])
            for total, place in zip(halves(0, 1), _strided(b, a[2], a[3], n_pairs), strict=True):
                _store(b, b.fmul(total, scale), place)
            return c.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64, types.int64, types.float32), codegen

    return intrinsic(tile)


@functools.cache
def convert_row(dtype: DType, dim: int) -> Any:
    """Intrinsic (row, out): a row of the cache as float32, padded with zeros to whole vectors."""

    def convert(typingctx, row, out):  # type: ignore[no-untyped-def]
        def codegen(c, b, s, a):  # type: ignore[no-untyped-def]
            for i in range(n_vectors(dim)):
                _store(b, load_lanes_ir(b, dtype, a[0], i, dim), offset_ir(b, a[1], 64 * i))
            return c.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return intrinsic(convert)


@functools.cache
def add_values(dtype: DType, dim: int, n_pairs: int) -> Any:
    """Intrinsic (cells, slots, begin, end, values, value_stride, weights, weight_stride, acc, acc_stride).

    acc[pair] += weights[pair][slots[k]] * values[cells[k]] for k in begin..end, in this order, for n_pairs accumulators of whole vectors.
    cells, slots: int32; weights, acc: float32; strides in bytes.
    """
    limit = max(1, (16 if wide_registers() else 6) // n_pairs)  # vectors of an accumulator that fit the registers
    total = n_vectors(dim)
    n_tiles = -(-total // limit)
    tiles = [range(total * t // n_tiles, total * (t + 1) // n_tiles) for t in range(n_tiles)]

    def add(typingctx, cells, slots, begin, end, values, value_stride, weights, weight_stride, acc, acc_stride):  # type: ignore[no-untyped-def]
        def codegen(c, b, s, a):  # type: ignore[no-untyped-def]
            rows = _strided(b, a[6], a[7], n_pairs)
            accumulators = _strided(b, a[8], a[9], n_pairs)

            def index(b: ir.IRBuilder, table: ir.Value, k: ir.Value) -> ir.Value:
                return b.sext(b.load(pointer_ir(b, b.add(table, b.shl(k, ir.Constant(I64, 2))), I32), align=4), I64)

            for tile in tiles:
                places = [offset_ir(b, base, 64 * i) for base in accumulators for i in tile]

                def step(b: ir.IRBuilder, k: ir.Value, carried: list[ir.Value], tile: range = tile) -> list[ir.Value]:
                    row = b.add(a[4], b.mul(index(b, a[0], k), a[5]))
                    slot = b.shl(index(b, a[1], k), ir.Constant(I64, 2))
                    values = [load_lanes_ir(b, dtype, row, i, dim) for i in tile]
                    updated = []
                    for r in range(n_pairs):
                        weight = _broadcast(b, b.add(rows[r], slot))
                        updated += [fma_ir(b, weight, v, carried[r * len(tile) + i]) for i, v in enumerate(values)]
                    return updated

                initial = [b.load(pointer_ir(b, place, VF.llvm), align=4) for place in places]
                for place, value in zip(places, _loop(b, a[2], a[3], initial, step), strict=True):
                    _store(b, value, place)
            return c.get_dummy_value()

        return types.void(*[types.int64] * 10), codegen

    return intrinsic(add)
