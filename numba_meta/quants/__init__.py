"""Quantized blocks in plain numpy: the definition that every kernel is tested against.

In: the bytes of rows as a GGUF file stores them. Out: their values (`dequantize`, bit for bit what the `gguf` package
gives), or their fields (`split_blocks`), from which kernels pack layouts of their own. `quantize` goes the other way for
the 32-element types. One file per family: `legacy`, `k_quants`, `iq4`.
"""

from numba_meta.quants.blocks import Blocks
from numba_meta.quants.convert import dequantize, split_blocks
from numba_meta.quants.encode import QUANTIZABLE, quantize

__all__ = ["QUANTIZABLE", "Blocks", "dequantize", "quantize", "split_blocks"]
