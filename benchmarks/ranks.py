"""How fast N ranks generate, beside one process with as many CPU devices; and what deterministic mode costs on either.

    python benchmarks/ranks.py [smollm2] [--ranks 1 2 4] [--tokens 200] [--rounds 3]

Every way is a launch of its own (`mpirun` as `numba-meta launch` starts it, or one process), and the launches take turns. In a launch the
plain and the deterministic model are both loaded, and their texts take turns. What a call costs before its first step, where all ranks say
what they call, is the time of `model.cache.clear()`, which does little else. Cores are divided by the product's own rule: every rank or
device has an equal part of them, and at least one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

from command_line import count, run_main

import numba_meta as nm
from numba_meta.cli.launch import find_mpirun, launch_environment
from numba_meta.cli.terminal import table
from numba_meta.comm.failure import ranks

PROMPT = "The lighthouse keeper"
KINDS = ("ranks", "devices")
CALLS = 200  # that are timed together
TEXTS = 3  # of each mode in a launch, after one that warms up
Speeds = dict[str, list[float]]  # tokens per second by mode, microseconds of a `call`: a number for each text


def measure(path: str, devices: str, n_tokens: int) -> None:
    """One rank, or one process alone. Rank 0 prints its speeds: every token waits for the slowest rank, so that is the speed of all."""
    modes = {"plain": False, "deterministic": True}
    with ranks() as launch:
        models = {
            mode: nm.load(path, devices=devices, ctx_size=n_tokens + 64, deterministic=on, ranks=launch) for mode, on in modes.items()
        }
        speeds: Speeds = {mode: [] for mode in (*modes, "call")}
        for text in range(TEXTS + 1):
            for mode, model in models.items():
                model.generate_ids(model.tokenize(PROMPT), n_tokens, ignore_eos=True)
                if text:
                    speeds[mode].append(model.timings.n_generated / model.timings.generation_seconds)
            begin = time.perf_counter()
            for _ in range(CALLS):
                models["plain"].cache.clear()
            speeds["call"].append((time.perf_counter() - begin) / CALLS * 1e6)
        for model in models.values():
            model.close()
        if launch.rank == 0:
            print(json.dumps(speeds), flush=True)


def start(kind: str, n: int, path: str, n_tokens: int) -> Speeds:
    """The speeds of one launch: `n` ranks of one device each, or one process with `n` devices."""
    devices = "cpu:0" if kind == "ranks" else ",".join(["cpu:0"] * n)
    command = [sys.executable, __file__, path, "--tokens", str(n_tokens), "--measure", devices]
    if kind == "ranks":
        command = [find_mpirun(os.environ), "-n", str(n), *command]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=launch_environment(os.environ, os.geteuid() == 0))
    if done.returncode:
        raise SystemExit(f"{n} {kind} ended with status {done.returncode}; the reason is above")
    speeds: Speeds = json.loads(done.stdout.splitlines()[-1])
    return speeds


def spread(values: Sequence[float], digits: int) -> str:
    """`median (lowest to highest)`."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--ranks", type=count(), nargs="+", default=[1, 2, 4], help="numbers of ranks and of devices (default 1 2 4)")
    parser.add_argument("--tokens", type=count(), default=200, help="of each text (default 200)")
    parser.add_argument("--rounds", type=count(), default=3, help="launches of each way (default 3)")
    parser.add_argument("--measure", metavar="DEVICES", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.model, options.measure, options.tokens)
        return
    turns: dict[tuple[str, int], list[Speeds]] = {(kind, n): [] for n in options.ranks for kind in KINDS}
    for _ in range(options.rounds):
        for (kind, n), launches in turns.items():
            launches.append(start(kind, n, options.model, options.tokens))
    rows, ratios = [], []
    for (kind, n), launches in turns.items():
        plain, deterministic = ([speed for each in launches for speed in each[mode]] for mode in ("plain", "deterministic"))
        cost = [d / p for each in launches for p, d in zip(each["plain"], each["deterministic"], strict=True)]
        rows.append([f"{n} {kind if n > 1 else kind[:-1]}", spread(plain, 1), spread(deterministic, 1), spread(cost, 2),
                     spread([us for each in launches for us in each["call"]], 0)])  # fmt: skip
    for n in options.ranks:
        medians = {kind: [statistics.median(each["plain"]) for each in turns[kind, n]] for kind in KINDS}
        each_round = [r / d for r, d in zip(medians["ranks"], medians["devices"], strict=True)]
        ratios.append(f"ranks beside devices of one process, {n} of each: {spread(each_round, 2)} x")
    print(table(["way", "plain, t/s", "deterministic, t/s", "deterministic / plain", "a call, us"], rows, markdown=True))
    print("\n".join(ratios))


if __name__ == "__main__":
    run_main(main)
