"""Attention against float64, and its bits: the same on every path, for any threads, batch, order of cells and division of heads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kernels.cpu.attention_case import Case, make_case, random_sinks

from numba_meta.dtypes import BF16, F16, F32, Q4_0, Q4_K, Q8_0, DType
from numba_meta.errors import ShapeError
from numba_meta.kernels.cpu.attention import attention_chunks, attention_rows, attention_scratch_bytes, chunks_needed

TYPES = [(F32, F32, 64, 64), (F16, F16, 64, 64), (BF16, Q8_0, 40, 96), (Q8_0, Q4_0, 64, 64), (Q4_0, BF16, 32, 20)]
SMALL = (F32, F32, 64, 64)


def every_path(case: Case) -> np.ndarray:
    """The result, after all paths and numbers of threads gave the same bytes."""
    first = case.by_chunks(1)
    for other in (case.by_chunks(2), case.by_chunks(7), case.by_rows(1), case.by_rows(3)):
        assert other.tobytes() == first.tobytes()
    return first


@pytest.mark.parametrize("types", TYPES, ids=lambda t: "-".join(map(str, t)))
@pytest.mark.parametrize(
    ("window", "holes"), [(0, 0.0), (300, 0.0), (20, 0.1), (0, 0.4)], ids=["full", "window", "narrow-holes", "holes"]
)
def test_against_float64(types: tuple[DType, DType, int, int], window: int, holes: float) -> None:
    positions = [0, 3, 255, 256, 300, 301, 302, 303, 304, 511, 512, 700]
    case = make_case(*types, positions, window=window, holes=holes)
    np.testing.assert_allclose(every_path(case), case.expected(), atol=3e-6)


def test_a_prompt() -> None:
    case = make_case(*SMALL, list(range(200, 500)), n_kv=1, group=5)
    np.testing.assert_allclose(every_path(case), case.expected(), atol=3e-6)


def test_sequences_side_by_side() -> None:
    case = make_case(*SMALL, [5, 300, 6, 301, 40, 302, 303, 7], [0, 1, 0, 1, 2, 1, 1, 0], holes=0.05)
    np.testing.assert_allclose(every_path(case), case.expected(), atol=3e-6)


def test_a_row_stands_alone() -> None:
    """Alone or in a batch; in single steps, in a prompt."""
    case = make_case(*SMALL, list(range(250, 290)), window=100, holes=0.02)
    together = every_path(case)
    for row in (0, 5, 6, 7, 39):
        alone = case.rows([row])
        assert alone.by_chunks().tobytes() == together[row].tobytes()
        assert alone.by_rows().tobytes() == together[row].tobytes()
    some = [3, 9, 11, 30]
    assert case.rows(some).by_rows().tobytes() == together[some].tobytes()


def test_cells_may_lie_anywhere() -> None:
    case = make_case(*SMALL, list(range(250, 270)))
    expected = case.by_rows()
    to = np.random.default_rng().permutation(len(case.keys)).astype(np.int32)
    keys, values = np.empty_like(case.keys), np.empty_like(case.values)
    keys[to], values[to] = case.keys, case.values
    assert every_path(replace(case, keys=keys, values=values, table=to[case.table])).tobytes() == expected.tobytes()


@pytest.mark.parametrize("spoiled", ["keys", "values"])
@pytest.mark.parametrize("holes", [0.0, 0.1])
def test_what_a_neighbour_attends_to_is_not_touched(spoiled: str, holes: float) -> None:
    """NaN in the newest cell of a prompt reaches the last row alone; NaN in the oldest one, the rows whose window holds it."""
    case = make_case(*SMALL, list(range(256, 300)), window=50, holes=holes, filled=(207, 299))
    expected = case.by_rows()
    cache = getattr(case, spoiled).copy()
    cache[case.table[0, [299, 207]]] = 0xFF
    out = every_path(replace(case, **{spoiled: cache}))
    assert np.isnan(out[[0, 43]]).all()
    assert out[1:43].tobytes() == expected[1:43].tobytes()


def test_heads_on_several_devices() -> None:
    """9 heads over 3 KV heads, cut anywhere: with all of K and V, and with the KV heads that the device's heads read."""
    case = make_case(*SMALL, [10, 300, 301], n_kv=3, group=3)
    whole = every_path(case)
    kv_bytes = case.k_type.row_bytes(case.dim_k)
    for first, end in ((0, 1), (0, 4), (4, 9), (2, 7), (6, 9), (8, 9)):
        mirrored = replace(case, q=case.q[:, first:end], first_head=first)
        assert every_path(mirrored).tobytes() == whole[:, first:end].tobytes()
        kv_begin, kv_end = first // 3, (end - 1) // 3 + 1
        run = slice(kv_begin * kv_bytes, kv_end * kv_bytes)
        keys, values = np.ascontiguousarray(case.keys[:, run]), np.ascontiguousarray(case.values[:, run])
        cut = replace(mirrored, keys=keys, values=values, first_kv=kv_begin)
        assert every_path(cut).tobytes() == whole[:, first:end].tobytes()


def test_a_device_without_heads_does_nothing() -> None:
    case = make_case(*SMALL, [10, 300])
    assert every_path(replace(case, q=case.q[:, :0], first_head=6)).size == 0


def test_more_heads_over_one_kv_head_than_a_block_holds() -> None:
    case = make_case(*SMALL, [3, 270], n_kv=1, group=150)
    np.testing.assert_allclose(every_path(case), case.expected(), atol=3e-6)


def test_nothing_attended_gives_zeros() -> None:
    case = make_case(*SMALL, [2, 300, 301], window=10)
    case.table[0, :3] = -1
    out = every_path(case)
    assert (out[0] == 0).all() and (out[1:] != 0).all()
    padding = every_path(replace(case, positions=np.array([-1, 300, 301])))
    assert (padding[0] == 0).all() and padding[1:].tobytes() == out[1:].tobytes()


@pytest.mark.parametrize("n_live", [0, 2])
def test_dead_rows_are_left_alone(n_live: int) -> None:
    case = make_case(*SMALL, [10, 11, 12, 13])
    for out in (case.by_chunks(2, n_live), case.by_rows(2, n_live)):
        assert np.isfinite(out[:n_live]).all() and np.isnan(out[n_live:]).all()


def test_scores_far_apart_do_not_overflow() -> None:
    case = make_case(*SMALL, [10, 600])
    case = replace(case, q=(case.q * 300).astype(np.float32))
    np.testing.assert_allclose(every_path(case), case.expected(), atol=2e-3)


@pytest.mark.parametrize("types", TYPES, ids=lambda t: "-".join(map(str, t)))
@pytest.mark.parametrize(("window", "holes"), [(0, 0.0), (300, 0.1)], ids=["full", "window-holes"])
def test_capped_scores_against_float64(types: tuple[DType, DType, int, int], window: int, holes: float) -> None:
    """A cap that acts on most scores, and slots that are hidden all the same; sinks are no scores of keys and stay as they are."""
    case = replace(make_case(*types, [0, 3, 255, 256, 300, 301, 511, 512, 700], window=window, holes=holes), softcap=0.75)
    np.testing.assert_allclose(every_path(case), case.expected(), atol=3e-6)
    assert np.abs(every_path(replace(case, softcap=0.0)) - every_path(case)).max() > 0.01, "the cap counts"
    with_both = with_sinks(case)
    np.testing.assert_allclose(every_path(with_both), with_both.expected(), atol=3e-6)


def test_capped_scores_of_a_prompt() -> None:
    case = replace(make_case(*SMALL, list(range(200, 500)), n_kv=1, group=5), softcap=0.75)
    np.testing.assert_allclose(every_path(case), case.expected(), atol=3e-6)


def with_sinks(case: Case, sinks: np.ndarray | None = None) -> Case:
    return replace(case, sinks=random_sinks(case.q.shape[1]) if sinks is None else sinks)


def check_sinks(case: Case) -> None:
    """Every path against float64: relative to each result too, since a large sink makes it small."""
    out, expected = every_path(case), case.expected()
    np.testing.assert_allclose(out, expected, atol=3e-6)
    error, size = np.abs(out - expected).max(-1), np.abs(expected).max(-1)
    assert (error <= 1e-5 * size).all(), (error / size).max()


@pytest.mark.parametrize("types", TYPES, ids=lambda t: "-".join(map(str, t)))
@pytest.mark.parametrize(("window", "holes"), [(0, 0.0), (300, 0.0), (20, 0.1)], ids=["full", "window", "narrow-holes"])
def test_sinks_against_float64(types: tuple[DType, DType, int, int], window: int, holes: float) -> None:
    positions = [0, 3, 255, 256, 300, 301, 302, 511, 512, 700]
    check_sinks(with_sinks(make_case(*types, positions, window=window, holes=holes, filled=(0, 3))))


def test_sinks_of_a_prompt() -> None:
    check_sinks(with_sinks(make_case(*SMALL, list(range(200, 500)), n_kv=1, group=5)))


def test_sinks_of_more_heads_than_a_block_holds() -> None:
    check_sinks(with_sinks(make_case(*SMALL, [3, 270], n_kv=1, group=150)))


def test_sinks_of_several_sequences() -> None:
    check_sinks(with_sinks(make_case(*SMALL, [5, 300, 6, 301, 40, 302, 303, 7], [0, 1, 0, 1, 2, 1, 1, 0])))


def test_sinks_that_weigh_nothing_or_everything() -> None:
    """At -inf there are none, by their bits; one whose exponential overflows leaves zeros."""
    case = make_case(*SMALL, [2, 300, 301], window=100)
    without = every_path(case)
    low, high = np.float32([-np.inf] * 6), np.float32([-np.inf, 200, -np.inf, np.inf, -np.inf, 3e38])
    assert every_path(with_sinks(case, low)).tobytes() == without.tobytes()
    mixed = every_path(with_sinks(case, high))
    assert mixed[:, ::2].tobytes() == without[:, ::2].tobytes() and (mixed[:, 1::2] == 0).all()
    assert (every_path(with_sinks(case, np.zeros(6, np.float32))) != without).any(axis=-1).all()


def test_sinks_of_a_row_that_attends_to_nothing_leave_zeros() -> None:
    case = with_sinks(make_case(*SMALL, [2, 300, 301], window=10), np.float32([-np.inf, 0, 3, -50, 1, 2]))
    case.table[0, :3] = -1
    out = every_path(case)
    assert (out[0] == 0).all() and (out[1:] != 0).all()
    padding = every_path(replace(case, positions=np.array([-1, 300, 301])))
    assert (padding[0] == 0).all() and padding[1:].tobytes() == out[1:].tobytes()


def test_a_device_reads_the_sinks_of_its_own_heads() -> None:
    case = with_sinks(make_case(*SMALL, [10, 300, 301], n_kv=3, group=3))
    whole = every_path(case)
    for first, end in ((0, 1), (0, 4), (4, 9), (2, 7), (6, 9), (8, 9)):
        mine = replace(case, q=case.q[:, first:end], first_head=first, sinks=case.sinks[first:end])  # type: ignore[index]
        assert every_path(mine).tobytes() == whole[:, first:end].tobytes()


@pytest.mark.parametrize("make", [attention_chunks, attention_rows])
def test_heads_and_types_that_do_not_fit_are_an_error(make: object) -> None:
    with pytest.raises(ShapeError, match="multiple of 32"):
        make(F16, Q8_0, 64, 40)  # type: ignore[operator]
    with pytest.raises(ShapeError, match="q4_k"):
        make(Q4_K, F16, 256, 64)  # type: ignore[operator]


def test_sizes_of_scratch() -> None:
    assert [chunks_needed(n) for n in (1, 256, 257, 4096)] == [1, 1, 2, 16]
    assert [chunks_needed(4096, window) for window in (1, 256, 512, 10000)] == [2, 2, 3, 16]
    assert attention_scratch_bytes(2, 9, 64, 3) == 2 * 9 * 3 * (64 * 4 + 64)
