"""Generation and prompt speed beside llama.cpp, in turns (A/B/A/B) in one run, on the same file with the same threads.

    python benchmarks/compare_llama_cpp.py smollm2 gemma3 --rounds 5

Needs `pip install llama-cpp-python`. Prints medians, spreads and the ratio; for generation also GB/s of weight bytes and the part of this
machine's copy bandwidth (bytes read + written) that is.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
from command_line import count, run_main

import numba_meta as nm
from numba_meta.cli.machine import copy_bandwidth
from numba_meta.models.files.pull import resolve_model

TEXT = "A lamp stood in every window of the harbour, and the boats came home by their light. "
Speeds = tuple[float, float]  # prompt, generation in tokens per second


def ours(model: nm.Model, prompt: Sequence[int], n_generated: int) -> Speeds:
    """Prompt speed over the whole prompt; generation speed after its first 16 tokens."""
    model.generate_ids(prompt, max_tokens=1, ignore_eos=True)
    prompt_speed = len(prompt) / model.timings.prompt_seconds
    model.generate_ids(prompt[:16], max_tokens=n_generated + 1, ignore_eos=True)
    return prompt_speed, model.timings.n_generated / model.timings.generation_seconds


class LlamaCpp:
    """The same through llama-cpp-python, greedy, with its own default kernels."""

    def __init__(self, path: str, threads: int, ctx_size: int) -> None:
        try:
            from llama_cpp import Llama
        except ImportError as error:
            raise SystemExit(f"llama-cpp-python is not there ({error}); pip install llama-cpp-python") from None

        self._model = Llama(path, n_ctx=ctx_size, n_threads=threads, n_threads_batch=threads, n_batch=ctx_size, n_ubatch=512, verbose=False)

    def run(self, prompt: Sequence[int], n_generated: int) -> Speeds:
        seconds = self._eval_from_empty(prompt)
        self._eval_from_empty(prompt[:16])
        begin = time.perf_counter()
        for _ in range(n_generated):
            self._model.eval([self._best()])
        return len(prompt) / seconds, n_generated / (time.perf_counter() - begin)

    def _eval_from_empty(self, ids: Sequence[int]) -> float:
        self._model.reset()
        self._model._ctx.kv_cache_clear()
        begin = time.perf_counter()
        self._model.eval(list(ids))
        return time.perf_counter() - begin

    def _best(self) -> int:
        logits = np.ctypeslib.as_array(self._model._ctx.get_logits(), shape=(self._model.n_vocab(),))
        return int(np.argmax(logits))


def report(name: str, what: str, a: Sequence[float], b: Sequence[float], extra: str = "") -> None:
    def shown(values: Sequence[float]) -> str:
        return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"

    ratio = statistics.median(a) / statistics.median(b)
    print(f"| {name} | {what} | {shown(a)} | {shown(b)} | {ratio:.2f} | {extra} |", flush=True)


def compare(name: str, rounds: int, threads: int, n_prompt: int, n_generated: int) -> None:
    path = str(resolve_model(name))
    llama = LlamaCpp(path, threads, 2048)
    with nm.load(path, threads=threads, ctx_size=2048) as model:
        ids = model.tokenize(TEXT * n_prompt)[:n_prompt]
        runs: tuple[Callable[[], Speeds], Callable[[], Speeds]] = (
            lambda: ours(model, ids, n_generated),
            lambda: llama.run(ids, n_generated),
        )
        for run in runs:
            run()
        a, b = [], []
        for _ in range(rounds):
            a.append(runs[0]())
            b.append(runs[1]())
        weight_bytes = sum(device.weight_bytes for device in model.plan.devices)
    report(name, f"prompt {n_prompt}", [x[0] for x in a], [x[0] for x in b])
    gigabytes = statistics.median(x[1] for x in a) * weight_bytes / 1e9
    bandwidth = copy_bandwidth(threads, 256 << 20) / 1e9
    extra = f"{gigabytes:.1f} GB/s of weights, {gigabytes / bandwidth:.2f} of {bandwidth:.1f} GB/s copied"
    report(name, f"generation {n_generated}", [x[1] for x in a], [x[1] for x in b], extra)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="names or paths of GGUF files")
    parser.add_argument("--rounds", type=count(), default=5)
    parser.add_argument("--threads", type=count(), default=len(os.sched_getaffinity(0)))
    parser.add_argument("--prompt", type=count(), default=512)
    parser.add_argument("--generate", type=count(), default=128)
    options = parser.parse_args()
    print("| model | what | numba_meta, t/s | llama.cpp, t/s | ratio | |\n| --- | --- | --- | --- | --- | --- |")
    for name in options.models:
        compare(name, options.rounds, options.threads, options.prompt, options.generate)


if __name__ == "__main__":
    run_main(main)
