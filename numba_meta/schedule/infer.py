"""Split states of a whole graph, and where devices must meet."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from numba_meta.errors import SplitError
from numba_meta.graph import Graph
from numba_meta.operation import NeedsGather, NeedsReduce, operation
from numba_meta.split.state import MIRRORED, SplitState
from numba_meta.tensor import Tensor


@dataclass(frozen=True)
class SplitGraph:
    """A graph with its collectives inserted, and the state of every tensor in it."""

    graph: Graph
    states: Mapping[Tensor, SplitState]

    @property
    def collectives(self) -> tuple[Tensor, ...]:
        """The all-reduces and gathers, in order."""
        return tuple(node for node in self.graph.nodes if node.op in ("all_reduce", "gather"))


def infer_splits(
    graph: Graph, leaf_state: Callable[[Tensor], SplitState], n_devices: int, may_gather: Callable[[Tensor], bool] = lambda _: False
) -> SplitGraph:
    """States for all tensors of a graph over `n_devices`.

    `leaf_state` is the policy. `may_gather` says which split tensors may be made whole for an operation that needs it; outputs always may.
    Raises `SplitError` where a combination has no rule. With one device everything is MIRRORED.
    """
    if n_devices == 1:
        everything = {tensor: MIRRORED for tensor in (*graph.leaves, *graph.nodes)}
        return SplitGraph(graph, everything)
    leaves = {leaf: leaf_state(leaf) for leaf in graph.leaves}
    for leaf, state in leaves.items():
        state.validate(leaf.shape, leaf.dtype, leaf.name)
    reduced: set[Tensor] = set()
    gathered: set[Tensor] = set()
    while True:
        before = len(reduced) + len(gathered)
        states = _propagate(graph, leaves, reduced, gathered, may_gather)
        if len(reduced) + len(gathered) == before:
            branching = _branching_partials(graph, states, reduced)
            if not branching:
                break
            reduced |= branching
    return _with_collectives(graph, states, reduced, gathered)


def _propagate(
    graph: Graph, leaves: Mapping[Tensor, SplitState], reduced: set[Tensor], gathered: set[Tensor], may_gather: Callable[[Tensor], bool]
) -> dict[Tensor, SplitState]:
    """One pass over the graph; adds to `reduced` and `gathered` what a rule asks for. The states are those before a collective."""
    states = dict(leaves)

    def seen(source: Tensor) -> SplitState:
        """The state in which consumers find a tensor."""
        if source in gathered or (source in reduced and states[source].is_partial):
            return MIRRORED
        return states[source]

    for node in graph.nodes:
        while True:
            try:
                states[node] = operation(node.op).split(node, [seen(s) for s in node.sources])
                break
            except NeedsReduce as request:
                whole = {_summand(source) for source in request.sources}
                reduced.update(whole)
                if not whole.issubset(request.sources):  # the views of what is reduced now have other states
                    return _propagate(graph, leaves, reduced, gathered, may_gather)
            except NeedsGather as request:
                for source in request.sources:
                    if not may_gather(source):
                        raise SplitError(f"{node.op} {node.name} needs {source.name} whole, but it is cut ({states[source]})") from None
                gathered.update(request.sources)
    for output in graph.outputs:
        if states[output].is_partial:
            reduced.add(output)
        elif states[output].is_split and output not in gathered:
            gathered.add(output)
    return states


def _summand(tensor: Tensor) -> Tensor:
    """What to reduce to make this tensor whole: itself, or what it looks at where it has gaps."""
    while tensor.op and operation(tensor.op).is_view and not tensor.is_contiguous:
        tensor = tensor.sources[0]
    return tensor


def _branching_partials(graph: Graph, states: Mapping[Tensor, SplitState], reduced: set[Tensor]) -> set[Tensor]:
    """PARTIAL tensors whose consumers would end in different reductions: cheaper reduced once, here.

    A reduction may be delayed along a chain only where every consumer of each link lies inside it.
    """
    ends: dict[Tensor, set[Tensor]] = defaultdict(set)  # the reductions that a tensor's summands flow into
    consumers: dict[Tensor, list[Tensor]] = defaultdict(list)
    for node in graph.nodes:
        for source in node.sources:
            consumers[source].append(node)
    branching = set()
    for tensor in reversed([*graph.leaves, *graph.nodes]):
        if not states[tensor].is_partial:
            continue
        if tensor in reduced:
            ends[tensor] = {tensor}
            continue
        flows = [ends[consumer] for consumer in consumers[tensor]]
        ends[tensor] = set().union(*flows)
        if len(ends[tensor]) > 1 and all(len(flow) <= 1 for flow in flows):
            branching.add(tensor)
    return branching


def _with_collectives(graph: Graph, states: Mapping[Tensor, SplitState], reduced: set[Tensor], gathered: set[Tensor]) -> SplitGraph:
    """The graph made anew, with an all-reduce or gather after each tensor that needs one."""
    new = Graph(graph.name)
    new.leaves = list(graph.leaves)
    new._names = set(graph._names)
    new_states = {leaf: states[leaf] for leaf in graph.leaves}
    replacement: dict[Tensor, Tensor] = {leaf: leaf for leaf in graph.leaves}
    for tensor in (*graph.leaves, *graph.nodes):
        if tensor.op:
            sources = [replacement[s] for s in tensor.sources]
            same = all(new_source is old for new_source, old in zip(sources, tensor.sources, strict=True))
            copy = tensor if same else operation(tensor.op).result(tensor.name, sources, tensor.params)
            new.nodes.append(copy)
            new_states[copy] = states[tensor]
            replacement[tensor] = copy
        kind = "gather" if tensor in gathered else "all_reduce" if tensor in reduced and states[tensor].is_partial else ""
        if kind:
            whole = new.apply(kind, replacement[tensor], name=f"{tensor.name}.{kind}")
            new_states[whole] = operation(kind).split(whole, [states[tensor]])
            replacement[tensor] = whole
    new.outputs = [replacement[output] for output in graph.outputs]
    return SplitGraph(new, new_states)
