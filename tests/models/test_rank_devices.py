"""Whose devices are whose, and what a rank keeps of a cache."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from numba_meta.comm.calls import Call
from numba_meta.comm.join import Joined
from numba_meta.comm.record import JoinRecord
from numba_meta.dtypes import F16
from numba_meta.errors import OutOfMemoryError, UsageError
from numba_meta.graph import Graph
from numba_meta.models.running.rank_calls import describe_call
from numba_meta.models.running.ranks import RankGroup, check_host_memory, leaf_of_devices, parse_rank_devices
from numba_meta.models.text.sampling import SamplingOptions
from numba_meta.schedule.ranks import device_ranges
from numba_meta.split.state import MIRRORED, split
from numba_meta.tensor import Role, Tensor


def test_lists_of_devices() -> None:
    assert [[d.name for d in own] for own in parse_rank_devices("cpu:0,cpu:1;cpu:2", 2)] == [["cpu:0", "cpu:1"], ["cpu:2"]]
    assert [[d.name for d in own] for own in parse_rank_devices("cpu:0,cpu:1", 3)] == [["cpu:0", "cpu:1"]] * 3
    assert parse_rank_devices(["cpu:0"], 2) == parse_rank_devices("cpu:0;cpu:0", 2)


@pytest.mark.parametrize(
    ("devices", "n", "pattern"),
    [
        ("cpu:0;cpu:0", 1, "those of 2 ranks, and 1 process runs"),
        ("cpu:0;cpu:0", 3, "those of 2 ranks, and 3 ranks run"),
        ("cpu:0;", 2, "unknown device ''"),
    ],
)
def test_lists_that_do_not_fit(devices: str, n: int, pattern: str) -> None:
    with pytest.raises(UsageError, match=pattern):
        parse_rank_devices(devices, n)


def cache(n: int) -> Tensor:
    return Graph("g").leaf("cache_k.0", F16, [n, 16], Role.HOST)


@given(st.lists(st.integers(0, 5).map(lambda heads: 32 * heads), min_size=1, max_size=6).filter(any), st.data())
def test_ranks_keep_what_their_devices_hold(extents: list[int], data: Any) -> None:
    """The pieces of all ranks' devices are those of the whole; in each rank they lie one behind the other from 0 on."""
    counts, left = [], len(extents)
    while left:
        counts.append(data.draw(st.integers(1, left)))
        left -= counts[-1]
    whole, state = cache(sum(extents)), split(0, extents)
    kept = []
    for devices in device_ranges(counts):
        own, own_state = leaf_of_devices(whole, state, devices), state.of_devices(devices)
        own_state.validate(own.shape, own.dtype)
        assert own_state.extents == state.extents[devices.start : devices.stop]
        assert own.shape[1:] == whole.shape[1:] and own.strides[1] == own.dtype.row_bytes(own.shape[0])
        kept.append(own.n_bytes)
    assert sum(kept) == whole.n_bytes


def test_what_is_mirrored_is_kept_whole() -> None:
    whole = cache(64)
    assert leaf_of_devices(whole, MIRRORED, range(1, 2)) is whole
    assert MIRRORED.of_devices(range(1, 2)) == MIRRORED


def joined(*needs: tuple[str, int, int | None]) -> Joined:
    records = [
        JoinRecord(rank, f"name-{key}", key, rank, "1", needed_host_bytes=needed, available_host_bytes=free)
        for rank, (key, needed, free) in enumerate(needs)
    ]
    return Joined(0, tuple(records))


def test_ranks_of_one_host_add_up_what_they_need() -> None:
    check_host_memory(joined(("a", 60, 100), ("b", 60, 100), ("c", 10**9, None)))
    with pytest.raises(OutOfMemoryError, match="name-a: 2 ranks need 120 B together .* 100 B are free"):
        check_host_memory(joined(("a", 60, 100), ("b", 60, 100), ("a", 60, 110)))


def group(levels: list[bytes], begin: Callable[[Call], int] = lambda _: 0) -> RankGroup:
    world = SimpleNamespace(exchange=lambda payload, purpose: [levels[0], payload])
    launch: Any = SimpleNamespace(world=world, calls=SimpleNamespace(begin=begin))
    return RankGroup(launch, joined(("a", 0, None)), SimpleNamespace(), 2)  # type: ignore[arg-type]


def test_ranks_draw_with_rank_0s_seed_where_none_is_given() -> None:
    begun: list[Call] = []

    def begin(call: Call) -> int:
        begun.append(call)
        return 123456

    ranks = group([b""], begin)
    drawn = ranks.begin_drawing("generate", [[5, 6]], SamplingOptions(temperature=1.0), max_tokens=np.int64(3))
    assert drawn == SamplingOptions(temperature=1.0, seed=123456)
    for options in (SamplingOptions(), SamplingOptions(temperature=1.0, seed=5)):
        assert ranks.begin_drawing("generate", [[5, 6]], options, max_tokens=3) is options
    facts = begun[0].facts
    assert list(facts)[:4] == ["model", "prompts", "lengths", "ids"] and facts["model"] == "of model 2"
    assert facts["lengths"] == "with 2 prompt tokens" and facts["ids"] == "with prompt ids 5 6"
    assert facts["temperature"] == "with temperature 1" and facts["seed"] == "with seed None" and facts["max_tokens"] == "with max_tokens 3"
    assert begun[1].facts["max_tokens"] == facts["max_tokens"], "numpy's numbers are plain ones"


def test_what_is_long_is_told_as_its_digest() -> None:
    texts = [describe_call("x", 1, [prompt], None, {"stop": ["a" * n]}).facts for prompt, n in ((range(9), 99), (range(1, 10), 98))]
    assert all("sha256" in facts[name] and len(facts[name]) < 50 for facts in texts for name in ("ids", "stop"))
    assert texts[0]["ids"] != texts[1]["ids"] and texts[0]["stop"] != texts[1]["stop"]
    many = [describe_call("x", 1, prompts, None, {}).facts["ids"] for prompts in ([[1, 2], [3]], [[1], [2, 3]])]
    assert many[0] != many[1]


def test_the_least_level_counts() -> None:
    assert group([b"\x01"]).least(2, "ring") == 1 and group([b"\x02"]).least(0, "ring") == 0
