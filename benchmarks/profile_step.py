"""How much of a decode step is spent outside compiled code: `python benchmarks/profile_step.py smollm2`.

Times the one call into compiled code of every step against the whole generation loop (sampling, bookkeeping, inputs).
"""

from __future__ import annotations

import argparse
import statistics
import time

import numba_meta as nm
from numba_meta.devices.cpu import CpuStep


def profile(name: str, devices: str, n_tokens: int, rounds: int) -> None:
    """Prints milliseconds a step and the part outside compiled code, a median over rounds."""
    seconds_inside = 0.0
    whole_run = CpuStep._call  # the compiled code and nothing else

    def timed(self: CpuStep) -> None:
        nonlocal seconds_inside
        begin = time.perf_counter()
        whole_run(self)
        seconds_inside += time.perf_counter() - begin

    with nm.load(name, devices=devices, ctx_size=2048) as model:
        ids = model.tokenize("The lighthouse keeper climbed the spiral stairs")
        model.generate_ids(ids, n_tokens, ignore_eos=True)
        outside, step = [], []
        CpuStep._call = timed  # type: ignore[method-assign]
        try:
            for _ in range(rounds):
                generated = model._generated(ids, n_tokens, True, False, {})
                next(generated)  # the prompt
                seconds_inside, begin = 0.0, time.perf_counter()
                n_steps = sum(1 for _ in generated)
                whole = time.perf_counter() - begin
                outside.append(1 - seconds_inside / whole)
                step.append(whole / n_steps)
        finally:
            CpuStep._call = whole_run  # type: ignore[method-assign]
    print(f"| {name} | {devices} | {1e3 * statistics.median(step):.2f} ms | {100 * statistics.median(outside):.1f}% |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print("| model | devices | a step | outside compiled code |\n| --- | --- | --- | --- |")
    for devices in ("cpu:0", "cpu:0,cpu:0"):
        profile(options.model, devices, options.tokens, options.rounds)


if __name__ == "__main__":
    main()
