"""`LoadedModel`: a file and its context, whatever they are used for: what was decided, the cache, states, timelines, and the end."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self

from numba_meta.arguments import file_path, whole_number
from numba_meta.errors import NumbaMetaError, UsageError
from numba_meta.interrupts import held_back
from numba_meta.models.architectures.config import ModelConfig
from numba_meta.models.cache.sequences import Cache
from numba_meta.models.cache.state_file import ModelIdentity, identify_model, load_state, save_state
from numba_meta.models.cache.transport import Transport
from numba_meta.models.files.gguf import GGUFFile
from numba_meta.models.loading.load_plan import LoadOptions, LoadPlan
from numba_meta.models.plan import DeviceFacts, ModelPlan
from numba_meta.models.running.context import Context
from numba_meta.models.running.timelines import MOST_STEPS, Timelines
from numba_meta.one_process import OneProcess
from numba_meta.split.policy import describe_cuts


class LoadedModel(OneProcess):
    """Owns the file and the context of a load. A context manager; after `close` every use is a `NumbaMetaError`."""

    def __init__(self, file: GGUFFile, config: ModelConfig, options: LoadOptions, plan: LoadPlan, context: Context) -> None:
        super().__init__()
        self.config = config
        self.context = context
        self._file = file
        self._options = options
        self._load_plan = plan
        self._open = True
        self._lock = threading.RLock()  # held for a step and the reading of its logits, by whichever Python thread asks
        self._last_call = 0  # its number among those of all ranks
        self._uses = 0  # how often the cache was begun anew: a generation whose cache another call has taken must not go on

    # ---- what was decided --------------------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> ModelPlan:
        """Cuts, shares, memory and threads as data; a table in a terminal and in a notebook."""
        self._check_open()
        context, plan = self.context, self._load_plan
        placement, weights = context.cache_plan.placement, context.weight_plan
        devices = tuple(
            DeviceFacts(
                device.name,
                device.n_threads,
                weights.n_bytes[j],
                placement.simple_bytes(j),
                placement.shares[j],
                context.workspace_bytes(j),
            )
            for j, device in enumerate(context.device)
        )
        return ModelPlan(
            model=self._file.path.name,
            architecture=self.config.architecture,
            isa=context.device.devices[0].level,
            exact=self._options.exact,
            cache_types=(plan.cache_types[0].name, plan.cache_types[1].name),
            n_cells=plan.cache_shape.n_cells,
            n_window_cells=plan.cache_shape.n_window_cells,
            n_sequences=plan.cache_shape.n_sequences,
            collectives_per_step=context.collectives_per_step,
            cuts=describe_cuts(plan.cuts),
            devices=devices,
            host_cache_bytes=context.host_cache_bytes,
            n_device_layers=plan.host_cache.n_device_layers if plan.host_cache else None,
            devices_of_ranks=tuple(map(len, plan.rank_devices)) if context.group else (),
        )

    def memory(self) -> dict[str, int]:
        """Bytes in use on each device."""
        self._check_open()
        return {device.name: device.allocated_bytes for device in self.context.device}

    # ---- the cache ---------------------------------------------------------------------------------------------------------------------

    @property
    def cache(self) -> Cache:
        """The sequences in the cache: their tokens, and clear, remove, copy, shift."""
        self._check_open()
        return Cache(self.context.cache, self._check_open, self._begin_call, self._begin_use)

    def save_state(self, path: str | Path) -> None:
        """Writes what the cache holds, all sequences, to a file that any split and place of the cache of this model can load.

        The file is replaced as a whole or not at all. Raises `NumbaMetaError` where it cannot be written.
        """
        self._check_open()
        self._check_alone("save a state")
        save_state(file_path("a state is saved to", path), self._identity, self.context.cache)

    def load_state(self, path: str | Path) -> None:
        """Makes the cache hold what `save_state` wrote; `generate(prompt, reuse_prefix=True)` goes on from there without computing it
        again.

        Raises `NumbaMetaError` for a damaged file, `UsageError` for one of another model or other cache types, `ContextFullError` where it
        does not fit; then the cache is as it was.
        """
        self._check_open()
        self._check_alone("load a state")
        path, identity = file_path("a state is loaded from", path), self._identity
        with held_back():
            load_state(path, identity, self.context.cache)
            self._uses += 1

    @cached_property
    def _identity(self) -> ModelIdentity:
        return identify_model(self._file, self.config.shape.n_layer, self.config.shape.n_vocab)

    def _begin_call(self, kind: str, prompts: Sequence[Sequence[int]] = (), **facts: object) -> None:
        """Over ranks: all say what they call, and go on once they have said the same."""
        if self.context.group is not None:
            self.context.group.begin(kind, prompts, **facts)
            self._last_call = self.context.group.calls.number

    def _begin_use(self) -> None:
        self._check_open()
        self._uses += 1

    # ---- how it runs -------------------------------------------------------------------------------------------------------------------

    @property
    def transport(self) -> Transport:
        """How a host-resident cache reaches the devices: `transport.stats` says what was decided and moved."""
        self._check_open()
        return self.context.transport

    def record_timeline(self, n_steps: int = 128) -> AbstractContextManager[Timelines]:
        """Notes what every stream of every device did, and when, in the steps within; keeps the latest `n_steps`.

            with model.record_timeline() as steps:
                model.generate_ids("Hello", max_tokens=8)
            steps[-1]  # a schedule.timeline.Timeline; draw it with inspect.draw_timeline

        Costs two looks at the clock per call of a step (some 50 ns), and nothing outside; the times also go into `transport.stats`. Raises
        `UsageError` for less than one step, and within another recording.
        """
        self._check_open()
        return self._timelines(whole_number("n_steps", n_steps, 1, MOST_STEPS))

    @contextmanager
    def _timelines(self, n_steps: int) -> Iterator[Timelines]:
        self._check_open()
        if self.context.traces is not None:
            raise UsageError("a timeline is being recorded already; end its `with` block first")
        steps = Timelines(n_steps)
        self.context.traces = steps.traces
        try:
            yield steps
        finally:
            self.context.traces = None

    # ---- life --------------------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Gives devices' memory and threads back and closes the file. Twice is once."""
        if self._process != os.getpid():
            return  # what a fork has of it goes with the fork
        with self._lock, held_back():
            if self._open:
                self._open = False
                if self.context.group is not None and sys.exc_info()[0] is None:  # of an error the others hear more
                    self.context.group.calls.leave(self._last_call)
                self.context.close()
                self.context.transport.close()
                self._file.close()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        devices = ", ".join(device.name for device in self.context.device)
        return f"<Model {self._file.path.name} ({self.config.architecture}) on {devices}>"

    def _check_open(self) -> None:
        self._check_process()
        if not self._open:
            raise NumbaMetaError("the model was closed; load it again")

    def _check_alone(self, what: str) -> None:
        if self.context.group is not None:
            n = self.context.group.launch.size
            raise UsageError(f"{n} ranks cannot {what} yet: each holds a part of the cache; use one process with several devices")
