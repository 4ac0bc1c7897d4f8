"""Rows of a packed table as float32: token embeddings (layouts: `packed.py`).

Values are those of `numba_meta.quants.dequantize`, bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from numba_meta import dtypes
from numba_meta.dtypes import DType
from numba_meta.kernels.cuda.device import (
    add,
    cuda,
    device_function,
    load_bf16,
    load_f16,
    load_f32,
    load_i8,
    load_i32,
    load_i64,
    load_u8,
    mul,
    store_f32,
    types,
)
from numba_meta.kernels.cuda.kernel import CudaKernel, Gpu, Int, Launch, Ptr, cuda_kernel
from numba_meta.kernels.cuda.packed import FLOAT_TYPES, QUANT_LAYOUTS, QuantLayout, check_weight_type, same_layout

_THREADS = 128
_QUAD = 4  # elements of a thread


def get_rows_kernel(dtype: DType) -> CudaKernel:
    """Looks rows up in a table `w` packed as `dtype`, `[count, k]`: y[r] = table[ids[r] - first], or zeros where that is not in the table.

    Parameters: `w`; `ids` int32; `first`, `count`, the part of the vocabulary that the table holds; `k`; `y` float32 rows, `y_stride` bytes
    apart; `n_rows` address of the live row count (int64).
    """
    check_weight_type(dtype)
    return _get_rows_kernel(same_layout(dtype))


def _launch(arguments: Mapping[str, Any], n_rows: int, gpu: Gpu) -> Launch:
    return Launch((-(-arguments["k"] // (_QUAD * _THREADS)), n_rows, 1), (_THREADS, 1, 1))


@functools.cache
def _get_rows_kernel(dtype: DType) -> CudaKernel:
    quad = _float_quad(dtype) if dtype in FLOAT_TYPES else _quant_quad(QUANT_LAYOUTS[dtype])
    name = dtype.name if dtype in FLOAT_TYPES else QUANT_LAYOUTS[dtype].name

    @cuda_kernel(launch=_launch, max_threads=_THREADS, name=f"get_rows_{name}")
    def get_rows(w: Ptr, ids: Ptr, first: Int, count: Int, k: Int, y: Ptr, y_stride: Int, n_rows: Ptr) -> None:
        """grid (512 elements of a row each, rows), block of 128 threads of 4 elements."""
        row = types.int64(cuda.blockIdx.y)
        element = (types.int64(cuda.blockIdx.x) * _THREADS + types.int64(cuda.threadIdx.x)) * _QUAD
        if row >= load_i64(n_rows) or element >= k:
            return
        index = types.int64(load_i32(ids + 4 * row)) - first
        to, n = y + row * y_stride + 4 * element, min(types.int64(_QUAD), k - element)
        if index < 0 or index >= count:
            for e in range(n):
                store_f32(to + 4 * e, types.float32(0.0))
        else:
            quad(w, count, k, index, element, n, to)

    return get_rows


def _float_quad(dtype: DType) -> Callable[..., None]:
    """Up to 4 elements of one row: `quad(w, count, k, index, element, n, to)`."""
    size = dtype.block_bytes
    load = {dtypes.F32: load_f32, dtypes.F16: load_f16, dtypes.BF16: load_bf16}[dtype]

    @device_function
    def quad(w, count, k, index, element, n, to):  # type: ignore[no-untyped-def]
        place = w + index * ((k * size + 15) & -16) + element * size
        for e in range(n):
            store_f32(to + 4 * e, load(place + e * size))

    return quad  # type: ignore[no-any-return]


def _quant_quad(layout: QuantLayout) -> Callable[..., None]:
    """4 elements of one row that share a scale; `n` is 4."""
    bits, offset, group, groups, n_sub = layout.bits, layout.offset, layout.group, layout.groups, layout.super_blocks
    quant_bytes, high_bytes, scale_bytes, head_bytes = layout.quant_bytes, layout.high_bytes, layout.scale_bytes, layout.head_bytes
    has_minimum, has_scales, signed = layout.has_minimum, layout.has_scales, layout.has_signed_scales

    @device_function
    def quad(w, count, k, index, element, n, to):  # type: ignore[no-untyped-def]
        n_blocks = k >> 5
        block = index * n_blocks + (element >> 5)
        g = (element & 31) >> 2
        high = w + count * n_blocks * quant_bytes
        scales = w + ((count * n_blocks * (quant_bytes + high_bytes) + 15) & -16)
        heads = w + ((scales - w + count * n_blocks * scale_bytes + 15) & -16)
        at = scales + block * scale_bytes
        head = heads + block // n_sub * head_bytes if has_scales else at
        scale, minimum = load_f16(head), types.float32(0.0)
        if has_minimum:
            minimum = load_f16(head + 2)
        if has_scales:
            place = at + 4 * g // group
            scale = mul(scale, types.float32(load_i8(place) if signed else load_u8(place)))
            if has_minimum:
                minimum = mul(minimum, -types.float32(load_u8(place + groups)))
        for e in range(4):
            if bits == 8:
                quant = load_i8(w + index * k + (g >> 2) * (k >> 1) + ((element >> 5) << 4) + 4 * (g & 3) + e)
            else:
                quant = (load_u8(w + 16 * block + 4 * (g & 3) + e) >> 4 * (g >> 2)) & 15
            if bits == 5:
                quant |= ((load_u8(high + 4 * block + e) >> g) & 1) << 4
            if bits == 6:
                quant |= ((load_u8(high + 8 * block + 4 * (g >> 2) + e) >> 2 * (g & 3)) & 3) << 4
            value = mul(scale, types.float32(quant - offset))
            store_f32(to + 4 * e, add(value, minimum) if has_minimum else value)

    return quad  # type: ignore[no-any-return]


def all_kernels() -> list[CudaKernel]:
    """Every kernel of this module."""
    return list(dict.fromkeys(get_rows_kernel(dtype) for dtype in (*FLOAT_TYPES, *QUANT_LAYOUTS)))
