"""Reading the rows of a KV cache: one head of one cell, 16 elements at a time, from any cache type to float32."""

from __future__ import annotations

from llvmlite import ir

from numba_meta.dtypes import BF16, F16, F32, Q4_0, Q8_0, DType
from numba_meta.errors import ShapeError
from numba_meta.kernels.cpu.simd import LANES, VF, pointer_ir, splat_ir
from numba_meta.kernels.cpu.simd_math import I8, I16, I32, I64, const_ir, f32_from_bf16_ir, f32_from_f16_ir, lanes_ir


def n_vectors(dim: int) -> int:
    """Vectors of 16 that hold `dim` elements; the last one is padded with zeros."""
    return -(-dim // LANES)


def offset_ir(b: ir.IRBuilder, address: ir.Value, n_bytes: int) -> ir.Value:
    """IR: address + n_bytes."""
    return b.add(address, ir.Constant(I64, n_bytes)) if n_bytes else address


def _lanes(b: ir.IRBuilder, address: ir.Value, element: ir.Type, count: int, align: int) -> ir.Value:
    """`count` elements at an address and zeros behind them; reads nothing else."""
    if count == LANES:
        return b.load(pointer_ir(b, address, lanes_ir(element)), align=align)
    value: ir.Value = ir.Constant(lanes_ir(element), [0.0 if isinstance(element, ir.FloatType) else 0] * LANES)
    for lane in range(count):
        one = b.load(pointer_ir(b, offset_ir(b, address, lane * align), element), align=align)
        value = b.insert_element(value, one, ir.Constant(I32, lane))
    return value


def load_lanes_ir(b: ir.IRBuilder, dtype: DType, address: ir.Value, vector: int, dim: int) -> ir.Value:
    """IR: elements 16 * vector ... of a row of `dim` elements at `address`, as 16 float32; zeros beyond `dim`."""
    count = min(LANES, dim - LANES * vector)
    if dtype is F32:
        return _lanes(b, offset_ir(b, address, 64 * vector), VF.llvm.element, count, 4)
    if dtype is F16:
        return f32_from_f16_ir(b, _lanes(b, offset_ir(b, address, 32 * vector), I16, count, 2))
    if dtype is BF16:
        return f32_from_bf16_ir(b, _lanes(b, offset_ir(b, address, 32 * vector), I16, count, 2))
    block = offset_ir(b, address, dtype.block_bytes * (vector // 2))
    d = splat_ir(b, f32_from_f16_ir(b, b.load(pointer_ir(b, block, I16), align=2)))
    if dtype is Q8_0:
        quants = b.sext(_lanes(b, offset_ir(b, block, 2 + 16 * (vector % 2)), I8, LANES, 1), lanes_ir(I32))
    else:
        packed = _lanes(b, offset_ir(b, block, 2), I8, LANES, 1)
        four = const_ir(packed.type, 4)
        nibbles = b.lshr(packed, four) if vector % 2 else b.and_(packed, const_ir(packed.type, 15))
        quants = b.sub(b.zext(nibbles, lanes_ir(I32)), const_ir(lanes_ir(I32), 8))
    return b.fmul(b.sitofp(quants, VF.llvm), d)


def check_cache_row(dtype: DType, dim: int) -> None:
    """ShapeError unless attention reads rows of `dim` elements of this type."""
    if dtype not in (F32, F16, BF16, Q8_0, Q4_0):
        raise ShapeError(f"attention does not read a cache in {dtype.name}; use f32, f16, bf16, q8_0 or q4_0")
    if dim < 1 or dim % dtype.block_size:
        raise ShapeError(f"a head of {dim} elements does not fill blocks of {dtype.name}; it must be a multiple of {dtype.block_size}")
