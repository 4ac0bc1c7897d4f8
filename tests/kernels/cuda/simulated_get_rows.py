"""Run by test_packed.py with NUMBA_ENABLE_CUDASIM=1: looks packed rows up in the simulator, for every type, and compares bits.

Prints a JSON object: the name of each type, and what was wrong ("" where nothing was).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np

assert os.environ.get("NUMBA_ENABLE_CUDASIM") == "1", "start this with NUMBA_ENABLE_CUDASIM=1"
sys.path[:0] = [str(Path(__file__).parents[3]), str(Path(__file__).parents[2])]

from kernels.cuda.weights import make_weights  # noqa: E402
from numba import cuda  # noqa: E402

from numba_meta import dtypes  # noqa: E402
from numba_meta.dtypes import DType  # noqa: E402
from numba_meta.kernels.cuda.get_rows import get_rows_kernel  # noqa: E402
from numba_meta.kernels.cuda.kernel import Gpu  # noqa: E402


def look_up(dtype: DType, n_out: int, k: int, ids: list[int], first: int, n_live: int) -> str:
    weights = make_weights(dtype, n_out, k, np.random.default_rng())
    planes = np.zeros(weights.planes.size + 16, np.uint8)
    planes = planes[-planes.ctypes.data % 16 :][: weights.planes.size]
    planes[:] = weights.planes
    chosen, rows = np.array(ids, np.int32), np.array([n_live], np.int64)
    y = np.full((len(ids), k + 3), np.nan, np.float32)
    kernel = get_rows_kernel(dtype)
    places = [planes.ctypes.data, chosen.ctypes.data, first, n_out, k, y.ctypes.data, y.strides[0], rows.ctypes.data]
    launch = kernel.launch({"k": k}, len(ids), Gpu((9, 0), 1))
    cuda.jit(kernel.function)[launch.grid, launch.block](*places)
    expected = np.full_like(y, np.nan)
    for row, index in enumerate(ids[:n_live]):
        expected[row, :k] = weights.values[index - first] if 0 <= index - first < n_out else 0.0
    return "" if (y.view(np.uint32) == expected.view(np.uint32)).all() else f"{dtype} [{n_out}, {k}]: wrong bits"


def main() -> None:
    told = {}
    for dtype in dtypes.WEIGHT_TYPES:
        shapes = [(5, 512)] if dtype.block_size > 32 else [(5, 96), (3, 544)] if dtype.is_quantized else [(5, 45)]
        told[dtype.name] = "; ".join(filter(None, (look_up(dtype, *shape, [12, 10, 99, 11], 10, 3) for shape in shapes)))
    print(json.dumps(told))


if __name__ == "__main__":
    main()
