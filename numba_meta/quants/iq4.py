"""Types whose four bits choose from a table of sixteen unevenly spaced values: iq4_nl (32 elements), iq4_xs (256).

Layouts in bytes: iq4_nl = d 2, nibbles 16; iq4_xs = d 2, high scale bits 2, low scale bits 4, nibbles 128.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from numba_meta import dtypes
from numba_meta.quants.blocks import Blocks, ByteArray, bit_fields, halves

# The format's own table: closer together near zero, where weights are dense.
CODEBOOK: npt.NDArray[np.int8] = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)


def split_iq4_nl(blocks: ByteArray) -> Blocks:
    """[n_blocks, 18] bytes; quants int8, values of `CODEBOOK`."""
    return Blocks(dtypes.IQ4_NL, CODEBOOK[bit_fields(blocks[:, 2:], 16, 4)], halves(blocks, 0))


def split_iq4_xs(blocks: ByteArray) -> Blocks:
    """[n_blocks, 136] bytes; quants int8, values of `CODEBOOK`; 8 groups of 32 with scales in -32..31.

    Scale `i` has its low four bits in nibble `i % 2` of byte `4 + i // 2` and its high two in bits `2 i` of the u16 at byte 2.
    """
    low = bit_fields(blocks[:, 4:8], 1, 4)
    high = bit_fields(blocks[:, 2:4], 1, 2)
    scales = (low | (high << np.uint8(4))).view(np.int8) - np.int8(32)
    return Blocks(dtypes.IQ4_XS, CODEBOOK[bit_fields(blocks[:, 8:], 16, 4)], halves(blocks, 0), sub_scales=scales)


SPLITTERS = {dtypes.IQ4_NL: split_iq4_nl, dtypes.IQ4_XS: split_iq4_xs}
