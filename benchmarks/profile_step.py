"""How much of a decode step is spent outside compiled code: `python benchmarks/profile_step.py smollm2`.

Times the one call into compiled code of every step against the whole generation loop (sampling, bookkeeping, inputs).
"""

from __future__ import annotations

import argparse
import statistics
import time

from command_line import count, run_main

import numba_meta as nm
from numba_meta.models.running.recordings import Capacity


def profile(name: str, devices: str, n_tokens: int, rounds: int) -> None:
    """Prints milliseconds a step and the part outside compiled code, a median over rounds."""
    seconds_inside = 0.0
    with nm.load(name, devices=devices, ctx_size=2048) as model:
        ids = model.tokenize("The lighthouse keeper climbed the spiral stairs")
        model.generate_ids(ids, n_tokens, ignore_eos=True)
        step = model.context.recording(Capacity(1, 1))._step.step
        compiled = step._call  # the one call into compiled code

        def timed(*arguments: int) -> None:
            nonlocal seconds_inside
            begin = time.perf_counter()
            compiled(*arguments)
            seconds_inside += time.perf_counter() - begin

        step._call = timed
        outside, seconds = [], []
        for _ in range(rounds):
            seconds_inside = 0.0
            model.generate_ids(ids, n_tokens, ignore_eos=True)
            timings = model.timings
            outside.append(1 - seconds_inside / timings.generation_seconds)
            seconds.append(timings.generation_seconds / timings.n_generated)
    print(f"| {name} | {devices} | {1e3 * statistics.median(seconds):.2f} ms | {100 * statistics.median(outside):.1f}% |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=count(), default=200)
    parser.add_argument("--rounds", type=count(), default=5)
    options = parser.parse_args()
    print("| model | devices | a step | outside compiled code |\n| --- | --- | --- | --- |")
    for devices in ("cpu:0", "cpu:0,cpu:0"):
        profile(options.model, devices, options.tokens, options.rounds)


if __name__ == "__main__":
    run_main(main)
