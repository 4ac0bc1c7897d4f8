"""A model that needs no weights: it answers with given pieces and remembers what it was asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

ON_THE_DEVICE = {"path": "device", "reason": "nothing in the host", "ring_bytes": (), "early_bytes": (), "late_bytes": ()}


class FakeTemplate:
    """A chat template that spells every message as `role:content;`."""

    def __init__(self) -> None:
        self.parsed_special: list[bool] = []

    def encode(self, messages: Sequence[dict[str, str]], parse_special: bool = False) -> list[int]:
        assert all(message["content"] for message in messages), "templates may refuse a message without words"
        self.parsed_special.append(parse_special)
        return [ord(c) for message in messages for c in f"{message['role']}:{message['content']};"]


class FakeModel:
    """Ids are code points. `pieces` is what `generate` yields; an exception among them is raised."""

    def __init__(self, pieces: Sequence[str | BaseException] = (" is", " lit", "."), **load_arguments: Any) -> None:
        self.pieces = list(pieces)
        self.load_arguments = load_arguments
        self.calls: list[tuple[Any, dict[str, Any]]] = []
        self.closed = False
        self.chat_template: FakeTemplate | None = FakeTemplate()
        self.plan = SimpleNamespace(table=lambda: "device  part\ncpu:0   100%", n_cells=64, n_sequences=1)
        self.timings = SimpleNamespace(n_prompt=0, prompt_seconds=0.0, n_generated=0, generation_seconds=0.0)
        self.traced: list[int] = []
        self.transport = SimpleNamespace(stats=dict(ON_THE_DEVICE), options=SimpleNamespace(depth=1))

    @contextmanager
    def record_timeline(self, n_steps: int) -> Iterator[None]:
        self.traced.append(n_steps)
        yield

    def __enter__(self) -> FakeModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def tokenize(self, text: str, add_special: bool | None = None, parse_special: bool = False) -> list[int]:
        return [ord(character) for character in text]

    def detokenize(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    def generate(self, prompt: str | list[int], max_tokens: int, **arguments: Any) -> Iterator[str]:
        self.calls.append((prompt, {"max_tokens": max_tokens, **arguments}))
        for piece in self.pieces[:max_tokens]:
            if isinstance(piece, BaseException):
                raise piece
            yield piece
        self._time(len(prompt), min(max_tokens, len(self.pieces)))

    def generate_ids(self, prompt: Sequence[int], max_tokens: int, **arguments: Any) -> list[int]:
        self.calls.append((list(prompt), {"max_tokens": max_tokens, **arguments}))
        self._time(len(prompt), max_tokens)
        return [33] * max_tokens

    def generate_many(self, prompts: Sequence[str], max_tokens: int, **arguments: Any) -> list[list[int]]:
        self.calls.append((prompts, {"max_tokens": max_tokens, **arguments}))
        return [self.tokenize(f"{prompt}!") for prompt in prompts]

    def memory(self) -> dict[str, int]:
        return {"cpu:0": 3 << 20}

    def _time(self, n_prompt: int, n_generated: int) -> None:
        self.timings = SimpleNamespace(n_prompt=n_prompt, prompt_seconds=0.5, n_generated=n_generated, generation_seconds=0.25)
