"""What the kernels over rows share: 4 columns per thread, sums across a warp and a block in one fixed order, blocks for so many columns."""

from __future__ import annotations

import numpy as np

from numba_meta.kernels.cuda.device import add, cuda, device_function, fma, load_f32, load_v4_f32, maximum, store_f32, store_v4_f32

ALL_LANES = 0xFFFFFFFF
MAX_THREADS = 1024


def threads_for(n: int, most: int = MAX_THREADS) -> int:
    """Threads of a block that walks n columns, 4 to a thread: whole warps."""
    return max(32, min(most, -(-n // 128) * 32))


def threads_for_two(n: int) -> int:
    """As `threads_for`, for kernels with two groups of 4 columns in registers: up to 4,096 columns 512 threads beat 1,024."""
    return max(threads_for(n, 512), min(MAX_THREADS, -(-n // 256) * 32))


@device_function
def load_4(address, left, is_aligned):  # type: ignore[no-untyped-def]
    """4 float32, zeros in place of those beyond the first `left`. `is_aligned`: the address is a multiple of 16."""
    zero = np.float32(0.0)
    if is_aligned and left >= 4:
        return load_v4_f32(address)
    x0, x1, x2, x3 = zero, zero, zero, zero
    if left > 0:
        x0 = load_f32(address)
    if left > 1:
        x1 = load_f32(address + 4)
    if left > 2:
        x2 = load_f32(address + 8)
    if left > 3:
        x3 = load_f32(address + 12)
    return (x0, x1, x2, x3)


@device_function
def store_4(address, values, left, is_aligned):  # type: ignore[no-untyped-def]
    """The first `left` of 4 float32."""
    if is_aligned and left >= 4:
        store_v4_f32(address, values[0], values[1], values[2], values[3])
    else:
        if left > 0:
            store_f32(address, values[0])
        if left > 1:
            store_f32(address + 4, values[1])
        if left > 2:
            store_f32(address + 8, values[2])
        if left > 3:
            store_f32(address + 12, values[3])


@device_function
def warp_sum(x):  # type: ignore[no-untyped-def]
    """The sum over a warp, in every lane: lanes 16, 8, 4, 2, 1 apart are joined."""
    x = add(x, cuda.shfl_xor_sync(ALL_LANES, x, 16))
    x = add(x, cuda.shfl_xor_sync(ALL_LANES, x, 8))
    x = add(x, cuda.shfl_xor_sync(ALL_LANES, x, 4))
    x = add(x, cuda.shfl_xor_sync(ALL_LANES, x, 2))
    return add(x, cuda.shfl_xor_sync(ALL_LANES, x, 1))


@device_function
def warp_max(x):  # type: ignore[no-untyped-def]
    """The largest value of a warp, in every lane; NaN is passed over."""
    x = maximum(x, cuda.shfl_xor_sync(ALL_LANES, x, 16))
    x = maximum(x, cuda.shfl_xor_sync(ALL_LANES, x, 8))
    x = maximum(x, cuda.shfl_xor_sync(ALL_LANES, x, 4))
    x = maximum(x, cuda.shfl_xor_sync(ALL_LANES, x, 2))
    return maximum(x, cuda.shfl_xor_sync(ALL_LANES, x, 1))


@device_function
def block_sum(x, scratch):  # type: ignore[no-untyped-def]
    """The sum over a block of whole warps, in every thread. `scratch`: 32 float32 in shared memory that nothing else uses."""
    x = warp_sum(x)
    n_warps = cuda.blockDim.x >> 5
    if n_warps > 1:
        lane = cuda.threadIdx.x & 31
        if lane == 0:
            scratch[cuda.threadIdx.x >> 5] = x
        cuda.syncthreads()
        x = scratch[lane] if lane < n_warps else np.float32(0.0)
        x = warp_sum(x)
    return x


@device_function
def block_max(x, scratch):  # type: ignore[no-untyped-def]
    """The largest value of a block of whole warps, in every thread; NaN is passed over. `scratch`: as in `block_sum`."""
    x = warp_max(x)
    n_warps = cuda.blockDim.x >> 5
    if n_warps > 1:
        lane = cuda.threadIdx.x & 31
        if lane == 0:
            scratch[cuda.threadIdx.x >> 5] = x
        cuda.syncthreads()
        x = scratch[lane] if lane < n_warps else np.float32(-np.inf)
        x = warp_max(x)
    return x


@device_function
def squares_4(values, total):  # type: ignore[no-untyped-def]
    """total + the squares of 4 values, one after the other."""
    total = fma(values[0], values[0], total)
    total = fma(values[1], values[1], total)
    total = fma(values[2], values[2], total)
    return fma(values[3], values[3], total)
