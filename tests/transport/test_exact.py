"""The gate: how deliveries travel changes no bit of what is computed. Every pair of values of every two factors."""

from __future__ import annotations

from dataclasses import asdict
from itertools import combinations
from typing import Any

import pytest
from transport.pairwise import all_pairs
from transport.product import CONFIGURATION, WAY, Configuration, Gate, Way, sample
from transport.scenario import difference

SAMPLE = sample()


def name_of(value: Configuration | Way) -> str:
    """A test's name: what differs from the default."""
    default = asdict(type(value)())
    return "-".join(f"{name}={v}" for name, v in asdict(value).items() if v != default[name]) or "default"


def test_the_sample_covers_every_pair() -> None:
    factors = {**CONFIGURATION, **WAY}
    rows = [{**vars(configuration), **vars(way)} for configuration, way in SAMPLE]
    indices = [{name: values.index(row[name]) for name, values in factors.items()} for row in rows]
    got = {((one, row[one]), (other, row[other])) for row in indices for one, other in combinations(factors, 2)}
    assert got == all_pairs(factors)
    assert sum("pipelined" in way.expected_paths for _, way in SAMPLE) > len(SAMPLE) / 2


def rows() -> list[Any]:
    """Those for a ring first; the others are slow tests."""
    slow = {True: (), False: (pytest.mark.slow,)}
    return [pytest.param(configuration, way, marks=slow["pipelined" in way.expected_paths]) for configuration, way in SAMPLE]


@pytest.mark.parametrize(("configuration", "way"), rows(), ids=name_of)
def test_every_way_gives_the_bits_of_a_cache_on_the_devices(configuration: Configuration, way: Way, gate: Gate) -> None:
    wanted = gate.reference(configuration)
    got = gate.deliver(configuration, way)
    assert difference(got, wanted) is None
    assert got.paths <= way.expected_paths
