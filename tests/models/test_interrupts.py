"""Ctrl-C at any point of load, record and step: what comes next works and is right, and nothing is left. Few tries of `interrupting.py`."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from models.interrupting import OPTIONS, PLACES, Bench, interrupted, try_a_load, try_a_model
from models.step_driver import StepDriver
from synthetic import write_model

import numba_meta as nm
from numba_meta.interrupts import held_back, let_through
from numba_meta.kernels.cuda.kernel import CudaKernel

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted through Linux's /proc")


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_waits_for_the_end_of_a_block() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with held_back():
            interrupt()
            with held_back():
                done.append(1)
            done.append(2)
        done.append(3)
    assert done == [1, 2]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_long_work_lets_it_through_and_is_undone_undisturbed() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt):
        with held_back():
            let_through()  # nothing waits
            interrupt()
            try:
                let_through()
                done.append("not here")
            except KeyboardInterrupt:
                interrupt()  # a second one, while what was begun is undone
                done.append("undone")
                raise
    assert done == ["undone"]


def test_whoever_handles_the_signal_is_asked() -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        with held_back():
            interrupt()
            assert not came
        assert came == [signal.SIGINT]
        for handler in (signal.SIG_IGN, before):
            signal.signal(signal.SIGINT, handler)
            with held_back():
                pass
            assert signal.getsignal(signal.SIGINT) is handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with held_back():
            interrupt()
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_hold_nothing_back() -> None:
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with held_back():
            inside.set()
            leave.wait(10)
            let_through()

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait(10)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        interrupt()
        time.sleep(10)
    leave.set()
    thread.join()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("architecture", ("llama", "gemma3"))
def test_interrupts_at_random_times(architecture: str, place: str, paths: dict[str, Path], tmp_path: Path) -> None:
    rng = random.Random(f"{architecture} {place}")
    bench = Bench(paths[architecture], PLACES[place], tmp_path / "state")
    with bench.load() as model:
        expected = bench.answers(model)
    start = time.perf_counter()
    with bench.load() as model:
        bench.answers(model)
    whole = time.perf_counter() - start
    for _ in range(4):
        try_a_load(bench, rng.random() * whole, rng.choice((1, 3)))
    model = bench.load()
    for act in bench.actions(model):  # the first of them starts the threads
        for _ in range(2):
            try_a_model(bench, model, expected, act, rng.random() * 0.01, rng.choice((1, 3)))
    model.close()


def test_an_interrupt_while_threads_start(paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is made, and whole; the next call goes on with the same threads."""
    start = threading.Thread.start

    def interrupted_start(thread: threading.Thread) -> None:
        interrupt()
        start(thread)

    with nm.load(paths["llama"], threads=4, **OPTIONS) as model:
        monkeypatch.setattr(threading.Thread, "start", interrupted_start)
        with pytest.raises(KeyboardInterrupt):
            model.generate_ids([5, 6, 7], 4, ignore_eos=True)
        monkeypatch.undo()
        assert model.cache.length() == 3, "the step was whole"
        after = model.generate_ids([5, 6, 7], 4, ignore_eos=True, reuse_prefix=True)
    with nm.load(paths["llama"], threads=4, **OPTIONS) as model:
        assert model.generate_ids([5, 6, 7], 4, ignore_eos=True) == after


@pytest.mark.parametrize("options", ({}, {"kv": "host", "kv_pipeline_budget": 0, "kv_pipeline_headroom": 0}), ids=("device", "host"))
def test_interrupts_on_a_driver_without_a_gpu(
    options: dict[str, Any], make_driver: Callable[..., StepDriver], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No stream is left in capture, no context on the stack, no memory, no graph, no event."""
    monkeypatch.setattr(CudaKernel, "binary", lambda self, capability: (self.name, self.name.encode()))  # nothing is compiled
    path = write_model(tmp_path / "model.gguf", n_layer=2, n_embd=256, n_head=4, n_head_kv=2, n_ff=256, types="q8_0")
    driver, rng = make_driver([(8, 0), (8, 0)], False), random.Random(f"{options}")

    def load() -> nm.Model:
        return nm.load(path, devices="cuda:0,cuda:1", ctx_size=256, ubatch_size=32, **options)

    def life() -> None:
        with load() as model:
            model.generate_ids(list(range(5, 75)), 3, ignore_eos=True)

    life()
    start = time.perf_counter()
    life()
    whole = time.perf_counter() - start
    for _ in range(10):
        interrupted(life, rng.random() * whole, rng.choice((1, 3)))
        assert driver.live["context"] == 0 and not driver.stack, "a context is left on the stack"
        assert not driver.held and not driver.pinned and not any(driver.live.values()), "something was not given back"
    with load() as model:
        n_bytes = None
        for _ in range(10):
            interrupted(lambda: model.generate_ids(list(range(5, 75)), 9, ignore_eos=True), rng.random() * 0.02, rng.choice((1, 3)))
            assert driver.live["context"] == driver.live["event"] == 0 and not driver.capturing
            assert len(model.generate_ids(list(range(5, 75)), 3, ignore_eos=True)) == 3
            if n_bytes is not None:
                assert (model.memory(), len(driver.held), len(driver.pinned)) == n_bytes
            n_bytes = model.memory(), len(driver.held), len(driver.pinned)
    gc.collect()
    assert not driver.held and not driver.pinned and not any(driver.live.values())
