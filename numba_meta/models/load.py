"""`nm.load`: from a name and options to a model on devices."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from numba_meta.arguments import switch
from numba_meta.devices.meta import MetaDevice
from numba_meta.errors import NumbaMetaWarning
from numba_meta.interrupts import held_back
from numba_meta.kernels.code_cache import tidy_after_compiling
from numba_meta.models.architectures.builder import BatchShape
from numba_meta.models.architectures.description import ModelDescription, describe_model
from numba_meta.models.files.gguf import GGUFFile, read_gguf
from numba_meta.models.files.pull import resolve_model
from numba_meta.models.loading.load_plan import LoadOptions, LoadPlan, beyond_training, check_call, check_options, plan_load
from numba_meta.models.model import Model
from numba_meta.models.running.context import Context
from numba_meta.models.running.ranks import RankGroup
from numba_meta.models.running.weights import load_weights, plan_weights
from numba_meta.models.text.template_check import check_chat
from numba_meta.models.text.tokenizer_check import refuse_text, tokenizer_problem
from numba_meta.tensor import Role

if TYPE_CHECKING:
    from numba_meta.comm.failure import RankLaunch

Progress = Callable[[str, int, int], None]


def load(
    name_or_path: str | Path,
    devices: str | Sequence[str] = "cpu:0",
    tensor_split: str | Sequence[float] | None = None,
    cache_type_k: str | None = None,
    cache_type_v: str | None = None,
    ctx_size: int | None = None,
    ubatch_size: int = 512,
    kv_unified: bool = True,
    parallel: int = 1,
    exact: bool = False,
    threads: int | None = None,
    kv: str = "device",
    kv_pipeline_depth: int | None = None,
    kv_pipeline_budget: int | None = None,
    kv_pipeline_headroom: int | None = None,
    kv_ring_by_share: bool | None = None,
    kv_gpu_layers: int | None = None,
    kv_cpu_pinned: bool | None = None,
    deterministic: bool = False,
    progress: Progress | None = None,
    ranks: RankLaunch | None = None,
    needs_text: bool = False,
    needs_chat: bool = False,
) -> Model:
    """Loads a GGUF model over devices. A known name (`smollm2`, `gemma3`) is pulled first where it is missing.

    Under `mpirun` all ranks load together, and each holds its own devices' pieces: all make the same calls of the model in the same order.
    ranks: the launch (`comm.failure.ranks`); None: entered here where a launcher started several.

    devices: `cpu:0`, or several: `cpu:0,cpu:0?mem=2G`; those of one rank, or of each: `cpu:0,cpu:0;cpu:0`. tensor_split: the proportions of
    all devices of all ranks; None: equal.
    cache_type_k, cache_type_v: f32, f16, bf16, q8_0 or q4_0; None: f16, or f32 with `exact`.
    ctx_size: tokens over all sequences; None: the model's. ubatch_size: tokens of a prompt that are computed in one step.
    parallel: sequences at once; kv_unified: they share all cells, else each has its part.
    exact: float32 activations. threads: over all devices of a process; None: the cores that it may use,
    shared with the other ranks there.
    kv: where the cache lies, `device` or `host`; from the host it is delivered layer by layer. What follows belongs to `host` alone:
    kv_gpu_layers (0): first layers whose cache stays on the devices all the same. kv_cpu_pinned=False: deliveries are ordered.
    kv_pipeline_depth (1): deliveries go so many splits ahead, 0: in order, through a ring of at most kv_pipeline_budget (128) MiB a
    device, 0: no cap, that leaves kv_pipeline_headroom (512) MiB free; kv_ring_by_share=False: every device holds whole slots.
    deterministic: no sum crosses devices: any number of devices and any batch give the same bits, at the price of more gathers.
    progress(what, done, total): told about long work.
    needs_text: refuse a file whose tokenizer cannot be built, before weights are read; else that is a warning, since ids need none.
    needs_chat: refuse one without a chat template that can be used, too.

    Raises `UsageError` for impossible options, `ModelFileError` for the file, `OutOfMemoryError` where a device has no room. Warns
    (`NumbaMetaWarning`) for a context longer than what the model was trained with, and for a tokenizer that cannot be built.
    """
    check_call(name_or_path, progress, ranks)
    needs = _Needs(switch("needs_text", needs_text), switch("needs_chat", needs_chat))
    options = LoadOptions(
        devices,
        tensor_split,
        cache_type_k,
        cache_type_v,
        ctx_size,
        ubatch_size,
        kv_unified,
        parallel,
        exact,
        threads,
        kv,
        kv_pipeline_depth,
        kv_pipeline_budget,
        kv_pipeline_headroom,
        kv_ring_by_share,
        kv_gpu_layers,
        kv_cpu_pinned,
        deterministic,
    )
    launch = ranks or _launch()
    if launch is not None and launch.size > 1:
        return _load_over_ranks(str(name_or_path), options, progress, launch, needs)
    check_options(options)
    file = read_gguf(resolve_model(str(name_or_path), progress))
    try:
        model = describe_model(file)
        needs.check(file, model)
        plan = plan_load(model, options)
        context = load_context(file, model, options, plan, progress)
    except BaseException as error:
        file.close()
        _let_go_of_locals(error)
        raise
    return Model(file, model.config, options, plan, context)


def _let_go_of_locals(error: BaseException) -> None:
    """Whoever keeps the error of a load would keep what its functions held: views of weights."""
    told: BaseException | None = error
    while told is not None:
        traceback.clear_frames(told.__traceback__)
        told = told.__context__


def _launch() -> RankLaunch | None:
    """The launch that this process belongs to; None where it works alone."""
    from numba_meta.comm.launch import detect_launch

    if detect_launch().alone:
        return None
    from numba_meta.comm.failure import enter_ranks

    return enter_ranks()


@dataclass(frozen=True)
class _Needs:
    """What a load is for, besides ids."""

    text: bool
    chat: bool

    def check(self, file: GGUFFile, model: ModelDescription, warns: bool = True) -> None:
        """Raises `ModelFileError` for a tokenizer that cannot be built and that text needs, else warns of it; the same for chats."""
        problem = tokenizer_problem(file.metadata, model.config.shape.n_vocab)
        if self.text or self.chat:
            refuse_text(file.path.name, problem)
        if self.chat:
            check_chat(file.metadata, file.path.name)
        if problem is not None and warns:
            warnings.warn(f"{file.path.name}: {problem}; ids alone can be given and come back", NumbaMetaWarning, stacklevel=3)


def _load_over_ranks(name: str, options: LoadOptions, progress: Progress | None, launch: RankLaunch, needs: _Needs) -> Model:
    """Joins the other ranks before any memory is taken, then loads this rank's pieces."""
    from numba_meta.comm.calls import Call
    from numba_meta.models.loading.load_ranks import RankLoad

    load, calls = RankLoad(launch, options), launch.calls
    calls.begin(Call("load"))
    try:
        with calls:
            file, model, plan, group = load.join(
                lambda: read_gguf(resolve_model(name, progress)),
                lambda file, model: needs.check(file, model, not launch.rank),
            )
            context = load_context(file, model, options, plan, progress, group)
    except BaseException as error:
        load.close()
        _let_go_of_locals(error)
        raise
    return Model(file, model.config, options, plan, context)


def load_context(
    file: GGUFFile,
    model: ModelDescription,
    options: LoadOptions,
    plan: LoadPlan,
    progress: Progress | None,
    group: RankGroup | None = None,
) -> Context:
    """Carries a planned load out: weights on their devices, an empty cache."""
    with held_back():  # what is opened and taken here is either the context's or given back
        return _load_context(file, model, options, plan, progress, group)


def _load_context(
    file: GGUFFile, model: ModelDescription, options: LoadOptions, plan: LoadPlan, progress: Progress | None, group: RankGroup | None
) -> Context:
    smallest = model.graph(BatchShape(1, 1, 1, 1, 1, 1 if model.config.window else 0, *plan.cache_types))
    weight_leaves = [leaf for leaf in smallest.leaves if leaf.role is Role.WEIGHT]
    device = MetaDevice.open(plan.specs, plan.n_threads)
    own = group.ranks.own if group else None
    weight_plan = plan_weights(weight_leaves, plan.cuts.weights, len(device), own, device.kind, device.alignment)

    if (warning := beyond_training(model.config, plan.cache_shape)) and (group is None or group.ranks.rank == 0):
        warnings.warn(warning, NumbaMetaWarning, stacklevel=4)

    def report(done: int, total: int) -> None:
        if progress:
            progress("loading", done, total)

    try:
        with _told_of_compiling(progress), tidy_after_compiling():
            weights = load_weights(file, model.tensors, weight_leaves, weight_plan, device, report)
            context = Context(
                model.graph, plan.cuts, device, (weight_plan, weights), plan.cache_shape, plan.cache_types, options.exact, plan.ubatch_size,
                plan.few_rows_apart,
                plan.host_cache,
                options.deterministic,
                group,
            )
            if group is not None:
                group.leaders_first(context.compile)
            context.prepare()
    except BaseException:
        device.close()
        raise
    return context


@contextmanager
def _told_of_compiling(progress: Progress | None) -> Iterator[None]:
    """Passes on what is compiled: slow, and only once on a machine."""
    from numba_meta.kernels.code_cache import on_compile

    n_compiled = 0

    def listener(kernel: str) -> None:
        nonlocal n_compiled
        n_compiled += 1
        if progress:
            progress("compiling kernels for this machine (only once)", n_compiled, 0)

    on_compile.append(listener)
    try:
        yield
    finally:
        on_compile.remove(listener)
        if progress and n_compiled:
            progress("compiling kernels for this machine (only once)", n_compiled, n_compiled)
