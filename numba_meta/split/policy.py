"""The cut plan of a model: one split state for every weight and every cache tensor, by architecture.

Comes in: the model's sizes, its tensors' types and shapes, proportions. Goes out: a `CutPlan`, plain data.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import gcd, lcm
from types import MappingProxyType
from typing import Any

from numba_meta.dtypes import F16, DType
from numba_meta.errors import SplitError
from numba_meta.split.cut import cut_extents
from numba_meta.split.families import group_items
from numba_meta.split.rules import Described, Family, Items, LayerTable, ModelShape, Part, Rule
from numba_meta.split.state import MIRRORED, Segment, SplitState, split

_LAYER_NAME = re.compile(r"blk\.([0-9]{1,6})\.(.+)")
_WHOLE_EXPERT = (Part("one"),)


@dataclass(frozen=True)
class CutGroup:
    """Tensors that are cut alike: `extents[j]` items for device j, cut between units of `unit` items.

    `layer` is None for what lies outside of layers. `items` says what is counted ("KV head with 3 query heads").
    """

    name: str
    layer: int | None
    items: str
    n_items: int
    unit: int
    extents: tuple[int, ...]
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class LayerCuts:
    """What a layer's attention (or its stand-in, `mixer`) divides: heads on axis 2, and what is kept per sequence on axis 0.

    `q_heads` and `kv_heads` count heads (of the gated delta rule: key heads and value heads). `kv_heads` and the cache are
    mirrored where all query heads read one KV head. A cache row is `[head_dim * n_head_kv]`, one per cell. States that this
    kind of layer does not keep are None.
    """

    mixer: str
    q_heads: SplitState
    kv_heads: SplitState
    cache_k: SplitState | None = None
    cache_v: SplitState | None = None
    conv_state: SplitState | None = None
    recurrent_state: SplitState | None = None


@dataclass(frozen=True)
class CutPlan:
    """How a model is divided over `n_devices`: `weights` by tensor name, `layers` in order, `groups` for printing.

    On one device every state is mirrored, so that nothing has to be reduced there.
    """

    architecture: str
    n_devices: int
    weights: Mapping[str, SplitState] = field(repr=False)
    layers: tuple[LayerCuts, ...] = field(repr=False)
    groups: tuple[CutGroup, ...] = field(repr=False)

    def __getstate__(self) -> dict[str, object]:
        """As `pickle` and `copy` take it: a read-only view is neither's."""
        return {**vars(self), "weights": dict(self.weights)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, weights=MappingProxyType(state["weights"]))

    def weight(self, name: str) -> SplitState:
        """The state of a weight; `SplitError` for a name that was not among the plan's tensors."""
        if name not in self.weights:
            raise SplitError(f"{name}: not among the {len(self.weights)} tensors that the cuts were planned for")
        return self.weights[name]

    def group(self, name: str, layer: int | None = None) -> CutGroup:
        """A group by name ("attention", "feed_forward", "vocabulary", ...) and layer; `SplitError` where the model has none."""
        for group in self.groups:
            if group.name == name and group.layer == layer:
                return group
        raise SplitError(f"group {name} of layer {layer}: this {self.architecture} model has none")


@dataclass(frozen=True)
class _Cut:
    """A group's decision: its items and how many of them each device holds."""

    items: Items
    unit: int
    extents: tuple[int, ...]
    by_expert: bool = False


def plan_cuts(
    family: Family,
    shape: ModelShape,
    tensors: Mapping[str, Described],
    proportions: Sequence[Fraction | int],
    cache_types: tuple[DType, DType] = (F16, F16),
    deterministic: bool = False,
    layer_shapes: Sequence[ModelShape] | None = None,
) -> CutPlan:
    """Where every tensor of a model is cut for these proportions, one per device, by the rules of its `family`.

    `layer_shapes`: the sizes of each layer, where they differ from `shape`. `deterministic`: no weight is cut inside its
    rows, so that no sum crosses devices; what a device's rows read is gathered.

    Tensors that meet in a layer are cut alike, in the least unit that keeps every cut between their blocks; so are the
    rows of the K and V cache, stored as `cache_types`. Raises `SplitError` for a tensor without a rule and for sizes that do
    not fit the tensors.
    """
    weights: dict[str, SplitState] = {}
    groups: list[CutGroup] = []
    layers: list[LayerCuts] = []
    for layer, members in _by_layer(tensors, shape).items():
        table = None if layer is None else _table_of(family, members)
        rules = _rules_of(members, family.outside if table is None else table.rules, layer, family.name)
        demands = [(rule, members[name].dtype) for name, rule in rules.items()]
        if table is not None:
            demands += [(rule, _state_type(name, cache_types)) for name, rule in table.states.items()]
        sizes = shape if layer is None or layer_shapes is None else layer_shapes[layer]
        cuts = _choose_cuts(demands, sizes, proportions)
        for name, rule in rules.items():
            full_name = _full_name(name, layer)
            weights[full_name] = _state(rule, cuts)
            weights[full_name].validate(members[name].shape, members[name].dtype, full_name)
        if deterministic and len(proportions) > 1:
            inside = [name for name in members if weights[_full_name(name, layer)].axis == 0 and len(members[name].shape) == 2]
            for name in inside:
                extents = cut_extents(members[name].shape[1], 1, proportions)
                weights[_full_name(name, layer)] = split(1, extents)
                groups.append(CutGroup(f"outputs of {name}", layer, "row", members[name].shape[1], 1, extents, (_full_name(name, layer),)))
        for group, cut in cuts.items():
            names = tuple(_full_name(name, layer) for name, rule in rules.items() if rule.group == group)
            groups.append(CutGroup(group, layer, cut.items.name, cut.items.n, cut.unit, cut.extents, names))
        if table is not None:
            layers.append(LayerCuts(table.mixer, **{name: _state(rule, cuts) for name, rule in table.states.items()}))
    in_order = {name: weights[name] for name in tensors}
    return CutPlan(family.name, len(proportions), MappingProxyType(in_order), tuple(layers), tuple(groups))


def describe_cuts(plan: CutPlan) -> tuple[str, ...]:
    """One line per group for `-v`; layers that are cut alike share a line."""
    layers: dict[tuple[str, str, int, int, tuple[int, ...]], list[int]] = {}
    for group in plan.groups:
        key = (group.name, group.items, group.n_items, group.unit, group.extents)
        layers.setdefault(key, []).extend([] if group.layer is None else [group.layer])
    return tuple(
        f"{name.replace('_', ' ')}{_shown_layers(numbers)}: {n_items} x {items}, unit {unit}: {'|'.join(map(str, extents))}"
        for (name, items, n_items, unit, extents), numbers in layers.items()
    )


def _choose_cuts(demands: Sequence[tuple[Rule, DType]], shape: ModelShape, proportions: Sequence[Fraction | int]) -> dict[str, _Cut]:
    """The cut of every group, given the rules and types of all that is cut in one layer (or outside of layers)."""
    groups = dict.fromkeys(rule.group for rule, _ in demands if rule.group)
    return {group: _choose_cut(group, [met for met in demands if met[0].group == group], shape, proportions) for group in groups}


def _choose_cut(group: str, demands: Sequence[tuple[Rule, DType]], shape: ModelShape, proportions: Sequence[Fraction | int]) -> _Cut:
    """Items, unit and extents of a group, given the rules and types of all that is cut with it."""
    # A tensor cannot be cut in one part and mirrored in another: a fused one keeps a single KV head on one device.
    fused = any(len(rule.parts) > 1 for rule, _ in demands)
    one_per_query_head = group == "attention" and shape.n_head_kv == 1 and not fused
    items = group_items(group, shape, one_per_query_head)
    unit = lcm(items.granule, *(_items_per_block(rule, dtype, items) for rule, dtype in demands))
    n_wanting = sum(1 for part in proportions if part)
    if group == "experts" and -(-items.n // unit) < n_wanting:
        # Too narrow for every device to get a part of each expert.
        return _Cut(Items("expert", shape.n_expert, items.sizes), 1, cut_extents(shape.n_expert, 1, proportions), by_expert=True)
    return _Cut(items, unit, cut_extents(items.n, unit, proportions))


def _items_per_block(rule: Rule, dtype: DType, items: Items) -> int:
    """The fewest items whose elements fill whole blocks in every part of a tensor that is cut on axis 0."""
    if rule.axis != 0:
        return 1
    sizes = [items.sizes[part.size] for part in rule.parts]
    return lcm(*(dtype.block_size // gcd(dtype.block_size, size) for size in sizes if size))


def _state(rule: Rule, cuts: Mapping[str, _Cut]) -> SplitState:
    """The state of a tensor under `rule`, from the cut of its group."""
    if not rule.group:
        return MIRRORED
    cut = cuts[rule.group]
    sizes = cut.items.sizes
    axis, parts = (2, _WHOLE_EXPERT) if cut.by_expert else (rule.axis, rule.parts)
    if len(cut.extents) == 1 or any(sizes[part.size] is None for part in parts):
        return MIRRORED
    return SplitState(axis, tuple(Segment(_times(cut.extents, sizes[part.size]), sizes[part.repeat] or 1) for part in parts))


def _times(extents: Iterable[int], size: int | None) -> tuple[int, ...]:
    return tuple(extent * (size or 0) for extent in extents)


def _by_layer(tensors: Mapping[str, Described], shape: ModelShape) -> dict[int | None, dict[str, Described]]:
    """Tensors outside of layers (None), then those of every layer in order, by their names without `blk.N.`."""
    embedding = tensors.get("token_embd.weight")
    if embedding is not None and embedding.shape[0] != shape.n_embd:
        raise SplitError(f"token_embd.weight {list(embedding.shape)}: expected rows of {shape.n_embd} elements, as the model's sizes say")
    layers: dict[int | None, dict[str, Described]] = {None: {}, **{layer: {} for layer in range(shape.n_layer)}}
    for name, facts in tensors.items():
        match = _LAYER_NAME.fullmatch(name)
        layer = int(match[1]) if match else None
        if layer not in layers:
            raise SplitError(f"{name}: a tensor of layer {layer}; expected layers 0 to {shape.n_layer - 1}")
        layers[layer][match[2] if match else name] = facts
    return layers


def _table_of(family: Family, members: Iterable[str]) -> LayerTable:
    """The rules of a layer's kind, told by its tensors' names."""
    names = list(members)
    for table in family.layers:
        if not table.marker or any(re.fullmatch(table.marker, name) for name in names):
            return table
    raise AssertionError("the last kind of layer of a family has no marker")


def _rules_of(members: Mapping[str, Described], rules: Sequence[Rule], layer: int | None, architecture: str) -> dict[str, Rule]:
    """The first rule that speaks of each tensor."""
    found: dict[str, Rule] = {}
    for name, facts in members.items():
        rule = next((rule for rule in rules if rule.matches(name)), None)
        if rule is None:
            raise SplitError(f"{_full_name(name, layer)}: the policy for {architecture} has no rule for a tensor of this name")
        # Some files store one number per head as [1, n_head].
        as_column = rule.axis == 0 and len(facts.shape) > 1 and facts.shape[0] == 1
        found[name] = replace(rule, axis=1) if as_column else rule
    return found


def _state_type(name: str, cache_types: tuple[DType, DType]) -> DType:
    """The type of a cache tensor; other states are f32 or views, without blocks."""
    return {"cache_k": cache_types[0], "cache_v": cache_types[1]}.get(name, F16)


def _full_name(name: str, layer: int | None) -> str:
    return name if layer is None else f"blk.{layer}.{name}"


def _shown_layers(layers: Sequence[int]) -> str:
    """" of layers 0-4,6" for a sequence of layer numbers, "" for none."""
    if not layers:
        return ""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][-1] == layer - 1:
            runs[-1][1:] = [layer]
        else:
            runs.append([layer])
    shown = ",".join("-".join(map(str, run)) for run in runs)
    return f" of layer {shown}" if len(layers) == 1 else f" of layers {shown}"
