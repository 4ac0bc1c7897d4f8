"""What policies are made of: tables of tensor names, with the axis each is cut on and the group it is cut with.

An architecture's own table stands beside its graph (`models/architectures/`). `FAMILIES` has those whose graphs are not there yet.

Read a line as: tensors of this name are cut on this axis, in these parts, together with all tensors of that group. The
output of one weight meets the input of the next (Q heads meet the attention output, up and gate meet down), so a group is
what has to be cut alike. Weights on axis 1 are column parallel, on axis 0 row parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import gcd

from numba_meta.errors import SplitError
from numba_meta.split.rules import Family, Items, LayerTable, ModelShape, Part, Rule, cut, mirrored

_OUTSIDE = (
    cut(r"(token_embd|output)\.weight", 1, "vocabulary", "row"),
    cut(r"output\.bias", 0, "vocabulary", "row"),
    mirrored(r"output_norm\.(weight|bias)"),
    mirrored(r"rope_(freqs|factors_long|factors_short)\.weight"),
)

_NORMS = (
    mirrored(r"(attn|ffn|post_attention|post_ffw)_norm\.(weight|bias)"),
    mirrored(r"rope_(freqs|factors_long|factors_short)\.weight"),
)

_ATTENTION = (
    cut(r"attn_q\.weight", 1, "attention", "q"),
    cut(r"attn_k\.weight", 1, "attention", "k"),
    cut(r"attn_v\.weight", 1, "attention", "v"),
    cut(r"attn_qkv\.weight", 1, "attention", "q", "k", "v"),
    cut(r"attn_q\.bias", 0, "attention", "q"),
    cut(r"attn_k\.bias", 0, "attention", "k"),
    cut(r"attn_v\.bias", 0, "attention", "v"),
    cut(r"attn_qkv\.bias", 0, "attention", "q", "k", "v"),
    cut(r"attn_output\.weight", 0, "attention", "out"),
    mirrored(r"attn_output\.bias"),
    mirrored(r"attn_[qk]_norm\.weight"),  # one head wide
)

_FEED_FORWARD = (
    cut(r"ffn_(gate|up)\.weight", 1, "feed_forward", "neuron"),
    cut(r"ffn_(gate|up)\.bias", 0, "feed_forward", "neuron"),
    cut(r"ffn_down\.weight", 0, "feed_forward", "neuron"),
    mirrored(r"ffn_down\.bias"),
)

EXPERTS = (
    cut(r"ffn_(gate|up)_exps\.weight", 1, "experts", "neuron"),
    cut(r"ffn_gate_up_exps\.weight", 1, "experts", "neuron", "neuron"),
    cut(r"ffn_down_exps\.weight", 0, "experts", "neuron"),
    cut(r"ffn_(gate|up)_shexp\.weight", 1, "shared_experts", "neuron"),
    cut(r"ffn_down_shexp\.weight", 0, "shared_experts", "neuron"),
    mirrored(r"ffn_gate_inp(_shexp)?\.weight"),  # the router: every device must choose the same experts
    mirrored(r"exp_probs_b(\.bias)?"),
)

_ATTENTION_STATES: Mapping[str, Rule] = {
    "q_heads": cut("", 2, "attention", "q_heads"),
    "kv_heads": cut("", 2, "attention", "kv_heads"),
    "cache_k": cut("", 0, "attention", "k"),
    "cache_v": cut("", 0, "attention", "v"),
}


def dense(name: str, *extra: Rule) -> Family:
    """Layers of attention and a gated feed-forward part under their usual names, with `extra` rules."""
    rules = _ATTENTION + _FEED_FORWARD + _NORMS + extra
    return Family(name, (LayerTable("attention", rules, _ATTENTION_STATES),), _OUTSIDE)


def _gated_delta(name: str, value: Part, value_head: Part, state: Part) -> Family:
    """Layers of the gated delta rule beside layers of gated attention; how value heads are ordered differs by model."""
    delta = LayerTable(
        "delta",
        (
            cut(r"attn_qkv\.weight", 1, "delta", "k", "k", value),
            cut(r"attn_gate\.weight", 1, "delta", value),
            cut(r"ssm_in\.weight", 1, "delta", "in"),  # q, k, v and gate of each key head in a row
            cut(r"ssm_ba\.weight", 1, "delta", "ba"),  # b and a of each key head in a row
            cut(r"ssm_(alpha|beta)\.weight", 1, "delta", value_head),
            cut(r"ssm_conv1d\.weight", 1, "delta", "k", "k", value),
            cut(r"ssm_dt\.bias", 0, "delta", value_head),
            cut(r"ssm_a", 0, "delta", value_head),
            cut(r"ssm_out\.weight", 0, "delta", value),
            mirrored(r"ssm_norm\.weight"),  # one head wide
            *_FEED_FORWARD,
            *EXPERTS,
            *_NORMS,
        ),
        {
            "q_heads": cut("", 2, "delta", "one"),
            "kv_heads": cut("", 2, "delta", value_head),
            "conv_state": cut("", 0, "delta", "k_window", "k_window", Part(f"{value.size}_window", value.repeat)),
            "recurrent_state": cut("", 0, "delta", state),
        },
        marker=r"ssm_conv1d\.weight",
    )
    gated = cut(r"attn_q\.weight", 1, "attention", "q_gate")  # each query head lies beside its gate
    attention = LayerTable("attention", (gated, *_ATTENTION, *_FEED_FORWARD, *EXPERTS, *_NORMS), _ATTENTION_STATES)
    return Family(name, (delta, attention), _OUTSIDE)


_KDA = LayerTable(
    "kda",
    (
        cut(r"attn_[qkv]\.weight", 1, "kda", "head"),
        cut(r"attn_qkv\.weight", 1, "kda", "head", "head", "head"),
        cut(r"ssm_[fg]_b\.weight", 1, "kda", "head"),
        cut(r"ssm_conv1d_[qkv]\.weight", 2, "kda", "head"),
        cut(r"ssm_dt\.bias", 0, "kda", "head"),
        cut(r"ssm_a", 0, "kda", "one"),
        cut(r"ssm_beta\.weight", 1, "kda", "one"),
        cut(r"attn_output\.weight", 0, "kda", "head"),
        mirrored(r"ssm_[fg]_a\.weight"),
        mirrored(r"ssm_norm\.weight"),
        *_FEED_FORWARD,
        *EXPERTS,
        *_NORMS,
    ),
    {
        "q_heads": cut("", 2, "kda", "one"),
        "kv_heads": cut("", 2, "kda", "one"),
        "conv_state": cut("", 0, "kda", "window", "window", "window"),
        "recurrent_state": cut("", 0, "kda", "state"),
    },
    marker=r"ssm_conv1d_q\.weight",
)

_MLA = LayerTable(
    "mla",
    (
        cut(r"attn_q(_b)?\.weight", 1, "mla", "k"),
        cut(r"attn_kv_b\.weight", 1, "mla", "nope_v"),
        cut(r"attn_[kv]_b\.weight", 2, "mla", "one"),
        cut(r"attn_output\.weight", 0, "mla", "v"),
        mirrored(r"attn_(q_a|kv_a_mqa)\.weight"),
        mirrored(r"attn_(q_a|kv_a)_norm\.weight"),
        mirrored(r"indexer\..*"),
        *_FEED_FORWARD,
        *EXPERTS,
        *_NORMS,
    ),
    # Every head reads the one latent.
    {"q_heads": cut("", 2, "mla", "one"), "kv_heads": mirrored(""), "cache_k": mirrored(""), "cache_v": mirrored("")},
)

_PLANNED = (
    dense("qwen2moe", *EXPERTS),
    dense("qwen3moe", *EXPERTS),
    # The value heads of one key head lie side by side, or one head of every key head forms a tile.
    _gated_delta("qwen3next", Part("v"), Part("v_heads"), Part("state")),
    _gated_delta("qwen35", Part("v_head", "tiles"), Part("one", "tiles"), Part("state_head", "tiles")),
    _gated_delta("qwen35moe", Part("v_head", "tiles"), Part("one", "tiles"), Part("state_head", "tiles")),
    Family("kimi-linear", (_KDA, _MLA), _OUTSIDE),
)
FAMILIES: Mapping[str, Family] = {family.name: family for family in _PLANNED}


def _attention_items(shape: ModelShape, one_per_query_head: bool) -> Items:
    """A KV head with its query heads; with one KV head, which every device then holds, a query head."""
    if shape.n_head_kv < 1 or shape.n_head % shape.n_head_kv:
        raise SplitError(f"{shape.n_head} query heads over {shape.n_head_kv} KV heads: expected the same number for each KV head")
    group = 1 if one_per_query_head else shape.n_head // shape.n_head_kv
    q = {"one": 1, "q_heads": group, "q": group * shape.head_dim_k, "q_gate": 2 * group * shape.head_dim_k, "out": group * shape.head_dim_v}
    if one_per_query_head:
        return Items("query head", shape.n_head, {**q, "kv_heads": None, "k": None, "v": None})
    name = "KV head with its query head" if group == 1 else f"KV head with {group} query heads"
    return Items(name, shape.n_head_kv, {**q, "kv_heads": 1, "k": shape.head_dim_k, "v": shape.head_dim_v})


def _delta_items(shape: ModelShape) -> Items:
    """A key head of the gated delta rule with its value heads."""
    n, dim_k, dim_v = shape.delta_heads_k, shape.delta_head_dim_k, shape.delta_head_dim_v
    if n < 1 or shape.delta_heads_v % n:
        raise SplitError(f"{shape.delta_heads_v} value heads over {n} key heads: expected the same number for each key head")
    group, window = shape.delta_heads_v // n, shape.d_conv - 1
    sizes = {
        "one": 1, "tiles": group, "k": dim_k, "v": group * dim_v, "v_head": dim_v, "v_heads": group,
        "in": 2 * dim_k + 2 * group * dim_v, "ba": 2 * group, "k_window": window * dim_k, "v_window": window * group * dim_v,
        "v_head_window": window * dim_v, "state": group * dim_k * dim_v, "state_head": dim_k * dim_v,
    }  # fmt: skip
    return Items("key head" if group == 1 else f"key head with {group} value heads", n, sizes)


def _kda_items(shape: ModelShape) -> Items:
    """A KDA head; heads are cut so that each device holds a multiple of 128 elements of q, k and v."""
    dim = shape.kda_head_dim
    if dim < 1:
        raise SplitError(f"KDA heads of {dim} elements: expected 1 or more")
    sizes = {"one": 1, "head": dim, "window": (shape.d_conv - 1) * dim, "state": dim * dim}
    return Items("KDA head", shape.n_head, sizes, granule=128 // gcd(128, dim))


def _mla_items(shape: ModelShape) -> Items:
    """An MLA head; the latent that they all read is held by every device."""
    dim_v = shape.mla_head_dim_v
    sizes = {"one": 1, "k": shape.mla_head_dim_k, "v": dim_v, "nope_v": shape.mla_head_dim_nope + dim_v}
    return Items("MLA head", shape.n_head, sizes)


_NEURON = {"one": 1, "neuron": 1}
_ITEMS: Mapping[str, Callable[[ModelShape], Items]] = {
    "delta": _delta_items,
    "kda": _kda_items,
    "mla": _mla_items,
    "feed_forward": lambda shape: Items("neuron", shape.n_ff, _NEURON),
    "experts": lambda shape: Items("neuron of each expert", shape.n_ff_expert, _NEURON),
    "shared_experts": lambda shape: Items("neuron", shape.n_ff_shared, _NEURON),
    "vocabulary": lambda shape: Items("row", shape.n_vocab, {"one": 1, "row": 1}),
}


def group_items(group: str, shape: ModelShape, one_per_query_head: bool = False) -> Items:
    """What `group` is counted in. `one_per_query_head`: attention by query heads, with K and V mirrored."""
    return _attention_items(shape, one_per_query_head) if group == "attention" else _ITEMS[group](shape)
