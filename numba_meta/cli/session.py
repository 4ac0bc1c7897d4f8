"""The one file of the command line that calls a model: how options become a load, a generation and the lines that report them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import click

import numba_meta
from numba_meta.cli.before_load import check_arguments, check_header, check_prompts
from numba_meta.cli.options import GenerationOptions, LoadOptions
from numba_meta.cli.terminal import Progress
from numba_meta.devices.parse import format_bytes
from numba_meta.errors import ContextFullError, ModelFileError, UsageError, counted
from numba_meta.memory.placement import WHOLE_SHARE

if TYPE_CHECKING:
    from numba_meta.comm.failure import RankLaunch
    from numba_meta.models.model import Model

Message = dict[str, str]
# Options of a cache in host memory and the arguments that they are, and what words of theirs mean.
HOST_CACHE_ARGUMENTS = {
    "kv_pipeline_depth": "kv_pipeline_depth",
    "kv_pipeline_budget": "kv_pipeline_budget",
    "kv_pipeline_headroom": "kv_pipeline_headroom",
    "kv_ring": "kv_ring_by_share",
    "kv_gpu_layers": "kv_gpu_layers",
    "kv_cpu_pinned": "kv_cpu_pinned",
}
_SWITCHES = {"share": True, "whole": False, "on": True, "off": False}
TRACED_STEPS = 128
BENCH_IDS = 256  # that a bench repeats where text cannot be tokenized
UNTIL_FULL = -2  # of --predict; -1 is the same without a context shift
UNLIMITED = 1 << 62  # tokens
CONTEXT_FULL = "numba-meta: the context is full, so the text ends here; --ctx-size makes room, --context-shift forgets the oldest"
BENCH_TEXT = (
    "A lamp stood in every window of the harbour, and the boats came home by their light. The keeper counted 12 masts, then 13; "
    "he wrote the number down, closed the book, and went to see who had arrived so late in such a wind."
)


class Rehearsed(Exception):
    """The end of a command that `launch` tries before it starts ranks: what follows needs them."""


def open_model(
    name: str,
    load: LoadOptions,
    n_prompts: int,
    progress: Progress,
    prompts: Sequence[str] = (),
    needs_text: bool = True,
    needs_chat: bool = False,
) -> Model:
    """Load `name`, a file or a model's name, with room for `n_prompts` sequences unless `load` says how many.

    `prompts`: texts that must fit the context; one that is far too long is refused before weights are read.
    `needs_text`: so is a file whose tokenizer cannot be built; `needs_chat`: one without a chat template that can be used.
    """
    arguments = check_load(load, n_prompts)
    check_prompts(name, arguments, prompts, progress)
    if is_rehearsal():
        check_header(name, arguments, n_ranks(), progress, needs_text, needs_chat)
        raise Rehearsed
    if (launch := current_launch()) is not None:
        arguments["ranks"] = launch
    return numba_meta.load(name, **arguments, needs_text=needs_text, needs_chat=needs_chat, progress=progress)


def check_load(load: LoadOptions, n_prompts: int = 1) -> dict[str, Any]:
    """The arguments of `numba_meta.load`. Raises `UsageError` for what is impossible whatever the model."""
    arguments = load_arguments(load, n_prompts)
    check_arguments(arguments, n_ranks())
    return arguments


def current_launch() -> RankLaunch | None:
    """The ranks that run this command; None in a process that works alone."""
    launch: RankLaunch | None = getattr(_state(), "launch", None)
    return launch


def is_rehearsal() -> bool:
    """Whether this is `launch`, which tries a command before it starts ranks for it."""
    return getattr(_state(), "rehearsed_ranks", None) is not None


def n_ranks() -> int:
    """How many processes run this command, or will."""
    rehearsed: int | None = getattr(_state(), "rehearsed_ranks", None)
    launch = current_launch()
    return rehearsed or (launch.size if launch else 1)


def _state() -> object:
    """The `State` of this run of the command line; None where there is none."""
    context = click.get_current_context(silent=True)
    return context and context.find_root().obj


def load_arguments(load: LoadOptions, n_prompts: int = 1) -> dict[str, Any]:
    """The arguments of `numba_meta.load` (the fields of `models.load_plan.LoadOptions`) that `load` sets."""
    host_cache = {name: getattr(load, name) for name in HOST_CACHE_ARGUMENTS if getattr(load, name) is not None}
    if host_cache and not load.no_kv_offload:
        option = next(iter(host_cache)).replace("_", "-")
        raise UsageError(f"--{option} says how a KV cache in host memory is delivered, and this one is on the devices; add --no-kv-offload")
    return {
        "devices": load.devices,
        "tensor_split": load.tensor_split,
        "cache_type_k": load.cache_type_k,
        "cache_type_v": load.cache_type_v,
        "ctx_size": load.ctx_size or None,
        "ubatch_size": min(load.ubatch_size, load.batch_size),
        "parallel": load.parallel or n_prompts,
        "kv_unified": load.kv_unified,
        "exact": load.exact,
        "threads": load.threads,
        "deterministic": load.deterministic,
        "kv": "host" if load.no_kv_offload else "device",
        **{HOST_CACHE_ARGUMENTS[name]: _SWITCHES.get(value, value) for name, value in host_cache.items()},
    }


def generation_arguments(options: GenerationOptions) -> dict[str, Any]:
    """The arguments of `Model.generate` that `options` set; rules left out keep the model's defaults."""
    from numba_meta.models.text.sampling import sampling_options
    from numba_meta.models.text.stops import stop_texts

    if options.keep and not options.context_shift:
        raise UsageError("--keep says what a shift keeps, and none was asked for; add --context-shift")
    if options.repeat_last_n is not None and options.repeat_penalty is None:
        raise UsageError("--repeat-last-n says what --repeat-penalty looks at, and there is none; add it")
    chosen = {
        "top_k": options.top_k,
        "top_p": options.top_p,
        "min_p": options.min_p,
        "repetition_penalty": options.repeat_penalty,
        "repetition_last_n": options.repeat_last_n,
        "seed": options.seed,
    }
    sampling = {"temperature": options.temperature, **{name: value for name, value in chosen.items() if value is not None}}
    stop_texts(options.stop)
    sampling_options(sampling)
    shift = {"context_shift": True, "keep": options.keep} if options.context_shift else {}
    return {"stop": options.stop, "ignore_eos": options.ignore_eos, **shift, **sampling}


def generation_limit(predict: int, arguments: dict[str, Any]) -> int:
    """Tokens at most for `--predict`, where negative numbers mean as many as there are; -2 takes a context shift out of `arguments`."""
    if predict == UNTIL_FULL:
        arguments.pop("context_shift", None)
        arguments.pop("keep", None)
    return predict if predict >= 0 else UNLIMITED


def room_of_each(model: Model, prompts: Sequence[str | Sequence[int]], n_parts: int) -> int:
    """Tokens that every one of several prompts can be continued by in its part of the context, of `n_parts` equal ones."""
    longest = max(len(model.tokenize(prompt) if isinstance(prompt, str) else prompt) for prompt in prompts)
    part = model.plan.n_cells // n_parts
    if longest > part:
        room = f"its part of the context has room for {part}"
        raise ContextFullError(f"a prompt has {counted(longest, 'token')}, {room}; use a larger --ctx-size, or give it alone")
    return part - longest + 1  # nobody feeds the last one back


def until_full(pieces: Iterator[str], predict: int, note: Callable[[str], object]) -> Iterator[str]:
    """The same pieces. Where as many as there are were wanted, a full context ends them with a note instead of an error."""
    any_piece = False
    try:
        for piece in pieces:
            any_piece = True
            yield piece
    except ContextFullError:
        if predict >= 0 or not any_piece:
            raise
        note(CONTEXT_FULL)


PARSE_SPECIAL_OPTION = click.option(
    "--parse-special/--no-parse-special", default=False,
    help="Whether control tokens spelled in what you write, like <|im_end|>, become such tokens.  [default: they are text]",
)  # fmt: skip


def chat_prompt(model: Model, messages: Sequence[Message], parse_special: bool = False) -> list[int]:
    """The ids of a conversation in the model's own format, ready for its next answer. `parse_special`: of what the messages spell."""
    template = model.chat_template
    if template is None:
        raise UsageError("this model has no chat template (a base model continues text): use `generate` without --chat")
    return template.encode(messages, parse_special=parse_special)


def summary(model: Model) -> str:
    """The line after a generation: speeds, where the KV cache lies, memory per device."""
    timings = model.timings
    parts = [
        f"prompt {_speed(timings.n_prompt, timings.prompt_seconds)}",
        f"generation {_speed(timings.n_generated, timings.generation_seconds)}",
        cache_place(model),
        "memory " + ", ".join(f"{device} {format_bytes(n_bytes)}" for device, n_bytes in model.memory().items()),
    ]
    return "; ".join(parts)


def cache_place(model: Model) -> str:
    """Where the KV cache lies and how it travels: `KV cache in the host, pipelined`."""
    path = model.transport.stats["path"]
    return "KV cache on the device" if path == "device" else f"KV cache in the host, {path}"


def why_ordered(model: Model) -> str | None:
    """One line where deliveries were to be pipelined and are not; None where all is as it was asked for."""
    stats = model.transport.stats
    if stats["path"] != "ordered" or model.transport.options.depth == 0:
        return None
    return f"numba-meta: the KV cache is delivered in order, not pipelined: {stats['reason']}"


def after_generation(model: Model, verbosity: int) -> Iterator[str]:
    """The lines after a generation: how the cache travelled, as far as asked for, then the summary."""
    if verbosity:
        yield from transport_lines(model.transport.stats, list(model.memory()), verbosity)
    yield summary(model)
    if why := why_ordered(model):
        yield why


def transport_lines(stats: Mapping[str, Any], devices: Sequence[str], verbosity: int) -> Iterator[str]:
    """The transport plan of the latest step: what is staged, ring and bytes per device; from 2 on times, from 3 on what stayed ordered."""
    if stats["path"] == "device":
        return
    staged, ordered = stats["staged"], stats["ordered"]
    yield f"transport: {stats['path']}: {stats['reason']}"
    n, slot = len(staged) + len(ordered), format_bytes(stats["slot_bytes"])
    yield f"  {len(staged)} of {n} deliveries staged, {stats['n_slots']} slots of {slot}"
    shares = stats["shares"] or (0,) * len(devices)
    for j, device in enumerate(devices):
        ring, early, late = (format_bytes(stats[f"{what}_bytes"][j]) for what in ("ring", "early", "late"))
        yield f"  {device}: share {shares[j] / WHOLE_SHARE:.3f}, ring {ring}, early {early} and late {late} a step"
    reasons = Counter(ordered.values())
    for reason, count in reasons.items():
        yield f"  {count} ordered: {reason}"
    if verbosity >= 2 and stats["traced_steps"]:
        for j, device in enumerate(devices):
            yield f"  {device}: mean over {stats['traced_steps']} steps: {_times(stats, j)}"
    if verbosity >= 3:
        for name, reason in ordered.items():
            yield f"  ordered: {name}: {reason}"


def _times(stats: Mapping[str, Any], device: int) -> str:
    parts = (("in ordered copies", "ordered_copy"), ("waiting for deliveries", "consumer_wait"), ("waiting for slots", "recycle_wait"))
    return ", ".join(f"{1e3 * stats[f'{key}_seconds'][device]:.3f} ms {what}" for what, key in parts)


def traced(model: Model, verbosity: int) -> AbstractContextManager[object]:
    """Notes times of steps where they are asked for."""
    return model.record_timeline(TRACED_STEPS) if verbosity >= 2 else nullcontext()


def decisions(model: Model) -> Iterator[str]:
    """What was decided when the model was loaded, line by line."""
    yield from model.plan.table().splitlines()


def bench_ids(model: Model, n: int) -> list[int]:
    """`n` ids of ordinary text, the same ones every time; the first of the vocabulary where there is no tokenizer."""
    try:
        ids = model.tokenize(BENCH_TEXT, add_special=False)
    except ModelFileError:
        ids = list(range(min(BENCH_IDS, model.config.shape.n_vocab)))
    return (ids * -(-n // len(ids)))[:n]


def prompt_speed(model: Model, ids: Sequence[int]) -> float:
    """Tokens per second while the prompt `ids` is processed from an empty cache."""
    model.generate_ids(ids, max_tokens=1, ignore_eos=True)
    return model.timings.n_prompt / model.timings.prompt_seconds


def generation_speed(model: Model, ids: Sequence[int], n_generated: int) -> float:
    """Tokens per second of `n_generated` tokens that follow the context `ids`, which the cache may already hold."""
    model.generate_ids(ids, max_tokens=n_generated, ignore_eos=True, reuse_prefix=True)
    return model.timings.n_generated / model.timings.generation_seconds


def _speed(n_tokens: int, seconds: float) -> str:
    return f"{n_tokens} tokens" + (f" at {n_tokens / seconds:.1f} t/s" if seconds > 0 else "")
