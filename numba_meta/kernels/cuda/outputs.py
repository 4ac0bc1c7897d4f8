"""What becomes of 4 columns that a thread has computed: float32, or 8-bit activations for a matrix product.

    write(row, i, values, n, is_aligned)

writes columns i..i+3 of the row at `row`, which has n. All lanes of a warp call it, each with the 4 columns behind those of the lane before
it, the first with a multiple of 128; lanes with i >= n write nothing.
"""

from __future__ import annotations

import numpy as np

from numba_meta.kernels.cuda.device import device_function
from numba_meta.kernels.cuda.lanes import store_4
from numba_meta.kernels.cuda.quantize import quantize_quad

WARP_COLUMNS = -128  # a mask: i & WARP_COLUMNS is where a warp's columns begin


@device_function
def write_f32(row, i, values, n, is_aligned):  # type: ignore[no-untyped-def]
    """float32. `is_aligned`: rows lie at multiples of 16 bytes."""
    store_4(row + 4 * i, values, n - i, is_aligned)


@device_function
def write_q8(row, i, values, n, is_aligned):  # type: ignore[no-untyped-def]
    """A row of `q8` activations, with the bits of `quantize_rows`. n: whole blocks of 32."""
    block = i >> 5
    if i >= n:
        block = np.int64(-1)
    quantize_quad(values[0], values[1], values[2], values[3], row, block, i & 31, n)
