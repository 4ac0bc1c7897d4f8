"""`Model`: text and ids in, text, ids and logits out."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from numba_meta.errors import ContextFullError, ModelFileError, NumbaMetaError, UsageError
from numba_meta.models.arguments import sampling_options, stop_texts, token_ids, until_stop
from numba_meta.models.cache import Cache
from numba_meta.models.cache_operations import choose_shift
from numba_meta.models.chat import ChatTemplate
from numba_meta.models.config import ModelConfig
from numba_meta.models.context import Context
from numba_meta.models.gguf import GGUFFile
from numba_meta.models.load_plan import LoadOptions, LoadPlan
from numba_meta.models.plan import DeviceFacts, ModelPlan
from numba_meta.models.recordings import SMALL_ROWS, Capacity
from numba_meta.models.sampling import Sampler, SamplingOptions
from numba_meta.models.state_file import ModelIdentity, identify_model, load_state, save_state
from numba_meta.models.timelines import Timelines
from numba_meta.models.timings import Timings
from numba_meta.models.tokenizer import StreamDetokenizer, Tokenizer
from numba_meta.models.transport import Transport
from numba_meta.split.policy import describe_cuts

Logits = npt.NDArray[np.float32]
_LOGIT_ROWS = 64  # rows of a step whose logits are all wanted: bounds their memory


class Model:
    """A loaded model. A context manager; `close` gives everything back.

    One generation at a time: each call begins from a cleared cache unless it says otherwise.
    """

    def __init__(self, file: GGUFFile, config: ModelConfig, options: LoadOptions, plan: LoadPlan, context: Context) -> None:
        self.config = config
        self.context = context
        self.timings = Timings()
        self._file = file
        self._options = options
        self._load_plan = plan
        self._open = True
        self._lock = threading.RLock()  # held for a step and the reading of its logits, by whichever Python thread asks
        self._uses = 0  # how often the cache was begun anew: a generation whose cache another call has taken must not go on

    # ---- text and ids ------------------------------------------------------------------------------------------------------------------

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Built from the file's vocabulary at its first use."""
        tokenizer = Tokenizer.from_metadata(self._file.metadata)
        if tokenizer.n_vocab > self.config.shape.n_vocab:
            raise ModelFileError(
                f"{self._file.path.name}: {tokenizer.n_vocab} tokens in the vocabulary, {self.config.shape.n_vocab} in the embedding; "
                "expected no more"
            )
        return tokenizer

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The model's chat template; None for a base model."""
        return ChatTemplate.from_metadata(self._file.metadata, self.tokenizer)

    def tokenize(self, text: str, add_special: bool | None = None, parse_special: bool = False) -> list[int]:
        """Ids of a text. `add_special`: BOS and EOS as the model's file says (None), always or never."""
        return self.tokenizer.encode(text, add_special, parse_special)

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of ids, without control tokens."""
        return self.tokenizer.decode(ids)

    # ---- generation --------------------------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: str | Sequence[int],
        max_tokens: int = 128,
        *,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        reuse_prefix: bool = False,
        context_shift: bool = False,
        keep: int = 0,
        **sampling: Any,
    ) -> Iterator[str]:
        """Text pieces that follow a prompt (text or ids), whole characters each; ends at an end-of-generation token or a stop text.

        A context that is full before that is a `ContextFullError`, after the text that fits; with `context_shift` the oldest half of what
        is not among the first `keep` tokens is forgotten instead, as often as needed (`keep` -1: the prompt; a BOS at its beginning is
        always kept).

        `sampling`: temperature, top_k, top_p, min_p, repetition_penalty, repetition_last_n, seed. `reuse_prefix` keeps what the cache
        already holds of the prompt (a conversation that grows).
        """
        stops = stop_texts(stop)
        ids = self._prompt_ids(prompt)
        stream = StreamDetokenizer(self.tokenizer, at_start=not ids)
        tokens = self._generated(ids, max_tokens, ignore_eos, reuse_prefix, sampling, self._kept_on_shift(ids, context_shift, keep))
        return until_stop(self._pieces(tokens, stream), stops)

    def _pieces(self, tokens: Iterator[int], stream: StreamDetokenizer) -> Iterator[str]:
        for token in tokens:
            if piece := stream.push(token):
                yield piece
        if piece := stream.flush():
            yield piece

    def generate_ids(
        self,
        prompt: str | Sequence[int],
        max_tokens: int = 128,
        *,
        ignore_eos: bool = False,
        reuse_prefix: bool = False,
        context_shift: bool = False,
        keep: int = 0,
        **sampling: Any,
    ) -> list[int]:
        """Ids that follow a prompt; ends before an end-of-generation id unless `ignore_eos`. The other options are those of `generate`.

        Raises `ContextFullError` where they do not fit.
        """
        ids = self._prompt_ids(prompt)
        with self._lock:  # threads take turns
            return list(self._generated(ids, max_tokens, ignore_eos, reuse_prefix, sampling, self._kept_on_shift(ids, context_shift, keep)))

    def generate_many(
        self,
        prompts: Sequence[str | Sequence[int]],
        max_tokens: int = 128,
        *,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        **sampling: Any,
    ) -> list[list[int]]:
        """One list of ids per prompt, decoded together as sequences of one batch; more prompts than `parallel` take turns.

        A sequence ends once its text holds a stop text, whose tokens are among its ids.
        """
        from numba_meta.models.many import generate_many

        all_ids = [self._prompt_ids(prompt) for prompt in prompts]
        options = self._sampling(sampling)
        for ids in all_ids:
            self._check_room(ids, max_tokens)
        stops, ends = stop_texts(stop), self._ends(ignore_eos)

        def is_over(generated: Sequence[int]) -> bool:
            return bool(stops) and any(text in self.detokenize(generated) for text in stops)

        with self._lock:
            self._reset()
            results, self.timings = generate_many(self.context, all_ids, max_tokens, ends, options, is_over)
            self._reset()
        return results

    def _generated(
        self,
        ids: list[int],
        max_tokens: int,
        ignore_eos: bool,
        reuse_prefix: bool,
        sampling: dict[str, Any],
        kept_on_shift: int | None = None,
    ) -> Iterator[int]:
        """Ids one by one. The last one is not fed back: nobody reads what would follow. `kept_on_shift` None: no shift."""
        self._check_open()
        sampler, ends = Sampler(self._sampling(sampling)), self._ends(ignore_eos)
        self._check_room(ids, max_tokens)
        begin = time.perf_counter()
        recent = list(ids)
        with self._lock:
            kept = self._keep_prefix(ids) if reuse_prefix else self._reset()
            logits = self._feed(ids[kept:])
            token, use = sampler.sample(logits, recent) if max_tokens else -1, self._uses
        start = time.perf_counter()
        self.timings = Timings(len(ids) - kept, start - begin)
        for n in range(max_tokens):
            if token in ends:
                return
            yield token
            recent.append(token)
            if n + 1 == max_tokens:
                return
            with self._lock:  # logits are a view: another thread's step would overwrite them
                self._check_open()
                if use != self._uses:
                    raise UsageError("another call has used the model since this generation began; finish one before the next begins")
                if kept_on_shift is not None and not self.context.cells.room(0):
                    self.context.cache.shift(0, *choose_shift(self.context.cells.length(0), kept_on_shift))
                token = sampler.sample(self._step(token), recent)
            self.timings = Timings(len(ids) - kept, start - begin, n + 1, time.perf_counter() - start)

    def _feed(self, ids: Sequence[int]) -> Logits:
        """Appends a prompt to sequence 0 in steps of `ubatch_size`; the logits of its last token."""
        n = self.context.ubatch_size
        logits: Logits | None = None
        for at in range(0, len(ids), n):
            chunk = ids[at : at + n]
            logits = self.context.decode(chunk, [0] * len(chunk), [len(chunk) - 1])[0]
        assert logits is not None
        return logits

    def _step(self, token: int) -> Logits:
        row: Logits = self.context.decode((token,), (0,), (0,))[0]
        return row

    # ---- logits ------------------------------------------------------------------------------------------------------------------------

    def logits(self, ids: Sequence[int], last: bool = False) -> Logits:
        """float32 `[len(ids), n_vocab]`, or `[n_vocab]` of the last row, from a cleared cache."""
        checked = self._prompt_ids(ids)
        self._check_room(checked, 0)
        with self._lock:
            self._reset()
            if last:
                return self._feed(checked).copy()
            return np.concatenate([rows.copy() for rows in self._feed_all(checked)])

    def _feed_all(self, ids: Sequence[int]) -> Iterator[Logits]:
        """Appends ids to sequence 0; the logits of all, some rows at a time: views that the next step overwrites."""
        n = min(_LOGIT_ROWS, self.context.ubatch_size)
        capacity = Capacity(n, n) if n > SMALL_ROWS else None
        for at in range(0, len(ids), n):
            chunk = ids[at : at + n]
            rows = self.context.decode(chunk, [0] * len(chunk), range(len(chunk)), capacity)
            yield rows

    def perplexity(self, text: str, ctx_size: int = 512) -> float:
        """exp of the mean negative log-likelihood over the second half of each whole chunk of `ctx_size` tokens.

        Each chunk begins from a cleared cache, with BOS in place of its first token where the model adds one. Raises `UsageError` for too
        short a text.
        """
        ids = self.tokenize(text)
        n_chunks = len(ids) // ctx_size if ctx_size >= 3 else 0
        if n_chunks == 0:
            raise UsageError(
                f"a text of {len(ids)} tokens has no whole chunk of {ctx_size}; use a longer text or a smaller ctx_size of at least 3"
            )
        bos = self.tokenizer.bos_id if self.tokenizer.vocabulary.add_bos else None
        total, count, first = 0.0, 0, ctx_size // 2
        with self._lock:
            for chunk in range(n_chunks):
                part = self._prompt_ids(ids[chunk * ctx_size : (chunk + 1) * ctx_size])
                self._check_room(part, 0)
                self._reset()
                self._feed(part[:first] if bos is None else [bos, *part[1:first]])
                targets = iter(part[first + 1 :])
                for rows in self._feed_all(part[first:-1]):
                    for row, target in zip(rows.astype(np.float64), targets, strict=False):
                        peak = row.max()
                        total += float(peak + np.log(np.exp(row - peak).sum()) - row[target])
                        count += 1
        return math.exp(total / count)

    # ---- what was decided --------------------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> ModelPlan:
        """Cuts, shares, memory and threads as data; a table in a terminal and in a notebook."""
        from numba_meta.kernels.cpu.isa import detect

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
            isa=detect().name.lower().replace("_", " "),
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

    # ---- the cache ---------------------------------------------------------------------------------------------------------------------

    @property
    def cache(self) -> Cache:
        """The sequences in the cache: their tokens, and clear, remove, copy, shift."""
        return Cache(self.context.cache, self._begin_use)

    def save_state(self, path: str | Path) -> None:
        """Writes what the cache holds, all sequences, to a file that any split and place of the cache of this model can load.

        The file is replaced as a whole or not at all. Raises `NumbaMetaError` where it cannot be written.
        """
        self._check_open()
        self._check_alone("save a state")
        save_state(path, self._identity, self.context.cache)

    def load_state(self, path: str | Path) -> None:
        """Makes the cache hold what `save_state` wrote; `generate(prompt, reuse_prefix=True)` goes on from there without computing it
        again.

        Raises `NumbaMetaError` for a damaged file, `UsageError` for one of another model or other cache types, `ContextFullError` where it
        does not fit; then the cache is as it was.
        """
        self._check_open()
        self._check_alone("load a state")
        load_state(path, self._identity, self.context.cache)
        self._uses += 1

    @cached_property
    def _identity(self) -> ModelIdentity:
        return identify_model(self._file, self.config.shape.n_layer, self.config.shape.n_vocab)

    def _begin_use(self) -> None:
        self._check_open()
        self._uses += 1

    @property
    def transport(self) -> Transport:
        """How a host-resident cache reaches the devices: `transport.stats` says what was decided and moved."""
        return self.context.transport

    @contextmanager
    def record_timeline(self, n_steps: int = 128) -> Iterator[Timelines]:
        """Notes what every stream of every device did, and when, in the steps within; keeps the latest `n_steps`.

            with model.record_timeline() as steps:
                model.generate_ids("Hello", max_tokens=8)
            steps[-1]  # a schedule.timeline.Timeline; draw it with inspect.draw_timeline

        Costs two looks at the clock per call of a step (some 50 ns), and nothing outside; the times also go into `transport.stats`. Raises
        `UsageError` for less than one step, and within another recording.
        """
        self._check_open()
        if self.context.traces is not None:
            raise UsageError("a timeline is being recorded already; end its `with` block first")
        steps = Timelines(n_steps)
        self.context.traces = steps.traces
        try:
            yield steps
        finally:
            self.context.traces = None

    def memory(self) -> dict[str, int]:
        """Bytes in use on each device."""
        return {device.name: device.allocated_bytes for device in self.context.device}

    # ---- life --------------------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Gives devices' memory and threads back and unmaps the file. Twice is once."""
        with self._lock:
            if self._open:
                self._open = False
                self.context.close()
                self._file.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        devices = ", ".join(device.name for device in self.context.device)
        return f"<Model {self._file.path.name} ({self.config.architecture}) on {devices}>"

    # ---- checks ------------------------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if not self._open:
            raise NumbaMetaError("the model was closed; load it again")

    def _check_alone(self, what: str) -> None:
        if self.context.group is not None:
            n = self.context.group.launch.size
            raise UsageError(f"{n} ranks cannot {what} yet: each holds a part of the cache; use one process with several devices")

    def _sampling(self, sampling: dict[str, Any]) -> SamplingOptions:
        options, group = sampling_options(sampling), self.context.group
        return options if group is None else group.with_seed(options)

    def _prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        self._check_open()
        ids = self.tokenize(prompt, parse_special=False) if isinstance(prompt, str) else token_ids(prompt)
        n_vocab = self.config.shape.n_vocab
        wrong = next((i for i in ids if not 0 <= i < n_vocab), None)
        if wrong is not None:
            raise UsageError(f"token id {wrong} is not in the vocabulary; expected 0 to {n_vocab - 1}")
        if not ids:
            raise UsageError("the prompt is empty; give at least one token")
        return ids

    def _check_room(self, ids: Sequence[int], max_tokens: int) -> None:
        if type(max_tokens) is not int or max_tokens < 0:
            raise UsageError(f"max_tokens {max_tokens!r} is impossible; expected a whole number, 0 or more")
        room = self.context.shape.n_positions
        if len(ids) > room:
            raise ContextFullError(
                f"the prompt has {len(ids)} tokens, the context has room for {room}; shorten it or use a larger --ctx-size"
            )

    def _kept_on_shift(self, ids: Sequence[int], context_shift: bool, keep: int) -> int | None:
        """How many tokens stay when the context is full; None: it does not shift."""
        if keep < -1:
            raise UsageError(f"keep {keep} is impossible; expected a number of tokens, or -1 for the prompt")
        if not context_shift:
            return None
        begins = self.tokenizer.vocabulary.add_bos and ids[0] == self.tokenizer.bos_id
        return len(ids) if keep == -1 else max(keep, 1 if begins else 0)

    def _ends(self, ignore_eos: bool) -> frozenset[int]:
        return frozenset() if ignore_eos else self.tokenizer.eog_ids

    def _reset(self) -> int:
        self.context.cells.clear()
        self._uses += 1
        return 0

    def _keep_prefix(self, ids: Sequence[int]) -> int:
        """Keeps the longest common beginning of cache and prompt; how many tokens that is. The prompt's last one is always computed."""
        cells = self.context.cells
        cached, n = cells.tokens(0), 0
        while n < min(len(ids) - 1, len(cached)) and ids[n] == cached[n]:
            n += 1
        try:
            cells.truncate(0, n)
        except UsageError:  # a sliding window has already overwritten what would be needed
            n = 0
            cells.truncate(0, 0)
        self._uses += 1
        return n
