"""The graph allocator: nothing alive is ever overwritten, and little more is taken than what lives at once."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from numba_meta.errors import PlacementError
from numba_meta.memory.layout import Request, max_live_bytes, plan_layout
from numba_meta.memory.placement import round_up

requests = st.lists(
    st.builds(
        lambda n_bytes, first, length: Request(f"{n_bytes} bytes from {first}", n_bytes, first, first + length),
        st.one_of(st.just(0), st.integers(1, 300)),
        st.integers(0, 20),
        st.integers(0, 6),
    ),
    max_size=30,
)


@given(requests, st.sampled_from([1, 16, 64]))
def test_live_requests_never_overlap(wanted: list[Request], alignment: int) -> None:
    layout = plan_layout(wanted, alignment)
    assert len(layout.offsets) == len(wanted)
    assert layout.n_bytes % alignment == 0
    bytes_at_step: dict[int, set[int]] = {}
    for request, offset in zip(wanted, layout.offsets, strict=True):
        assert offset % alignment == 0 and 0 <= offset and offset + request.n_bytes <= layout.n_bytes
        held = set(range(offset, offset + request.n_bytes))
        for step in range(request.first_use, request.last_use + 1):
            taken = bytes_at_step.setdefault(step, set())
            assert not held & taken
            taken |= held
    most = max((len(taken) for taken in bytes_at_step.values()), default=0)
    bound = max_live_bytes(wanted, alignment)
    assert most <= bound <= layout.n_bytes <= sum(round_up(request.n_bytes, alignment) for request in wanted)
    if alignment == 1:
        assert bound == most


@given(requests)
def test_the_plan_depends_on_nothing_else(wanted: list[Request]) -> None:
    assert plan_layout(wanted, 16) == plan_layout(list(wanted), 16)


def test_a_chain_needs_two_buffers() -> None:
    chain = [Request(f"step {i}", 100, i, i + 1) for i in range(50)]
    layout = plan_layout(chain, 32)
    assert layout.n_bytes == 256
    assert set(layout.offsets) == {0, 128}


def test_memory_of_a_last_reader_is_not_reused_in_its_own_step() -> None:
    layout = plan_layout([Request("input", 64, 0, 3), Request("output", 64, 3, 4), Request("later", 64, 4, 5)], 64)
    assert layout.offsets[0] != layout.offsets[1]
    assert layout.n_bytes == 128


def transformer_requests(n_layers: int, n_tokens: int, n_embd: int, n_ff: int, n_vocab: int) -> list[Request]:
    """The tensors of a Llama-like prompt graph in f32, with the lives that their readers give them."""
    step = 0
    made: list[Request] = []

    def add(name: str, width: int, life: int) -> None:
        nonlocal step
        made.append(Request(name, 4 * width * n_tokens, step, step + life))
        step += 1

    add("embedding", n_embd, 8)
    for layer in range(n_layers):
        add(f"norm.{layer}", n_embd, 3)
        add(f"q.{layer}", n_embd, 3)
        add(f"k.{layer}", n_embd // 3, 2)
        add(f"v.{layer}", n_embd // 3, 1)
        add(f"attention.{layer}", n_embd, 1)
        add(f"output.{layer}", n_embd, 1)
        add(f"residual.{layer}", n_embd, 6)
        add(f"ffn_norm.{layer}", n_embd, 2)
        add(f"gate.{layer}", n_ff, 2)
        add(f"up.{layer}", n_ff, 1)
        add(f"act.{layer}", n_ff, 1)
        add(f"down.{layer}", n_embd, 1)
        add(f"layer.{layer}", n_embd, 7)
    add("logits", n_vocab, 1)
    return made


def test_a_transformer_reaches_the_lower_bound() -> None:
    wanted = transformer_requests(n_layers=30, n_tokens=64, n_embd=576, n_ff=1536, n_vocab=49152)
    assert plan_layout(wanted, 128).n_bytes == max_live_bytes(wanted, 128)
    small = transformer_requests(n_layers=8, n_tokens=1, n_embd=576, n_ff=1536, n_vocab=100)
    assert plan_layout(small, 128).n_bytes <= 1.05 * max_live_bytes(small, 128)


def test_random_lives_stay_near_the_lower_bound() -> None:
    rng = random.Random(7)
    ratios = []
    for _ in range(20):
        wanted = [Request(str(i), rng.randint(1, 10_000), first := rng.randint(0, 100), first + rng.randint(1, 20)) for i in range(120)]
        ratios.append(plan_layout(wanted, 64).n_bytes / max_live_bytes(wanted, 64))
    assert max(ratios) < 1.25
    assert sum(ratios) / len(ratios) < 1.10


def test_nothing_and_zero_bytes() -> None:
    assert plan_layout([], 64).n_bytes == 0
    layout = plan_layout([Request("empty", 0, 0, 9), Request("full", 10, 2, 3)], 64)
    assert layout.n_bytes == 64 and layout.offsets == (0, 0)


def test_impossible_requests_are_errors() -> None:
    with pytest.raises(PlacementError, match="late: 8 bytes from step 3 to step 2"):
        Request("late", 8, 3, 2)
    with pytest.raises(PlacementError, match="less: -1 bytes"):
        Request("less", -1, 0, 0)
    with pytest.raises(PlacementError, match="alignment 0"):
        plan_layout([], 0)
