"""What every architecture's graph begins with: inputs, weights by name, caches, and the pieces that transformers share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


from numba_meta.dtypes import F32, I32, I64, DType
from numba_meta.errors import ModelFileError
from numba_meta.graph import Graph
from numba_meta.models.config import ModelConfig, RopeConfig
from numba_meta.ops import attention, elementwise, layout, matmul, norm, rope, rows
from numba_meta.split.rules import TensorFacts
from numba_meta.tensor import Role, Rows, Tensor, format_shape, pad_shape


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


class GraphBuilder:
    """Builds the graph of a step: one method per piece, shapes as `[axis 0, axis 1, ...]`; R stands for the rows of the batch."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, TensorFacts], batch: BatchShape, rope_factors: tuple[float, ...] | None) -> None:
        self.config = config
        self.batch = batch
        self.graph = Graph(f"{config.architecture} {batch.n_rows} rows")
        self._tensors = tensors
        self._rope_factors = rope_factors
        self._weights: dict[str, Tensor] = {}
        self._angles: dict[RopeConfig, Tensor] = {}
        leaf = self.graph.leaf
        n_tokens = leaf("n_tokens", I64, [1], Role.INPUT)
        n_outputs = leaf("n_outputs", I64, [1], Role.INPUT)
        token_rows, output_rows = Rows(n_tokens, 0), Rows(n_outputs, 0)
        self.tokens = leaf("tokens", I32, [batch.n_rows], Role.INPUT, token_rows)
        self.positions = leaf("positions", I32, [batch.n_rows], Role.INPUT, token_rows)
        self.sequences = leaf("sequences", I32, [batch.n_rows], Role.INPUT, token_rows)
        self.output_rows = leaf("output_rows", I32, [batch.n_outputs], Role.INPUT, output_rows)
        self._cells = {False: leaf("cells", I32, [batch.n_rows], Role.INPUT, token_rows)}
        self._tables = {False: self._cell_table("cell_table", self._cells[False])}
        if batch.n_window_cells:
            self._cells[True] = leaf("window_cells", I32, [batch.n_rows], Role.INPUT, token_rows)
            self._tables[True] = self._cell_table("window_cell_table", self._cells[True])

    def _cell_table(self, name: str, cells: Tensor) -> Tensor:
        table = self.graph.leaf(name, I32, [self.batch.n_positions, self.batch.n_sequences], Role.CACHE)
        return rows.store_cells(self.graph, table, self.sequences, self.positions, cells, f"{name}.stored")

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

    def embed(self) -> Tensor:
        """Token embeddings `[n_embd, R]`."""
        shape = self.config.shape
        x = rows.get_rows(self.graph, self.weight("token_embd.weight", shape.n_embd, shape.n_vocab), self.tokens, "embedding")
        if self.config.embedding_scale != 1.0:
            x = elementwise.scale(self.graph, x, self.config.embedding_scale, "embedding.scaled")
        return x

    def norm(self, x: Tensor, weight_name: str, name: str) -> Tensor:
        """RMS norm over axis 0."""
        return norm.rms_norm(self.graph, x, self.weight(weight_name, x.shape[0]), self.config.norm_epsilon, name)

    def heads(self, x: Tensor, weight: str, n_heads: int, head_dim: int) -> Tensor:
        """A projection into heads: `[head_dim, n_heads, R]`, with its bias where the model has one."""
        y = matmul.matmul(self.graph, self.weight(f"{weight}.weight", x.shape[0], n_heads * head_dim), x, weight)
        if self.has(f"{weight}.bias"):
            y = elementwise.add(self.graph, y, self.weight(f"{weight}.bias", n_heads * head_dim), f"{weight}.biased")
        return layout.reshape(self.graph, y, [head_dim, n_heads, x.shape[1]], f"{weight}.heads")

    def rotate(self, x: Tensor, config: RopeConfig, interleaved: bool, name: str) -> Tensor:
        """Rotary embedding of `[head_dim, heads, R]`; the angles are shared by all layers of a kind."""
        if config not in self._angles:
            frequencies = config.inverse_frequencies(self._rope_factors)
            self._angles[config] = rope.rope_angles(self.graph, self.positions, frequencies, config.scale, f"rope_angles_{len(self._angles)}")
        return rope.rope(self.graph, x, self._angles[config], interleaved, name)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Stores k and v `[head_dim, kv heads, R]` in the layer's cache, then attends: `[head_dim_v * heads, R]`."""
        g, window = self.graph, self.config.windows[layer]
        local = bool(window)
        n_cells = self.batch.n_window_cells if local else self.batch.n_cells
        stored: dict[str, Tensor] = {}
        for letter, x, dtype in (("k", k, self.batch.cache_type_k), ("v", v, self.batch.cache_type_v)):
            name, (head_dim, n_kv, n_rows, _) = f"cache_{letter}.{layer}", x.shape
            cache = g.leaf(name, dtype, [head_dim * n_kv, n_cells], Role.CACHE)
            written = rows.set_rows(g, cache, layout.reshape(g, x, [head_dim * n_kv, n_rows], f"{name}.rows"), self._cells[local], f"{name}.stored")
            by_head = layout.reshape(g, written, [head_dim, n_kv, n_cells], f"{name}.heads")
            stored[letter] = layout.permute(g, by_head, [0, 2, 1, 3], f"{name}.by_head")
        out = attention.attention(
            g,
            layout.permute(g, q, [0, 2, 1, 3], f"q.{layer}.by_head"),
            stored["k"],
            stored["v"],
            self._tables[local],
            self.sequences,
            self.positions,
            scale=self.config.attention_scale,
            window=window,
            name=f"attention.{layer}",
        )
        return layout.reshape(g, out, [out.shape[0] * out.shape[1], out.shape[2]], f"attention.{layer}.joined")

    def project(self, x: Tensor, name: str, n_out: int) -> Tensor:
        """A weight times activations: `[n_out, R]`, with its bias where the model has one."""
        y = matmul.matmul(self.graph, self.weight(f"{name}.weight", x.shape[0], n_out), x, name)
        if self.has(f"{name}.bias"):
            y = elementwise.add(self.graph, y, self.weight(f"{name}.bias", n_out), f"{name}.biased")
        return y

    def feed_forward(self, x: Tensor, layer: int, kind: str) -> Tensor:
        """`down(activation(gate(x)) * up(x))`: column parallel, then row parallel."""
        prefix, n_ff = f"blk.{layer}.ffn", self.config.shape.n_ff
        hidden = elementwise.glu(self.graph, self.project(x, f"{prefix}_gate", n_ff), self.project(x, f"{prefix}_up", n_ff), kind, f"{prefix}_hidden")
        return self.project(hidden, f"{prefix}_down", x.shape[0])

    def add(self, x: Tensor, y: Tensor, name: str) -> Tensor:
        """A residual sum."""
        return elementwise.add(self.graph, x, y, name)

    def only_outputs(self, x: Tensor, name: str) -> Tensor:
        """The rows of `[n, R]` that give logits."""
        return rows.get_rows(self.graph, x, self.output_rows, name)

    def logits(self, x: Tensor) -> Graph:
        """Output norm and head; a head tied to the embedding is the same weight in a second role. Ends the graph."""
        shape = self.config.shape
        x = self.norm(x, "output_norm.weight", "output_norm")
        head = "output.weight" if self.has("output.weight") else "token_embd.weight"
        self.graph.output(matmul.matmul(self.graph, self.weight(head, shape.n_embd, shape.n_vocab), x, "logits"))
        return self.graph
