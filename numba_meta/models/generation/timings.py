"""How long a generation took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timings:
    """Tokens and seconds of the last generation: the prompt, and what was generated after its first token."""

    n_prompt: int = 0
    prompt_seconds: float = 0.0
    n_generated: int = 0
    generation_seconds: float = 0.0
