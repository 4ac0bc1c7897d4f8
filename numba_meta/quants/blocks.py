"""The fields of quantized blocks, in one form for all families, and the helpers that take packed bits apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from numba_meta.dtypes import DType

ByteArray = npt.NDArray[np.uint8]
FloatArray = npt.NDArray[np.float32]
HalfArray = npt.NDArray[np.float16]


@dataclass(frozen=True)
class Blocks:
    """Rows of a quantized type, field by field; leading axes are those of the bytes they came from.

    The value of an element `i` of block `b` and group `g` (`group_size` elements that share a sub-scale), in float32, is
    - 32-element types: `scale[b] * quants[i]`, plus `minimum[b]` where there is one;
    - 256-element types: `(scale[b] * sub_scales[g]) * quants[i]`, less `minimum[b] * sub_minimums[g]` where there is one.
    """

    dtype: DType
    quants: npt.NDArray[Any]  # int8 (signed, centred, or a codebook's value) or uint8 [..., n_elements]
    scale: HalfArray  # [..., n_blocks]
    minimum: HalfArray | None = None  # [..., n_blocks]
    sub_scales: npt.NDArray[Any] | None = None  # int8 or uint8 [..., n_groups]
    sub_minimums: ByteArray | None = None  # [..., n_groups]

    @property
    def group_size(self) -> int:
        """Elements that share one sub-scale; the block size where there are none."""
        if self.sub_scales is None:
            return self.dtype.block_size
        return int(self.quants.shape[-1] // self.sub_scales.shape[-1])

    def reshape(self, leading: tuple[int, ...]) -> Blocks:
        """The same fields with other leading axes; the last axis of each takes up the rest."""
        n_rows = int(np.prod(leading, dtype=np.int64))

        def rows(field: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return field.reshape(*leading, field.size // n_rows if n_rows else 0)

        return Blocks(
            self.dtype,
            rows(self.quants),
            rows(self.scale),
            None if self.minimum is None else rows(self.minimum),
            None if self.sub_scales is None else rows(self.sub_scales),
            None if self.sub_minimums is None else rows(self.sub_minimums),
        )


def halves(blocks: ByteArray, start: int) -> HalfArray:
    """The float16 at byte `start` of each block, [n_blocks]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).reshape(-1)


def bit_fields(packed: ByteArray, run: int, bits: int) -> ByteArray:
    """Takes `bits`-bit numbers out of bytes, [n_blocks, n_bytes] -> [n_blocks, n_bytes * 8 // bits].

    Of each run of `run` bytes the lowest bits come first, as `run` consecutive elements, then the next higher bits: ggml's
    order, which lets one vector shift serve a whole run.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(1, 1, -1, 1)
    runs = packed.reshape(packed.shape[0], -1, 1, run)
    return ((runs >> shifts) & np.uint8((1 << bits) - 1)).reshape(packed.shape[0], -1)
