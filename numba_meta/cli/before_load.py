"""What a load is refused for before a weight is read: its options, the file's header, prompts that cannot fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numba_meta.cli.terminal import Progress

_MOST_BYTES_PER_TOKEN = 8  # text of more bytes than that for each cell is counted first: no language has so long tokens on average
_FEWEST_CELLS = 512  # models' own contexts are longer


def check_arguments(arguments: Mapping[str, Any], n_ranks: int) -> None:
    """Raises `UsageError` for arguments of `numba_meta.load` that are impossible whatever the model."""
    from numba_meta.models.loading.load_plan import LoadOptions, check_options

    check_options(LoadOptions(**arguments), n_ranks)


def check_header(name: str, arguments: Mapping[str, Any], n_ranks: int, progress: Progress, needs_text: bool, needs_chat: bool) -> None:
    """Fetches a model that is missing, and raises what its header says against a load by the first of several ranks."""
    from numba_meta.models.architectures.description import describe_model
    from numba_meta.models.files.gguf import read_gguf
    from numba_meta.models.files.pull import resolve_model
    from numba_meta.models.loading.load_plan import LoadOptions, plan_load
    from numba_meta.models.text.template_check import check_chat
    from numba_meta.models.text.tokenizer_check import refuse_text, tokenizer_problem

    file = read_gguf(resolve_model(name, progress))
    try:
        described = describe_model(file)
        if needs_text:
            refuse_text(file.path.name, tokenizer_problem(file.metadata, described.config.shape.n_vocab))
        if needs_chat:
            check_chat(file.metadata, file.path.name)
        plan_load(described, LoadOptions(**arguments), 0, n_ranks)
    finally:
        file.close()


def check_prompts(name: str, arguments: Mapping[str, Any], prompts: Sequence[str], progress: Progress) -> None:
    """Raises `ContextFullError` for a text of far more bytes than the context has cells; others are counted after the load."""
    longest = max((len(prompt.encode("utf-8")) for prompt in prompts), default=0)
    if longest <= _MOST_BYTES_PER_TOKEN * (arguments["ctx_size"] or _FEWEST_CELLS):
        return
    from numba_meta.models.architectures.description import describe_model
    from numba_meta.models.cache.cells import plan_cache_shape
    from numba_meta.models.files.gguf import read_gguf
    from numba_meta.models.files.pull import resolve_model
    from numba_meta.models.text.tokenizer import Tokenizer
    from numba_meta.models.text.tokenizer_check import refuse_text, tokenizer_problem

    file = read_gguf(resolve_model(name, progress))
    try:
        cells = arguments["ctx_size"] or describe_model(file).config.context_length
        shape = plan_cache_shape(cells, arguments["parallel"], arguments["kv_unified"], 0, arguments["ubatch_size"])
        if longest > _MOST_BYTES_PER_TOKEN * shape.n_positions:
            refuse_text(file.path.name, tokenizer_problem(file.metadata))
            tokenizer = Tokenizer.from_metadata(file.metadata)
            for prompt in prompts:
                shape.check_prompt(len(tokenizer.encode(prompt)))
    finally:
        file.close()
