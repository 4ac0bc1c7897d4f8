"""Options that several commands take, named as users of llama.cpp know them where the meaning is the same."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from numba_meta.dtypes import CACHE_TYPES

CACHE_TYPE = click.Choice([dtype.name for dtype in CACHE_TYPES])


class WholeNumber(click.IntRange):
    """A whole number from `least` up, or one of `special`, negative numbers that mean something else (llama.cpp's -1)."""

    def __init__(self, least: int, special: tuple[int, ...] = ()) -> None:
        super().__init__(min=least)
        self._special = special

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number; out of range is an error that names what is special."""
        number = click.INT.convert(value, param, ctx)
        if number in self._special or number >= (self.min or 0):
            return number
        others = "".join(f", or {each}" for each in self._special)
        self.fail(f"{number} is not a whole number of {self.min} or more{others}.", param, ctx)

    def _describe_range(self) -> str:
        return ", ".join([*map(str, self._special[::-1]), f"x>={self.min}"])  # in the help


class Text(click.types.StringParamType):
    """Text for the model. Where the locale could not read an argument (LC_ALL=C), its bytes are UTF-8 all the same."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The text; bytes that are no UTF-8 are an error that names the first one."""
        if not isinstance(value, str) or not any("\ud800" <= character <= "\udfff" for character in value):
            return value
        try:
            return value.encode("utf-8", "surrogateescape").decode("utf-8")  # Python stands a surrogate in for a byte that it cannot read
        except UnicodeError as error:
            where = f": byte {error.object[error.start]:#04x} at {error.start}" if isinstance(error, UnicodeDecodeError) else ""
            self.fail(f"this is not valid UTF-8 text{where}; write it to a UTF-8 file and use --file.", param, ctx)


TEXT = Text()


def minus_one(meaning: Any) -> Callable[[click.Context, click.Parameter, int | None], Any]:
    """A callback that puts `meaning` in the place of -1."""
    return lambda _context, _parameter, value: meaning if value == -1 else value


def finite(_context: click.Context, _parameter: click.Parameter, value: float | None) -> float | None:
    """Refuse `nan` and infinity, which the bounds of a range let pass."""
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a finite number.")
    return value


def counts(minimum: int) -> Callable[[str], tuple[int, ...]]:
    """A reader of lists like `128,512` of whole numbers from `minimum` up."""

    def read(text: str | tuple[int, ...]) -> tuple[int, ...]:
        if isinstance(text, tuple):
            return text
        if not all(part.strip().isdecimal() and int(part) >= minimum for part in text.split(",")):
            raise click.BadParameter(f"{text!r} is not a list of whole numbers from {minimum} up, like 128,512.")
        return tuple(int(part) for part in text.split(","))

    return read


def places(text: str | tuple[bool, ...]) -> tuple[bool, ...]:
    """Read a list like `0,1`: whether the KV cache is in host memory."""
    if isinstance(text, tuple):
        return text
    if not all(part.strip() in ("0", "1") for part in text.split(",")):
        raise click.BadParameter(f"{text!r} is not a list of 0 (on the devices) and 1 (in the host), like 0,1.")
    return tuple(part.strip() == "1" for part in text.split(","))


def cache_types(text: str) -> tuple[str, ...]:
    """Read a list like `f16,q8_0` of types of the KV cache."""
    types = tuple(part.strip() for part in text.split(","))
    for name in types:
        if name not in CACHE_TYPE.choices:
            raise click.BadParameter(f"{name!r} is not one of {', '.join(CACHE_TYPE.choices)}.")
    return types


@dataclass(frozen=True)
class LoadOptions:
    """How a model is loaded: the arguments of `numba_meta.load` that the command line offers. `ctx_size` 0 is the model's own.

    None leaves Python's default; what says how a cache in host memory travels is refused without one (`no_kv_offload`).
    """

    devices: str = "cpu:0"
    tensor_split: str | None = None
    cache_type_k: str | None = None
    cache_type_v: str | None = None
    ctx_size: int = 0
    batch_size: int = 2048
    ubatch_size: int = 512
    parallel: int | None = None
    kv_unified: bool = True
    exact: bool = False
    threads: int | None = None
    deterministic: bool = False
    no_kv_offload: bool = False
    kv_pipeline_depth: int | None = None
    kv_pipeline_budget: int | None = None
    kv_pipeline_headroom: int | None = None
    kv_ring: str | None = None
    kv_gpu_layers: int | None = None
    kv_cpu_pinned: str | None = None


@dataclass(frozen=True)
class GenerationOptions:
    """How the next token is chosen and when to stop; None leaves a rule out."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    context_shift: bool = False
    keep: int = 0
    repeat_last_n: int | None = None


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def _number(*names: str, least: int = 1, special: tuple[int, ...] = (), **settings: Any) -> Decorator:
    return click.option(*names, type=WholeNumber(least, special), metavar="N", **settings)


def _fraction(*names: str, **settings: Any) -> Decorator:
    return click.option(*names, type=click.FloatRange(min=0, max=1), callback=finite, metavar="P", **settings)


VERBOSE_OPTION = click.option(
    "-v", "--verbose", count=True,
    help="Print what was decided: cuts, memory, threads, transport; -vv: where the time of a step went; -vvv: what stayed ordered.",
)  # fmt: skip
RING_OPTIONS: tuple[Decorator, ...] = (
    _number("--kv-pipeline-budget", least=0, help="MiB of a device for deliveries; 0: no cap.  [default: 128]"),
    _number("--kv-pipeline-headroom", least=0, help="MiB that stay free on every device beside that.  [default: 512]"),
    click.option(
        "--kv-ring", type=click.Choice(["share", "whole"]),
        help="Each device holds its share of a delivery's slot, or room for all of it.  [default: share]",
    ),
    _number("--kv-gpu-layers", least=0, help="First layers whose cache stays on the devices.  [default: 0]"),
    click.option(
        "--kv-cpu-pinned", type=click.Choice(["on", "off"]),
        help="Pin the host's cache; without that deliveries are ordered.  [default: on]",
    ),
)  # fmt: skip
HOST_CACHE_OPTIONS: tuple[Decorator, ...] = (
    click.option("-nkvo", "--no-kv-offload", is_flag=True, help="Keep the KV cache in host memory and deliver it layer by layer."),
    _number("--kv-pipeline-depth", least=0, help="Layers that are delivered ahead; 0: each right before its use.  [default: 1]"),
    *RING_OPTIONS,
)
BATCH_OPTIONS: tuple[Decorator, ...] = (
    _number("-b", "--batch-size", default=2048, show_default=True, help="Upper limit of --ubatch-size."),
    _number("-ub", "--ubatch-size", default=512, show_default=True, help="Prompt tokens computed at once."),
    click.option("--exact", is_flag=True, help="32-bit activations and cache instead of 8 and 16 bits."),
)
LOAD_OPTIONS: tuple[Decorator, ...] = (
    click.option(
        "-dev", "--device", "devices", default="cpu:0", show_default=True, metavar="LIST",
        help="Devices to run on: cuda:0 is a GPU, cuda:0,cuda:1 are two, cpu:0,cpu:0 two devices on this CPU; cpu:0?mem=2G has 2 GiB; "
        "; separates the lists of ranks.",
    ),
    click.option("-ts", "--tensor-split", metavar="W,…", help="What part of the model each device gets, like 55,45.  [default: equal]"),
    _number(
        "-t", "--threads", special=(-1,), callback=minus_one(None),
        help="CPU threads over all devices of a process; -1: all cores.  [default: all cores]",
    ),
    _number("-c", "--ctx-size", least=0, default=0, help="Tokens that the KV cache has room for.  [default: what the model allows]"),
    click.option("-ctk", "--cache-type-k", type=CACHE_TYPE, help="Type of the cached keys.  [default: f16, f32 with --exact]"),
    click.option("-ctv", "--cache-type-v", type=CACHE_TYPE, help="Type of the cached values.  [default: f16, f32 with --exact]"),
    *BATCH_OPTIONS,
    click.option("--deterministic", is_flag=True, help="The same bits on any number of devices, for more exchanges between them."),
    *HOST_CACHE_OPTIONS,
)  # fmt: skip
SEQUENCE_OPTIONS: tuple[Decorator, ...] = (
    _number(
        "-np", "--parallel", special=(-1,), callback=minus_one(None), help="Sequences decoded together.  [default, and -1: one per prompt]"
    ),
    click.option(
        "-kvu/-no-kvu", "--kv-unified/--no-kv-unified", default=True,
        help="Sequences share the KV cache's cells, or each has its part.  [default: share]",
    ),
)  # fmt: skip
GENERATION_OPTIONS: tuple[Decorator, ...] = (
    click.option(
        "--temp", "--temperature", "temperature", type=click.FloatRange(min=0, clamp=True), callback=finite, default=0.0,
        show_default=True, metavar="T", help="0 takes the likeliest token, more gives more surprise.",
    ),
    _number("--top-k", least=0, special=(-1,), callback=minus_one(0), help="Choose among the N likeliest; 0 or -1: all."),
    _fraction("--top-p", help="Choose among the likeliest that make up P."),
    _fraction("--min-p", help="Leave out what is less likely than P times the likeliest."),
    click.option(
        "--repeat-penalty", type=click.FloatRange(min=0, min_open=True), callback=finite, metavar="X",
        help="Above 1: tokens of the text so far become less likely.",
    ),
    _number("--repeat-last-n", least=0, special=(-1,), help="Of the last N tokens; -1: all.  [default: 64]"),
    _number(
        "-s", "--seed", least=0, special=(-1,), callback=minus_one(None),
        help="The same seed gives the same text; -1: another each time.  [default: another each time]",
    ),
    click.option("--stop", type=TEXT, multiple=True, metavar="TEXT", help="Stop before this text; may be given again."),
    click.option("--ignore-eos", is_flag=True, help="Go on past the end that the model chooses."),
    click.option(
        "--context-shift/--no-context-shift", default=False,
        help="When the context is full, forget the oldest half and go on (what was computed with it in sight stays).  [default: stop]",
    ),
    click.option(
        "--keep", type=WholeNumber(0, (-1,)), default=0, metavar="N", help="First tokens that a shift keeps; -1: the prompt.  [default: 0]"
    ),
)  # fmt: skip


def predict_option(least: int, default: int) -> Decorator:
    """`-n`: as many tokens, or as many as there are."""
    return click.option(
        "-n", "--predict", "--n-predict", "predict", type=WholeNumber(least, (-1, -2)), default=default, show_default=True, metavar="N",
        help="Tokens at most; -1: until the model ends or the context is full (no limit with --context-shift); -2: as -1, without a shift.",
    )  # fmt: skip


def listed(*names: str, read: Callable[[Any], tuple[Any, ...]], default: str | None = None, **settings: Any) -> Decorator:
    """An option whose values are lists, which may be given again: all of them count. None where it is not given and has no default."""

    def join(_context: click.Context, _parameter: click.Parameter, lists: tuple[tuple[Any, ...], ...]) -> tuple[Any, ...] | None:
        return tuple(value for each in lists for value in each) or None

    usual = () if default is None else (default,)
    return click.option(*names, type=read, multiple=True, default=usual, show_default=bool(usual), callback=join, **settings)


def with_options(*options: Decorator) -> Decorator:
    """Give a command `options`, which its help lists in their order."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def gathered(argument: str, kind: type[Any], *options: Decorator) -> Decorator:
    """Give a command `options` and hand their values to it as one `kind`, a dataclass, in `argument`."""
    names = {field.name for field in dataclasses.fields(kind)}

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def gather(**values: Any) -> Any:
            own = {name: values.pop(name) for name in names & values.keys()}
            return command(**{argument: kind(**own)}, **values)

        return with_options(*options)(gather)

    return decorate
