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

    def variant(self, capability: Capability) -> CudaKernel:
        """The kernel that runs on a GPU of this compute capability."""
        return next((each for each in self.variants if each.capability <= capability), self.variants[-1])

    def launch(self, arguments: Mapping[str, Any], n_rows: int, gpu: Gpu) -> Launch:
        """As `CudaKernel.launch`."""
        return self.variant(gpu.capability).launch(arguments, n_rows, gpu)

    def ptx(self, capability: Capability) -> str:
        """As `CudaKernel.ptx`."""
        return self.variant(capability).ptx(capability)

    def binary(self, capability: Capability) -> tuple[str, bytes]:
        """As `CudaKernel.binary`."""
        return self.variant(capability).binary(capability)
