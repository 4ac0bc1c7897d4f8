"""Measured speeds: plausible, remembered, measured again where they are missing or damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from numba_meta.schedule import calibrate as module
from numba_meta.schedule.calibrate import Bench, calibrate, given_speeds, is_known, measure_speeds, speeds_file
from numba_meta.schedule.predict import AttentionKind, Needs, WeightKind

NEED = Needs((WeightKind("q8_0", False), WeightKind("f16", True)), (AttentionKind("f16", "q8_0", 64, 32, 2, 3),))
MORE = Needs((*NEED.weights, WeightKind("q4_0", False)), NEED.attention)
FASTEST = 2e12  # bytes per second that no machine reads


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Small amounts, and a folder of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "_WEIGHT_BYTES", 2 << 20)
    monkeypatch.setattr(module, "_ATTENTION_CELLS", 512)
    monkeypatch.setattr(module, "speeds_file", lambda: tmp_path / "speeds.json")


@pytest.mark.parametrize("n_threads", [(1,), (1, 1), (2,)])
def test_speeds_are_of_this_world(n_threads: tuple[int, ...]) -> None:
    for speeds in measure_speeds([NEED] * len(n_threads), n_threads):
        assert set(speeds.weights) == set(NEED.weights) and set(speeds.attention) == set(NEED.attention)
        assert all(1e6 < speed < FASTEST for speed in (*speeds.weights.values(), *speeds.attention.values(), speeds.copies))
        assert 0 <= speeds.call_seconds < 0.01 and 0 <= speeds.meeting_seconds < 0.1 and 0 < speeds.step_seconds < 0.1
        assert (speeds.meeting_seconds == 0) >= (len(n_threads) == 1)


def test_more_work_takes_longer() -> None:
    with Bench(1, 1) as bench:
        few, many = (bench.seconds(lambda device, recorder, n=n: bench._small_calls(recorder, n)) for n in (10, 10_000))
    assert many > 5 * few


def test_what_was_measured_is_remembered() -> None:
    assert not is_known([NEED], [1])
    first = calibrate([NEED], [1])
    assert is_known([NEED], [1]) and not is_known([NEED], [2]) and not is_known([MORE], [1])
    assert calibrate([NEED], [1]) == first
    calibrate([MORE], [1])
    assert calibrate([NEED], [1]) == first, "what was known stays as it was"
    assert calibrate([NEED], [1], renew=True) != first


@pytest.mark.parametrize("damaged", ["", "{", "[]", '{"x": 1}', '{"x": {"call": "fast"}}'])
def test_a_damaged_file_is_as_good_as_none(damaged: str, tmp_path: Path) -> None:
    (tmp_path / "speeds.json").write_text(damaged)
    assert not is_known([NEED], [1])
    speeds = calibrate([NEED], [1])
    assert is_known([NEED], [1]) and calibrate([NEED], [1]) == speeds
    assert isinstance(json.loads((tmp_path / "speeds.json").read_text()), dict)


@pytest.mark.parametrize("value", ["Infinity", "NaN", "-1", "0", "null", '"fast"', "1e999", "1" + 400 * "0"])
def test_numbers_that_are_no_speeds_are_measured_again(value: str, tmp_path: Path) -> None:
    """A time may be 0: what a call costs is a difference of two measurements."""
    calibrate([NEED], [1])
    path = tmp_path / "speeds.json"
    known = {where: dict.fromkeys(speeds, 7.25) for where, speeds in json.loads(path.read_text()).items()}
    path.write_text(json.dumps(known).replace("7.25", value))
    speeds = calibrate([NEED], [1])[0]
    every = [*speeds.weights.values(), *speeds.attention.values(), speeds.copies]
    assert all(0 < speed < 1e15 for speed in every) and 0 <= speeds.step_seconds < 1


def test_a_folder_that_cannot_be_written_is_no_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(module, "speeds_file", lambda: tmp_path / "file" / "speeds.json")
    assert calibrate([NEED], [1])[0].copies > 0


def test_given_speeds_replace_measured_ones() -> None:
    measured = measure_speeds([NEED], [1])
    assert given_speeds([NEED], 0, 0, measured) == measured
    (given,) = given_speeds([NEED], 7e9, 3e9, measured)
    assert set(given.weights.values()) == {7e9} and set(given.attention.values()) == {3e9}
    assert given.copies == measured[0].copies


def test_speeds_lie_beside_the_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NUMBA_META_CACHE", str(tmp_path / "own"))
    assert speeds_file() == tmp_path / "own" / "speeds.json"
