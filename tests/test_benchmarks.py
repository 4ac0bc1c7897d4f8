"""The command lines of benchmarks: what they read, and that whatever is wrong is one line without a traceback."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from child_processes import ROOT, environment
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.command_line import count, gpus, listed, one_of, run_main, sizes
from numba_meta.errors import DeviceError, UsageError

GPU_BENCHMARKS = sorted(path.name for path in (ROOT / "benchmarks").glob("gpu_*.py"))


@given(st.lists(st.integers(3, 1 << 40), min_size=1, max_size=5), st.sampled_from([",", ", ", " ,"]))
def test_lists_of_counts(numbers: list[int], comma: str) -> None:
    assert listed(count(3))(comma.join(map(str, numbers))) == numbers


@given(st.lists(st.integers(1, 1 << 20), min_size=1, max_size=4))
def test_sizes_are_as_many_as_in_the_example(numbers: list[int]) -> None:
    text = "x".join(map(str, numbers))
    assert sizes("x".join("1" * len(numbers)))(text) == text
    with pytest.raises(argparse.ArgumentTypeError, match="is not of the form"):
        sizes("x".join("1" * (len(numbers) + 1)))(text)


@pytest.mark.parametrize(
    ("read", "text", "said"),
    [
        (count(), "0", "'0' is not a whole number from 1 up"),
        (count(0), "-1", "is not a whole number from 0 up"),
        (count(), "٣", "is not a whole number"),
        (listed(count()), "1,,2", "'' is not a whole number"),
        (listed(one_of(["a", "b"])), "a,c", "'c' is unknown; use a, b"),
        (sizes("8x4"), "8x0", "'8x0' is not of the form 8x4"),
        (sizes("8x4"), "foo", "'foo' is not of the form 8x4"),
        (gpus, "cuda:0,cpu:0", "is not a list of CUDA devices like cuda:0,cuda:0"),
        (gpus, "cuda:0,gpu", "unknown device 'gpu'"),
    ],
)
def test_what_cannot_be_read(read: Callable[[str], Any], text: str, said: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=said):
        read(text)


def test_what_can_be_read() -> None:
    assert listed(one_of(["a", "b"]))("b, a") == ["b", "a"]
    assert gpus("cuda:0,cuda:1?mem=1G") == "cuda:0,cuda:1?mem=1G"


@pytest.mark.parametrize(("error", "status"), [(DeviceError("no\nGPU"), 1), (UsageError("wrong"), 2)])
def test_a_failure_is_one_line_and_a_status(error: Exception, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        run_main(fail)
    assert (ended.value.code, capsys.readouterr().err) == (status, f"{error}\n")
    assert len(str(error).splitlines()) == 1


@pytest.mark.parametrize("result", [None, 0, 1])
def test_what_a_benchmark_returns_is_its_status(result: int | None) -> None:
    with pytest.raises(SystemExit) as ended:
        run_main(lambda: result)
    assert ended.value.code == result


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A benchmark that sees no GPU."""
    command = [sys.executable, str(ROOT / "benchmarks" / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment(CUDA_VISIBLE_DEVICES=""))


@pytest.mark.parametrize("arguments", [[name] for name in GPU_BENCHMARKS] + [["gpu_reductions.py", "--ranks"]], ids=" ".join)
def test_without_a_gpu_there_is_one_line(arguments: list[str]) -> None:
    ended = run(*arguments)
    assert ended.returncode == 1
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert "CUDA" in ended.stderr or "there is no GPU" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("gpu_attention.py --types foo", "argument --types: 'foo' is unknown; use f32, f16, bf16, q8_0, q4_0"),
        ("gpu_attention.py --shapes foo", "argument --shapes: 'foo' is not of the form 8x128x4"),
        ("gpu_attention.py --prompt --cells 100", "--prompt needs --cells of 512 or more"),
        ("gpu_generation.py --types q8_0,foo", "argument --types: 'foo' is unknown"),
        ("gpu_host_cache.py --devices cpu:0", "argument --devices: 'cpu:0' is not a list of CUDA devices"),
        ("gpu_matmul.py --shapes 4x", "argument --shapes: '4x' is not of the form 4096x4096"),
        ("gpu_others.py --rows 1", "unrecognized arguments: --rows 1"),
        ("gpu_reductions.py --repeats 0", "argument --repeats: '0' is not a whole number from 1 up"),
    ],
)
def test_wrong_options_are_told(arguments: str, said: str) -> None:
    ended = run(*arguments.split())
    assert ended.returncode == 2 and ended.stdout == ""
    assert said in ended.stderr.splitlines()[-1] and "Traceback" not in ended.stderr
