"""One rank of a launch in which something goes wrong: `random_faults.py FOLDER MODEL`. FOLDER/fault.json says what, on which rank, when."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba_meta as nm
from numba_meta.comm.failure import RankLaunch, ranks
from numba_meta.errors import NumbaMetaError
from numba_meta.models.model import Model

folder, path = Path(sys.argv[1]), sys.argv[2]
own = int(os.environ["OMPI_COMM_WORLD_RANK"])
fault = json.loads((folder / "fault.json").read_text())
PROMPT = [5, 6, 7, 8]
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.7}, {"top_k": 3}, {"seed": 9}, {"max_tokens": 31}, {"stop": "x"}, {"ignore_eos": False}, {"reuse_prefix": True},
    {"repetition_penalty": 1.5},
]  # fmt: skip


def end(kind: str) -> None:
    """This rank ends by itself."""
    if kind == "exit":
        sys.exit(fault["value"])
    if kind == "os_exit":
        os._exit(fault["value"])
    if kind == "raise":
        raise ValueError("out of luck")


def strike() -> None:
    """When it happened."""
    (folder / "struck").touch()


def other_call(model: Model, launch: RankLaunch) -> None:
    works = [
        lambda: model.logits(PROMPT), lambda: model.generate_ids(PROMPT, 8), lambda: model.generate_many([PROMPT] * 2, 8),
        model.cache.clear, lambda: model.cache.shift(0, 0, 1), lambda: model.cache.remove(0, 0, 1),
        lambda: nm.load(path, ctx_size=128, exact=True, threads=1, ranks=launch), model.close,
    ]  # fmt: skip
    works[fault["value"]]()


def tokens(
    model: Model, prompt: list[int], max_tokens: int, ignore_eos: bool, reuse_prefix: bool = False, stop: str = "", **sampling: Any
) -> Iterator[int]:
    """As `generate`; token by token, where several may be one piece of text, or none."""
    return model._generated(prompt, max_tokens, ignore_eos, reuse_prefix, sampling, None, "generate", [stop] if stop else [])


def call(model: Model, number: int, rng: random.Random, launch: RankLaunch) -> None:
    """A generation as on all ranks, or what the fault makes of it."""
    hit = fault["rank"] == own and fault["call"] == number
    kind = fault["kind"] if hit else ""
    options: dict[str, Any] = {"max_tokens": 32, "ignore_eos": True, "temperature": 1.0}
    prompt = [rng.randrange(5, 200) for _ in range(rng.randrange(2, 9))]
    if kind in ("call", "prompt", "options"):
        strike()
    if kind == "call":
        other_call(model, launch)
    if kind == "prompt":
        prompt = prompt[1:] if fault["value"] % 2 else [prompt[0] ^ 1, *prompt[1:]]
    if kind == "options":
        options |= OPTIONS[fault["value"]]
    for n, _ in enumerate(tokens(model, prompt, **options)):
        if n == fault["token"] and kind in ("exit", "os_exit", "raise", "leave"):
            strike()
            end(kind)
            if kind == "leave":
                break


def main() -> int:
    (folder / f"started.{own}").touch()
    rng = random.Random(1)
    try:
        with ranks() as launch, nm.load(path, ctx_size=128, exact=True, threads=1, ranks=launch) as model:
            (folder / f"ready.{own}").touch()
            number = 0
            while number < 6 or fault["kind"] == "signal":
                call(model, number, rng, launch)
                number += 1
    except NumbaMetaError as error:
        print(f"numba-meta: {error}", file=sys.stderr, flush=True)
        return error.exit_status
    except KeyboardInterrupt:
        return 130
    except ValueError as error:
        print(f"numba-meta: rank {own}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
