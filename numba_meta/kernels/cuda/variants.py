"""One kernel in several forms: each GPU takes the best one that it can run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numba_meta.kernels.cuda.kernel import CudaKernel, Gpu, Launch


class VariantKernel:
    """Kernels of the same parameters and meaning, the best one first; the last one runs everywhere. Machine code is that of `for_gpu`."""

    def __init__(self, name: str, variants: Sequence[CudaKernel]) -> None:
        assert all(variant.parameters == variants[-1].parameters for variant in variants), name
        self.name = name
        self.variants = tuple(variants)
        self.parameters = variants[-1].parameters
        self.max_threads = max(variant.max_threads for variant in variants)

    def __repr__(self) -> str:
        return f"VariantKernel({self.name})"

    def for_gpu(self, gpu: Gpu) -> CudaKernel:
        """The best one that a GPU's compute capability and shared memory allow."""

        def fits(variant: CudaKernel) -> bool:
            return variant.capability <= gpu.capability and variant.shared_bytes <= gpu.max_shared_bytes

        return next(filter(fits, self.variants), self.variants[-1])

    def launch(self, arguments: Mapping[str, Any], n_rows: int, gpu: Gpu) -> Launch:
        """As `CudaKernel.launch`, of the one for this GPU."""
        return self.for_gpu(gpu).launch(arguments, n_rows, gpu)
