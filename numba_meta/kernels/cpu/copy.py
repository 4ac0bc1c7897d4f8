"""Copies of bytes: strided blocks, and zeros."""

from __future__ import annotations

from numba_meta.kernels.cpu.kernel import Int, Ptr, cpu_kernel
from numba_meta.kernels.cpu.simd import load_i64, load_u8, store_u8, vi_zero
from numba_meta.kernels.cpu.simd_math import bytes_load, bytes_store, device_function, share

BLOCK_BYTES = 4096  # of a row that stay with one thread


@device_function
def copy_bytes(source, target, n_bytes):  # type: ignore[no-untyped-def]
    """n_bytes from source to target, which do not overlap."""
    i = 0
    while i + 64 <= n_bytes:
        bytes_store(target + i, bytes_load(source + i))
        i += 64
    while i < n_bytes:
        store_u8(target + i, load_u8(source + i))
        i += 1


@cpu_kernel
def copy_2d(  # type: ignore[no-untyped-def]
    thread, n_threads, source: Ptr, source_pitch: Int, destination: Ptr, destination_pitch: Int, width: Int, height: Int
):
    """`height` rows of `width` bytes, a pitch (bytes) apart; the two must not overlap."""
    blocks = (width + BLOCK_BYTES - 1) // BLOCK_BYTES
    total = height * blocks
    for item in range(share(total, thread, n_threads), share(total, thread + 1, n_threads)):
        row = item // blocks
        begin = (item - row * blocks) * BLOCK_BYTES
        n_bytes = min(width - begin, BLOCK_BYTES)
        copy_bytes(source + row * source_pitch + begin, destination + row * destination_pitch + begin, n_bytes)


@cpu_kernel
def fill_zero(thread, n_threads, x: Ptr, x_stride: Int, n_bytes: Int, n_rows: Ptr):  # type: ignore[no-untyped-def]
    """Zero bytes in the first n_bytes of every live row."""
    total = load_i64(n_rows)
    zero = vi_zero()
    for row in range(share(total, thread, n_threads), share(total, thread + 1, n_threads)):
        i = 0
        while i + 64 <= n_bytes:
            bytes_store(x + row * x_stride + i, zero)
            i += 64
        while i < n_bytes:
            store_u8(x + row * x_stride + i, 0)
            i += 1
