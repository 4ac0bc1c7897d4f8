"""Rotary positions: a table of cosines and sines per row, and the rotation of the heads by it."""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from numba_meta.kernels.cpu.kernel import Float, Int, Ptr, cpu_kernel
from numba_meta.kernels.cpu.simd import VF, fma, load_f32, load_i32, load_i64, pointer_ir, store_f32, vf_load, vf_store
from numba_meta.kernels.cpu.simd_math import F32, I32, LANES, device_function, share, vf_load_part, vf_negate, vf_store_part


@intrinsic
def _load_f64(typingctx, address):  # type: ignore[no-untyped-def]
    return types.float64(types.int64), lambda c, b, s, a: b.load(pointer_ir(b, a[0], ir.DoubleType()), align=8)


@cpu_kernel
def rope_angles(  # type: ignore[no-untyped-def]
    thread, n_threads, positions: Ptr, inverse_frequencies: Ptr, table: Ptr, table_stride: Int, half: Int, magnitude: Float, n_rows: Ptr
):
    """table[r] = cos, then sin, of position * inverse frequency (float64), times magnitude: `half` float32 each. positions: int32."""
    total = load_i64(n_rows) * half
    for item in range(share(total, thread, n_threads), share(total, thread + 1, n_threads)):
        row = item // half
        i = item - row * half
        angle = np.float64(load_i32(positions + 4 * row)) * _load_f64(inverse_frequencies + 8 * i)
        place = table + row * table_stride + 4 * i
        store_f32(place, np.float32(math.cos(angle) * np.float64(magnitude)))
        store_f32(place + 4 * half, np.float32(math.sin(angle) * np.float64(magnitude)))


@device_function
def _copy_rest(x, y, begin, end):  # type: ignore[no-untyped-def]
    """Columns begin..end of a head that are not rotated."""
    i = begin
    while i + 16 <= end:
        vf_store(y + 4 * i, vf_load(x + 4 * i))
        i += 16
    if i < end:
        vf_store_part(y + 4 * i, vf_load_part(x + 4 * i, end - i), end - i)


@cpu_kernel
def rope_halves(  # type: ignore[no-untyped-def]
    thread, n_threads, x: Ptr, x_stride: Int, x_head_stride: Int, y: Ptr, y_stride: Int, y_head_stride: Int,
    table: Ptr, table_stride: Int, n_head: Int, head_dim: Int, half: Int, n_rows: Ptr,
):  # fmt: skip
    """Rotates the pairs (i, i + half) of each head by the row's angles; columns from 2 * half on are copied. y may be x."""
    total = load_i64(n_rows) * n_head
    for item in range(share(total, thread, n_threads), share(total, thread + 1, n_threads)):
        row = item // n_head
        head = item - row * n_head
        source, target = x + row * x_stride + head * x_head_stride, y + row * y_stride + head * y_head_stride
        cosines = table + row * table_stride
        sines = cosines + 4 * half
        i = 0
        while i + 16 <= half:
            a, b = vf_load(source + 4 * i), vf_load(source + 4 * (i + half))
            c, s = vf_load(cosines + 4 * i), vf_load(sines + 4 * i)
            vf_store(target + 4 * i, fma(a, c, vf_negate(b * s)))
            vf_store(target + 4 * (i + half), fma(a, s, b * c))
            i += 16
        if i < half:
            rest = half - i
            a, b = vf_load_part(source + 4 * i, rest), vf_load_part(source + 4 * (i + half), rest)
            c, s = vf_load_part(cosines + 4 * i, rest), vf_load_part(sines + 4 * i, rest)
            vf_store_part(target + 4 * i, fma(a, c, vf_negate(b * s)), rest)
            vf_store_part(target + 4 * (i + half), fma(a, s, b * c), rest)
        if target != source:
            _copy_rest(source, target, 2 * half, head_dim)


@intrinsic
def _even(typingctx, low, high):  # type: ignore[no-untyped-def]
    """Lanes 0, 2, ... of 32."""
    return VF(VF, VF), lambda c, b, s, a: b.shuffle_vector(*a, ir.Constant(ir.VectorType(I32, LANES), list(range(0, 32, 2))))


@intrinsic
def _odd(typingctx, low, high):  # type: ignore[no-untyped-def]
    """Lanes 1, 3, ... of 32."""
    return VF(VF, VF), lambda c, b, s, a: b.shuffle_vector(*a, ir.Constant(ir.VectorType(I32, LANES), list(range(1, 32, 2))))


@intrinsic
def _store_pairs(typingctx, address, even, odd):  # type: ignore[no-untyped-def]
    """Stores even[0], odd[0], even[1], ...: 32 float32."""

    def codegen(c, b, s, a):  # type: ignore[no-untyped-def]
        order = [i // 2 + LANES * (i % 2) for i in range(2 * LANES)]
        pairs = b.shuffle_vector(a[1], a[2], ir.Constant(ir.VectorType(I32, 2 * LANES), order))
        b.store(pairs, pointer_ir(b, a[0], ir.VectorType(F32, 2 * LANES)), align=4)
        return c.get_dummy_value()

    return types.void(types.int64, VF, VF), codegen


@cpu_kernel
def rope_interleaved(  # type: ignore[no-untyped-def]
    thread, n_threads, x: Ptr, x_stride: Int, x_head_stride: Int, y: Ptr, y_stride: Int, y_head_stride: Int,
    table: Ptr, table_stride: Int, n_head: Int, head_dim: Int, half: Int, n_rows: Ptr,
):  # fmt: skip
    """Rotates the pairs (2i, 2i + 1) of each head by the row's angles; columns from 2 * half on are copied. y may be x."""
    total = load_i64(n_rows) * n_head
    for item in range(share(total, thread, n_threads), share(total, thread + 1, n_threads)):
        row = item // n_head
        head = item - row * n_head
        source, target = x + row * x_stride + head * x_head_stride, y + row * y_stride + head * y_head_stride
        cosines = table + row * table_stride
        sines = cosines + 4 * half
        i = 0
        while i + 16 <= half:
            low, high = vf_load(source + 8 * i), vf_load(source + 8 * i + 64)
            a, b = _even(low, high), _odd(low, high)
            c, s = vf_load(cosines + 4 * i), vf_load(sines + 4 * i)
            _store_pairs(target + 8 * i, fma(a, c, vf_negate(b * s)), fma(a, s, b * c))
            i += 16
        while i < half:
            p, q = load_f32(source + 8 * i), load_f32(source + 8 * i + 4)
            cosine, sine = load_f32(cosines + 4 * i), load_f32(sines + 4 * i)
            store_f32(target + 8 * i, fma(p, cosine, -(q * sine)))
            store_f32(target + 8 * i + 4, fma(p, sine, q * cosine))
            i += 1
        if target != source:
            _copy_rest(source, target, 2 * half, head_dim)
