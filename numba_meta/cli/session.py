"""The one file of the command line that calls a model: how options become a load, a generation and the lines that report them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numba_meta
from numba_meta.cli.options import GenerationOptions, LoadOptions
from numba_meta.cli.terminal import Progress
from numba_meta.devices.parse import format_bytes
from numba_meta.errors import UsageError

if TYPE_CHECKING:
    from numba_meta.models.model import Model

Message = dict[str, str]
BENCH_TEXT = (
    "A lamp stood in every window of the harbour, and the boats came home by their light. The keeper counted 12 masts, then 13; "
    "he wrote the number down, closed the book, and went to see who had arrived so late in such a wind."
)


def open_model(name: str, load: LoadOptions, n_prompts: int, progress: Progress) -> Model:
    """Load `name`, a file or a model's name, with room for `n_prompts` sequences unless `load` says how many."""
    return numba_meta.load(
        name,
        devices=load.devices,
        tensor_split=load.tensor_split,
        cache_type_k=load.cache_type_k,
        cache_type_v=load.cache_type_v,
        ctx_size=load.ctx_size or None,
        ubatch_size=min(load.ubatch_size, load.batch_size),
        parallel=load.parallel or n_prompts,
        kv_unified=load.kv_unified,
        exact=load.exact,
        threads=load.threads,
        progress=progress,
    )


def generation_arguments(options: GenerationOptions) -> dict[str, Any]:
    """The arguments of `Model.generate` that `options` set; rules left out keep the model's defaults."""
    chosen = {
        "top_k": options.top_k,
        "top_p": options.top_p,
        "min_p": options.min_p,
        "repetition_penalty": options.repeat_penalty,
        "seed": options.seed,
    }
    return {
        "temperature": options.temperature,
        "stop": options.stop,
        "ignore_eos": options.ignore_eos,
        **{name: value for name, value in chosen.items() if value is not None},
    }


def chat_prompt(model: Model, messages: Sequence[Message]) -> list[int]:
    """The ids of a conversation in the model's own format, ready for its next answer."""
    if model.chat_template is None:
        raise UsageError("this model has no chat template (a base model continues text): use `generate` without --chat")
    return model.chat_template.encode(messages)


def summary(model: Model) -> str:
    """The line after a generation: speeds, where the KV cache lies, memory per device."""
    timings = model.timings
    parts = [
        f"prompt {_speed(timings.n_prompt, timings.prompt_seconds)}",
        f"generation {_speed(timings.n_generated, timings.generation_seconds)}",
        "KV cache on the device",
        "memory " + ", ".join(f"{device} {format_bytes(n_bytes)}" for device, n_bytes in model.memory().items()),
    ]
    return "; ".join(parts)


def decisions(model: Model) -> Iterator[str]:
    """What was decided when the model was loaded, line by line."""
    yield from model.plan.table().splitlines()


def bench_ids(model: Model, n: int) -> list[int]:
    """`n` ids of ordinary text, the same ones every time."""
    ids = model.tokenize(BENCH_TEXT, add_special=False)
    return (ids * -(-n // len(ids)))[:n]


def prompt_speed(model: Model, ids: Sequence[int]) -> float:
    """Tokens per second while the prompt `ids` is processed from an empty cache."""
    model.generate_ids(ids, max_tokens=1, ignore_eos=True)
    return model.timings.n_prompt / model.timings.prompt_seconds


def generation_speed(model: Model, ids: Sequence[int], n_generated: int) -> float:
    """Tokens per second of `n_generated` tokens that follow the context `ids`."""
    model.generate_ids(ids, max_tokens=n_generated, ignore_eos=True)
    return model.timings.n_generated / model.timings.generation_seconds


def _speed(n_tokens: int, seconds: float) -> str:
    return f"{n_tokens} tokens" + (f" at {n_tokens / seconds:.1f} t/s" if seconds > 0 else "")
