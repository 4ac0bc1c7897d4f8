"""A paged cache with queries, run through the attention kernels on a GPU and through float64."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from kernels.cuda import on_gpu

from numba_meta.dtypes import BF16, F16, F32, Q8_0, DType
from numba_meta.kernels.cuda.attention import (
    attention_chunks,
    attention_combine,
    attention_combine_quantize,
    attention_rows,
    attention_rows_scratch_bytes,
    attention_scratch_bytes,
    chunks_needed,
)
from numba_meta.kernels.cuda.kernel import CudaKernel

FILL = 0xFF  # NaN in every float type


def encode(x: np.ndarray, dtype: DType) -> np.ndarray:
    """float32 [..., n] as the bytes [..., row_bytes] of a cache type: what a good quantizer gives, not necessarily ours."""
    if dtype is F32:
        return x.astype(np.float32).view(np.uint8)
    if dtype is F16:
        return x.astype(np.float16).view(np.uint8)
    if dtype is BF16:
        return ((x.astype(np.float32).view(np.uint32) + 0x8000) >> 16).astype(np.uint16).view(np.uint8)
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    top = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)
    d = (np.abs(top) / 127 if dtype is Q8_0 else top / -8).astype(np.float16)
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = np.nan_to_num(blocks / d.astype(np.float32))
    if dtype is Q8_0:
        quants = np.clip(np.rint(scaled), -127, 127).astype(np.int8).view(np.uint8)
    else:
        nibbles = np.clip(np.rint(scaled) + 8, 0, 15).astype(np.uint8)
        quants = nibbles[..., :16] | nibbles[..., 16:] << 4
    return np.concatenate([d.view(np.uint8), quants], -1).reshape(*x.shape[:-1], -1)


def decode(cache: np.ndarray, dtype: DType) -> np.ndarray:
    """The bytes [..., row_bytes] of a cache type as float64 [..., n]."""
    cache = np.ascontiguousarray(cache)
    with np.errstate(all="ignore"):
        if dtype in (F32, F16):
            return cache.view(np.float32 if dtype is F32 else np.float16).astype(np.float64)
        if dtype is BF16:
            return (cache.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        blocks = cache.reshape(*cache.shape[:-1], -1, dtype.block_bytes)
        d, quants = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float64), blocks[..., 2:]
        if dtype is Q8_0:
            values = np.ascontiguousarray(quants).view(np.int8).astype(np.float64)
        else:
            values = np.concatenate([quants & 15, quants >> 4], -1).astype(np.float64) - 8
        return (values * d).reshape(*cache.shape[:-1], -1)


@dataclass(frozen=True)
class Case:
    """`q` [row, head, dim]; `keys`, `values` bytes [cell, KV head, row_bytes]; `table` [sequence, position]."""

    k_type: DType
    v_type: DType
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
    uploads: dict[str, Any] = field(default_factory=dict)

    @property
    def dims(self) -> tuple[int, int]:
        """Elements of a head of K and of V."""
        sizes = ((self.keys, self.k_type), (self.values, self.v_type))
        k, v = (cache.shape[2] // dtype.block_bytes * dtype.block_size for cache, dtype in sizes)
        return k, v

    def rows(self, which: Any) -> Case:
        """The same cache with some of the rows."""
        return self.changed(q=self.q[which], positions=self.positions[which], sequences=self.sequences[which])

    def changed(self, **changes: Any) -> Case:
        """The case with other fields."""
        return replace(self, **changes, uploads={})

    def largest_value(self) -> float:
        """The largest magnitude of V in a cell that some row attends to."""
        used = np.unique(self.table[self.table >= 0])
        return float(np.nanmax(np.abs(decode(self.values[used], self.v_type))))

    def expected(self) -> np.ndarray:
        """[row, head, dim] in float64; all heads and KV heads must be there."""
        k, v = decode(self.keys, self.k_type), decode(self.values, self.v_type)
        n_rows, n_head, dim = self.q.shape
        out = np.zeros((n_rows, n_head, v.shape[2]))
        scale = float(np.float32(dim**-0.5))
        sinks = (np.full(n_head, -np.inf) if self.sinks is None else self.sinks.astype(np.float64)).reshape(-1, self.group, 1)
        for row, position in enumerate(self.positions):
            first = max(0, position - self.window + 1) if self.window else 0
            cells = self.table[self.sequences[row], first : position + 1]
            cells = cells[cells >= 0]
            if not len(cells):
                continue
            q = self.q[row].astype(np.float64).reshape(-1, self.group, dim)
            score = np.einsum("hgd,nhd->hgn", q, k[cells]) * scale
            score = self.softcap * np.tanh(score / self.softcap) if self.softcap else score
            top = np.maximum(score.max(-1, keepdims=True), sinks)
            weight = np.exp(score - top)
            weight /= weight.sum(-1, keepdims=True) + np.exp(sinks - top)
            out[row] = np.einsum("hgn,nhd->hgd", weight, v[cells]).reshape(n_head, -1)
        return out

    def inputs(self, n_live: int) -> dict[str, Any]:
        """The arguments that the kernels share, in GPU memory; sinks lie between not-a-numbers."""
        gpu, (dim_k, _) = on_gpu.open_gpu(), self.dims
        arrays = {
            "q": self.q.astype(np.float32), "k": self.keys, "v": self.values, "cell_table": self.table.astype(np.int32),
            "positions": self.positions.astype(np.int32), "sequences": self.sequences.astype(np.int32),
        }  # fmt: skip
        if self.sinks is not None:
            arrays["sinks"] = np.r_[np.nan, self.sinks, np.nan].astype(np.float32)
        if not self.uploads:
            self.uploads.update({name: gpu.upload(array) for name, array in arrays.items() if array.size})
        n_kv_bytes = {"k": self.keys.shape[2], "v": self.values.shape[2]}
        return {
            **{name: self.uploads.get(name, 0) for name in arrays},
            "sinks": 0 if self.sinks is None else self.uploads["sinks"].address + 4,
            "q_stride": 4 * dim_k * self.q.shape[1], "q_head_stride": 4 * dim_k,
            "k_stride": self.keys.shape[1] * n_kv_bytes["k"], "k_head_stride": n_kv_bytes["k"],
            "v_stride": self.values.shape[1] * n_kv_bytes["v"], "v_head_stride": n_kv_bytes["v"],
            "table_stride": 4 * self.table.shape[1], "window": self.window, "n_head": self.q.shape[1], "first_head": self.first_head,
            "group": self.group, "first_kv": self.first_kv, "scale": dim_k**-0.5, "n_rows": gpu.upload(np.array([n_live], np.int64)),
        }  # fmt: skip

    def by_chunks(
        self, exact: bool = False, n_live: int | None = None, n_chunks: int | None = None, quantized: on_gpu.Buffer | None = None
    ) -> np.ndarray:
        """[row, head, dim] through `attention_chunks` and `attention_combine`; NaN in dead rows.

        `quantized`: rows of 2 bytes an element, which get the `q8` rows instead; everything that is given back is NaN then.
        """
        gpu, (dim_k, dim_v), (rows, n_head, _) = on_gpu.open_gpu(), self.dims, self.q.shape
        n_chunks = n_chunks or chunks_needed(self.table.shape[1], self.window)
        partial = gpu.empty(max(1, attention_scratch_bytes(rows, n_head, dim_v, n_chunks)))
        out = gpu.empty(4 * max(1, rows * n_head * dim_v))
        inputs = self.inputs(rows if n_live is None else n_live)
        sinks = inputs.pop("sinks")
        chunks = attention_chunks(self.k_type, self.v_type, dim_k, dim_v, exact, self.softcap)
        gpu.run(chunks, rows, **inputs, partial=partial, n_chunks=n_chunks)
        shared = {name: inputs[name] for name in ("positions", "window", "n_head", "n_rows")}
        strides = {"y_stride": 4 * n_head * dim_v, "y_head_stride": 4 * dim_v}
        if quantized is not None:
            strides["y_stride"] //= 2
        combine = attention_combine(dim_v, exact) if quantized is None else attention_combine_quantize(dim_v)
        gpu.run(combine, rows, **shared, partial=partial, n_chunks=n_chunks, sinks=sinks, y=quantized or out, **strides)
        return out.download(np.float32, (rows, n_head, dim_v))

    def by_rows(self, exact: bool = False, n_live: int | None = None) -> np.ndarray:
        """[row, head, dim] through `attention_rows`; NaN in dead rows."""
        gpu, (dim_k, dim_v), (rows, n_head, _) = on_gpu.open_gpu(), self.dims, self.q.shape
        n_bytes = attention_rows_scratch_bytes(dim_k, dim_v)
        scratch, out = gpu.empty(max(1, n_bytes)), gpu.empty(4 * max(1, rows * n_head * dim_v))
        kernel: CudaKernel = attention_rows(self.k_type, self.v_type, dim_k, dim_v, exact, self.softcap)
        strides = {"y_stride": 4 * n_head * dim_v, "y_head_stride": 4 * dim_v}
        inputs = self.inputs(rows if n_live is None else n_live)
        gpu.run(kernel, rows, **inputs, y=out, **strides, scratch=scratch, scratch_bytes=n_bytes)
        return out.download(np.float32, (rows, n_head, dim_v))


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
    n_cells = n_sequences * length + 9
    table = rng.permutation(n_cells)[: n_sequences * length].reshape(n_sequences, length).astype(np.int32)
    empty = rng.random(table.shape) < holes
    empty[:, list(filled)] = False
    table[empty] = -1
    attended = np.zeros(table.shape, bool)
    for position, sequence in zip(positions, sequence_of, strict=True):
        attended[sequence, max(0, position - window + 1) if window else 0 : position + 1] = True
    used = np.unique(table[attended & (table >= 0)])
    caches = []
    for dtype, dim in ((k_type, dim_k), (v_type, dim_v)):
        cache = np.full((n_cells, n_kv, dtype.row_bytes(dim)), FILL, np.uint8)
        cache[used] = encode(rng.standard_normal((len(used), n_kv, dim), dtype=np.float32), dtype)
        caches.append(cache)
    q = rng.standard_normal((len(positions), n_kv * group, dim_k), dtype=np.float32)
    return Case(k_type, v_type, group, q, *caches, table, np.array(positions), sequence_of, window)
