"""Messages as chat templates take them: checked, and in the shapes that templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from numba_meta.errors import UsageError

_MAY_BE_SILENT = ("tool_calls", "reasoning_content", "reasoning", "thinking")  # beside one of these a content can be missing
_PLAIN_ROLES = ("system", "developer", "user", "assistant")  # their contents are text; what a tool answers may be any data


class Arguments(dict[str, Any]):
    """The arguments of a tool call that came as JSON text: a mapping for templates that walk it, its text for those that print it."""

    def __init__(self, values: Mapping[str, Any], text: str) -> None:
        super().__init__(values)
        self.text = text

    def __str__(self) -> str:
        return self.text

    def __add__(self, other: object) -> str:
        return self.text + other if isinstance(other, str) else NotImplemented

    def __radd__(self, other: object) -> str:
        return other + self.text if isinstance(other, str) else NotImplemented


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`messages` as dictionaries of their own. Contents are text, or a list of text parts; a missing one beside what an assistant calls or
    thinks is None; `arguments` of tool calls are mappings. Raises UsageError naming the message that is wrong.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise UsageError(f"messages are of type {type(messages).__name__}, expected a list of {{'role': …, 'content': …}}")
    if not messages:
        raise UsageError("there are no messages; a chat needs at least one")
    return [_checked(message, i) for i, message in enumerate(messages)]


def _checked(message: Mapping[str, Any], i: int) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UsageError(f"message {i} is of type {type(message).__name__}, expected {{'role': …, 'content': …}}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise UsageError(f"message {i} has the role {role!r:.60}, expected a name such as user, assistant, system or tool")
    checked = {**message, "content": _content(message, role, i)}
    calls = message.get("tool_calls")
    if calls is not None and (not isinstance(calls, Sequence) or isinstance(calls, (str, bytes))):
        raise UsageError(f"message {i} has tool calls of type {type(calls).__name__}, expected a list of them")
    if calls:
        checked["tool_calls"] = [_tool_call(call) for call in calls]
    else:
        checked.pop("tool_calls", None)  # none are as no key: templates ask whether there is one
    return checked


def _content(message: Mapping[str, Any], role: str, i: int) -> Any:
    content = message.get("content")
    if isinstance(content, str) or (content is None and any(message.get(name) is not None for name in _MAY_BE_SILENT)):
        return content
    if role not in _PLAIN_ROLES and isinstance(content, (Mapping, list, tuple)):
        return content
    if isinstance(content, Sequence) and not isinstance(content, (str, bytes)):
        if all(isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content):
            return list(content)
        raise UsageError(f"message {i} has a content part that is not text; expected {{'type': 'text', 'text': …}}")
    raise UsageError(f"message {i} has a content of type {type(content).__name__}, expected text")


def _tool_call(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    function = call.get("function")
    if isinstance(function, Mapping):
        return {**call, "function": _with_arguments(function)}
    return _with_arguments(call)


def _with_arguments(function: Mapping[str, Any]) -> Mapping[str, Any]:
    text = function.get("arguments")
    if not isinstance(text, str):
        return function
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return function
    return {**function, "arguments": Arguments(values, text)} if isinstance(values, dict) else function


def is_text_parts(content: object) -> bool:
    """Whether a content is a list of parts `{"type": "text", "text": …}`."""
    return isinstance(content, list) and all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content)


def joined(content: Any) -> Any:
    """A content as one text; what is no list of text parts stays as it is."""
    return "".join(part["text"] for part in content) if is_text_parts(content) else content


def in_parts(content: Any) -> Any:
    """A text as a list of one part; anything else stays as it is."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
