"""Pure decisions: wire types, the generic tree, host memory, threads, the reason that a launch ends with."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from numba_meta.comm.cores import threads_of_rank
from numba_meta.comm.ending import Event, choose_ending, killed, silent
from numba_meta.comm.host_memory import HostNeed, add_up_host_memory, grant_host_memory
from numba_meta.comm.tree import plan_tree, run_tree
from numba_meta.comm.wire import choose_wire_type

# ---- wire type -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_ranks", "threshold"), [(1, 32_768), (2, 32_768), (3, 131_072), (4, 262_144), (5, 262_144), (64, 262_144)]
)
def test_large_payloads_travel_as_bf16(n_ranks, threshold):
    assert choose_wire_type(threshold - 1, n_ranks) == "f32"
    assert choose_wire_type(threshold, n_ranks) == "bf16"
    assert choose_wire_type(0, n_ranks) == "f32"


@pytest.mark.parametrize("n_ranks", [2, 3, 4])
def test_pairwise_has_one_threshold(n_ranks):
    assert choose_wire_type(32_767, n_ranks, pairwise=True) == "f32"
    assert choose_wire_type(32_768, n_ranks, pairwise=True) == "bf16"


@given(st.integers(0, 1 << 40), st.integers(1, 64), st.booleans(), st.sampled_from(["exact", "deterministic", "cpu"]))
def test_f32_stays_where_bits_count(n, n_ranks, pairwise, why):
    arguments = {"device": "cpu"} if why == "cpu" else {why: True}
    assert choose_wire_type(n, n_ranks, pairwise=pairwise, **arguments) == "f32"


# ---- tree ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(1, 10))
def test_tree_sums_everything_everywhere(n):
    rng = np.random.default_rng()
    values = rng.standard_normal((n, 37))
    parts = [value.astype(np.float32) for value in values]
    run_tree(parts)
    for part in parts:
        assert part.tobytes() == parts[0].tobytes()
        np.testing.assert_allclose(part, values.sum(0), rtol=0, atol=n * 1e-6)


@pytest.mark.parametrize("n", range(1, 10))
def test_tree_counts_every_part_once(n):
    """Each participant's own bit, as whole numbers: a part that is added twice or never shows."""
    parts = [np.array([1 << i], np.int64) for i in range(n)]
    run_tree(parts)
    assert [int(part[0]) for part in parts] == [(1 << n) - 1] * n


@pytest.mark.parametrize("n", range(1, 10))
def test_rounds_of_a_tree(n):
    rounds = plan_tree(n)
    power = 1 << (n.bit_length() - 1)
    assert len(rounds) == power.bit_length() - 1 + (2 if n > power else 0)
    for steps in rounds:
        touched = [i for step in steps for i in (step.source, step.target)]
        assert len(touched) == len(set(touched))  # a round's steps can run at the same time
    if n > power:
        assert {step.kind for step in rounds[0]} == {"add"} and {step.kind for step in rounds[-1]} == {"copy"}


def test_tree_of_nothing():
    with pytest.raises(ValueError, match="0 participants"):
        plan_tree(0)


# ---- host memory and threads -----------------------------------------------------------------------------------------------------------

need = st.builds(HostNeed, st.sampled_from("abc"), st.integers(0, 1 << 40), st.none() | st.integers(0, 1 << 41))
needs = st.lists(need, min_size=1, max_size=9)


@given(needs)
def test_what_is_granted_never_exceeds_a_host(all_needs):
    granted = grant_host_memory(all_needs)
    for host in add_up_host_memory(all_needs):
        total = sum(granted[rank] for rank in host.ranks)
        if host.fits:
            assert total == host.needed_bytes
        else:
            assert host.available_bytes - len(host.ranks) <= total <= host.available_bytes
    assert all(0 <= grant <= need.needed_bytes for grant, need in zip(granted, all_needs, strict=True))


def test_each_alone_would_fit_and_together_they_do_not():
    all_needs = [HostNeed("a", 6, 10), HostNeed("b", 9, 10), HostNeed("a", 6, 9)]
    hosts = add_up_host_memory(all_needs)
    seen = [(h.host, h.ranks, h.needed_bytes, h.available_bytes, h.fits) for h in hosts]
    assert seen == [("a", (0, 2), 12, 9, False), ("b", (1,), 9, 10, True)]
    assert grant_host_memory(all_needs) == (4, 9, 4)


def test_threads_of_ranks_that_share_cores():
    both, hosts = frozenset({0, 1}), ["a", "a"]
    assert [threads_of_rank(rank, hosts, [both, both]) for rank in (0, 1)] == [1, 1]
    assert [threads_of_rank(rank, hosts, [frozenset({0}), frozenset({1})]) for rank in (0, 1)] == [1, 1]
    assert threads_of_rank(0, ["a", "b"], [both, both]) == 2
    eight = frozenset(range(8))
    assert [threads_of_rank(rank, ["a"] * 3, [eight] * 3) for rank in range(3)] == [2, 2, 2]
    assert threads_of_rank(0, ["a"] * 3, [frozenset({0})] * 3) == 1  # more ranks than cores: one thread all the same
    assert threads_of_rank(0, ["a", "a"], [frozenset(range(6)), frozenset({0, 1})]) == 5


# ---- endings ---------------------------------------------------------------------------------------------------------------------------

RAISED = Event("raised", 1, "hostB", "cuda:0 is gone", 3)


def test_a_cause_counts_before_what_follows_from_it():
    signal = Event("signal", 0, "hostA", "was told to end (SIGTERM)", 143)
    mpi = Event("mpi", 0, "hostA", "MPI_Sendrecv failed: no peer")
    dead = killed(2, "hostC")
    assert choose_ending([mpi, signal, dead, RAISED], 0, frozenset()).message == "rank 1 (hostB): cuda:0 is gone"
    assert choose_ending([mpi, signal, dead], 0, frozenset()).event == dead
    assert choose_ending([mpi, signal], 0, frozenset()).exit_status == 143
    assert choose_ending([mpi], 0, frozenset()).message == "rank 0 (hostA): MPI_Sendrecv failed: no peer"
    assert "rank 3 (hostD) sent no sign of life for 31 s" in choose_ending([silent(3, "hostD", 31)], 0, frozenset()).message


@pytest.mark.parametrize(("own", "gone", "speaks"), [(0, (), True), (1, (), False), (1, (0,), True), (2, (0,), False), (2, (0, 1), True)])
def test_the_lowest_rank_that_lives_speaks(own, gone, speaks):
    assert choose_ending([RAISED], own, frozenset(gone)).speaks == speaks


def test_what_several_ranks_raise_is_said_as_by_one():
    same = Event("raised", 0, "hostA", RAISED.reason, 3)
    assert choose_ending([RAISED, same], 0, frozenset()).message == "cuda:0 is gone"
    assert choose_ending([Event("raised", 0, "h", "x", 0)], 0, frozenset()).exit_status == 1  # an ending is never a success
