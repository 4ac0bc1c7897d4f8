"""A model's own chat template: messages in, the prompt's text or ids out.

Templates are Jinja programs that come with the model file, so they run in Jinja's immutable sandbox: they see the messages and a few
harmless functions, and cannot reach Python. Page 6 of the design.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..errors import ModelFileError, UsageError
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from jinja2 import Template

ROLES = ("system", "developer", "user", "assistant", "tool")
_TEMPLATE_KEY = "tokenizer.chat_template"
_MAX_REASON = 200  # characters of a template's own error message that are passed on


class ChatTemplate:
    """The chat template of one model, compiled on first use so that a faulty one disturbs nobody who does not chat."""

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        self.source = source
        self._tokenizer = tokenizer

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], tokenizer: Tokenizer) -> ChatTemplate | None:
        """The template of a GGUF header, or None where it has none (base models). Raises ModelFileError for one that is not text."""
        source = metadata.get(_TEMPLATE_KEY)
        if source is None:
            return None
        if not isinstance(source, str):
            raise ModelFileError(f"{_TEMPLATE_KEY} is of type {type(source).__name__}, expected a string")
        return cls(source, tokenizer) if source.strip() else None

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any) -> str:
        """The prompt's text for `messages` (`{"role": …, "content": …}`; content is text, or a list of `{"type": "text", "text": …}`).

        `add_generation_prompt`: whether the text ends where the assistant begins to speak. `variables`: further names that a template
        knows, such as `tools` or `enable_thinking`. Raises UsageError, in one line, for messages that are malformed or that the template
        refuses, ModelFileError for a template that is no valid Jinja.
        """
        fixed = {"messages": _checked_messages(messages), "add_generation_prompt": add_generation_prompt}
        template = self._template
        try:
            return template.render({**self._special_tokens, **variables, **fixed})
        except Exception as error:  # a template is a program of the file's author and can raise anything
            raise UsageError(f"the model's chat template refuses these messages: {_one_line(error)}") from None

    def encode(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any) -> list[int]:
        """The prompt's ids: the rendered text, special tokens parsed, with one BOS where the model wants one and the template wrote it too.

        Raises as `render`.
        """
        text = self.render(messages, add_generation_prompt, **variables)
        ids = self._tokenizer.encode(text, parse_special=True)
        bos_id = self._tokenizer.bos_id
        return ids[1:] if bos_id is not None and ids[:2] == [bos_id, bos_id] else ids

    @cached_property
    def _special_tokens(self) -> dict[str, str]:
        v = self._tokenizer.vocabulary
        named = (("bos_token", v.bos_id), ("eos_token", v.eos_id), ("unk_token", v.unknown_id))
        return {name: "" if i is None else v.tokens[i] for name, i in named}

    @cached_property
    def _template(self) -> Template:
        from jinja2 import TemplateError

        try:
            template: Template = _environment().from_string(self.source)
        except (TemplateError, RecursionError) as error:
            raise ModelFileError(
                f"{_TEMPLATE_KEY} is not a valid Jinja template: {_one_line(error)}; give the prompt as plain text instead"
            ) from None
        return template


def _checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`messages` as plain dictionaries with text contents. Raises UsageError naming the message that is wrong."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise UsageError(f"messages are of type {type(messages).__name__}, expected a list of {{'role': …, 'content': …}}")
    if not messages:
        raise UsageError("there are no messages; a chat needs at least one")
    checked = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise UsageError(f"message {i} is of type {type(message).__name__}, expected {{'role': …, 'content': …}}")
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise UsageError(f"message {i} has the role {role!r:.60}, expected one of {', '.join(ROLES)}")
        checked.append({**message, "content": _text_content(message, i)})
    return checked


def _text_content(message: Mapping[str, Any], i: int) -> str:
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return ""  # an assistant that only calls tools says nothing
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and not isinstance(content, bytes):
        parts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(parts):
            return "".join(texts)
        raise UsageError(f"message {i} has a content part that is not text; expected {{'type': 'text', 'text': …}}")
    raise UsageError(f"message {i} has a content of type {type(content).__name__}, expected text")


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _MAX_REASON else text[: _MAX_REASON - 1] + "…"


def _environment() -> Any:
    """Jinja as chat templates expect it: block lines leave no white space, loops have break and continue, `tojson` leaves text readable."""
    from jinja2 import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """`{% generation %}…{% endgeneration %}` marks what the assistant says for training; here it is its contents."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: object) -> None:
        raise TemplateError(str(message))

    def strftime_now(layout: str) -> str:
        return datetime.now().strftime(layout)

    def to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, sort_keys: bool = False) -> str:
        return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock])
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    environment.filters["tojson"] = to_json
    return environment
