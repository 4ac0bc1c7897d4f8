"""What every architecture's graph begins with: inputs, weights by name, caches, and the pieces that transformers share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from numba_meta.dtypes import F32, I32, I64, DType
from numba_meta.errors import ModelFileError
from numba_meta.graph import Graph
from numba_meta.models.architectures.config import ModelConfig, RopeConfig
from numba_meta.ops import attention, elementwise, layout, matmul, norm, rope, rows, transport, unary
from numba_meta.split.rules import Described
from numba_meta.tensor import Role, Rows, Tensor, format_shape, pad_shape

Config = TypeVar("Config", bound=ModelConfig)


@dataclass(frozen=True)
class BatchShape:
    """What a recording is made for: capacities, not this step's counts."""

    n_rows: int  # tokens of a step
    n_outputs: int  # rows that give logits
    n_sequences: int
    n_positions: int  # per sequence: the length of a row of the cell tables
    n_cells: int  # of layers that see everything
    n_window_cells: int  # of layers with a sliding window; 0 without such layers
    cache_type_k: DType
    cache_type_v: DType
    n_device_layers: int | None = None  # the first layers, whose cache lies on the devices; None: all
    # Of the other layers' deliveries; by whether the layer has a sliding window.
    windows: Mapping[bool, transport.WindowShape] = field(default_factory=dict)


@dataclass(frozen=True)
class _Resident:
    """A cache on the devices: where rows are stored, and the cell of each position. Shared by all layers of a kind."""

    cells: Tensor
    table: Tensor


@dataclass(frozen=True)
class _Delivered:
    """A cache in host memory: which streams and how many cells of each are delivered; where rows lie in the window and in the host."""

    streams: Tensor
    n_streams: Tensor
    n_cells: Tensor
    slot_cells: Tensor
    cells: Tensor
    table: Tensor


class GraphBuilder:
    """Builds the graph of a step: one method per piece, shapes as `[axis 0, axis 1, ...]`; R stands for the rows of the batch."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, Described], batch: BatchShape) -> None:
        self.config = config
        self.batch = batch
        self.graph = Graph(f"{config.architecture} {batch.n_rows} rows")
        self._tensors = tensors
        self._weights: dict[str, Tensor] = {}
        self._angles: dict[RopeConfig, Tensor] = {}
        leaf = self.graph.leaf
        n_tokens = leaf("n_tokens", I64, [1], Role.INPUT)
        n_outputs = leaf("n_outputs", I64, [1], Role.INPUT)
        self._token_rows, output_rows = Rows(n_tokens, 0), Rows(n_outputs, 0)
        self.tokens = self._per_token("tokens")
        self.positions = self._per_token("positions")
        self.sequences = self._per_token("sequences")
        self.output_rows = leaf("output_rows", I32, [batch.n_outputs], Role.INPUT, output_rows)
        self._cells: dict[bool, Tensor] = {}
        self._resident: dict[bool, _Resident] = {}
        self._delivered: dict[bool, _Delivered] = {}

    def _per_token(self, name: str) -> Tensor:
        return self.graph.leaf(name, I32, [self.batch.n_rows], Role.INPUT, self._token_rows)

    # ---- caches: inputs of a kind of layers are made when the first of them is built; `local` means with a sliding window --------------

    def _cells_of(self, local: bool) -> Tensor:
        if local not in self._cells:
            self._cells[local] = self._per_token("window_cells" if local else "cells")
        return self._cells[local]

    def _cell_table(self, name: str, cells: Tensor) -> Tensor:
        table = self.graph.leaf(name, I32, [self.batch.n_positions, self.batch.n_sequences], Role.CACHE)
        return rows.store_cells(self.graph, table, self.sequences, self.positions, cells, f"{name}.stored")

    def _resident_of(self, local: bool) -> _Resident:
        if local not in self._resident:
            cells = self._cells_of(local)
            self._resident[local] = _Resident(cells, self._cell_table("window_cell_table" if local else "cell_table", cells))
        return self._resident[local]

    def _delivered_of(self, local: bool) -> _Delivered:
        if local not in self._delivered:
            prefix, leaf = "window_" if local else "", self.graph.leaf
            slot_cells = self._per_token(f"{prefix}slot_cells")
            self._delivered[local] = _Delivered(
                streams=leaf(f"{prefix}streams", I32, [self.batch.windows[local].n_streams], Role.INPUT),
                n_streams=leaf(f"{prefix}n_streams", I64, [1], Role.INPUT),
                n_cells=leaf(f"{prefix}n_cells", I64, [1], Role.INPUT),
                slot_cells=slot_cells,
                cells=self._cells_of(local),
                table=self._cell_table(f"{prefix}slot_table", slot_cells),
            )
        return self._delivered[local]

    def config_as(self, kind: type[Config]) -> Config:
        """The configuration as the kind that its architecture made."""
        if not isinstance(self.config, kind):
            raise ModelFileError(f"a {self.config.architecture} model was read as {type(self.config).__name__}, expected {kind.__name__}")
        return self.config

    # ---- weights -----------------------------------------------------------------------------------------------------------------------

    def has(self, name: str) -> bool:
        """Whether the model has this tensor."""
        return name in self._tensors

    def weight(self, name: str, *shape: int) -> Tensor:
        """A weight of the model file; vectors are float32 in memory. Raises `ModelFileError` where it is missing or of another shape."""
        if name not in self._weights:
            facts = self._tensors.get(name)
            if facts is None:
                raise ModelFileError(f"the tensor {name} {list(shape)} is missing; a {self.config.architecture} model needs it")
            if pad_shape(facts.shape) != pad_shape(shape):
                raise ModelFileError(f"the tensor {name} has the shape {format_shape(pad_shape(facts.shape))}, expected {list(shape)}")
            self._weights[name] = self.graph.leaf(name, facts.dtype if len(shape) > 1 else F32, shape, Role.WEIGHT)
        return self._weights[name]

    # ---- pieces ------------------------------------------------------------------------------------------------------------------------

    def embed(self, scale: float = 1.0) -> Tensor:
        """Token embeddings `[n_embd, R]`, times `scale`."""
        shape = self.config.shape
        x = rows.get_rows(self.graph, self.weight("token_embd.weight", shape.n_embd, shape.n_vocab), self.tokens, "embedding")
        return self.scaled(x, scale, "embedding.scaled")

    def norm(self, x: Tensor, weight_name: str, name: str) -> Tensor:
        """RMS norm over axis 0."""
        return norm.rms_norm(self.graph, x, self.weight(weight_name, x.shape[0]), self.config.norm_epsilon, name)

    def layer_norm(self, x: Tensor, weight_name: str, name: str) -> Tensor:
        """Layer norm over axis 0, without a bias."""
        return self.norm(norm.center(self.graph, x, f"{name}.centered"), weight_name, name)

    def heads(self, x: Tensor, weight: str, n_heads: int, head_dim: int) -> Tensor:
        """A projection into heads: `[head_dim, n_heads, R]`, with its bias where the model has one."""
        y = matmul.matmul(self.graph, self.weight(f"{weight}.weight", x.shape[0], n_heads * head_dim), x, weight)
        if self.has(f"{weight}.bias"):
            y = elementwise.add(self.graph, y, self.weight(f"{weight}.bias", n_heads * head_dim), f"{weight}.biased")
        return layout.reshape(self.graph, y, [head_dim, n_heads, x.shape[1]], f"{weight}.heads")

    def heads_of(self, layer: int, x: Tensor, norms: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Q, K and V of a layer: `[head_dim, heads, R]` each; with `norms` each head of Q and K is normed."""
        spec, shape, prefix = self.config.layers[layer], self.config.shape, f"blk.{layer}.attn"
        q = self.heads(x, f"{prefix}_q", spec.n_head, shape.head_dim_k)
        k = self.heads(x, f"{prefix}_k", spec.n_head_kv, shape.head_dim_k)
        v = self.heads(x, f"{prefix}_v", spec.n_head_kv, shape.head_dim_v)
        if norms:
            q = self.norm(q, f"{prefix}_q_norm.weight", f"q_norm.{layer}")
            k = self.norm(k, f"{prefix}_k_norm.weight", f"k_norm.{layer}")
        return q, k, v

    def rotate(self, x: Tensor, config: RopeConfig | None, name: str) -> Tensor:
        """Rotary embedding of `[head_dim, heads, R]`; the angles are shared by all layers of a kind. None: x as it is."""
        if config is None:
            return x
        config = config.for_context(self.batch.n_positions)
        if config not in self._angles:
            name_of_kind = f"rope_angles_{len(self._angles)}"
            frequencies = config.inverse_frequencies
            self._angles[config] = rope.rope_angles(self.graph, self.positions, frequencies, config.magnitude, name_of_kind)
        return rope.rope(self.graph, x, self._angles[config], config.interleaved, name)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, softcap: float = 0.0) -> Tensor:
        """Stores k and v `[head_dim, kv heads, R]` in the layer's cache, then attends: `[head_dim_v * heads, R]`."""
        n_device_layers = self.batch.n_device_layers
        resident = n_device_layers is None or layer < n_device_layers
        keys, values, table = (self._store if resident else self._store_delivered)(layer, k, v)
        out = attention.attention(
            self.graph,
            layout.permute(self.graph, q, [0, 2, 1, 3], f"q.{layer}.by_head"),
            self._by_head(keys, k, f"cache_k.{layer}"),
            self._by_head(values, v, f"cache_v.{layer}"),
            table,
            self.sequences,
            self.positions,
            scale=self.config.layers[layer].scale,
            window=self.config.layers[layer].window,
            softcap=softcap,
            name=f"attention.{layer}",
        )
        return layout.reshape(self.graph, out, [out.shape[0] * out.shape[1], out.shape[2]], f"attention.{layer}.joined")

    def _store(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Caches on the devices with this step's rows in them, and the table of their cells."""
        local = bool(self.config.layers[layer].window)
        resident, n_cells = self._resident_of(local), self.batch.n_window_cells if local else self.batch.n_cells
        stored = []
        for name, x, dtype in self._caches(layer, k, v):
            cache = self.graph.leaf(name, dtype, [x.shape[0], n_cells], Role.CACHE)
            stored.append(rows.set_rows(self.graph, cache, x, resident.cells, f"{name}.stored"))
        return stored[0], stored[1], resident.table

    def _store_delivered(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Windows of caches in host memory with this step's rows in them, which also go back to the host."""
        local = bool(self.config.layers[layer].window)
        d, shape, g = self._delivered_of(local), self.batch.windows[local], self.graph
        caches, windows = [], []
        for part, (name, x, dtype) in zip("kv", self._caches(layer, k, v), strict=True):
            caches.append(g.leaf(name, dtype, [x.shape[0], shape.n_cells_full * shape.n_streams_full], Role.HOST))
            window = transport.deliver(g, caches[-1], d.streams, d.n_streams, d.n_cells, layer, part, shape, f"{name}.window")
            windows.append((window, x, name))
        stored = [rows.set_rows(g, window, x, d.slot_cells, f"{name}.stored") for window, x, name in windows]
        for cache, window, (_, _, name) in zip(caches, stored, windows, strict=True):
            transport.write_back(g, cache, window, d.slot_cells, d.cells, layer, f"{name}.written_back")
        return stored[0], stored[1], d.table

    def _caches(self, layer: int, k: Tensor, v: Tensor) -> list[tuple[str, Tensor, DType]]:
        """(name, rows `[head_dim * kv heads, R]`, type) of a layer's K and V."""
        parts = (("cache_k", k, self.batch.cache_type_k), ("cache_v", v, self.batch.cache_type_v))
        return [
            (f"{name}.{layer}", layout.reshape(self.graph, x, [x.shape[0] * x.shape[1], x.shape[2]], f"{name}.{layer}.rows"), dtype)
            for name, x, dtype in parts
        ]

    def _by_head(self, cache: Tensor, x: Tensor, name: str) -> Tensor:
        """A cache `[head_dim * kv heads, cells]` as `[head_dim, cells, kv heads]`."""
        by_head = layout.reshape(self.graph, cache, [x.shape[0], x.shape[1], cache.shape[1]], f"{name}.heads")
        return layout.permute(self.graph, by_head, [0, 2, 1, 3], f"{name}.by_head")

    def project(self, x: Tensor, name: str, n_out: int) -> Tensor:
        """A weight times activations: `[n_out, R]`, with its bias where the model has one."""
        y = matmul.matmul(self.graph, self.weight(f"{name}.weight", x.shape[0], n_out), x, name)
        if self.has(f"{name}.bias"):
            y = elementwise.add(self.graph, y, self.weight(f"{name}.bias", n_out), f"{name}.biased")
        return y

    def feed_forward(self, x: Tensor, layer: int, kind: str) -> Tensor:
        """`down(activation(gate(x)) * up(x))`: column parallel, then row parallel."""
        prefix, n_ff = f"blk.{layer}.ffn", self.config.layers[layer].n_ff
        gate, up = self.project(x, f"{prefix}_gate", n_ff), self.project(x, f"{prefix}_up", n_ff)
        hidden = elementwise.glu(self.graph, gate, up, kind, f"{prefix}_hidden")
        return self.project(hidden, f"{prefix}_down", x.shape[0])

    def add(self, x: Tensor, y: Tensor, name: str) -> Tensor:
        """A residual sum."""
        return elementwise.add(self.graph, x, y, name)

    def scaled(self, x: Tensor, factor: float, name: str) -> Tensor:
        """`x * factor`."""
        return x if factor == 1.0 else elementwise.scale(self.graph, x, factor, name)

    def only_outputs(self, layer: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """What a layer has behind attention, `[n, R]` each; of the last layer the rows that give logits: nothing reads the others."""
        if layer < self.config.shape.n_layer - 1:
            return tensors
        return tuple(rows.get_rows(self.graph, tensor, self.output_rows, f"outputs.{i}") for i, tensor in enumerate(tensors))

    def logits(
        self, x: Tensor, scale: float = 1.0, softcap: float = 0.0, may_have_bias: bool = False, layer_norm: bool = False
    ) -> Graph:
        """Output norm and head, then `scale`, then `softcap * tanh(logits / softcap)` (0: none). Ends the graph.

        A head tied to the embedding is the same weight in a second role. `layer_norm`: of that kind is the norm.
        """
        shape = self.config.shape
        x = (self.layer_norm if layer_norm else self.norm)(x, "output_norm.weight", "output_norm")
        head = "output.weight" if self.has("output.weight") else "token_embd.weight"
        x = matmul.matmul(self.graph, self.weight(head, shape.n_embd, shape.n_vocab), x, "logits")
        if may_have_bias and self.has("output.bias"):
            x = elementwise.add(self.graph, x, self.weight("output.bias", shape.n_vocab), "logits.biased")
        x = self.scaled(x, scale, "logits.scaled")
        self.graph.output(unary.softcap(self.graph, x, softcap, "logits.capped") if softcap else x)
        return self.graph
