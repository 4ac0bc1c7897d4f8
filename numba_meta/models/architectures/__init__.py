"""The architectures that load: a file each, with its keys, its graph and its cuts side by side.

Comes in: the `general.architecture` of a GGUF file. Goes out: an `Architecture`. docs/architecture.md says how to add one.
"""

from __future__ import annotations

from numba_meta.models.architectures import cohere2, gemma2, gemma3, granite, llama, phi3, qwen2, qwen3
from numba_meta.models.architectures.base import Architecture

__all__ = ["ARCHITECTURES", "Architecture"]

_ALL = (llama.LLAMA, gemma2.GEMMA2, gemma3.GEMMA3, qwen2.QWEN2, qwen3.QWEN3, phi3.PHI3, granite.GRANITE, cohere2.COHERE2)
ARCHITECTURES = {each.name: each for each in _ALL}
