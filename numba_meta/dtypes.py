"""Element and block types: how many elements a block holds and how many bytes it takes.

The identifiers are those of GGUF files (`ggml_type`), so that a type read from a file is a look-up.
A block type stores `block_size` elements of the fastest-varying axis (axis 0) in `block_bytes` bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from numba_meta.errors import ShapeError


@dataclass(frozen=True)
class DType:
    """An element type (`block_size` 1) or a quantized block type.

    `gguf_id` is the type's number in GGUF files, -1 for types that only live in memory.
    """

    name: str
    gguf_id: int
    block_size: int
    block_bytes: int

    @property
    def is_quantized(self) -> bool:
        """Whether elements share a block, so that a cut on axis 0 must respect `block_size`."""
        return self.block_size > 1

    def row_bytes(self, n_elements: int) -> int:
        """Bytes of `n_elements` consecutive elements of axis 0; they must fill whole blocks."""
        if n_elements % self.block_size:
            raise ShapeError(
                f"a row of {n_elements} elements does not fill blocks of {self.name} ({self.block_size} elements each)"
            )
        return n_elements // self.block_size * self.block_bytes

    def __repr__(self) -> str:
        return self.name


F32 = DType("f32", 0, 1, 4)
F16 = DType("f16", 1, 1, 2)
Q4_0 = DType("q4_0", 2, 32, 18)
Q4_1 = DType("q4_1", 3, 32, 20)
Q5_0 = DType("q5_0", 6, 32, 22)
Q5_1 = DType("q5_1", 7, 32, 24)
Q8_0 = DType("q8_0", 8, 32, 34)
Q2_K = DType("q2_k", 10, 256, 84)
Q3_K = DType("q3_k", 11, 256, 110)
Q4_K = DType("q4_k", 12, 256, 144)
Q5_K = DType("q5_k", 13, 256, 176)
Q6_K = DType("q6_k", 14, 256, 210)
IQ4_NL = DType("iq4_nl", 20, 32, 18)
IQ4_XS = DType("iq4_xs", 23, 256, 136)
I32 = DType("i32", 26, 1, 4)
I64 = DType("i64", 27, 1, 8)
BF16 = DType("bf16", 30, 1, 2)

ALL = (F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, I32, I64)
WEIGHT_TYPES = ALL[:-2]
CACHE_TYPES = (F32, F16, BF16, Q8_0, Q4_0)
BY_NAME = {dtype.name: dtype for dtype in ALL}
BY_GGUF_ID = {dtype.gguf_id: dtype for dtype in ALL}
