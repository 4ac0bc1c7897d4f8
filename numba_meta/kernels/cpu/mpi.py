"""Reductions and gathers over the ranks of a launch, from compiled code: MPI's C functions called at their addresses.

A step that reduces over ranks stays one call into compiled code. Thread 0 of the stream does all of it; the next call's barrier shows the
result to the others. Sums go in rank order for every size, so bits depend on the values alone.

A table of int64 words (made by `comm/mpi_table.py`) holds addresses and handles. Handles travel as 8-byte words: they are pointers (Open
MPI) or ints (MPICH), and the calling conventions of Linux look at an int's low half only. After an error, kept in the table, nothing calls
MPI any more: the step runs to its end with garbage, and Python raises.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from numba_meta.kernels.cpu.kernel import Int, Ptr, cpu_kernel
from numba_meta.kernels.cpu.simd import load_i64, store_i32, store_i64, vf_load, vf_store
from numba_meta.kernels.cpu.simd_math import device_function, vf_load_part, vf_store_part

(
    SEND_RECV, ALL_GATHER, ALL_TO_ALL_V, ALL_GATHER_V, ALL_REDUCE,  # addresses of functions
    COMMUNICATOR, FLOAT, SUM, IN_PLACE,  # handles
    STATUS, COUNTS,  # memory for an MPI_Status; int32 [4, size] for counts and displacements
    RANK, SIZE, PAIRWISE, LARGE_BYTES,  # PAIRWISE: two ranks exchange and add; LARGE_BYTES: from here each rank sums its own slice
    ERROR, ERROR_CALL,  # the first code that was not 0, and which function returned it
    N_WORDS,
) = (8 * i for i in range(18))  # fmt: skip
TAG = 0x6E6D
_i32, _i64 = ir.IntType(32), ir.IntType(64)


def _call(kinds: str) -> Any:
    """Codegen of a call of `int f(...)` at an address; `i`: int, `p`: a pointer or handle. All arrive as int64."""

    def codegen(c, b, s, a):  # type: ignore[no-untyped-def]
        kind = ir.FunctionType(_i32, [_i32 if k == "i" else _i64 for k in kinds])
        arguments = [b.trunc(x, _i32) if k == "i" else x for k, x in zip(kinds, a[1:], strict=True)]
        return b.sext(b.call(b.inttoptr(a[0], kind.as_pointer()), arguments), _i64)

    return types.int64(*[types.int64] * (len(kinds) + 1)), codegen


@intrinsic
def _send_recv(typingctx, f, send, n_send, send_type, to, send_tag, receive, n_receive, receive_type, source, receive_tag, comm, status):  # type: ignore[no-untyped-def]
    return _call("pipiipipiipp")


@intrinsic
def _all_gather(typingctx, f, send, n_send, send_type, receive, n_receive, receive_type, comm):  # type: ignore[no-untyped-def]
    return _call("pippipp")


@intrinsic
def _all_to_all_v(typingctx, f, send, n_send, send_at, send_type, receive, n_receive, receive_at, receive_type, comm):  # type: ignore[no-untyped-def]
    return _call("ppppppppp")


@intrinsic
def _all_gather_v(typingctx, f, send, n_send, send_type, receive, n_receive, receive_at, receive_type, comm):  # type: ignore[no-untyped-def]
    return _call("pipppppp")


@intrinsic
def _all_reduce(typingctx, f, send, receive, n, kind, operation, comm):  # type: ignore[no-untyped-def]
    return _call("ppippp")


@device_function
def _note(table, code, call):  # type: ignore[no-untyped-def]
    """Keeps the first error; True where the call went well."""
    if code != 0:
        store_i64(table + ERROR, code)
        store_i64(table + ERROR_CALL, call)
    return code == 0


@device_function
def _sum_in_order(parts, stride, n_parts, out, n):  # type: ignore[no-untyped-def]
    """out[i] = ((part 0 + part 1) + part 2) ...; parts lie `stride` bytes apart. out may be a part."""
    i = 0
    while i + 16 <= n:
        value = vf_load(parts + 4 * i)
        for part in range(1, n_parts):
            value = value + vf_load(parts + part * stride + 4 * i)
        vf_store(out + 4 * i, value)
        i += 16
    if i < n:
        value = vf_load_part(parts + 4 * i, n - i)
        for part in range(1, n_parts):
            value = value + vf_load_part(parts + part * stride + 4 * i, n - i)
        vf_store_part(out + 4 * i, value, n - i)


@device_function
def _add(a, b, out, n):  # type: ignore[no-untyped-def]
    i = 0
    while i + 16 <= n:
        vf_store(out + 4 * i, vf_load(a + 4 * i) + vf_load(b + 4 * i))
        i += 16
    if i < n:
        vf_store_part(out + 4 * i, vf_load_part(a + 4 * i, n - i) + vf_load_part(b + 4 * i, n - i), n - i)


@device_function
def _copy_rows(source, source_stride, target, target_stride, n, rows):  # type: ignore[no-untyped-def]
    """Rows of n float32."""
    for row in range(rows):
        a, b = source + row * source_stride, target + row * target_stride
        i = 0
        while i + 16 <= n:
            vf_store(b + 4 * i, vf_load(a + 4 * i))
            i += 16
        if i < n:
            vf_store_part(b + 4 * i, vf_load_part(a + 4 * i, n - i), n - i)


@device_function
def _reduce_two(table, source, out, scratch, n):  # type: ignore[no-untyped-def]
    comm, kind, rank = load_i64(table + COMMUNICATOR), load_i64(table + FLOAT), load_i64(table + RANK)
    if load_i64(table + PAIRWISE) == 0:
        # Two summands have one sum, whichever comes first: MPI's own order is ours.
        send = load_i64(table + IN_PLACE) if source == out else source
        code = _all_reduce(load_i64(table + ALL_REDUCE), send, out, n, kind, load_i64(table + SUM), comm)
        return _note(table, code, ALL_REDUCE)
    peer = 1 - rank
    code = _send_recv(
        load_i64(table + SEND_RECV), source, n, kind, peer, TAG, scratch, n, kind, peer, TAG, comm, load_i64(table + STATUS)
    )  # fmt: skip
    if not _note(table, code, SEND_RECV):
        return False
    if rank == 0:
        _add(source, scratch, out, n)
    else:
        _add(scratch, source, out, n)
    return True


@device_function
def _reduce_small(table, source, out, scratch, n):  # type: ignore[no-untyped-def]
    """Every rank gets all summands and adds them: one collective."""
    kind = load_i64(table + FLOAT)
    code = _all_gather(load_i64(table + ALL_GATHER), source, n, kind, scratch, n, kind, load_i64(table + COMMUNICATOR))
    if not _note(table, code, ALL_GATHER):
        return False
    _sum_in_order(scratch, 4 * n, load_i64(table + SIZE), out, n)
    return True


@device_function
def _reduce_large(table, source, out, scratch, n):  # type: ignore[no-untyped-def]
    """Every rank adds its own slice of all summands, then all slices are gathered: each element travels twice, not `size` times."""
    kind, comm = load_i64(table + FLOAT), load_i64(table + COMMUNICATOR)
    size, rank = load_i64(table + SIZE), load_i64(table + RANK)
    slice_counts = load_i64(table + COUNTS)
    slice_starts, own_counts, own_starts = slice_counts + 4 * size, slice_counts + 8 * size, slice_counts + 12 * size
    own_start, own_count = n * rank // size, n * (rank + 1) // size - n * rank // size
    for other in range(size):
        start = n * other // size
        store_i32(slice_starts + 4 * other, start)
        store_i32(slice_counts + 4 * other, n * (other + 1) // size - start)
        store_i32(own_starts + 4 * other, own_count * other)
        store_i32(own_counts + 4 * other, own_count)
    code = _all_to_all_v(
        load_i64(table + ALL_TO_ALL_V), source, slice_counts, slice_starts, kind, scratch, own_counts, own_starts, kind, comm
    )  # fmt: skip
    if not _note(table, code, ALL_TO_ALL_V):
        return False
    _sum_in_order(scratch, 4 * own_count, size, out + 4 * own_start, own_count)
    code = _all_gather_v(
        load_i64(table + ALL_GATHER_V), load_i64(table + IN_PLACE), 0, kind, out, slice_counts, slice_starts, kind, comm
    )  # fmt: skip
    return _note(table, code, ALL_GATHER_V)


@device_function
def _reduce(table, source, out, scratch, n):  # type: ignore[no-untyped-def]
    """n contiguous float32; out may be source."""
    if load_i64(table + SIZE) == 2:
        return _reduce_two(table, source, out, scratch, n)
    if 4 * n < load_i64(table + LARGE_BYTES):
        return _reduce_small(table, source, out, scratch, n)
    return _reduce_large(table, source, out, scratch, n)


@cpu_kernel
def mpi_all_reduce(  # type: ignore[no-untyped-def]
    thread, n_threads, table: Ptr, part: Ptr, part_stride: Int, out: Ptr, out_stride: Int, scratch: Ptr, n: Int, n_rows: Ptr
):
    """out = the sum of all ranks' parts in rank order: float32 rows of n, strides in bytes; out may be part.

    n and the row count (int64 at `n_rows`) are the same on all ranks. `scratch`: `MpiTable.reduce_scratch_bytes`.
    """
    rows = load_i64(n_rows)
    if thread == 0 and rows * n > 0 and load_i64(table + ERROR) == 0:
        if rows == 1 or (part_stride == 4 * n and out_stride == 4 * n):
            _reduce(table, part, out, scratch, rows * n)
        else:
            _copy_rows(part, part_stride, scratch, 4 * n, n, rows)
            if _reduce(table, scratch, scratch, scratch + 4 * n * rows, rows * n):
                _copy_rows(scratch, 4 * n, out, out_stride, n, rows)


@cpu_kernel
def mpi_gather_columns(  # type: ignore[no-untyped-def]
    thread, n_threads, table: Ptr, part: Ptr, part_stride: Int, widths: Ptr, out: Ptr, out_stride: Int, scratch: Ptr, n_rows: Ptr
):
    """Rows of all ranks' parts side by side in rank order. `widths` int64 `[size]`: float32 elements of each rank's rows (0: nothing).

    Part and out must not overlap. `scratch`: `MpiTable.gather_scratch_bytes`.
    """
    rows, size, rank = load_i64(n_rows), load_i64(table + SIZE), load_i64(table + RANK)
    total = 0
    for other in range(size):
        total += load_i64(widths + 8 * other)
    if thread == 0 and rows * total > 0 and load_i64(table + ERROR) == 0:
        counts = load_i64(table + COUNTS)
        starts = counts + 4 * size
        start = 0
        for other in range(size):
            count = rows * load_i64(widths + 8 * other)
            store_i32(counts + 4 * other, count)
            store_i32(starts + 4 * other, start)
            start += count
        width, kind = load_i64(widths + 8 * rank), load_i64(table + FLOAT)
        send, receive = part, scratch
        if rows == 1:
            receive = out
        elif part_stride != 4 * width:
            send = scratch + 4 * rows * total
            _copy_rows(part, part_stride, send, 4 * width, width, rows)
        code = _all_gather_v(
            load_i64(table + ALL_GATHER_V), send, rows * width, kind, receive, counts, starts, kind, load_i64(table + COMMUNICATOR)
        )  # fmt: skip
        if _note(table, code, ALL_GATHER_V) and rows > 1:
            column = 0
            for other in range(size):
                n = load_i64(widths + 8 * other)
                _copy_rows(scratch + 4 * rows * column, 4 * n, out + 4 * column, out_stride, n, rows)
                column += n
