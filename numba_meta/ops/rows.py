"""Rows by index: looking up embeddings, choosing the rows that need logits, storing K and V in cells."""

from __future__ import annotations

from collections.abc import Sequence

from numba_meta.dtypes import F32, I32, I64
from numba_meta.graph import Graph
from numba_meta.lowering import Lowering
from numba_meta.operation import Operation, Params, register
from numba_meta.ops.base import check, new_tensor, no_rule, reduce_partial
from numba_meta.split.state import MIRRORED, PARTIAL, SplitState
from numba_meta.tensor import Role, Rows, Tensor


def get_rows(graph: Graph, table: Tensor, ids: Tensor, name: str = "") -> Tensor:
    """Rows `[n, t]` of a table `[n, rows]` by int32 ids `[t]`, as float32."""
    return graph.apply("get_rows", table, ids, name=name)


def set_rows(graph: Graph, destination: Tensor, rows: Tensor, ids: Tensor, name: str = "") -> Tensor:
    """Stores float32 rows `[n, t]` in rows `ids` (int32 `[t]`, -1: not stored) of a cache `[n, cells]`, in its type; a view of it."""
    return graph.apply("set_rows", destination, rows, ids, name=name)


def store_cells(graph: Graph, table: Tensor, sequences: Tensor, positions: Tensor, cells: Tensor, name: str = "") -> Tensor:
    """Notes in a cell table `[positions, sequences]` which cell holds each row's position; a view of the table."""
    return graph.apply("store_cells", table, sequences, positions, cells, name=name)


@register
class GetRows(Operation):
    name = "get_rows"

    def result(self, name: str, sources: Sequence[Tensor], params: Params) -> Tensor:
        table, ids = sources
        fits = table.shape[2:] == (1, 1) and table.dtype not in (I32, I64) and ids.dtype == I32 and ids.shape[1:] == (1, 1, 1)
        check(fits, "get_rows", name, sources, "a table [n, rows] and int32 ids [t]")
        rows = Rows(ids.rows.count, 1) if ids.rows else None
        return new_tensor("get_rows", name, (table.shape[0], ids.shape[0]), sources, params, rows=rows)

    def split(self, node: Tensor, states: Sequence[SplitState]) -> SplitState:
        table, ids = states
        if not ids.is_mirrored:
            raise no_rule(node, states)
        if table.is_partial or table.is_mirrored or table.axis == 0:
            return table
        if table.axis == 1 and len(table.segments) == 1 == table.segments[0].repeat:
            return PARTIAL  # vocabulary: each device looks up the ids that it holds, zeros elsewhere
        raise no_rule(node, states)

    def localize(self, node: Tensor, states: Sequence[SplitState], state: SplitState, device: int) -> Params:
        if states[0].axis != 1:
            return node.params
        ranges = states[0].ranges(device)
        return {**node.params, "first": ranges[0][0] if ranges else 0}

    def lower(self, node: Tensor, to: Lowering) -> None:
        table, ids = node.sources
        first = int(node.params.get("first", 0))
        shared = {"ids": ids, "y": node, "y_stride": node.strides[1], "n_rows": to.count(node)}
        if table.role is Role.WEIGHT:
            kernel = to.kernels.get_rows.get_rows_kernel(table.dtype)
            extents = {"w": table, "first": first, "count": table.shape[1], "k": table.shape[0]}
            to.call(kernel, reads=(table, ids), writes=(node,), **extents, **shared)
        else:
            check(table.dtype == F32, "get_rows", node.name, node.sources, "a weight or float32 rows")
            extents = {"table": table, "table_stride": table.strides[1], "n": table.shape[0]}
            extents |= {"first_row": first, "n_table_rows": table.shape[1]}
            to.call(to.kernels.rows.get_rows_f32, reads=(table, ids), writes=(node,), **extents, **shared)


class _InPlace(Operation):
    """Writes into its first source and gives a view of it."""

    def result(self, name: str, sources: Sequence[Tensor], params: Params) -> Tensor:
        target = sources[0]
        return Tensor(name, target.dtype, target.shape, target.strides, self.name, tuple(sources), dict(params), target.role, target)


@register
class SetRows(_InPlace):
    name = "set_rows"

    def result(self, name: str, sources: Sequence[Tensor], params: Params) -> Tensor:
        target, rows, ids = sources
        fits = rows.dtype == F32 and ids.dtype == I32 and rows.shape[0] == target.shape[0] and rows.shape[1] == ids.shape[0]
        fits = fits and rows.shape[2:] == (1, 1) == target.shape[2:] and rows.strides[0] == 4
        check(fits, "set_rows", name, sources, "a cache [n, cells], float32 rows [n, t] and int32 ids [t]")
        return super().result(name, sources, params)

    def split(self, node: Tensor, states: Sequence[SplitState]) -> SplitState:
        target, rows, ids = states
        reduce_partial(node, states)
        if ids.is_mirrored and target.axis == rows.axis != 1 and target.same_cuts(rows):
            return target
        raise no_rule(node, states)

    def lower(self, node: Tensor, to: Lowering) -> None:
        target, rows, ids = node.sources
        if target.storage.op == "deliver" and not to.transport.is_read(target):
            return
        to.call(
            to.kernels.rows.store_rows_kernel(target.dtype),
            reads=(rows, ids),
            writes=(target,),
            x=rows,
            x_stride=rows.strides[1],
            cells=ids,
            cache=target,
            cell_stride=target.strides[1],
            n=rows.shape[0],
            n_rows=to.count(rows),
        )


@register
class StoreCells(_InPlace):
    name = "store_cells"

    def result(self, name: str, sources: Sequence[Tensor], params: Params) -> Tensor:
        check(all(s.dtype == I32 for s in sources), "store_cells", name, sources, "int32 tensors")
        return super().result(name, sources, params)

    def split(self, node: Tensor, states: Sequence[SplitState]) -> SplitState:
        if all(state.is_mirrored for state in states):
            return MIRRORED
        raise no_rule(node, states)

    def lower(self, node: Tensor, to: Lowering) -> None:
        kernel = to.kernels.cells.store_cells
        table, sequences, positions, cells = node.sources
        to.call(
            kernel,
            reads=(sequences, positions, cells),
            writes=(table,),
            table=table,
            table_stride=table.strides[1],
            sequences=sequences,
            positions=positions,
            cells=cells,
            n_rows=to.count(cells),
        )
