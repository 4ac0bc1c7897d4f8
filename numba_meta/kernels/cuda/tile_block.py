"""The code of one block of the products on tensor cores: a tile of the product, all of k (weights: `tile_weights.py`).

Steps of 64 elements of k: activations (and float16 weights) come to shared memory by asynchronous copies two steps ahead (sm_80 on), other
weights through registers, as float16 between the products of a step. In shared memory a row of a step is 8 chunks of 16 bytes, chunk c at
c xor (row mod 8): neither stores nor `ldmatrix` meet in a bank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from numba_meta import dtypes
from numba_meta.dtypes import DType
from numba_meta.kernels.cuda import emit
from numba_meta.kernels.cuda.emit import Value
from numba_meta.kernels.cuda.kernel import Capability
from numba_meta.kernels.cuda.tile_weights import weight_row

TILE = 128  # activation rows and weight rows of a block, in large tiles
STEP = 64  # elements of k
_PARTS = STEP // 16
THREADS = 256
_ROW_BYTES = 2 * STEP
_BUFFER_BYTES = TILE * _ROW_BYTES
STAGES = 3  # buffers that asynchronous copies fill in turn


def stages(capability: Capability) -> int:
    """Buffers of activations; sm_75 copies through registers, one step ahead."""
    return STAGES if capability >= (8, 0) else 2


def shared_bytes(dtype: DType, capability: Capability) -> int:
    """Buffers of activations, then as many of float16 weights, or two of others."""
    n = stages(capability)
    return (n + (n if dtype is dtypes.F16 else 2)) * _BUFFER_BYTES


@dataclass(frozen=True)
class Tiling:
    """How 8 warps (2 by 4) share a tile: each `m` times 16 activation rows by `n` times 8 weight rows."""

    m: int
    n: int

    @property
    def x_rows(self) -> int:
        """Activation rows of a tile."""
        return 32 * self.m

    @property
    def w_rows(self) -> int:
        """Weight rows of a tile."""
        return 32 * self.n


LARGE, SMALL = Tiling(4, 4), Tiling(2, 2)


def _min(b: Any, x: Value, y: Value) -> Value:
    return b.select(b.icmp_signed("<", x, y), x, y)


@dataclass
class Block:
    """The code of one block: a tile of the product, all of k. `shared`: 32-bit address of the buffers; others int64."""

    b: Any
    tiling: Tiling
    dtype: DType
    w: Value
    x: Value
    x_stride: Value
    n_out: Value
    k: Value
    rows: Value
    first_x: Value
    first_w: Value
    thread: Value
    shared: Value

    def __post_init__(self) -> None:
        b = self.b
        self.newer = emit.compiling_for() >= (8, 0)  # cp.async, and mma of 16 elements
        self.n_steps = b.lshr(b.add(self.k, emit.i64(STEP - 1)), emit.i64(6))
        self.n_chunks = b.lshr(b.add(self.k, emit.i64(7)), emit.i64(3))
        self.thread32 = b.trunc(self.thread, emit.I32)
        self.stages = stages(emit.compiling_for())
        self.w_shared = b.add(self.shared, emit.i32(self.stages * _BUFFER_BYTES))
        self._place_copies()
        self._place_fragments()
        tiles = [(i, j) for i in range(self.tiling.m) for j in range(self.tiling.n)]
        self.sums = {tile: [emit.slot(b, emit.f32(0.0)) for _ in range(4)] for tile in tiles}

    def _place_copies(self) -> None:
        """Which row and chunk of a step this thread brings: a chunk of some rows that are copied, 32 weights of a row that are not."""
        b, t = self.b, self.thread32
        row, chunk = b.lshr(t, emit.i32(3)), b.and_(t, emit.i32(7))
        self.chunk = b.zext(chunk, emit.I64)
        swizzled = b.shl(b.xor(chunk, b.and_(row, emit.i32(7))), emit.i32(4))
        self.copy_place = b.add(b.shl(row, emit.i32(7)), swizzled)
        self.x_copied = self._rows_to_copy(self.x, self.x_stride, self.first_x, self.rows, self.tiling.x_rows)
        self.copies_weights = self.dtype is dtypes.F16
        if self.copies_weights:
            w_stride = b.mul(self.n_chunks, emit.i64(16))
            self.w_copied = self._rows_to_copy(self.w, w_stride, self.first_w, self.n_out, self.tiling.w_rows)
            return
        w_row, half = b.lshr(t, emit.i32(1)), b.and_(t, emit.i32(1))
        index = _min(b, b.add(self.first_w, b.zext(w_row, emit.I64)), b.sub(self.n_out, emit.i64(1)))
        self.weights = weight_row(b, self.dtype, self.w, self.n_out, self.k, index)
        self.w_half = b.zext(half, emit.I64)
        self.w_place = b.add(self.w_shared, b.shl(w_row, emit.i32(7)))
        self.w_swizzle = b.shl(b.xor(b.shl(half, emit.i32(2)), b.and_(w_row, emit.i32(7))), emit.i32(4))

    def _rows_to_copy(self, base: Value, stride: Value, first: Value, count: Value, n: int) -> list[Value]:
        """Addresses of this thread's rows: every 32nd of n; beyond the last one that one again."""
        b, last = self.b, self.b.sub(count, emit.i64(1))
        row = b.add(first, b.zext(b.lshr(self.thread32, emit.i32(3)), emit.I64))
        return [b.add(base, b.mul(_min(b, b.add(row, emit.i64(32 * i)), last), stride)) for i in range(n // 32)]

    def _place_fragments(self) -> None:
        """Where this lane's rows for `ldmatrix` lie."""
        b, t, seven = self.b, self.thread32, emit.i32(7)
        lane, warp = b.and_(t, emit.i32(31)), b.lshr(t, emit.i32(5))
        self.lane = lane
        self.warp_m = b.mul(b.and_(warp, emit.i32(1)), emit.i32(16 * self.tiling.m))
        self.warp_n = b.mul(b.lshr(warp, emit.i32(1)), emit.i32(8 * self.tiling.n))
        low = b.and_(lane, seven)
        x_row = b.add(self.warp_m, b.and_(lane, emit.i32(15)))
        self.x_fragment = b.add(self.shared, b.shl(x_row, seven))
        self.x_chunk_bits = b.shl(b.xor(b.lshr(lane, emit.i32(4)), low), emit.i32(4))
        w_row = b.add(b.add(self.warp_n, low), b.shl(b.lshr(lane, emit.i32(4)), emit.i32(3)))
        self.w_fragment = b.add(self.w_shared, b.shl(w_row, seven))
        self.w_chunk_bits = b.shl(b.xor(b.and_(b.lshr(lane, emit.i32(3)), emit.i32(1)), low), emit.i32(4))

    def buffer(self, step: Value) -> Value:
        """Offset of the buffer of weights that come through registers."""
        b = self.b
        return b.mul(b.and_(b.trunc(step, emit.I32), emit.i32(1)), emit.i32(_BUFFER_BYTES))

    def copy(self, step: Value, buffer: Value) -> None:
        """Brings a step's activations, and float16 weights, to shared memory; zeros beyond k."""
        b = self.b
        to = b.add(self.copy_place, buffer)
        self._copy_rows(self.x_copied, b.add(self.shared, to), step)
        if self.copies_weights:
            self._copy_rows(self.w_copied, b.add(self.w_shared, to), step)
        if self.newer:
            emit.asm(b, emit.VOID, "cp.async.commit_group;", "~{memory}", [], True)

    def next_buffer(self, place: Value) -> Value:
        """The offset in a variable, which goes on to the next buffer of copies."""
        b = self.b
        offset = b.load(place)
        following = b.add(offset, emit.i32(_BUFFER_BYTES))
        at_end = b.icmp_unsigned("==", following, emit.i32(self.stages * _BUFFER_BYTES))
        b.store(b.select(at_end, emit.i32(0), following), place)
        return offset

    def _copy_rows(self, rows: list[Value], to: Value, step: Value) -> None:
        b = self.b
        chunk = b.add(b.mul(step, emit.i64(8)), self.chunk)
        inside = b.icmp_signed("<", chunk, self.n_chunks)
        offset = b.mul(b.select(inside, chunk, emit.i64(0)), emit.i64(16))
        for i, row in enumerate(rows):
            place, source = b.add(to, emit.i32(32 * i * _ROW_BYTES)), b.add(row, offset)
            if self.newer:
                n_bytes = b.select(inside, emit.i32(16), emit.i32(0))
                emit.asm(b, emit.VOID, "cp.async.cg.shared.global [$0], [$1], 16, $2;", "r,l,r,~{memory}", [place, source, n_bytes], True)
            else:
                self._store(place, [b.select(inside, word, emit.i32(0)) for word in emit.load(b, source, 4)])

    def meet(self) -> None:
        """What was copied for this step is there for all warps."""
        wait = f"cp.async.wait_group {self.stages - 2}; " if self.newer else ""
        emit.asm(self.b, emit.VOID, wait + "bar.sync 0;", "~{memory}", [], True)

    def _store(self, place: Value, words: list[Value]) -> None:
        emit.asm(self.b, emit.VOID, "st.shared.v4.b32 [$0], {$1,$2,$3,$4};", "r,r,r,r,r,~{memory}", [place, *words], True)

    @contextmanager
    def if_brings_weights(self) -> Iterator[None]:
        """Code for the threads that have a part of the tile's weights; whole warps."""
        if self.tiling.w_rows == THREADS // 2:
            yield
        else:
            with self.b.if_then(self.b.icmp_unsigned("<", self.thread32, emit.i32(2 * self.tiling.w_rows))):
                yield

    def load_weights(self, step: Value) -> list[Value]:
        """The registers of this thread's weights of a step."""
        return [] if self.copies_weights else self.weights.load(self.block_of(step))

    def block_of(self, step: Value) -> Value:
        """Which 32 weights of its row this thread brings in a step."""
        return self.b.add(self.b.mul(step, emit.i64(2)), self.w_half)

    def store_weights(self, halves: Any, j: int, buffer: Value) -> None:
        """8 weights of 32, as float16, to shared memory."""
        b = self.b
        place = b.add(b.add(self.w_place, buffer), b.xor(self.w_swizzle, emit.i32(j << 4)))
        self._store(place, halves.chunk(j))

    def fragments(self, part: int, x_buffer: Value, w_buffer: Value) -> tuple[list[list[Value]], list[list[Value]]]:
        """16 elements of k, number `part` of the step: registers of each 16 activation rows and of each 8 weight rows."""
        b = self.b
        x_at = b.add(b.add(self.x_fragment, x_buffer), b.xor(self.x_chunk_bits, emit.i32(part << 5)))
        w_at = b.add(b.add(self.w_fragment, w_buffer), b.xor(self.w_chunk_bits, emit.i32(part << 5)))
        x = [self._matrix(x_at, 16 * i * _ROW_BYTES) for i in range(self.tiling.m)]
        return x, [pair for i in range(self.tiling.n // 2) for pair in self._pairs(w_at, 16 * i * _ROW_BYTES)]

    def multiply(self, x: list[list[Value]], w: list[list[Value]]) -> None:
        """Adds the products of fragments to the sums."""
        for (i, j), sums in self.sums.items():
            self._mma(x[i], w[j], sums)

    def _matrix(self, place: Value, offset: int) -> list[Value]:
        b = self.b
        text = f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$0,$1,$2,$3}}, [$4+{offset}];"
        value = emit.asm(b, ir.LiteralStructType([emit.I32] * 4), text, "=r,=r,=r,=r,r,~{memory}", [place], True)
        return [b.extract_value(value, i) for i in range(4)]

    def _pairs(self, place: Value, offset: int) -> list[list[Value]]:
        found = self._matrix(place, offset)
        return [found[:2], found[2:]]

    def _mma(self, x: list[Value], w: list[Value], sums: list[Value]) -> None:
        b = self.b
        found = [b.load(place) for place in sums]
        kind = ir.LiteralStructType([emit.F32] * 4)
        if self.newer:
            text = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
            value = emit.asm(b, kind, text, ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4), [*x, *w, *found])
            found = [b.extract_value(value, i) for i in range(4)]
        else:
            text = "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {$0,$1,$2,$3}, {$4,$5}, {$6}, {$7,$8,$9,$10};"
            constraints = ",".join(["=f"] * 4 + ["r"] * 3 + ["f"] * 4)
            for part in range(2):
                value = emit.asm(b, kind, text, constraints, [*x[2 * part : 2 * part + 2], w[part], *found])
                found = [b.extract_value(value, i) for i in range(4)]
        for place, one in zip(sums, found, strict=True):
            b.store(one, place)

    def run(self) -> None:
        """All steps; none where k is 0."""
        with self.b.if_then(self.b.icmp_signed(">", self.n_steps, emit.i64(0))):
            self._steps()

    def _steps(self) -> None:
        """Products of a step, between them the weights of the next go to shared memory; those after that are on their way."""
        b, zero = self.b, emit.i64(0)
        filled, read = emit.slot(b, emit.i32(0)), emit.slot(b, emit.i32(0))
        for early in range(self.stages - 1):
            self.copy(emit.i64(early), self.next_buffer(filled))
        ahead = self._first_weights(zero)
        step_slot = emit.slot(b, zero)
        with emit.loop_while(b, lambda: b.icmp_signed("<", b.load(step_slot), self.n_steps)):
            step = b.load(step_slot)
            following = b.add(step, emit.i64(1))
            self.meet()
            self.copy(b.add(step, emit.i64(self.stages - 1)), self.next_buffer(filled))
            coming = self.load_weights(b.add(step, emit.i64(2)))
            halves = self.weights.halves([b.load(place) for place in ahead], self.block_of(following)) if ahead else None
            x_buffer = self.next_buffer(read)
            w_buffer = x_buffer if self.copies_weights else self.buffer(step)
            found = self.fragments(0, x_buffer, w_buffer)
            for part in range(_PARTS):
                current = found
                if part + 1 < _PARTS:
                    found = self.fragments(part + 1, x_buffer, w_buffer)  # on their way during these products
                self.multiply(*current)
                if halves is not None:
                    with self.if_brings_weights():
                        self.store_weights(halves, part, self.buffer(following))
            for place, value in zip(ahead, coming, strict=True):
                b.store(value, place)
            b.store(following, step_slot)

    def _first_weights(self, zero: Value) -> list[Value]:
        """Step 0's weights to shared memory; variables with the registers of step 1's."""
        if self.copies_weights:
            return []
        first = self.weights.halves(self.load_weights(zero), self.block_of(zero))
        with self.if_brings_weights():
            for j in range(_PARTS):
                self.store_weights(first, j, self.buffer(zero))
        return [emit.slot(self.b, value) for value in self.load_weights(emit.i64(1))]

    def store(self, y: Value, y_stride: Value) -> None:
        """Sums times the scale of their row of activations, to y."""
        b = self.b
        g, c = b.lshr(self.lane, emit.i32(2)), b.shl(b.and_(self.lane, emit.i32(3)), emit.i32(1))
        scale_at = b.mul(self.n_chunks, emit.i64(16))
        out = b.add(self.first_w, b.zext(b.add(self.warp_n, c), emit.I64))
        for i in range(self.tiling.m):
            for upper in range(2):
                offset = emit.i64(16 * i + 8 * upper)
                row = b.add(b.add(self.first_x, b.zext(b.add(self.warp_m, g), emit.I64)), offset)
                with b.if_then(b.icmp_signed("<", row, self.rows)):
                    (word,) = emit.load(b, b.add(b.add(self.x, b.mul(row, self.x_stride)), scale_at), 1)
                    to, scale = b.add(y, b.mul(row, y_stride)), b.bitcast(word, emit.F32)
                    # Without elements nobody wrote the row of activations: what lies there may be NaN.
                    scale = b.select(b.icmp_signed(">", self.k, emit.i64(0)), scale, emit.f32(0.0))
                    for j in range(self.tiling.n):
                        for e in range(2):
                            column = b.add(out, emit.i64(8 * j + e))
                            value = emit.mul(b, b.load(self.sums[i, j][2 * upper + e]), scale)
                            with b.if_then(b.icmp_signed("<", column, self.n_out)):
                                place = b.add(to, b.mul(column, emit.i64(4)))
                                emit.asm(b, emit.VOID, "st.global.f32 [$0], $1;", "l,f,~{memory}", [place, value], True)
