"""Samples of a product: every pair of values of every two factors, or every value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

Pair = tuple[tuple[str, int], tuple[str, int]]


def all_pairs(factors: Mapping[str, Sequence[Any]]) -> set[Pair]:
    """Every pair of values, as ((factor, index), (other factor, index)), factors in the order of the mapping."""
    values = {name: [(name, i) for i in range(len(factors[name]))] for name in factors}
    return {pair for one, other in combinations(factors, 2) for pair in product(values[one], values[other])}


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Rows (a value for each factor) that together hold every pair of values. The same factors give the same rows.

    Greedy: a row begins with a pair that is still missing; each other factor takes the value that brings the most missing pairs.
    """
    missing = all_pairs(factors)
    rows = []
    while missing:
        row = dict(min(missing))
        for name in factors:
            if name not in row:
                gains = [len(missing & _pairs_with(factors, row, name, i)) for i in range(len(factors[name]))]
                row[name] = gains.index(max(gains))
        missing -= {pair for one, other in combinations(factors, 2) for pair in [((one, row[one]), (other, row[other]))]}
        rows.append({name: factors[name][row[name]] for name in factors})
    return rows


def every_value(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """The fewest rows that hold every value: in turns, so that pairs with a factor of one value are all there."""
    return [{name: values[i % len(values)] for name, values in factors.items()} for i in range(max(map(len, factors.values())))]


def _pairs_with(factors: Mapping[str, Sequence[Any]], row: Mapping[str, int], name: str, index: int) -> set[Pair]:
    """The pairs that a value brings beside the values that a row has already."""
    order = list(factors)
    new = (name, index)
    return {((known, i), new) if order.index(known) < order.index(name) else (new, (known, i)) for known, i in row.items()}
