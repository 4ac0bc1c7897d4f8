"""Real interrupts at random times: what a load, a step or an operation leaves behind. Also a program, for many more tries than a test has.

    python tests/models/interrupting.py 500 [SEED]
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numba_meta as nm
from numba_meta.models.model import Model

PROMPT = [5, 9, 6, 11, 7, 8, 20, 14, 31, 17]
MORE = [40, 41, 42]
OPTIONS: dict[str, Any] = {"ctx_size": 256, "ubatch_size": 8, "parallel": 2}
PLACES: dict[str, dict[str, Any]] = {
    "device": {"devices": "cpu:0,cpu:0", "threads": 4},
    "host": {"devices": "cpu:0,cpu:0?link=5", "threads": 4, "kv": "host", "kv_pipeline_headroom": 0},
    "ordered": {"devices": "cpu:0", "threads": 2, "kv": "host", "kv_pipeline_depth": 0},
}


def interrupted(act: Callable[[], Any], seconds: float, n: int = 1) -> bool:
    """Acts, and sends this process `n` interrupts so much later; whether one came through. None is left under way."""
    begun = threading.Event()

    def send() -> None:
        begun.wait()
        time.sleep(seconds)
        for _ in range(n):
            os.kill(os.getpid(), signal.SIGINT)

    sender = threading.Thread(target=send)
    sender.start()
    came = False
    try:
        try:
            begun.set()
            act()
        finally:
            sender.join()
    except KeyboardInterrupt:
        came = True
    while True:
        try:
            sender.join()
            time.sleep(0)  # whatever is still on its way
            return came
        except KeyboardInterrupt:
            came = True


def n_threads() -> int:
    """Threads of this process, as the system counts them."""
    return len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else threading.active_count()


def n_left(before: int) -> int:
    """Threads that are more than there were; one that was joined takes a moment to leave the system's list."""
    deadline = time.monotonic() + 10
    while (left := n_threads() - before) > 0 and time.monotonic() < deadline:
        time.sleep(0.001)
    return max(0, left)


@dataclass
class Bench:
    """A model in a place, what it answers undisturbed, and how long that takes."""

    path: Path
    options: dict[str, Any]
    state: Path

    def load(self) -> Model:
        return nm.load(self.path, **OPTIONS, **self.options)

    def answers(self, model: Model) -> tuple[Any, ...]:
        """Anew; going on from what the cache holds; several at once; all of the cache's bookkeeping."""
        first = model.generate_ids(PROMPT, 6, ignore_eos=True)
        second = model.generate_ids([*PROMPT, *first, *MORE], 6, ignore_eos=True, reuse_prefix=True)
        many = model.generate_many([PROMPT, MORE], 4, ignore_eos=True)
        return first, second, many

    def kept(self, model: Model) -> list[int]:
        """What follows where the cache's own prefix is used again, whatever an interrupt has left in it."""
        held = model.cache.tokens(0)
        ids = [*held, *MORE] if held and -1 not in held else PROMPT
        reused = model.generate_ids(ids, 4, ignore_eos=True, reuse_prefix=True)
        assert reused == model.generate_ids(ids, 4, ignore_eos=True), "rows that no step has written were used"
        return reused

    def actions(self, model: Model) -> list[Callable[[], Any]]:
        def operate() -> None:
            model.generate_ids(PROMPT, 4, ignore_eos=True)
            model.cache.copy(0, 1)
            model.cache.shift(1, 2, 3)
            model.cache.remove(1, 1, 3)
            model.cache.clear(1)

        def states() -> None:
            model.generate_ids(PROMPT, 2, ignore_eos=True)
            model.save_state(self.state)
            model.load_state(self.state)

        def stream() -> None:
            for _ in model.generate(PROMPT, 20, ignore_eos=True, context_shift=True):
                pass

        return [lambda: self.answers(model), operate, states, stream]


def try_a_load(bench: Bench, seconds: float, n: int) -> bool:
    """An interrupt at any point of load, first steps and close: what comes next works, and nothing is left."""
    before, files = n_threads(), len(os.listdir("/proc/self/fd"))

    def life() -> None:
        model = bench.load()
        bench.answers(model)
        model.close()

    came = interrupted(life, seconds, n)
    assert n_left(before) == 0, "threads are left"
    assert len(os.listdir("/proc/self/fd")) == files, "files are left open"
    return came


def try_a_model(bench: Bench, model: Model, expected: tuple[Any, ...], act: Callable[[], Any], seconds: float, n: int) -> bool:
    """An interrupt at any point of what a model does: it goes on as if nothing had been."""
    allocated = model.memory()
    came = interrupted(act, seconds, n)
    bench.kept(model)
    assert model.context.cells.length(1) <= OPTIONS["ctx_size"]
    assert bench.answers(model) == expected
    with ThreadPoolExecutor(1) as other:  # for which a lock that was left locked is not free
        assert other.submit(lambda: model._lock.acquire(blocking=False) and model._lock.release() is None).result()
    model.cache.clear()
    pool = model.context.cells._pool
    assert sorted(pool._given_back) == list(range(pool._next)), "a cell was lost, or is there twice"
    assert model.memory().keys() == allocated.keys()
    assert model.context.traces is None
    return came


def main(n_tries: int, seed: int, folder: Path) -> None:
    from synthetic import write_model

    rng = random.Random(seed)
    files = {
        "llama": write_model(folder / "llama.gguf", seed=41, types="q8_0"),
        "gemma3": write_model(folder / "gemma3.gguf", "gemma3", n_layer=6, n_head_kv=1, seed=42, types="q8_0"),
    }
    came = tries = 0
    begun = time.monotonic()
    for architecture, path in files.items():
        for place, options in PLACES.items():
            bench = Bench(path, options, folder / "state")
            model = bench.load()
            expected = bench.answers(model)
            memory = model.memory()
            model.close()
            start = time.perf_counter()
            with bench.load() as model:
                bench.answers(model)
            whole = time.perf_counter() - start
            each = n_tries // (len(files) * len(PLACES) * 2)
            for _ in range(each):
                came += try_a_load(bench, rng.random() * whole * 1.1, rng.choice((1, 1, 3)))
            model = bench.load()
            for i in range(each):
                if i % 4 == 0:  # threads that are yet to start
                    model.close()
                    model = bench.load()
                act = rng.choice(bench.actions(model))
                seconds = rng.choice((rng.random() * 0.002, rng.random() * 0.03))
                came += try_a_model(bench, model, expected, act, seconds, rng.choice((1, 1, 3)))
            assert all(model.memory()[name] <= 2 * n for name, n in memory.items())
            model.close()
            tries += 2 * each
            print(f"{architecture} {place}: {tries} tries, {came} interrupts came, {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    import tempfile

    sys.path.insert(0, str(Path(__file__).parents[1]))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as name:
        main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1, Path(name))
