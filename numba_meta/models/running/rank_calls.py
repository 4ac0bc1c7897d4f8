"""What the ranks tell each other of a call: all that its steps depend on, a phrase of a few words each (`comm.calls.Call`)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields

import numpy as np

from numba_meta.comm.calls import Call
from numba_meta.errors import counted
from numba_meta.models.text.sampling import SamplingOptions

_OPTIONS = [field.name for field in fields(SamplingOptions)]
_MAX_TEXT = 40  # characters; longer ones travel as their digest
_MAX_IDS = 8  # so many ids of a prompt are shown


def describe_call(
    kind: str, model: int, prompts: Sequence[Sequence[int]], options: SamplingOptions | None, facts: Mapping[str, object]
) -> Call:
    """A call of model number `model`, by load order. `facts`: limits and the like, by the names that a user gives them."""
    said = {"model": f"of model {model}"}
    if prompts:
        said["prompts"] = f"with {counted(len(prompts), 'prompt')}"
        said["lengths"] = f"with {counted(sum(map(len, prompts)), 'prompt token')}"
        said["ids"] = f"with prompt ids {_ids(prompts)}"
    values = {**facts, **({name: getattr(options, name) for name in _OPTIONS} if options is not None else {})}
    return Call(kind, said | {name: f"with {name} {_short(value)}" for name, value in values.items()})


def _ids(prompts: Sequence[Sequence[int]]) -> str:
    if len(prompts) == 1 and len(prompts[0]) <= _MAX_IDS:
        return " ".join(map(str, prompts[0]))
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(len(prompt).to_bytes(8, "little") + np.asarray(prompt, "<i8").tobytes())
    return f"sha256 {digest.hexdigest()[:12]}"


def _short(value: object) -> str:
    """Equal for equal values, whatever number types they have."""
    if isinstance(value, (bool, np.bool_)) or value is None:
        text = str(value)
    elif isinstance(value, (int, np.integer)):
        text = str(int(value))
    elif isinstance(value, (float, np.floating)):
        text = f"{float(value):.17g}" if float(f"{float(value):g}") != float(value) else f"{float(value):g}"
    else:
        text = repr(value)
    return text if len(text) <= _MAX_TEXT else f"sha256 {hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:12]}"
