"""One kernel in several forms: each GPU takes the best one that it can run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numba_meta.kernels.cuda.kernel import Capability, CudaKernel, Gpu, Launch


class VariantKernel(CudaKernel):
    """Kernels of the same parameters and meaning, the best one first; the last one runs everywhere."""

    def __init__(self, name: str, variants: Sequence[CudaKernel]) -> None:
        last = variants[-1]
        assert all(variant.parameters == last.parameters for variant in variants), name
        super().__init__(last.function, name, last.launch, max(variant.max_threads for variant in variants), last.capability)
        self.variants = tuple(variants)

    def for_gpu(self, gpu: Gpu) -> CudaKernel:
        """The best one that a GPU's compute capability and shared memory allow."""

        def fits(variant: CudaKernel) -> bool:
            return variant.capability <= gpu.capability and variant.shared_bytes <= gpu.max_shared_bytes

        return next(filter(fits, self.variants), self.variants[-1])

    def launch(self, arguments: Mapping[str, Any], n_rows: int, gpu: Gpu) -> Launch:
        """As `CudaKernel.launch`."""
        return self.for_gpu(gpu).launch(arguments, n_rows, gpu)

    def ptx(self, capability: Capability) -> str:
        """Refused: a capability alone does not say which variant a GPU runs; see `for_gpu`."""
        raise NotImplementedError(f"{self.name} has variants")

    def binary(self, capability: Capability) -> tuple[str, bytes]:
        """Refused, as `ptx`."""
        raise NotImplementedError(f"{self.name} has variants")
