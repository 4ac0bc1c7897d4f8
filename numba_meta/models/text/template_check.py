"""Whether a header's chat templates can be used, told without a tokenizer and without rendering."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numba_meta.errors import ModelFileError, UsageError
from numba_meta.models.text.chat import one_line, template_sources


def check_chat(metadata: Mapping[str, Any], file_name: str) -> None:
    """Raises `UsageError` for a header without a chat template, `ModelFileError` for one that is no text or no Jinja."""
    if not template_sources(metadata, file_name):
        raise UsageError(f"{file_name} has no chat template (a base model continues text): use `generate` without --chat")
    if (problem := template_problem(metadata, file_name)) is not None:
        raise ModelFileError(f"{problem}; give the prompt as plain text instead")


def template_problem(metadata: Mapping[str, Any], file_name: str) -> str | None:
    """One line that says why the chat templates of a header cannot be used; None where they can, or where there are none."""
    from jinja2 import TemplateError

    from numba_meta.models.text.template_syntax import parse

    try:
        sources = template_sources(metadata, file_name)
    except ModelFileError as error:
        return str(error)
    for key, source in sources.items():
        try:
            parse(source)
        except (TemplateError, RecursionError, SyntaxError, ValueError, MemoryError) as error:
            return f"{file_name}: {key} is not a valid Jinja template: {one_line(error)}"
    return None
