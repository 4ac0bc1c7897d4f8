"""One rank whose program differs from the others': `faults.py FOLDER MODEL SCENARIO`. What rank 1 does otherwise is in its function.

A user's program: it knows of ranks only what `nm.load` does, and catches nothing.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numba_meta as nm
from numba_meta.models.model import Model

folder, path = Path(sys.argv[1]), sys.argv[2]
own = int(os.environ["OMPI_COMM_WORLD_RANK"])
PROMPT = [5, 6, 7]
ENDLESS = 10**8
OPTIONS: dict[str, Any] = {"ctx_size": 128, "exact": True, "threads": 1}


def endless(model: Model, **options: Any) -> None:
    """Tokens until something happens. Leaves `ready.RANK`."""
    for _ in model._generated(PROMPT, ENDLESS, True, False, options, 4):
        (folder / f"ready.{own}").touch()


def goes_on(model: Model) -> None:
    """Nothing is wrong but what is done to it."""
    endless(model)


def exits(model: Model) -> None:
    if own == 1:
        sys.exit(0)
    endless(model)


def exits_later(model: Model) -> None:
    """After a call, in a program that has its own end."""
    model.generate_ids(PROMPT, 4, ignore_eos=True)
    if own == 0:
        endless(model)


def exits_at_once(model: Model) -> None:
    if own == 1:
        os._exit(0)
    endless(model)


def rank_0_exits(model: Model) -> None:
    if own == 1:
        endless(model)


def length(model: Model) -> None:
    model.generate_ids(PROMPT, 4)
    "".join(model.generate(PROMPT[own:], 64, ignore_eos=True))


def text(model: Model) -> None:
    "".join(model.generate([5, 6, 7 + own], 64, ignore_eos=True))


def temperature(model: Model) -> None:
    "".join(model.generate(PROMPT, 64, temperature=0.5 * own, seed=1))


def limit(model: Model) -> None:
    model.generate_ids(PROMPT, 8 + own)


def seed(model: Model) -> None:
    model.generate_many([PROMPT, PROMPT[1:]], 8, temperature=1.0, seed=[None, 7][own])


def other_call(model: Model) -> None:
    model.logits(PROMPT) if own else model.generate_ids(PROMPT, 8)


def cache(model: Model) -> None:
    model.generate_ids(PROMPT, 8, ignore_eos=True)
    if own:
        model.cache.remove(0, 1, 2)
    model.generate_ids(PROMPT, 8, ignore_eos=True, reuse_prefix=True)


def half(model: Model) -> None:
    """A generation that one rank leaves, and goes on with other work."""
    for _ in islice(model.generate(PROMPT, ENDLESS, ignore_eos=True, context_shift=True), 5 if own else None):
        pass
    time.sleep(60)


def half_then_another(model: Model) -> None:
    begun = model.generate(PROMPT, ENDLESS, ignore_eos=True, context_shift=True)
    for _ in islice(begun, 5 if own else None):
        pass
    model.generate_ids(PROMPT, 4)


def half_held(model: Model) -> None:
    """The program ends with the generator in hand."""
    begun = model.generate(PROMPT, ENDLESS, ignore_eos=True, context_shift=True)
    for _ in islice(begun, 5 if own else None):
        pass


def another_model(model: Model) -> None:
    """One loads, the other generates."""
    if own:
        nm.load(path, **OPTIONS)
    endless(model)


def wrong_model(model: Model) -> None:
    with nm.load(path, **OPTIONS) as second:
        (second if own else model).generate_ids(PROMPT, 8)


def threads(model: Model) -> None:
    """Two threads, which start in another order."""
    works = [threading.Thread(target=model.generate_ids, args=(prompt, 64), daemon=True) for prompt in (PROMPT, PROMPT[1:])]
    for work in works[:: -1 if own else 1]:
        work.start()
    for work in works:
        work.join()


def caught(model: Model) -> None:
    """An error on one rank, after which its program goes on."""
    for _ in range(3):
        try:
            model.generate_ids(PROMPT, 8 if own == 0 else -1)
        except nm.UsageError:
            pass


def forks(model: Model) -> None:
    """Children by fork are no ranks: ended by signals, by themselves, with an error; none of it is a reason to end."""
    fork = multiprocessing.get_context("fork")
    with fork.Pool(2) as pool:
        assert pool.map(abs, [-1, -2]) == [1, 2]
    child = fork.Process(target=time.sleep, args=(60,), daemon=True)
    child.start()
    child.terminate()
    child.join(10)
    assert child.exitcode == -signal.SIGTERM
    fork.Process(target=time.sleep, args=(60,), daemon=True).start()  # ended with its parent
    ended = os.fork()
    if ended == 0:
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(ended, 0)[1]) == 7
    print(model.generate_ids(PROMPT, 4, ignore_eos=True), flush=True)


def interrupted_wait(model: Model) -> None:
    """A handler of the program's own raises where a call waits for the others."""

    def late(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    if own == 0:
        time.sleep(2)
    while True:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.5 * own)
            model.generate_ids(PROMPT, 4)
        except TimeoutError:
            continue


def hangs_up(model: Model) -> None:
    if own == 1:
        os.kill(os.getpid(), signal.SIGHUP)
    endless(model)


def after_the_end(model: Model) -> None:
    """An exit handler from before the load runs after the ranks have parted."""


def take_turns() -> None:
    """Nothing is wrong here: two models' generations, token by token."""
    with nm.load(path, **OPTIONS) as one, nm.load(path, **OPTIONS) as two:
        pairs = zip(one.generate(PROMPT, 9, ignore_eos=True), two.generate(PROMPT[1:], 9, ignore_eos=True), strict=False)
        first = list(islice(pairs, 6))
        one.cache.clear()
        print(first == first, one.generate_ids(PROMPT, 5, temperature=9.0), flush=True)


def early() -> None:
    """Before anything is loaded."""
    if own == 0:
        try:
            endless(nm.load(path, **OPTIONS))
        except nm.NumbaMetaError as error:
            print(f"numba-meta: {error}", file=sys.stderr)
            sys.exit(1)
    from numba_meta.comm.failure import enter_ranks

    enter_ranks()


def main(scenario: str) -> None:
    (folder / f"started.{own}").touch()
    if scenario == "after_the_end":
        atexit.register(lambda: print(kept.generate_ids(PROMPT, 4)))
        kept = nm.load(path, **OPTIONS)
        return
    if scenario in ("take_turns", "early"):
        globals()[scenario]()
        return
    with nm.load(path, **OPTIONS) as model:
        work: Callable[[Model], None] = globals()[scenario]
        work(model)


if __name__ == "__main__":
    main(sys.argv[3])
