"""The gate sees what it is there for: with a fault put into deliveries its bits differ; with the same delays and no fault they do not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from transport import faults
from transport.hazards import poisoned
from transport.product import Configuration, Gate, Way
from transport.scenario import Played, difference, play

import numba_meta as nm

Fault = Callable[[], AbstractContextManager[None]]
LENGTHS = {1: (300,), 8: (250, 3, 40, 17, 9, 5, 20, 30)}
ONE = Configuration(split="2", types=("f16", "q8_0"))
MANY = Configuration(split="2: 70,30", types=("q8_0", "q8_0"), n_sequences=8, unified=False)
WINDOWS = Configuration(split="1", model="gemma3")
FAULTS: list[tuple[Fault, Configuration, tuple[int, ...]]] = [
    (faults.a_cell_too_few, ONE, (0, 1)),
    (faults.a_cell_too_few, WINDOWS, (0, 2)),
    (faults.bucket_rounded_down, ONE, (0, 1)),
    (faults.last_cell_of_the_ring_of_cells_missing, WINDOWS, (0, 1)),
    (faults.streams_in_another_order, MANY, (0, 1)),
    (faults.stale_slot_cells, MANY, (0, 1)),
    (faults.release_too_early, ONE, (1, 2)),
    (faults.ready_not_waited_for, ONE, (1, 4)),
    (faults.a_slot_too_few, ONE, (1, 2)),
    (faults.late_row_not_stored, ONE, (0, 1)),
    (faults.late_row_not_written_back, ONE, (0, 1)),
    (faults.written_back_to_another_cell, MANY, (0, 1)),
    (faults.ranges_beside_the_heads, ONE, (0, 1)),
]


def runs(configuration: Configuration, way: Way | None, models: dict[str, Path], fault: Fault | None = None) -> Played:
    """As `Gate` runs it, but shorter, with poisoned windows, and with a fault."""
    devices = way.devices(configuration.n_devices) if way else ["cpu:0"] * configuration.n_devices
    lengths = (508,) if configuration == WINDOWS else LENGTHS[configuration.n_sequences]
    options = {**configuration.options(), **(way.options() if way else {})}
    with poisoned(), fault() if fault else poisoned(), nm.load(models[configuration.model], devices=devices, **options) as model:
        return play(model, lengths)


@pytest.fixture(scope="module")
def wanted(tiny_models: dict[str, Path]) -> dict[Configuration, Played]:
    return {configuration: runs(configuration, None, tiny_models) for configuration in (ONE, MANY, WINDOWS)}


@pytest.mark.parametrize(
    ("fault", "configuration", "depth"),
    [
        pytest.param(fault, configuration, depth, marks=() if depth == depths[-1] else (pytest.mark.slow,))
        for fault, configuration, depths in FAULTS
        for depth in depths
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_fault_is_seen(
    fault: Fault, configuration: Configuration, depth: int, tiny_models: dict[str, Path], wanted: dict[Configuration, Played]
) -> None:
    got = runs(configuration, Way(depth=depth), tiny_models, fault)
    assert difference(got, wanted[configuration]) is not None


@pytest.mark.parametrize("delays", (faults.slow_readers, faults.late_windows), ids=lambda delays: delays.__name__)
@pytest.mark.parametrize("depth", (0, 1, 2, 4))
def test_delays_alone_change_nothing(depth: int, delays: Fault, tiny_models: dict[str, Path], wanted: dict[Configuration, Played]) -> None:
    got = runs(ONE, Way(depth=depth), tiny_models, delays)
    assert difference(got, wanted[ONE]) is None
    assert got.paths == {"pipelined" if depth else "ordered"}


def test_the_gate_compares_bits_and_not_values(gate: Gate) -> None:
    """A single bit of one logit of one step is a difference, and so is a token."""
    played = gate.reference(ONE)
    assert difference(played, played) is None
    row = bytearray(played.rows[7])
    row[100] ^= 1
    assert difference(Played([*played.rows[:7], bytes(row), *played.rows[8:]], played.tokens), played) == (
        f"step 7 of {len(played.rows)}: 1 of {len(row) // 4} logits differ"
    )
    assert difference(Played(played.rows, [*played.tokens[:-1], -1]), played) == "the tokens differ"
