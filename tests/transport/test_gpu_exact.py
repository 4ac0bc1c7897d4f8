"""The gate on GPUs, over one and two devices on one or two of them: deliveries by the copy engine, a whole step in one graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transport.pairwise import pairwise
from transport.product import CONFIGURATION, WAY, Configuration, Gate, Way, split_row
from transport.scenario import difference
from transport.test_exact import name_of

pytestmark = pytest.mark.gpu
FACTORS: dict[str, tuple[Any, ...]] = {
    **CONFIGURATION,
    "split": ("1", "2", "2: 70,30", "2: 1,0"),
    "depth": (0, 1, 2, 4),
    "budget": WAY["budget"],
    "by_share": (True, False),
    "link": ("fast",),
    "poison": (False, True),
    "device_layers": (0, 1),
    "async_copies": (True,),
    "pinned": (True, False),
}
SAMPLE = [split_row(row) for row in pairwise(FACTORS)]


@pytest.mark.parametrize(("configuration", "way"), SAMPLE, ids=name_of)
def test_every_way_gives_the_bits_of_a_cache_on_the_devices(configuration: Configuration, way: Way, gate: Gate) -> None:
    check(replace(configuration, kind="cuda"), way, gate)


@pytest.mark.gpu(2)
@pytest.mark.parametrize(("configuration", "way"), [row for row in SAMPLE if row[0].n_devices > 1], ids=name_of)
def test_devices_on_two_gpus(configuration: Configuration, way: Way, gate: Gate) -> None:
    check(replace(configuration, kind="gpus"), way, gate)


def check(configuration: Configuration, way: Way, gate: Gate) -> None:
    got = gate.deliver(configuration, way)
    assert difference(got, gate.reference(configuration)) is None
    assert got.paths <= way.expected_paths
