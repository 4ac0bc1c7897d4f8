"""From a device's graph to kernel calls: operations say which kernels, with which arguments; nothing has an address yet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from numba_meta.dtypes import F32, DType
from numba_meta.errors import ShapeError
from numba_meta.lowering import Constant, Kernel, Scratch
from numba_meta.operation import operation
from numba_meta.schedule.calls import AddressList, Call, Offset, Peer, Place
from numba_meta.schedule.localize import DeviceGraph
from numba_meta.schedule.lower_ranks import RankLowering
from numba_meta.schedule.lower_transport import Link, TransportLowering
from numba_meta.tensor import Tensor

if TYPE_CHECKING:
    from numba_meta.kernels import KernelSet
    from numba_meta.schedule.infer import SplitGraph
    from numba_meta.schedule.ranks import Ranks


class DeviceLowering:
    """Collects the calls of one device. Operations use it from `lower`."""

    def __init__(
        self,
        device_graphs: Sequence[DeviceGraph],
        device: int,
        exact: bool,
        n_threads: int,
        kernels: KernelSet,
        staged_layers: Sequence[int] = (),
        n_slots: int = 0,
        link: Link | None = None,
        over_ranks: tuple[Ranks, SplitGraph] | None = None,
    ) -> None:
        self.exact = exact
        self.n_threads = n_threads
        self.kernels = kernels
        self.device = device
        self.calls: list[Call] = []
        self._graphs = device_graphs
        self._own = device_graphs[device]
        self._whole_of = {simple: whole for whole, simple in self._own.simple.items()}
        self._activations: dict[tuple[Tensor, str], Scratch] = {}
        self._constants: dict[str, Constant] = {}
        self._max_rows: dict[int, int] = {}  # by the id of a row count, which the graph or this object keeps
        self._node = ""
        self._consumed = {source for node in self._own.graph.nodes for source in node.sources}
        self.transport = TransportLowering(self, device_graphs, staged_layers, n_slots, link or Link())
        self._over_ranks = RankLowering(self, *over_ranks) if over_ranks else None

    def lower(self) -> list[Call]:
        """Calls for the whole graph of this device, in order."""
        for node in self._own.graph.nodes:
            self._node = node.name
            is_collective = node.op in ("all_reduce", "gather")
            if node.n_elements or is_collective:
                operation(node.op).lower(node, self)
        return self.calls

    # ---- what operations ask for -------------------------------------------------------------------------------------------------------

    def call(self, kernel: Kernel, reads: Sequence[Place], writes: Sequence[Place], **arguments: Any) -> None:
        """Adds a call. A place among the arguments stands for its address; one that is not written is read (row counts)."""
        known = {id(place) for place in (*reads, *writes)}
        more = tuple(value for value in arguments.values() if isinstance(value, Place) and id(value) not in known)
        max_rows = self._max_rows.get(id(arguments.get("n_rows")), 1)
        self.calls.append(Call(kernel, arguments, (*reads, *more), tuple(writes), node=self._node, max_rows=max_rows))

    def count(self, tensor: Tensor) -> Place:
        """Where a kernel finds how many rows of this tensor are live (int64)."""
        if tensor.rows is not None:
            count = tensor.rows.count
            self._max_rows[id(count)] = max(self._max_rows.get(id(count), 0), tensor.shape[tensor.rows.axis])
            return count
        return self.constant_count(math.prod(tensor.shape[1:]))

    def constant_count(self, value: int) -> Constant:
        """A row count that is the same in every step."""
        count = self.constant(f"count {value}", np.array([value], np.int64))
        self._max_rows[id(count)] = value
        return count

    def constant(self, name: str, data: np.ndarray) -> Constant:
        """Data that calls read; the same name gives the same constant."""
        if name not in self._constants:
            self._constants[name] = Constant(name, data)
        return self._constants[name]

    def scratch(self, name: str, n_bytes: int) -> Scratch:
        """Memory for this node's calls alone."""
        return Scratch(f"{self._node}.{name}", n_bytes)

    def row_extent(self, tensor: Tensor) -> tuple[int, int]:
        """(elements of one row, bytes from row to row), where everything below the token axis is one row."""
        axis = tensor.rows.axis if tensor.rows else 1
        n = math.prod(tensor.shape[:axis])
        if tensor.strides[:axis] != (4, *_row_strides(tensor.shape, axis)) or math.prod(tensor.shape[axis + 1 :]) != 1 and tensor.rows:
            raise ShapeError(f"{self._node}: {tensor.name} {tensor.shape} does not lie row by row")
        return n, n * 4

    def norm_rows(self, x: Tensor) -> tuple[int, Place]:
        """(rows of axis 0 per token, count of tokens)."""
        if x.rows is None:
            return 1, self.count(x)
        return math.prod(x.shape[1 : x.rows.axis]), self.count(x)

    def activation(self, x: Tensor, weight_type: DType, columns: int) -> tuple[Place, int]:
        """x `[k, t]` in the form that a product with this weight type and so many columns at once reads; the bytes from row to row.

        Converted once for all products that read it.
        """
        if x.dtype != F32 or x.strides[0] != 4:
            raise ShapeError(f"{self._node}: activations {x.name} must be float32 rows")
        packed = self.kernels.packed
        form = packed.activation_format(weight_type, self.exact, columns)
        if form == "f32":
            return x, x.strides[1]
        row_bytes = packed.activation_row_bytes(form, x.shape[0])
        if (x, form) not in self._activations:
            self._activations[x, form] = Scratch(f"{x.name}.{form}", row_bytes * x.shape[1])
            to = self._activations[x, form]
            arguments = {"x": x, "x_stride": x.strides[1], "y": to, "y_stride": row_bytes, "n": x.shape[0], "n_rows": self.count(x)}
            if x.shape[0]:
                self.call(self.kernels.quantize.quantize_kernel(form), (x,), (to,), **arguments)
        return self._activations[x, form], row_bytes

    def copy(self, source: Tensor, destination: Tensor) -> None:
        """A copy of a tensor to another of its shape; both may be strided, but on axis 0."""
        self.copy_part(source, (0, 0, 0, 0), destination, (0, 0, 0, 0), source.shape)

    def copy_part(self, source: Tensor, first: Sequence[int], destination: Tensor, at: Sequence[int], shape: Sequence[int]) -> None:
        """Copies `shape` elements that begin at the indices `first` of one tensor to the indices `at` of another, in whole blocks."""
        for tensor in (source, destination):
            if tensor.strides[0] != tensor.dtype.block_bytes:
                raise ShapeError(f"{self._node}: {tensor.name} cannot be copied, its axis 0 has gaps {tensor.strides}; permute other axes")
        for i3 in range(shape[3]):
            for i2 in range(shape[2]):
                self.call(
                    self.kernels.copy.copy_2d,
                    (source,),
                    (destination,),
                    source=Offset(source, _offset(source, first, i2, i3)),
                    source_pitch=source.strides[1],
                    destination=Offset(destination, _offset(destination, at, i2, i3)),
                    destination_pitch=destination.strides[1],
                    width=source.dtype.row_bytes(shape[0]),
                    height=shape[1],
                )

    def whole(self, tensor: Tensor) -> Tensor:
        """The tensor of the whole graph that this device's tensor is a piece of."""
        return self._whole_of[tensor]

    def is_mirrored(self, tensor: Tensor) -> bool:
        """Whether all devices of this process hold the whole of this tensor."""
        return all(graph.simple[self._whole_of[tensor]].shape == self._whole_of[tensor].shape for graph in self._graphs)

    # ---- collectives -------------------------------------------------------------------------------------------------------------------

    def all_reduce(self, part: Tensor, out: Tensor) -> None:
        """All devices meet; then each adds all summands, in device order, into its own result."""
        if self._over_ranks is not None:
            self._over_ranks.all_reduce(part, out)
            return
        self.meet()
        if self.is_used(out):
            n, stride = self.row_extent(out)
            self.add_up(AddressList(self.peers(part)), out, n, stride, self.count(out))

    def gather(self, piece: Tensor, out: Tensor) -> None:
        """All devices meet; then each that needs the whole joins all pieces along axis 0."""
        if self._over_ranks is not None:
            self._over_ranks.gather(piece, out)
            return
        self.meet()
        if self.is_used(out):
            self.join_columns(self.peers(piece), out, out.strides[1], self.count(out), out.name)

    def add_up(self, parts: AddressList, out: Place, n: int, stride: int, rows: Place) -> None:
        """The sum of rows of n elements, `stride` bytes apart everywhere."""
        self.call(
            self.kernels.reduce.all_reduce,
            (*parts.peers, parts),
            (out,),
            parts=parts,
            n_parts=len(parts.peers),
            part_stride=stride,
            out=out,
            out_stride=stride,
            n=n,
            n_rows=rows,
        )

    def join_columns(self, peers: tuple[Peer, ...], out: Place, out_stride: int, rows: Place, name: str) -> None:
        """Rows of the peers' pieces side by side."""
        parts = AddressList(peers)
        widths = np.array([peer.tensor.shape[0] for peer in parts.peers], np.int64)
        strides = np.array([peer.tensor.strides[1] for peer in parts.peers], np.int64)
        self.call(
            self.kernels.reduce.gather_columns,
            (*parts.peers, parts),
            (out,),
            parts=parts,
            widths=self.constant(f"{name}.widths", widths),
            strides=self.constant(f"{name}.strides", strides),
            n_parts=len(parts.peers),
            out=out,
            out_stride=out_stride,
            n_rows=rows,
        )

    def meet(self) -> None:
        """All devices of this process wait for each other."""
        self.calls.append(Call(None, meets=True, node=self._node))

    def peers(self, own: Tensor) -> tuple[Peer, ...]:
        """The tensors of all devices of this process that belong to the same tensor of the whole graph."""
        whole = self._whole_of[own]
        return tuple(Peer(graph.device, graph.simple[whole]) for graph in self._graphs)

    def is_used(self, tensor: Tensor) -> bool:
        """Whether this device computes with a tensor, or the host reads it here (outputs are read from the first device)."""
        return tensor in self._consumed or (self.device == 0 and tensor in self._own.graph.outputs)


def _offset(tensor: Tensor, first: Sequence[int], i2: int, i3: int) -> int:
    """Bytes from the start of a tensor to the row that is i2, i3 beyond `first`."""
    n_bytes = tensor.dtype.row_bytes(first[0])
    return n_bytes + first[1] * tensor.strides[1] + (first[2] + i2) * tensor.strides[2] + (first[3] + i3) * tensor.strides[3]


def _row_strides(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    return tuple(4 * math.prod(shape[:i]) for i in range(1, axis))
