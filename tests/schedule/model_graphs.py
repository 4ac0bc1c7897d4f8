"""Steps of small llama and gemma3 models as graphs, with their cuts; no files."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from numba_meta.dtypes import F16, F32, Q4_0, DType
from numba_meta.graph import Graph
from numba_meta.models.architectures import ARCHITECTURES
from numba_meta.models.architectures.builder import BatchShape, GraphBuilder
from numba_meta.models.architectures.config import LayerSpec, ModelConfig, RopeConfig
from numba_meta.models.architectures.gemma3 import Gemma3Config
from numba_meta.split.policy import CutPlan, plan_cuts
from numba_meta.split.rules import ModelShape, TensorFacts
from numba_meta.split.state import MIRRORED, SplitState
from numba_meta.tensor import Role, Tensor


class ModelGraph:
    """The graph of a step of a model with random sizes; `leaf_state` is its policy."""

    def __init__(
        self,
        architecture: str,
        proportions: Sequence[Fraction | int],
        *,
        n_layer: int = 2,
        n_head: int = 4,
        n_head_kv: int = 2,
        head_dim: int = 32,
        n_embd: int = 64,
        n_ff: int = 96,
        n_vocab: int = 37,
        n_rows: int = 3,
        n_outputs: int = 2,
        n_sequences: int = 2,
        n_cells: int = 12,
        weight_type: DType = Q4_0,
        cache_type: DType = F16,
    ) -> None:
        self.shape = ModelShape(n_embd, n_layer, n_head, n_head_kv, head_dim, head_dim, n_ff, n_vocab)
        is_gemma = architecture == "gemma3"
        scale, interleaved = head_dim**-0.5, not is_gemma
        sees_all = LayerSpec(n_head, n_head_kv, n_ff, RopeConfig(head_dim, 1000.0, interleaved), scale)
        local = LayerSpec(n_head, n_head_kv, n_ff, RopeConfig(head_dim, 100.0, interleaved), scale, window=4)
        layers = tuple(local if is_gemma and layer % 2 == 0 else sees_all for layer in range(n_layer))
        self.config = (Gemma3Config if is_gemma else ModelConfig)(architecture, self.shape, layers, 64, 1e-5)
        self.batch = BatchShape(n_rows, n_outputs, n_sequences, n_cells, n_cells, n_cells if is_gemma else 0, cache_type, cache_type)
        self.tensors = self._tensors(is_gemma, weight_type)
        self.graph = self.build(self.batch)
        self.cuts: CutPlan = plan_cuts(ARCHITECTURES[architecture].family, self.shape, self.tensors, proportions, (cache_type, cache_type))

    def build(self, batch: BatchShape) -> Graph:
        """The graph of a step of these capacities."""
        return ARCHITECTURES[self.config.architecture].build(GraphBuilder(self.config, self.tensors, batch))

    def _tensors(self, is_gemma: bool, weight_type: DType) -> dict[str, TensorFacts]:
        s = self.shape
        n_q, n_kv = s.n_head * s.head_dim_k, s.n_head_kv * s.head_dim_k
        matrices = {"attn_q": (s.n_embd, n_q), "attn_k": (s.n_embd, n_kv), "attn_v": (s.n_embd, n_kv), "attn_output": (n_q, s.n_embd)}
        matrices |= {"ffn_gate": (s.n_embd, s.n_ff), "ffn_up": (s.n_embd, s.n_ff), "ffn_down": (s.n_ff, s.n_embd)}
        vectors = {"attn_norm": s.n_embd, "ffn_norm": s.n_embd}
        if is_gemma:
            vectors |= {"attn_q_norm": s.head_dim_k, "attn_k_norm": s.head_dim_k}
            vectors |= {"post_attention_norm": s.n_embd, "post_ffw_norm": s.n_embd}
        facts = {"token_embd.weight": TensorFacts(weight_type, (s.n_embd, s.n_vocab))}
        facts["output_norm.weight"] = TensorFacts(F32, (s.n_embd,))
        for layer in range(s.n_layer):
            facts |= {f"blk.{layer}.{name}.weight": TensorFacts(weight_type, shape) for name, shape in matrices.items()}
            facts |= {f"blk.{layer}.{name}.weight": TensorFacts(F32, (n,)) for name, n in vectors.items()}
        return facts

    def leaf_state(self, leaf: Tensor) -> SplitState:
        """The policy: weights and caches as planned, all else on every device."""
        if leaf.role is Role.WEIGHT:
            return self.cuts.weight(leaf.name)
        kind, _, layer = leaf.name.partition(".")
        if kind in ("cache_k", "cache_v"):
            state: SplitState = getattr(self.cuts.layers[int(layer)], kind)
            return state
        return MIRRORED
