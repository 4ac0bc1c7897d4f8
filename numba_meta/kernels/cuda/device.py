"""The names that kernels are written with: real ones, or the simulator's where `NUMBA_ENABLE_CUDASIM` is set."""

from numba_meta.kernels.cuda.api import IS_SIMULATOR, cuda, device_function, types

if IS_SIMULATOR:
    from numba_meta.kernels.cuda.simulated import *  # noqa: F403
else:
    from numba_meta.kernels.cuda.intrinsics import *  # noqa: F403
    from numba_meta.kernels.cuda.tensor_cores import *  # noqa: F403

__all__ = [*(name for name in globals() if not name.startswith("_") and name != "IS_SIMULATOR"), "cuda", "device_function", "types"]
