"""What an operation may ask for when it is lowered to kernel calls of a device. The planner implements it (schedule/lower.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from numba_meta.dtypes import DType
from numba_meta.tensor import Tensor

if TYPE_CHECKING:
    from numba_meta.kernels import KernelSet


class Kernel(Protocol):
    """A kernel of some kind of device, as a plan names it."""

    name: str


@dataclass(eq=False)
class Scratch:
    """Memory of a step that no tensor of the graph names: quantized activations, partial results of a kernel."""

    name: str
    n_bytes: int


@dataclass(eq=False)
class Constant:
    """Data that calls read and that never changes: frequencies, row counts, lists of addresses."""

    name: str
    data: np.ndarray


class TransportLowering(Protocol):
    """How deliveries of a host-resident cache become calls."""

    def is_read(self, window: Tensor) -> bool:
        """Whether this device reads a delivered window."""

    def deliver(self, node: Tensor) -> None:
        """Copies a window from the host."""

    def write_back(self, node: Tensor) -> None:
        """Copies new rows to the host."""

    def done_reading(self, window: Tensor) -> None:
        """All kernels that read a window are emitted."""


class Lowering(Protocol):
    """Collects the calls of one device. A tensor, `Scratch` or `Constant` among the arguments of a call stands for its address."""

    exact: bool  # float32 activations
    n_threads: int
    kernels: KernelSet  # of the device's kind

    @property
    def transport(self) -> TransportLowering:
        """Deliveries of host-resident caches."""

    def call(self, kernel: Kernel, reads: Sequence[Any], writes: Sequence[Any], **arguments: Any) -> None:
        """Adds a call of a kernel, with what it reads and writes."""

    def count(self, tensor: Tensor) -> Any:
        """Where a kernel finds how many rows of a tensor are live (int64)."""

    def constant(self, name: str, data: np.ndarray) -> Constant:
        """Data that calls read; the same name gives the same constant."""

    def scratch(self, name: str, n_bytes: int) -> Scratch:
        """Memory for this node's calls alone."""

    def row_extent(self, tensor: Tensor) -> tuple[int, int]:
        """(elements of one row, bytes from row to row), where everything below the token axis is one row."""

    def norm_rows(self, x: Tensor) -> tuple[int, Any]:
        """(rows of axis 0 per token, count of tokens)."""

    def activation(self, x: Tensor, weight_type: DType, columns: int) -> tuple[Any, int]:
        """x `[k, t]` in the form that a product with this weight type and so many columns at once reads; the bytes from row to row."""

    def copy(self, source: Tensor, destination: Tensor) -> None:
        """A copy of a strided tensor to a contiguous one."""

    def copy_part(self, source: Tensor, first: Sequence[int], destination: Tensor, at: Sequence[int], shape: Sequence[int]) -> None:
        """A copy of a part of a tensor to a place in another."""

    def all_reduce(self, part: Tensor, out: Tensor) -> None:
        """The sum of all devices' tensors."""

    def gather(self, piece: Tensor, out: Tensor) -> None:
        """All devices' pieces, joined along axis 0."""
