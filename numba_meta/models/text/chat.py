"""A model's own chat template: messages in, the prompt's text or ids out.

Templates are Jinja programs that come with the model file. They see what `transformers` shows them (the messages, tools, special tokens and
a few harmless functions), in a sandbox without Python, memory or time to waste (`template_sandbox`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from numba_meta.arguments import switch
from numba_meta.errors import ModelFileError, UsageError
from numba_meta.models.text.chat_messages import checked_messages, in_parts, joined
from numba_meta.models.text.spelled_tokens import ControlTokens, Disguise
from numba_meta.models.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jinja2 import Template

_TEMPLATE_KEY = "tokenizer.chat_template"
_TOOL_USE = "tool_use"  # the name of a template for prompts with tools, in files that have several
_MAX_REASON = 200  # characters of a template's own error message that are passed on
_DISGUISE = "\0disguise"  # the name of the `Disguise` among a template's variables, which no template can write


def template_sources(metadata: Mapping[str, Any], file_name: str | None = None) -> dict[str, str]:
    """The templates of a GGUF header by their keys, those that are blank left out. Raises ModelFileError for one that is not text."""
    sources = {}
    for key in (_TEMPLATE_KEY, f"{_TEMPLATE_KEY}.default", f"{_TEMPLATE_KEY}.{_TOOL_USE}"):
        source = metadata.get(key)
        if source is not None and not isinstance(source, str):
            where = key if file_name is None else f"{file_name}: {key}"
            raise ModelFileError(f"{where} is of type {type(source).__name__}, expected a string")
        if source and source.strip():
            sources[key] = source
    return sources


class ChatTemplate:
    """The chat template of one model, compiled on first use so that a faulty one disturbs nobody who does not chat.

    `tool_use`: a second template, for prompts with tools, where the file has one.
    """

    def __init__(self, source: str, tokenizer: Tokenizer, tool_use: str | None = None, file_name: str | None = None) -> None:
        self.source = source
        self.tool_use = tool_use
        self._tokenizer = tokenizer
        self._file_name = file_name
        self._key = _TEMPLATE_KEY if file_name is None else f"{file_name}: {_TEMPLATE_KEY}"

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], tokenizer: Tokenizer, file_name: str | None = None) -> ChatTemplate | None:
        """The template of a GGUF header, or None where it has none (base models). `file_name` is for messages.

        Beside `tokenizer.chat_template` a file may have named ones: `.default`, which stands in for it, and `.tool_use`. Raises
        ModelFileError for one that is not text.
        """
        sources = template_sources(metadata, file_name)
        tool_use = sources.pop(f"{_TEMPLATE_KEY}.{_TOOL_USE}", None)
        source = next(iter(sources.values()), tool_use)
        return None if source is None else cls(source, tokenizer, tool_use, file_name)

    def __reduce__(self) -> tuple[type[ChatTemplate], tuple[str, Tokenizer, str | None, str | None]]:
        return type(self), (self.source, self._tokenizer, self.tool_use, self._file_name)  # copies are compiled anew

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any) -> str:
        """The prompt's text for `messages` (`{"role": …, "content": …}`; content is text, or a list of `{"type": "text", "text": …}`).

        Any role reaches the template, which decides about it; `developer` becomes `system` for templates that do not know it. `content`
        may be None beside `tool_calls` or `reasoning_content`; `arguments` of a tool call may be JSON text or a mapping.
        `add_generation_prompt`: whether the text ends where the assistant begins to speak. `variables`: further names that a template
        knows, such as `tools`, `documents` or `enable_thinking`. Raises UsageError, in one line, for messages that are malformed or that
        the template refuses, ModelFileError for a template that is no valid Jinja or does not come to an end.
        """
        add_generation_prompt = switch("add_generation_prompt", add_generation_prompt)
        program = self._program(variables)
        return self._rendered(program, program.prepared(messages, variables), add_generation_prompt, _UNDISGUISED)

    def encode(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, *, parse_special: bool = False, **variables: Any
    ) -> list[int]:
        """The prompt's ids: the rendered text, with the BOS that the model wants unless the template wrote one. Raises as `render`.

        The template's own control tokens become such tokens. Those that messages and `variables` spell stay text (but for `bos_token` and
        its like); with `parse_special` they become control tokens too. User-defined tokens are found anywhere, as in every text. What an
        assistant said keeps the control tokens that the template itself looks for there, such as `</think>`: they are its format.
        """
        add_generation_prompt = switch("add_generation_prompt", add_generation_prompt)
        parse_special = switch("parse_special", parse_special)
        program = self._program(variables)
        values = program.prepared(messages, variables)
        disguise = _UNDISGUISED
        if not parse_special:
            written = {name: value for name, value in values.items() if name not in self._special_tokens}
            try:
                disguise = self._control_tokens.disguise(written, program.looked_for, program.source)
                values |= disguise.values(written)
            except RecursionError:
                raise UsageError("messages, tools or other variables hold themselves or nest too deeply; give plain data") from None
        text = self._rendered(program, values, add_generation_prompt, disguise)
        ids = self._tokenizer.encode(text, add_special=False, parse_special=True, stand_ins=disguise.originals)
        v = self._tokenizer.vocabulary
        return [v.bos_id, *ids] if v.add_bos and v.bos_id is not None and ids[:1] != [v.bos_id] else ids

    def _program(self, variables: Mapping[str, Any]) -> _Program:
        for name in ("tools", "documents"):
            if not isinstance(given := variables.get(name), (Sequence, Mapping, type(None))):
                raise UsageError(f"{name} are of type {type(given).__name__}, expected a list of mappings, or None")
        return self._tool_program if self.tool_use is not None and variables.get("tools") else self._plain_program

    def _rendered(self, program: _Program, values: Mapping[str, Any], add_generation_prompt: bool, disguise: Disguise) -> str:
        from numba_meta.models.text.template_sandbox import EndlessTemplateError, with_budget

        values = {**self._special_tokens, **values, "add_generation_prompt": add_generation_prompt}
        try:
            return program.template.render({**with_budget(values), _DISGUISE: disguise})
        except EndlessTemplateError as error:
            raise ModelFileError(f"{self._key} does not come to an end: {error}; give the prompt as plain text instead") from None
        except Exception as error:  # a template is a program of the file's author and can raise anything
            raise UsageError(f"the model's chat template refuses these messages: {one_line(error)}") from None

    @cached_property
    def _special_tokens(self) -> dict[str, str]:
        v = self._tokenizer.vocabulary
        named = {"bos_token": v.bos_id, "eos_token": v.eos_id, "unk_token": v.unknown_id}
        return {name: "" if i is None else v.tokens[i] for name, i in named.items()} | {
            name: v.tokens[i] for name, i in v.named_ids.items()
        }

    @cached_property
    def _control_tokens(self) -> ControlTokens:
        v = self._tokenizer.vocabulary
        return ControlTokens(v.tokens[i] for i in v.control_ids)

    @cached_property
    def _plain_program(self) -> _Program:
        return _compiled(self.source, self._key)

    @cached_property
    def _tool_program(self) -> _Program:
        return _compiled(self.tool_use or self.source, self._key)


_UNDISGUISED = Disguise([], {}, ControlTokens(()), frozenset())


@dataclass(frozen=True)
class _Program:
    """A compiled template and what it expects, which its syntax tree and a look at what it writes tell."""

    source: str
    template: Template
    looked_for: frozenset[str]  # texts that it compares contents with, or cuts them at
    knows_developer: bool  # the role of that name
    asks_for_none: bool  # it tells a content of None apart
    takes_parts: bool  # contents are lists of parts to it, and a text would be lost
    keeps_parts: bool  # it takes lists of parts, beside texts

    def prepared(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> dict[str, Any]:
        """The variables of a rendering, messages as this template expects them. Raises UsageError for malformed ones."""
        checked = checked_messages(messages)
        for message in checked:
            if message["role"] == "developer" and not self.knows_developer:
                message["role"] = "system"
            if message["content"] is None and not self.asks_for_none:
                message["content"] = ""  # as a template that prints it without a look takes it
            if self.takes_parts:
                message["content"] = in_parts(message["content"])
            elif not self.keeps_parts:
                message["content"] = joined(message["content"])
        return {"tools": None, "documents": None, **variables, "messages": checked}


def _compiled(source: str, key: str) -> _Program:
    from jinja2 import TemplateError

    from numba_meta.models.text.template_sandbox import compile_template, with_budget
    from numba_meta.models.text.template_syntax import asks_for_none, knows_role, looked_for, parse

    try:
        tree = parse(source)
        template = compile_template(source, _functions(), {"tojson": _to_json()})
    except (TemplateError, RecursionError, SyntaxError, ValueError, MemoryError) as error:
        raise ModelFileError(
            f"{key} is not a valid Jinja template: {one_line(error)}; give the prompt as plain text instead"
        ) from None

    def writes(content: Any) -> str:
        """What the template makes of one message of this content; nothing where it refuses it."""
        values = {"messages": [{"role": "user", "content": content}], "add_generation_prompt": False, "tools": None, "documents": None}
        tokens = {"bos_token": "", "eos_token": "", "unk_token": ""}
        try:
            return template.render({**with_budget({**tokens, **values}), _DISGUISE: _UNDISGUISED})
        except Exception:
            return ""

    word = "needle"
    of_parts = writes(in_parts(word))
    knows_parts = word in of_parts and "'text'" not in of_parts  # and did not print the list as it is
    takes_parts = knows_parts and word not in writes(word)
    return _Program(source, template, looked_for(tree), knows_role(tree, "developer"), asks_for_none(tree), takes_parts, knows_parts)


def _functions() -> dict[str, Callable[..., Any]]:
    from jinja2 import TemplateError

    def raise_exception(message: object) -> None:
        raise TemplateError(str(message))

    def strftime_now(layout: str) -> str:
        return datetime.now().strftime(layout)

    return {"raise_exception": raise_exception, "strftime_now": strftime_now}


def _to_json() -> Callable[..., str]:
    from jinja2 import pass_context
    from jinja2.runtime import Context

    @pass_context
    def to_json(
        context: Context,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON as `transformers` writes it: no HTML escapes, text as it is. Escapes are those of the real characters."""
        disguise: Disguise = context.parent[_DISGUISE]
        value = disguise.undone(value) if disguise.originals else value
        text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        return disguise.text(text)

    return to_json


def one_line(error: BaseException) -> str:
    """What went wrong in a template, in one line, without the lines of the template that Jinja adds."""
    text = " ".join(str(getattr(error, "message", None) or error).split()) or type(error).__name__
    return text if len(text) <= _MAX_REASON else text[: _MAX_REASON - 1] + "…"
