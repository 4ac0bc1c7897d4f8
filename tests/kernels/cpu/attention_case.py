"""A paged cache with queries, run through every path of the attention kernels and through float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import gguf
import numpy as np
from kernels.cpu.guarded import FILL, Guarded, live

from numba_meta.dtypes import BF16, F16, F32, Q4_0, Q8_0, DType
from numba_meta.kernels.cpu.attention import (
    attention_chunks,
    attention_combine,
    attention_rows,
    attention_rows_scratch_bytes,
    attention_scratch_bytes,
    chunks_needed,
)
from numba_meta.kernels.cpu.rows import store_rows_kernel

GGUF_TYPES = {F16: "F16", BF16: "BF16", Q8_0: "Q8_0", Q4_0: "Q4_0"}


def floats(cache: np.ndarray, dtype: DType) -> np.ndarray:
    """The values of cache rows (bytes) in float64."""
    with np.errstate(all="ignore"):
        if dtype is F32:
            return cache.view(np.float32).astype(np.float64)
        kind = getattr(gguf.GGMLQuantizationType, GGUF_TYPES[dtype])
        return gguf.quants.dequantize(cache, kind).astype(np.float64)


@dataclass(frozen=True)
class Case:
    """`q` [row, head, dim]; `keys`, `values` bytes [cell, KV head * bytes]; `table` [sequence, position]."""

    k_type: DType
    v_type: DType
    dim_k: int
    dim_v: int
    group: int
    q: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    table: np.ndarray
    positions: np.ndarray
    sequences: np.ndarray
    window: int = 0
    first_head: int = 0
    first_kv: int = 0
    sinks: np.ndarray | None = None  # [head]
    softcap: float = 0.0

    def rows(self, which: list[int] | slice) -> Case:
        """The same cache with some of the rows."""
        return replace(self, q=self.q[which], positions=self.positions[which], sequences=self.sequences[which])

    def expected(self) -> np.ndarray:
        """[row, head, dim] in float64; all heads and KV heads must be there."""
        n_head = self.q.shape[1]
        k = floats(self.keys, self.k_type).reshape(len(self.keys), -1, self.dim_k)
        v = floats(self.values, self.v_type).reshape(len(self.values), -1, self.dim_v)
        out = np.zeros((len(self.q), n_head, self.dim_v))
        sinks = np.full(n_head, -np.inf) if self.sinks is None else self.sinks.astype(np.float64)
        for row, position in enumerate(self.positions):
            first = max(0, position - self.window + 1) if self.window else 0
            cells = self.table[self.sequences[row], first : position + 1]
            cells = cells[cells >= 0]
            for head in range(n_head if len(cells) else 0):
                score = k[cells, head // self.group] @ self.q[row, head].astype(np.float64) * float(np.float32(self.dim_k**-0.5))
                score = self.softcap * np.tanh(score / self.softcap) if self.softcap else score
                top = max(score.max(), sinks[head])
                weight = np.exp(score - top)
                out[row, head] = weight @ v[cells, head // self.group] / (weight.sum() + np.exp(sinks[head] - top))
        return out

    def _inputs(self, rows: int) -> dict[str, object]:
        q, kv_bytes_k, kv_bytes_v = np.ascontiguousarray(self.q), self.k_type.row_bytes(self.dim_k), self.v_type.row_bytes(self.dim_v)
        return {
            "q": q, "q_stride": q.strides[0], "q_head_stride": q.strides[1], "k": self.keys, "k_stride": self.keys.strides[0],
            "k_head_stride": kv_bytes_k, "v": self.values, "v_stride": self.values.strides[0], "v_head_stride": kv_bytes_v,
            "cell_table": self.table, "table_stride": self.table.strides[0], "positions": self.positions.astype(np.int32),
            "sequences": self.sequences.astype(np.int32), "window": self.window, "n_head": q.shape[1], "first_head": self.first_head,
            "group": self.group, "first_kv": self.first_kv, "scale": self.dim_k**-0.5, "n_rows": live(rows),
        }  # fmt: skip

    def _guarded_sinks(self) -> Guarded | None:
        return None if self.sinks is None else Guarded.of(self.sinks.astype(np.float32).reshape(1, -1))

    def by_chunks(self, threads: int = 1, n_live: int | None = None) -> np.ndarray:
        """[row, head, dim] through `attention_chunks` and `attention_combine`."""
        rows, n_head = self.q.shape[:2]
        n_chunks = chunks_needed(self.table.shape[1], self.window)
        sinks = self._guarded_sinks()
        partial = Guarded(1, attention_scratch_bytes(rows, n_head, self.dim_v, n_chunks), np.uint8, gap=0)
        out = Guarded(rows, n_head * self.dim_v)
        inputs = self._inputs(rows if n_live is None else n_live)
        attention_chunks(self.k_type, self.v_type, self.dim_k, self.dim_v, softcap=self.softcap)(
            threads=threads, **inputs, partial=partial.address, n_chunks=n_chunks
        )
        shared = {name: inputs[name] for name in ("positions", "window", "n_head", "n_rows")}
        attention_combine(self.dim_v)(
            threads=threads, **shared, partial=partial.address, n_chunks=n_chunks, sinks=sinks.address if sinks else 0,
            y=out.address, y_stride=out.stride, y_head_stride=4 * self.dim_v,
        )  # fmt: skip
        partial.result()
        return out.result().reshape(rows, n_head, self.dim_v)

    def by_rows(self, threads: int = 1, n_live: int | None = None) -> np.ndarray:
        """[row, head, dim] through `attention_rows`."""
        rows, n_head = self.q.shape[:2]
        scratch_bytes = attention_rows_scratch_bytes(self.dim_k, self.dim_v)
        sinks = self._guarded_sinks()
        scratch, out = Guarded(1, threads * scratch_bytes, np.uint8, gap=0), Guarded(rows, n_head * self.dim_v)
        attention_rows(self.k_type, self.v_type, self.dim_k, self.dim_v, softcap=self.softcap)(
            threads=threads, **self._inputs(rows if n_live is None else n_live), y=out.address, y_stride=out.stride,
            y_head_stride=4 * self.dim_v, scratch=scratch.address, scratch_bytes=scratch_bytes,
            sinks=sinks.address if sinks else 0,
        )  # fmt: skip
        scratch.result()
        return out.result().reshape(rows, n_head, self.dim_v)


def random_sinks(n_head: int) -> np.ndarray:
    """Scores of sinks: far below, about, and far above those that random queries and keys give."""
    rng = np.random.default_rng()
    return rng.permutation(np.resize([-50, -4, 0, 3, 8, 50], n_head)).astype(np.float32) + rng.standard_normal(n_head, np.float32)


def make_case(
    k_type: DType, v_type: DType, dim_k: int, dim_v: int, positions: list[int], sequences: list[int] | None = None, *, n_kv: int = 2,
    group: int = 3, window: int = 0, holes: float = 0.0, filled: tuple[int, ...] = (),
) -> Case:  # fmt: skip
    """Random queries and a cache whose cells lie in random order. Cells that no row attends to are NaN; so is what no sequence uses.

    holes: the part of the positions, `filled` ones aside, that have no cell.
    """
    rng = np.random.default_rng()
    sequence_of = np.array(sequences or [0] * len(positions))
    n_sequences, length = int(sequence_of.max()) + 1, max(positions) + 40
    table = np.full((n_sequences, length), -1, np.int32)
    table[:] = rng.permutation(n_sequences * length + 9)[: n_sequences * length].reshape(table.shape)
    empty = rng.random(table.shape) < holes
    empty[:, list(filled)] = False
    table[empty] = -1
    attended = np.zeros(table.shape, bool)
    for position, sequence in zip(positions, sequence_of, strict=True):
        attended[sequence, max(0, position - window + 1) if window else 0 : position + 1] = True
    cells = np.where(attended, table, -1)
    caches = []
    for dtype, dim in ((k_type, dim_k), (v_type, dim_v)):
        cache = np.full((n_sequences * length + 9, n_kv * dtype.row_bytes(dim)), FILL, np.uint8)
        x = rng.standard_normal((cells.size, n_kv * dim)).astype(np.float32)
        store_rows_kernel(dtype)(
            x=x, x_stride=x.strides[0], cells=cells.ravel().astype(np.int32), cache=cache, cell_stride=cache.strides[0], n=n_kv * dim,
            n_rows=live(cells.size),
        )  # fmt: skip
        caches.append(cache)
    q = rng.standard_normal((len(positions), n_kv * group, dim_k)).astype(np.float32)
    return Case(k_type, v_type, dim_k, dim_v, group, q, *caches, table, np.array(positions), sequence_of, window)
