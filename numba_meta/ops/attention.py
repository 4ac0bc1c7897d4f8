"""Attention over cells of a KV cache, split by heads."""

from __future__ import annotations

from collections.abc import Sequence

from numba_meta.dtypes import F32, I32
from numba_meta.graph import Graph
from numba_meta.lowering import Lowering
from numba_meta.operation import Operation, Params, register
from numba_meta.ops.base import check, new_tensor, no_rule, reduce_partial
from numba_meta.split.state import SplitState
from numba_meta.tensor import Rows, Tensor

SHARED_CHUNK_ROWS = 16  # up to here threads share a row's chunks; with more rows they share the rows


def attention(
    graph: Graph,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cell_table: Tensor,
    sequences: Tensor,
    positions: Tensor,
    *,
    scale: float,
    window: int = 0,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    name: str = "",
) -> Tensor:
    """Softmax attention: `[head_dim_v, heads, t]` from q `[head_dim, t, heads]` and caches k, v `[head_dim, cells, kv heads]`.

    Row t of sequence s at position p sees the cells that `cell_table[s]` names for positions 0..p; with a window, the last `window` of
    them. `sinks` float32 `[heads]`: one more score for every row of a head, whose exponential joins the softmax's denominator and weighs no
    value; a row that sees nothing gets zeros all the same. `softcap` (0: none): scores become `softcap * tanh(score / softcap)`.
    """
    sources = (q, k, v, cell_table, sequences, positions, *(() if sinks is None else (sinks,)))
    group = q.shape[2] // k.shape[2] if k.shape[2] else 0
    check(group * k.shape[2] == q.shape[2], "attention", name, sources, "as many query heads for each KV head")
    params = {"scale": scale, "window": window, "softcap": softcap, "group": group, "first_head": 0, "first_kv": 0}
    return graph.apply("attention", *sources, name=name, **params)


@register
class Attention(Operation):
    name = "attention"

    def result(self, name: str, sources: Sequence[Tensor], params: Params) -> Tensor:
        q, k, v, table, sequences, positions, *sinks = sources
        fits = q.dtype == F32 and q.shape[0] == k.shape[0] and k.shape[1:3] == v.shape[1:3] and q.rows is not None and q.rows.axis == 1
        fits = fits and table.dtype == I32 == sequences.dtype == positions.dtype and params["group"] > 0
        expected = "q [head_dim, t, heads], k and v [head_dim, cells, kv heads], int32 table, sequences, positions"
        fits = fits and all(s.dtype == F32 and s.shape == (q.shape[2], 1, 1, 1) and s.strides[0] == 4 for s in sinks)
        check(fits, "attention", name, sources, expected + ", float32 sinks [heads]" * len(sinks))
        assert q.rows is not None
        return new_tensor("attention", name, (v.shape[0], q.shape[2], q.shape[1]), sources, params, rows=Rows(q.rows.count, 2))

    def split(self, node: Tensor, states: Sequence[SplitState]) -> SplitState:
        q, k, v, *rest = states[:6]
        sinks = states[6:]
        reduce_partial(node, states)
        if not all(state.is_mirrored for state in rest):
            raise no_rule(node, states)
        if q.is_mirrored and k.is_mirrored and v.is_mirrored and all(state.is_mirrored for state in sinks):
            return q
        own = all(state.axis == 0 and state.same_cuts(q) for state in sinks)  # a device holds the sinks of its heads
        if own and q.axis == 2 and len(q.segments) == 1 == q.segments[0].repeat:  # one run of heads per device
            if k.is_mirrored and v.is_mirrored:
                return q.on_axis(1)  # one KV head, or replicated by policy: every device finds its heads' K and V
            if k.axis == 2 == v.axis and k.same_cuts(v) and k.scaled(node.params["group"]).same_cuts(q):
                return q.on_axis(1)
        raise no_rule(node, states)

    def localize(self, node: Tensor, states: Sequence[SplitState], state: SplitState, device: int) -> Params:
        q, k = states[:2]
        first_head = _start(q, device)
        return {**node.params, "first_head": first_head, "first_kv": _start(k, device)}

    def lower(self, node: Tensor, to: Lowering) -> None:
        kernels = to.kernels.attention
        q, k, v, table, sequences, positions, *sinks = node.sources
        window, n_rows, n_head = int(node.params["window"]), q.shape[1], q.shape[2]
        rows = {"positions": positions, "window": window, "n_head": n_head, "n_rows": to.count(node)}
        out = {"sinks": sinks[0] if sinks else 0, "y": node, "y_stride": node.strides[2], "y_head_stride": node.strides[1]}
        query = {
            "q": q,
            "q_stride": q.strides[1],
            "q_head_stride": q.strides[2],
            "k": k,
            "k_stride": k.strides[1],
            "k_head_stride": k.strides[2],
            "v": v,
            "v_stride": v.strides[1],
            "v_head_stride": v.strides[2],
            "cell_table": table,
            "table_stride": table.strides[1],
            "sequences": sequences,
            "first_head": int(node.params["first_head"]),
            "group": int(node.params["group"]),
            "first_kv": int(node.params["first_kv"]),
            "scale": float(node.params["scale"]),
        }
        dims, cap = (q.shape[0], v.shape[0]), float(node.params["softcap"])
        reads = (q, k, v, table, sequences, positions)
        if n_rows > SHARED_CHUNK_ROWS:
            per_thread = kernels.attention_rows_scratch_bytes(*dims)
            scratch = to.scratch("chunk", per_thread * to.n_threads)
            kernel = kernels.attention_rows(k.dtype, v.dtype, *dims, exact=to.exact, softcap=cap)
            memory = {"scratch": scratch, "scratch_bytes": per_thread}
            to.call(kernel, reads=(*reads, *sinks), writes=(node, scratch), **memory, **query, **rows, **out)
            to.transport.done_reading(k)
            return
        # A few rows: the chunks of a long context are shared among the threads, then combined.
        n_chunks = kernels.chunks_needed(table.shape[0], window)
        partial = to.scratch("partial", kernels.attention_scratch_bytes(n_rows, n_head, dims[1], n_chunks))
        kernel = kernels.attention_chunks(k.dtype, v.dtype, *dims, exact=to.exact, softcap=cap)
        to.call(kernel, reads=reads, writes=(partial,), partial=partial, n_chunks=n_chunks, **query, **rows)
        to.transport.done_reading(k)
        combine = kernels.attention_combine(dims[1], exact=to.exact)
        to.call(combine, reads=(partial, positions, *sinks), writes=(node,), partial=partial, n_chunks=n_chunks, **rows, **out)


def _start(state: SplitState, device: int) -> int:
    if not state.is_split:
        return 0
    ranges = state.ranges(device)
    return ranges[0][0] if ranges else 0
