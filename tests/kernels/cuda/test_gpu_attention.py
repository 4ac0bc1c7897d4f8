"""Attention on a GPU against float64, and its bits: the same for any batch, capacity, order of cells and division of heads."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from numba_meta.dtypes import BF16, F16, F32, Q4_0, Q8_0, DType

pytestmark = pytest.mark.gpu

attention_on_gpu = pytest.importorskip("kernels.cuda.attention_on_gpu", reason="numba-cuda is not installed")
on_gpu = pytest.importorskip("kernels.cuda.on_gpu", reason="numba-cuda is not installed")
quantize_rows = pytest.importorskip("numba_meta.kernels.cuda.quantize", reason="numba-cuda is not installed").quantize_rows
Case, make_case, random_sinks = attention_on_gpu.Case, attention_on_gpu.make_case, attention_on_gpu.random_sinks

TYPES = [
    (F32, F32, 64, 64), (F16, F16, 128, 128), (F16, F16, 64, 64), (BF16, BF16, 128, 128), (Q8_0, Q8_0, 128, 128), (Q4_0, Q4_0, 128, 128),
    (Q8_0, Q8_0, 64, 64), (F16, F16, 256, 256), (Q8_0, Q8_0, 256, 256), (Q4_0, Q8_0, 256, 256), (BF16, Q8_0, 96, 32), (Q8_0, F16, 128, 64),
]  # fmt: skip
SINK_TYPES = [(F32, F32, 64, 64), (BF16, Q8_0, 96, 32), (F16, F16, 128, 128), (Q8_0, Q8_0, 128, 128), (Q4_0, Q4_0, 64, 64)]
FAST = [(F16, F16, 128, 128), (Q8_0, Q8_0, 128, 128), (Q4_0, Q4_0, 64, 64), (BF16, BF16, 256, 256)]
PATHS = {
    "exact-chunks": lambda case: case.by_chunks(exact=True),
    "exact-rows": lambda case: case.by_rows(exact=True),
    "chunks": lambda case: case.by_chunks(),
    "rows": lambda case: case.by_rows(),
}
TOLERANCES = {"exact-chunks": 3e-6, "exact-rows": 3e-6, "chunks": 3e-5, "rows": 2e-3}


def named(types: tuple[DType, DType, int, int]) -> str:
    return "-".join(map(str, types))


def check(case: Case, path: str) -> np.ndarray:
    """The result of a path, after it was compared with float64. Tensor cores take values of block types rounded to f16."""
    out = PATHS[path](case)
    rounded = case.v_type.is_quantized and not path.startswith("exact")
    np.testing.assert_allclose(out, case.expected(), atol=TOLERANCES[path] + rounded * 2**-11 * case.largest_value())
    return out


def with_sinks(case: Case, sinks: np.ndarray | None = None) -> Case:
    return case.changed(sinks=random_sinks(case.q.shape[1]) if sinks is None else sinks)


@pytest.mark.parametrize("types", TYPES, ids=named)
@pytest.mark.parametrize("path", PATHS)
def test_single_steps_against_float64(types: tuple[DType, DType, int, int], path: str) -> None:
    positions = [0, 3, 63, 64, 65, 300, 301, 511, 512, 700, 4095, 4096, 4400]
    for window, holes in ((0, 0.0), (300, 0.0), (20, 0.1), (0, 0.4)):
        check(make_case(*types, positions, window=window, holes=holes), path)


@pytest.mark.parametrize("types", [TYPES[0], *FAST], ids=named)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("window", [4096, 5000])
def test_windows_that_begin_within_a_chunk(window: int, types: tuple[DType, DType, int, int], path: str) -> None:
    """As many chunks as a row can have, and one more."""
    check(make_case(*types, [4095, 4159, 6000, 9001], window=window, n_kv=1, group=4), path)


@pytest.mark.parametrize("group", [1, 4, 8, 16])
@pytest.mark.parametrize("path", PATHS)
def test_groups_of_heads(group: int, path: str) -> None:
    check(make_case(F16, F16, 128, 128, [10, 300, 301], n_kv=2, group=group), path)
    check(make_case(Q8_0, Q8_0, 64, 64, [10, 300, 301], n_kv=3, group=group), path)


@pytest.mark.parametrize("types", TYPES, ids=named)
@pytest.mark.parametrize("path", ["exact-rows", "rows"])
def test_a_prompt(types: tuple[DType, DType, int, int], path: str) -> None:
    check(make_case(*types, list(range(200, 500)), n_kv=1, group=5), path)
    check(make_case(*types, list(range(1000, 1070)), window=100, holes=0.05), path)


def test_a_long_row() -> None:
    for types in FAST:
        check(make_case(*types, [20_000], n_kv=1, group=4), "chunks")


def test_sequences_side_by_side() -> None:
    for types in (*FAST, TYPES[0]):
        case = make_case(*types, [5, 300, 6, 301, 40, 302, 303, 7], [0, 1, 0, 1, 2, 1, 1, 0], holes=0.05)
        for path in PATHS:
            check(case, path)


def test_exact_paths_give_the_same_bits() -> None:
    for types in (TYPES[0], *FAST):
        case = make_case(*types, list(range(4080, 4120)), window=100, holes=0.02)
        together = case.by_chunks(exact=True)
        assert case.by_rows(exact=True).tobytes() == together.tobytes()
        assert case.rows([5, 20]).by_rows(exact=True).tobytes() == together[[5, 20]].tobytes()


@pytest.mark.parametrize("types", [TYPES[0], *FAST], ids=named)
def test_a_row_stands_alone(types: tuple[DType, DType, int, int]) -> None:
    """Alone or in a batch, whatever the capacity of the recording."""
    case = make_case(*types, list(range(250, 260)) + [4097, 4500, 9000], holes=0.02)
    together = case.by_chunks(n_chunks=64)
    for row in (0, 5, 10, 11, 12):
        assert case.rows([row]).by_chunks().tobytes() == together[row].tobytes()


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [0, 4096])
@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (96, 32), (256, 256), (64, 96), (64, 192)])
def test_results_that_are_quantized_at_once(dims: tuple[int, int], window: int, has_sinks: bool) -> None:
    """The bits of `quantize_rows`; dead rows stay as they were."""
    positions = [0, 3, 130, 4500, 9000, 6000, -1, 12]
    case = make_case(F16, F16, *dims, positions, [0, 0, 0, 0, 0, 0, 1, 0], holes=0.02, window=window)
    case = with_sinks(case) if has_sinks else case
    rows, n = len(case.positions), case.q.shape[1] * dims[1]
    bits, wanted = (on_gpu.open_gpu().empty(rows * 2 * n) for _ in range(2))
    live = on_gpu.open_gpu().upload(np.array([rows - 1], np.int64))
    results = on_gpu.open_gpu().upload(case.by_chunks(n_live=rows - 1))
    on_gpu.open_gpu().run(quantize_rows, rows, x=results, x_stride=4 * n, y=wanted, y_stride=2 * n, n=n, n_rows=live)
    case.by_chunks(n_live=rows - 1, quantized=bits)
    got = bits.download(np.uint8, (rows, 2 * n))
    assert got.tobytes() == wanted.download(np.uint8, (rows, 2 * n)).tobytes()
    assert (got[-1] == 0xFF).all() and not (got[:-1] == 0xFF).all()


@pytest.mark.parametrize("types", FAST, ids=named)
def test_cells_may_lie_anywhere(types: tuple[DType, DType, int, int]) -> None:
    case = make_case(*types, list(range(250, 270)))
    to = np.random.default_rng().permutation(len(case.keys)).astype(np.int32)
    keys, values = np.empty_like(case.keys), np.empty_like(case.values)
    keys[to], values[to] = case.keys, case.values
    moved = case.changed(keys=keys, values=values, table=to[case.table])
    for run in (Case.by_chunks, Case.by_rows):
        assert run(moved).tobytes() == run(case).tobytes()


@pytest.mark.parametrize("types", [TYPES[0], *FAST], ids=named)
@pytest.mark.parametrize("path", ["exact-chunks", "exact-rows", "chunks"])
def test_what_a_neighbour_attends_to_is_not_touched(types: tuple[DType, DType, int, int], path: str) -> None:
    """NaN in the newest cell of a prompt reaches the last row alone; NaN in the oldest one, the rows whose window holds it."""
    run = PATHS[path]
    case = make_case(*types, list(range(256, 300)), window=50, holes=0.1, filled=(207, 299))
    expected = run(case)
    for name in ("keys", "values"):
        cache = getattr(case, name).copy()
        cache[case.table[0, [299, 207]]] = 0xFF
        out = run(case.changed(**{name: cache}))
        assert np.isnan(out[[0, 43]]).all()
        assert out[1:43].tobytes() == expected[1:43].tobytes()


@pytest.mark.parametrize("types", [TYPES[0], *FAST], ids=named)
@pytest.mark.parametrize("run", [Case.by_chunks, Case.by_rows])
def test_heads_on_several_devices(types: tuple[DType, DType, int, int], run: Callable[[Case], np.ndarray]) -> None:
    """9 heads over 3 KV heads, cut anywhere: with all of K and V, and with the KV heads that the device's heads read."""
    case = make_case(*types, [10, 300, 301], n_kv=3, group=3)
    whole = run(case)
    for first, end in ((0, 1), (0, 4), (4, 9), (2, 7), (6, 9), (8, 9)):
        mirrored = case.changed(q=case.q[:, first:end], first_head=first)
        assert run(mirrored).tobytes() == whole[:, first:end].tobytes()
        kv = slice(first // 3, (end - 1) // 3 + 1)
        cut = mirrored.changed(keys=case.keys[:, kv], values=case.values[:, kv], first_kv=kv.start)
        assert run(cut).tobytes() == whole[:, first:end].tobytes()


@pytest.mark.parametrize("path", PATHS)
def test_a_device_without_heads_does_nothing(path: str) -> None:
    case = make_case(F16, F16, 128, 128, [10, 300])
    assert PATHS[path](case.changed(q=case.q[:, :0], first_head=6)).size == 0


@pytest.mark.parametrize("path", PATHS)
def test_nothing_attended_gives_zeros(path: str) -> None:
    case = make_case(F16, F16, 128, 128, [2, 300, 301], window=10)
    case.table[0, :3] = -1
    out = PATHS[path](case)
    assert (out[0] == 0).all() and (out[1:] != 0).all()
    padding = PATHS[path](case.changed(positions=np.array([-1, 300, 301])))
    assert (padding[0] == 0).all() and padding[1:].tobytes() == out[1:].tobytes()


@pytest.mark.parametrize("n_live", [0, 2])
@pytest.mark.parametrize("exact", [False, True])
def test_dead_rows_are_left_alone(n_live: int, exact: bool) -> None:
    case = make_case(F16, F16, 128, 128, [10, 11, 12, 13])
    for out in (case.by_chunks(exact, n_live), case.by_rows(exact, n_live)):
        assert np.isfinite(out[:n_live]).all() and np.isnan(out[n_live:]).all()


@pytest.mark.parametrize("types", [TYPES[0], *FAST], ids=named)
@pytest.mark.parametrize("path", ["chunks", "rows"])
def test_scores_far_apart_do_not_overflow(types: tuple[DType, DType, int, int], path: str) -> None:
    case = make_case(*types, [10, 600])
    case = case.changed(q=case.q * np.float32(300))
    np.testing.assert_allclose(PATHS[path](case), case.expected(), atol=2e-3 if path == "chunks" else 0.2)


@pytest.mark.parametrize("types", TYPES, ids=named)
@pytest.mark.parametrize("path", PATHS)
def test_capped_scores(types: tuple[DType, DType, int, int], path: str) -> None:
    positions = [0, 3, 63, 64, 65, 300, 301, 511, 512, 700, 4400]
    for window, holes, group in ((0, 0.0, 3), (300, 0.1, 4)):
        case = make_case(*types, positions, window=window, holes=holes, group=group).changed(softcap=0.75)
        out = check(case, path)
        assert np.abs(out - case.changed(softcap=0.0).expected()).max() > 0.01, "the cap counts"
    check(make_case(*types, list(range(200, 300)), n_kv=1, group=5).changed(softcap=0.75), path)


def test_exact_paths_give_the_same_bits_with_capped_scores() -> None:
    for types in (TYPES[0], *FAST):
        case = make_case(*types, [0, 100, *range(4080, 4110), 9000], holes=0.02).changed(softcap=0.75)
        assert case.by_chunks(exact=True).tobytes() == case.by_rows(exact=True).tobytes()


# ---- sinks -----------------------------------------------------------------------------------------------------------------------------


def check_sinks(case: Case, path: str) -> None:
    """Against float64; in float32 throughout relative to each result too, since a large sink makes it small."""
    out, expected = check(case, path), case.expected()
    if path.startswith("exact"):
        error, size = np.abs(out - expected).max(-1), np.abs(expected).max(-1)
        assert (error <= 1e-4 * size).all(), (error / size).max()


@pytest.mark.parametrize("types", SINK_TYPES, ids=named)
@pytest.mark.parametrize("path", PATHS)
def test_sinks_of_single_steps(types: tuple[DType, DType, int, int], path: str) -> None:
    positions = [0, 3, 63, 64, 65, 300, 301, 511, 512, 700, 4095, 4096, 4400]
    for window, holes in ((0, 0.0), (300, 0.0), (20, 0.1)):
        check_sinks(with_sinks(make_case(*types, positions, window=window, holes=holes, filled=(0, 3))), path)
    check_sinks(with_sinks(make_case(*types, [4095, 4159, 6000, 9001], window=4096, n_kv=1, group=4)), path)


@pytest.mark.parametrize("group", [1, 4, 8, 16])
@pytest.mark.parametrize("path", PATHS)
def test_sinks_of_groups_of_heads(group: int, path: str) -> None:
    check_sinks(with_sinks(make_case(F16, F16, 128, 128, [10, 300, 301], n_kv=2, group=group)), path)
    check_sinks(with_sinks(make_case(Q8_0, Q8_0, 64, 64, [10, 300, 301], n_kv=3, group=group)), path)


@pytest.mark.parametrize("types", SINK_TYPES, ids=named)
@pytest.mark.parametrize("path", ["exact-rows", "rows"])
def test_sinks_of_a_prompt(types: tuple[DType, DType, int, int], path: str) -> None:
    check_sinks(with_sinks(make_case(*types, list(range(200, 500)), n_kv=1, group=5)), path)
    check_sinks(with_sinks(make_case(*types, list(range(1000, 1070)), window=100, holes=0.05)), path)


def test_sinks_of_several_sequences() -> None:
    for types in SINK_TYPES:
        case = with_sinks(make_case(*types, [5, 300, 6, 301, 40, 302, 303, 7], [0, 1, 0, 1, 2, 1, 1, 0]))
        for path in PATHS:
            check_sinks(case, path)


def test_exact_paths_give_the_same_bits_with_sinks() -> None:
    for types in SINK_TYPES:
        for window in (0, 100, 4096, 5000):  # 4096: as many chunks as a row can have, and one more
            case = with_sinks(make_case(*types, [0, 100, *range(4080, 4110), 9000], window=window, holes=0.02, filled=(0,)))
            together = case.by_chunks(exact=True)
            assert case.by_rows(exact=True).tobytes() == together.tobytes()
            assert case.rows([5, 20]).by_rows(exact=True).tobytes() == together[[5, 20]].tobytes()
            assert case.rows([32]).by_chunks(exact=True).tobytes() == together[32].tobytes()


@pytest.mark.parametrize("path", PATHS)
def test_sinks_that_weigh_nothing_or_everything(path: str) -> None:
    """At -inf there are none, by their bits; one whose exponential overflows leaves zeros."""
    case = make_case(F16, F16, 128, 128, [2, 300, 301, 5000], window=1000)
    without = PATHS[path](case)
    low, high = np.float32([-np.inf] * 6), np.float32([-np.inf, 200, -np.inf, np.inf, -np.inf, 3e38])
    assert PATHS[path](with_sinks(case, low)).tobytes() == without.tobytes()
    mixed = PATHS[path](with_sinks(case, high))
    assert mixed[:, ::2].tobytes() == without[:, ::2].tobytes() and (mixed[:, 1::2] == 0).all()
    assert (PATHS[path](with_sinks(case, np.zeros(6, np.float32))) != without).any(axis=-1).all()


@pytest.mark.parametrize("path", PATHS)
def test_sinks_of_a_row_that_attends_to_nothing_leave_zeros(path: str) -> None:
    case = with_sinks(make_case(F16, F16, 128, 128, [2, 300, 301], window=10), np.float32([-np.inf, 0, 3, -50, 1, 2]))
    case.table[0, :3] = -1
    out = PATHS[path](case)
    assert (out[0] == 0).all() and (out[1:] != 0).all()
    padding = PATHS[path](case.changed(positions=np.array([-1, 300, 301])))
    assert (padding[0] == 0).all() and padding[1:].tobytes() == out[1:].tobytes()


@pytest.mark.parametrize("types", SINK_TYPES, ids=named)
@pytest.mark.parametrize("path", PATHS)
def test_a_device_reads_the_sinks_of_its_own_heads(types: tuple[DType, DType, int, int], path: str) -> None:
    case = with_sinks(make_case(*types, [10, 300, 301], n_kv=3, group=3))
    whole = PATHS[path](case)
    for first, end in ((0, 1), (0, 4), (4, 9), (2, 7), (6, 9), (8, 9)):
        mine = case.changed(q=case.q[:, first:end], first_head=first, sinks=case.sinks[first:end])
        assert PATHS[path](mine).tobytes() == whole[:, first:end].tobytes()


@pytest.mark.parametrize("path", PATHS)
def test_dead_rows_with_sinks_are_left_alone(path: str) -> None:
    case = with_sinks(make_case(F16, F16, 128, 128, [10, 11, 12, 13]))
    run = case.by_chunks if path.endswith("chunks") else case.by_rows
    out = run(path.startswith("exact"), 2)
    assert np.isfinite(out[:2]).all() and np.isnan(out[2:]).all()
