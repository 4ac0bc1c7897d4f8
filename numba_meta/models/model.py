"""`Model`: text and ids in, text, ids and logits out."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import cached_property
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from numba_meta.arguments import listed_prompts, switch, token_ids, whole_number
from numba_meta.errors import ModelFileError, UsageError, counted
from numba_meta.interrupts import held_back
from numba_meta.models.architectures.config import ModelConfig
from numba_meta.models.cache.operations import choose_shift
from numba_meta.models.files.gguf import GGUFFile
from numba_meta.models.generation.timings import Timings
from numba_meta.models.loaded import LoadedModel
from numba_meta.models.loading.load_plan import LoadOptions, LoadPlan
from numba_meta.models.running.context import Context
from numba_meta.models.running.ranks import RankCall
from numba_meta.models.running.recordings import Capacity
from numba_meta.models.running.step_shape import SMALL_ROWS
from numba_meta.models.text.chat import ChatTemplate
from numba_meta.models.text.sampling import Sampler, SamplingOptions, sampling_options
from numba_meta.models.text.stops import stop_texts, until_stop
from numba_meta.models.text.tokenizer import StreamDetokenizer, Tokenizer
from numba_meta.models.text.tokenizer_check import check_tokenizer, n_choosable
from numba_meta.models.text.vocabulary import Vocabulary, read_vocabulary

Logits = npt.NDArray[np.float32]
_LOGIT_ROWS = 64  # rows of a step whose logits are all wanted: bounds their memory


class Model(LoadedModel):
    """A loaded model. A context manager; `close` gives everything back.

    One generation at a time: each call begins from a cleared cache unless it says otherwise.
    """

    def __init__(self, file: GGUFFile, config: ModelConfig, options: LoadOptions, plan: LoadPlan, context: Context) -> None:
        super().__init__(file, config, options, plan, context)
        self.timings = Timings()

    # ---- text and ids ------------------------------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer:
        """Built from the file's vocabulary at its first use."""
        self._check_open()
        if isinstance(self._built_tokenizer, str):
            raise ModelFileError(self._built_tokenizer)
        return self._built_tokenizer

    @cached_property
    def _built_tokenizer(self) -> Tokenizer | str:
        """The tokenizer, or the text that says why there is none (an error that is kept would hold the frames it was raised in)."""
        try:
            return Tokenizer(check_tokenizer(self._file.metadata, self.config.shape.n_vocab))
        except ModelFileError as error:
            return f"{self._file.path.name}: the tokenizer cannot be built: {error}; only ids can be used"

    @cached_property
    def _n_tokens(self) -> int:
        """Tokens of the vocabulary, as far as the embedding has rows for them. Rows beyond are in the logits and are never chosen."""
        return n_choosable(self._file.metadata, self.config.shape.n_vocab)

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The model's chat template; None for a base model."""
        self._check_open()
        return self._chat_template

    @cached_property
    def _chat_template(self) -> ChatTemplate | None:
        return ChatTemplate.from_metadata(self._file.metadata, self.tokenizer, self._file.path.name)

    def tokenize(self, text: str, add_special: bool | None = None, parse_special: bool = False) -> list[int]:
        """Ids of a text. `add_special`: the begin token that the model's file asks for (None, True), or none. No end token, ever."""
        wanted = None if add_special is None else switch("add_special", add_special)
        return self.tokenizer.encode(text, wanted, switch("parse_special", parse_special))

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of ids, without control tokens."""
        return self.tokenizer.decode(token_ids(ids, "what to detokenize"))

    # ---- generation --------------------------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: str | Sequence[int],
        max_tokens: int | None = 128,
        *,
        stop: str | Sequence[str] | None = (),
        ignore_eos: bool = False,
        reuse_prefix: bool = False,
        context_shift: bool = False,
        keep: int = 0,
        **sampling: Any,
    ) -> Iterator[str]:
        """Text pieces that follow a prompt (text or ids), whole characters each; ends at an end-of-generation token or a stop text.

        A context that is full before `max_tokens` is a `ContextFullError`, after the text that fits; None goes on until it is full. With
        `context_shift` the oldest half of what is not among the first `keep` tokens is forgotten instead, as often as needed (`keep` -1:
        the prompt; a BOS at its beginning is always kept).

        `sampling`: temperature, top_k, top_p, min_p, repetition_penalty, repetition_last_n, seed. `reuse_prefix` keeps what the cache
        already holds of the prompt (a conversation that grows).
        """
        stops = stop_texts(stop)
        ids = self._prompt_ids(prompt)
        stream = StreamDetokenizer(self.tokenizer, at_start=not ids)
        kept = self._kept_on_shift(ids, context_shift, keep)
        tokens = self._generated(ids, max_tokens, ignore_eos, reuse_prefix, sampling, kept, stop=stops)
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
        max_tokens: int | None = 128,
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
        if max_tokens is None and context_shift and ignore_eos:
            raise UsageError("max_tokens None with context_shift and ignore_eos has no end; give a number, or use generate")
        self._check_thread()
        with self._lock:  # threads take turns
            kept = self._kept_on_shift(ids, context_shift, keep)
            return list(self._generated(ids, max_tokens, ignore_eos, reuse_prefix, sampling, kept, "generate_ids"))

    def generate_many(
        self,
        prompts: Sequence[str | Sequence[int]],
        max_tokens: int | None = 128,
        *,
        stop: str | Sequence[str] | None = (),
        ignore_eos: bool = False,
        **sampling: Any,
    ) -> list[list[int]]:
        """One list of ids per prompt, decoded together as sequences of one batch; more prompts than `parallel` take turns.

        A sequence ends once its text holds a stop text, whose tokens are among its ids. `max_tokens` None: each may fill the context, so
        that sequences which share its cells take turns.
        """
        from numba_meta.models.generation.many import generate_many

        all_ids = [self._prompt_ids(prompt) for prompt in listed_prompts(prompts)]
        plain = sampling_options(sampling)
        limit = self._checked_limit(max_tokens)
        room = [self.context.shape.n_positions - self._check_room(ids) + 1 for ids in all_ids]
        most = room if limit is None else [limit] * len(all_ids)
        stops, ends = stop_texts(stop), self._ends(ignore_eos)
        options = self._begin_drawing("generate_many", all_ids, plain, max_tokens=limit, stop=stops, ignore_eos=bool(ignore_eos))

        def is_over(generated: Sequence[int]) -> bool:
            return bool(stops) and any(text in self.detokenize(generated) for text in stops)

        with self._lock:
            self._reset()
            results, self.timings = generate_many(self.context, all_ids, most, ends, options, is_over, self._n_tokens)
            self._reset()
        return results

    def _generated(
        self,
        ids: list[int],
        max_tokens: int | None,
        ignore_eos: bool,
        reuse_prefix: bool,
        sampling: dict[str, Any],
        kept_on_shift: int | None = None,
        kind: str = "generate",
        stop: Sequence[str] = (),
    ) -> Iterator[int]:
        """Ids one by one. The last one is not fed back: nobody reads what would follow. `kept_on_shift` None: no shift. `kind` and `stop`
        are what other ranks are told.
        """
        self._check_open()
        plain, ends = sampling_options(sampling), self._ends(ignore_eos)
        limit, reuse = self._checked_limit(max_tokens), switch("reuse_prefix", reuse_prefix)
        self._check_room(ids)
        limits = {"max_tokens": limit, "stop": list(stop), "ignore_eos": bool(ignore_eos), "reuse_prefix": reuse}
        shift = {"context_shift": kept_on_shift is not None, "keep": kept_on_shift}
        sampler = Sampler(self._begin_drawing(kind, [ids], plain, **limits, **shift), self._n_tokens)
        group = self.context.group
        with nullcontext() if group is None else RankCall(group) as call:
            yield from self._tokens(ids, limit, sampler, ends, reuse, kept_on_shift, call)

    def _tokens(
        self, ids: list[int], limit: int | None, sampler: Sampler, ends: frozenset[int], reuse: bool, kept_on_shift: int | None,
        call: RankCall | None,
    ) -> Iterator[int]:  # fmt: skip
        """As `_generated`, of a call that has begun."""
        begin = time.perf_counter()
        recent = list(ids)
        with self._lock:
            kept = self._keep_prefix(ids) if reuse else self._reset()
            logits = self._feed(ids[kept:])
            token, use = sampler.sample(logits, recent) if limit != 0 else -1, self._uses
        start = time.perf_counter()
        self.timings = Timings(len(ids) - kept, start - begin)
        for n in range(limit) if limit is not None else count():
            if token in ends:
                return
            yield token
            recent.append(token)
            if n + 1 == limit:
                return
            with self._lock:  # logits are a view: another thread's step would overwrite them
                self._check_open()
                if use != self._uses:
                    raise UsageError("another call has used the model since this generation began; finish one before the next begins")
                is_full = not self.context.cells.room(0)
                if is_full and limit is None and kept_on_shift is None:
                    return
                if call is not None:
                    call.go_on()
                if is_full and kept_on_shift is not None:
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
        self._check_room(checked)
        last = switch("last", last)
        self._begin_call("logits", [checked], last=last)
        with self._lock:
            self._reset()
            if last:
                return self._feed(checked).copy()
            return np.concatenate([rows.copy() for rows in self._feed_all(checked)])

    def _feed_all(self, ids: Sequence[int]) -> Iterator[Logits]:
        """Appends ids to sequence 0; the logits of all, some rows at a time: views that the next step overwrites."""
        n = min(_LOGIT_ROWS, self.context.ubatch_size)
        for at in range(0, len(ids), n):
            chunk = ids[at : at + n]
            capacity = Capacity(n, n) if n > SMALL_ROWS and not self.context.stays_small(len(chunk)) else None
            rows = self.context.decode(chunk, [0] * len(chunk), range(len(chunk)), capacity)
            yield rows

    def perplexity(self, text: str, ctx_size: int = 512) -> float:
        """exp of the mean negative log-likelihood over the second half of each whole chunk of `ctx_size` tokens.

        Each chunk begins from a cleared cache, with BOS in place of its first token where the model adds one. Raises `UsageError` for too
        short a text.
        """
        ctx_size, ids = whole_number("ctx_size", ctx_size, 3), self.tokenize(text)
        n_chunks = len(ids) // ctx_size
        if n_chunks == 0:
            what = counted(len(ids), "token")
            raise UsageError(f"a text of {what} has no whole chunk of {ctx_size}; use a longer text or a smaller ctx_size of at least 3")
        bos = self.tokenizer.bos_id if self.tokenizer.vocabulary.add_bos else None
        total, count, first = 0.0, 0, ctx_size // 2
        self._begin_call("perplexity", [ids], ctx_size=ctx_size)
        with self._lock:
            for chunk in range(n_chunks):
                part = self._prompt_ids(ids[chunk * ctx_size : (chunk + 1) * ctx_size])
                self._check_room(part)
                self._reset()
                self._feed(part[:first] if bos is None else [bos, *part[1:first]])
                targets = iter(part[first + 1 :])
                for rows in self._feed_all(part[first:-1]):
                    for row, target in zip(rows.astype(np.float64), targets, strict=False):
                        peak = row.max()
                        total += float(peak + np.log(np.exp(row - peak).sum()) - row[target])
                        count += 1
        return math.exp(total / count)

    # ---- checks ------------------------------------------------------------------------------------------------------------------------

    def _begin_drawing(self, kind: str, prompts: Sequence[Sequence[int]], options: SamplingOptions, **facts: object) -> SamplingOptions:
        """As `_begin_call`; options by which all ranks draw the same tokens."""
        group = self.context.group
        if group is None:
            return options
        options = group.begin_drawing(kind, prompts, options, **facts)
        self._last_call = group.calls.number
        return options

    def _check_thread(self) -> None:
        """Over ranks: that no other thread makes calls. Before it would wait for that thread."""
        if self.context.group is not None:
            self.context.group.calls.check_thread()

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

    def _check_room(self, ids: Sequence[int]) -> int:
        """Tokens of a prompt. Raises `ContextFullError` for one that does not fit the context."""
        self.context.shape.check_prompt(len(ids))
        return len(ids)

    def _checked_limit(self, max_tokens: int | None) -> int | None:
        return None if max_tokens is None else whole_number("max_tokens", max_tokens, 0)

    def _kept_on_shift(self, ids: Sequence[int], context_shift: bool, keep: int) -> int | None:
        """How many tokens stay when the context is full; None: it does not shift."""
        keep = whole_number("keep", keep, -1)
        if not switch("context_shift", context_shift):
            return None
        vocabulary = self._vocabulary
        begins = vocabulary is not None and vocabulary.add_bos and ids[0] == vocabulary.bos_id
        return len(ids) if keep == -1 else max(keep, 1 if begins else 0)

    def _ends(self, ignore_eos: bool) -> frozenset[int]:
        self._check_open()
        if switch("ignore_eos", ignore_eos):
            return frozenset()
        if isinstance(self._built_tokenizer, Tokenizer):
            return self._built_tokenizer.eog_ids
        return self._vocabulary.eog_ids if self._vocabulary else frozenset()

    @cached_property
    def _vocabulary(self) -> Vocabulary | None:
        """What the file says about tokens, also where no tokenizer can be built; None where that cannot be read either."""
        if isinstance(self._built_tokenizer, Tokenizer):
            return self._built_tokenizer.vocabulary
        try:
            return read_vocabulary(self._file.metadata)
        except ModelFileError:
            return None  # a load has said that the tokenizer cannot be built, and why

    def _reset(self) -> int:
        with held_back():
            self.context.cells.clear()
            self._uses += 1
        return 0

    def _keep_prefix(self, ids: Sequence[int]) -> int:
        """Keeps the longest common beginning of cache and prompt; how many tokens that is. The prompt's last one is always computed."""
        cells = self.context.cells
        cached, n = cells.tokens(0), 0
        while n < min(len(ids) - 1, len(cached)) and ids[n] == cached[n]:
            n += 1
        with held_back():
            try:
                cells.truncate(0, n)
            except UsageError:  # a sliding window has already overwritten what would be needed
                n = 0
                cells.truncate(0, 0)
            self._uses += 1
        return n
