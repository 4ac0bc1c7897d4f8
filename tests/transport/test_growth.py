"""A ring grows with its windows: in powers of two, up to the full context; what was recorded for an older one is not used again."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from transport.hazards import poisoned
from transport.scenario import Player, difference, ids, play

import numba_meta as nm
from numba_meta.models.model import Model
from numba_meta.models.running.recordings import Capacity, Recorder, Recording

HOST = {"kv": "host", "kv_pipeline_headroom": 0}
CELL = 2 * 64 * 2  # bytes of K and V of a layer of the tiny llama: 2 heads of 32 in f16


def grow(model: Model, n_tokens: int, seen: list[dict[str, Any]]) -> Player:
    """A sequence of so many tokens, by prompt chunks and by single steps in turns; the stats after each."""
    player, context = Player(model), model.context
    prompt = ids(8, n_tokens, 300)
    while (at := context.cells.length(0)) < n_tokens:
        n = 1 if at % 64 < 5 else min(64 - at % 64, n_tokens - at)
        player.step(prompt[at : at + n], [0] * n, [n - 1])
        seen.append(model.transport.stats)
    return player


@pytest.mark.parametrize(("ctx_size", "slots"), [(2048, (256, 512, 1024, 2048)), (700, (256, 512, 768)), (100, (256,))])
def test_slots_grow_in_powers_of_two_up_to_the_full_context(ctx_size: int, slots: tuple[int, ...], tiny_models: dict[str, Path]) -> None:
    """The last slot is that of the whole context, in whole buckets; bits are those of a cache on the devices all the way."""
    options = {"ctx_size": ctx_size, "ubatch_size": 64}
    n_tokens = min(ctx_size, 1100)
    with nm.load(tiny_models["llama"], **options) as model:
        wanted = grow(model, n_tokens, []).finish()
    seen: list[dict[str, Any]] = []
    with poisoned(), nm.load(tiny_models["llama"], **options, **HOST) as model:
        assert difference(grow(model, n_tokens, seen).finish(), wanted) is None
    assert {stats["path"] for stats in seen} == {"pipelined"}
    sizes = list(dict.fromkeys(stats["slot_bytes"] for stats in seen))
    assert sizes == [n_cells * CELL for n_cells in slots]
    for stats in seen:
        assert stats["ring_bytes"] == (3 * stats["slot_bytes"],) and stats["slot_bytes"] <= stats["full_bytes"][0] // 3


def test_growth_stops_at_the_budget(tiny_models: dict[str, Path]) -> None:
    """1 MiB holds three slots of 1,365 cells: enough for a window of 1,280 cells, and not one byte more."""
    seen: list[dict[str, Any]] = []
    with nm.load(tiny_models["llama"], ctx_size=4096, ubatch_size=64, kv_pipeline_budget=1, **HOST) as model:
        grow(model, 1400, seen)
    paths = [(stats["path"], max(stats["ring_bytes"])) for stats in seen]
    assert all(n_bytes <= 1 << 20 for _, n_bytes in paths)
    moved = [stats["early_bytes"][0] // (7 * CELL) for stats in seen if stats["path"] == "pipelined"]
    assert max(moved) == 1280 and len(moved) + sum(path == "ordered" for path, _ in paths) == len(paths)
    assert paths[-1][0] == "ordered"


def test_recordings_are_few_and_none_outlives_its_ring(tiny_models: dict[str, Path]) -> None:
    """While a sequence grows by eight times, each kind of step is recorded anew as often as the ring moves, no more."""
    with nm.load(tiny_models["llama"], ctx_size=2048, ubatch_size=64, **HOST) as model:
        context = model.context
        recorded: list[Capacity] = []
        generations: list[int] = []
        record, run = Recorder.record, Recording.run

        def note_record(self: Recorder, capacity: Capacity, *arguments: Any) -> Recording:
            recorded.append(capacity)
            return record(self, capacity, *arguments)

        def note_run(self: Recording, *arguments: Any) -> Any:
            assert self.is_valid and self in context._recordings.values()
            generations.append(self._generations[1])
            return run(self, *arguments)

        first = context.recording(Capacity(1, 1))
        with mock.patch.object(Recorder, "record", note_record), mock.patch.object(Recording, "run", note_run):
            grow(model, 2000, [])
        assert not first.is_valid and context.recording(Capacity(1, 1)) is not first
        assert len(context._recordings) <= 4
        assert all(recorded.count(capacity) <= 4 for capacity in recorded) and len(recorded) > 4
        assert generations == sorted(generations)


def test_a_small_step_goes_through_a_ring_that_has_grown(tiny_models: dict[str, Path]) -> None:
    """A ring does not shrink with its windows: after a long text, short ones keep it, and their bits."""
    with nm.load(tiny_models["gemma3"], ctx_size=2048, ubatch_size=64, parallel=8) as model:
        wanted = play(model)
    with poisoned(), nm.load(tiny_models["gemma3"], ctx_size=2048, ubatch_size=64, parallel=8, **HOST) as model:
        grow(model, 1000, [])
        grown = model.transport.stats["ring_bytes"]
        model.context.cells.clear()
        played = play(model)
        assert difference(played, wanted) is None
        assert all(now >= then for now, then in zip(played.stats["ring_bytes"], grown, strict=True))
